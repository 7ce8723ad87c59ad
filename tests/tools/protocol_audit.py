"""What must be so in every world of ``protocol_model.py``, worked out anew from what was decided.

Each answer must be the one that the registers of the rounds give. A step that is said to be one table's must be that
table's on all communicators of its rank, and of the length that was agreed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamiccl.envs.nccl.agreement.protocol import QUAD
from dynamiccl.envs.nccl.plugin.bindings import Span
from plugin_model import Clock, due_turn
from protocol_scopes import CAPTURED, Scope

#: Which of four turns are the trial's, by `swap`.
ORDER = ((True, False, False, True), (False, True, True, False))


def expected(scope: Scope, registers: Sequence[Any], comm: int, group: int) -> int:
    """Generation of the table that answers a group of a communicator; 0: the empty one."""
    groups = scope.groups_of(comm)
    sizes = [0 if size == CAPTURED else size for size in groups]
    count, before = sum(sizes[:group]), sum(sizes[: max(group - 1, 0)])
    stays = answer = 0
    for generation, register in enumerate(registers, 1):
        span = dict(register[1]).get(comm) if register else None
        if span is None or count < span.since:
            stays = generation if span is not None and not span.until else stays
            continue
        table = 0 if generation in scope.empty else generation
        if not span.until:
            stays = answer = table
        else:
            tries = count < span.until and _is_tried(span, count, before if group else -1)
            answer = table if tries else stays
    return answer


def _is_tried(span: Span, count: int, before: int) -> bool:
    """``before``: with which collective the last group began, -1: there was none."""
    if not span.length:
        return True
    if not span.a_step:
        candidates = range(max(before + 1, span.since), count + 1)
        return any(_is_due(span, one - span.since) for one in candidates)
    return _is_due(span, (count - span.since) // span.length)


def _is_due(span: Span, turn: int) -> bool:
    if span.one_of == 2:
        return ORDER[span.swap][turn % QUAD]
    block = turn // span.one_of
    assert block * span.one_of <= due_turn(span, block) < (block + 1) * span.one_of
    return due_turn(span, block) == turn


def label_of(clocks: Sequence[Clock], mutations: frozenset[str]) -> int | None:
    """Generation of the table whose step has just ended, as rhythm.c says it; None where the step is no table's."""
    turns = [clock for clock in clocks if _lease(clock) is not None]
    seen = {table.generation for clock in turns for table in clock.seen}
    if not turns or (len(seen) > 1 and "a mixed step is the base's" not in mutations):
        return None
    for clock in turns:
        lease, made = _lease(clock), clock.count - clock.ended_at
        accepted = made > 0 and made % lease.a_step == 0
        if made != lease.a_step and not ("two steps' calls are a step" in mutations and accepted):
            return None
    return min(seen)


def _lease(clock: Clock) -> Span | None:
    """The turns in which the step began, if they follow steps."""
    found = clock.change_at(clock.ended_at)
    return found.span if found is not None and found.holds(clock.ended_at) and found.span.a_step else None


def wrong_label(scope: Scope, comms: Sequence[int], step: int, label: int, answers: Sequence[Any]) -> str:
    """What is wrong with saying that a step is that table's; empty if nothing is."""
    told = {(comm, group): generation for comm, group, generation in answers}
    for comm in comms:
        ends = scope.end_of(comm, step)
        for group in range(scope.end_of(comm, step - 1), ends):
            if told[comm, group] != label:
                return f"step {step} is called table {label}'s, and collective {group} is table {told[comm, group]}'s"
        if scope.steps[step][comm] != scope.steps[0][comm]:
            return f"step {step} of another length is called table {label}'s"
    return ""

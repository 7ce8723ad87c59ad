"""What must be so in every world of ``protocol_model.py``, worked out anew from what was decided.

Each answer must be the one that the registers of the rounds give. A step that is said to be one table's must be that
table's on all communicators of its rank, and of the length that was agreed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from dynamiccl.envs.nccl.agreement.plans import Report, Told, lacking, mismatch
from dynamiccl.envs.nccl.agreement.protocol import QUAD
from dynamiccl.envs.nccl.plugin.bindings import Span
from plugin_model import Clock, due_turn, is_by_calls
from protocol_scopes import Scope

#: Which of four turns are the trial's, by `swap`.
#: Calls ahead at which the answers of a plugin are looked at.
AHEAD = 12
ORDER = ((True, False, False, True), (False, True, True, False))


@cache
def expected(scope: Scope, registers: tuple[Any, ...], comm: int, group: int) -> int:
    """Generation of the table that answers a group of a communicator; 0: the empty one. Groups count as on rank 0:
    where another counts others, no table may hold."""
    sizes = [scope.size_of(comm, one, rank=0) for one in range(len(scope.groups_of(comm)))]
    count, before = sum(sizes[:group]), sum(sizes[: max(group - 1, 0)])
    stays = answer = 0
    for number, register in enumerate(registers, 1):
        generation = scope.generation(number)
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
    if is_by_calls(span):
        candidates = range(max(before + 1, span.since), count + 1)
        return any(_is_due(span, one - span.since) for one in candidates)
    return _is_due(span, (count - span.since) // span.length)


def _is_due(span: Span, turn: int) -> bool:
    if span.one_of == 2:
        return ORDER[span.swap][turn % QUAD]
    block = turn // span.one_of
    assert block * span.one_of <= due_turn(span, block) < (block + 1) * span.one_of
    return due_turn(span, block) == turn


def wrong_conclusion(scope: Scope, world: Any) -> str:
    """What rank 0 would take from the reports though it is not so; empty if there is nothing.

    Between two rounds: where a communicator lacks nothing, all its members answer the wanted rows from there on. No
    two plans differ.
    """
    first = world.ranks[0]
    if first.results is not None or not (first.agrees and first.round):
        return ""
    rounds = {}
    for number, register in enumerate(world.registers[: first.round], 1):
        rounds |= {comm: number for comm, _ in (register[1] if register else ())}
    reports = {0: Report(first.round, _told(scope, _plans(scope, 0, first)))}
    reports |= {rank: Report(number, _told(scope, plans)) for rank, number, plans in world.reports}
    if "an old report is a proof" in scope.mutations:
        rounds = {}
    if why := mismatch(reports, rounds):
        return f"no plans differ, but rank 0 finds: {why}"
    for rows in range(len(world.registers) + 1):
        lacks = lacking(rows, reports, rounds)
        for comm, members in enumerate(scope.members):
            told = [reports[r].comms[comm].plan for r in members if r in reports and comm in reports[r].comms]
            if comm in lacks or len(told) < len(members):
                continue
            now = max(max(plan.made, plan.since) for plan in told)
            for r in members:
                clock = world.ranks[r].clocks[scope.comms(r).index(comm)]
                if wrong := _other_answer(clock, world.ranks[r].buffers, now, rows):
                    return f"communicator {comm} is said to have table {rows}, but rank {r}: {wrong}"
    return ""


def _other_answer(clock: Clock, buffers: Sequence[int], now: int, rows: int) -> str:
    for count in range(now, now + AHEAD):
        buffer = clock.table(count).buffer
        answer = buffers[buffer - 1] if buffer else 0
        if answer != rows and count >= clock.count:
            return f"collective {count} is answered by table {answer}"
    return ""


def _plans(scope: Scope, r: int, rank: Any) -> list[tuple[int, Any]]:
    clocks = zip(scope.comms(r), rank.clocks, strict=True)
    return [(comm, clock.plan(clock.count, rank.buffers)) for comm, clock in clocks]


def _told(scope: Scope, plans: Any) -> dict[int, Told]:
    return {comm: Told(len(scope.members[comm]), plan) for comm, plan in plans}


def label_of(clocks: Sequence[Clock], mutations: frozenset[str]) -> int | None:
    """Generation of the table whose step has just ended, as rhythm.c says it; None where the step is no table's."""
    turns = [clock for clock in clocks if _lease(clock) is not None]
    seen = {table.generation for clock in clocks for table in clock.seen}
    if not turns or not seen or (len(seen) > 1 and "a mixed step is the base's" not in mutations):
        return None
    for clock in turns:
        lease, made = _lease(clock), clock.count - clock.ended_at
        if not lease.a_step:
            continue
        accepted = made > 0 and made % lease.a_step == 0
        if made != lease.a_step and not ("two steps' calls are a step" in mutations and accepted):
            return None
    return min(seen)


def _lease(clock: Clock) -> Span | None:
    """The turns in which the step began, if they follow steps."""
    found = clock.change_at(clock.ended_at)
    if found is None or not found.holds(clock.ended_at) or not found.span.length or is_by_calls(found.span):
        return None
    return found.span


def wrong_label(scope: Scope, comms: Sequence[int], step: int, label: int, answers: Sequence[Any]) -> str:
    """What is wrong with saying that a step is that table's; empty if nothing is."""
    told = {(comm, group): generation for comm, group, generation in answers}
    for comm in comms:
        ends = scope.end_of(comm, step)
        for group in range(scope.end_of(comm, step - 1), ends):
            if told[comm, group] != label:
                return f"step {step} is called table {label}'s, and collective {group} is table {told[comm, group]}'s"
        if not scope.is_uneven and scope.steps[step][comm] != scope.steps[0][comm]:
            return f"step {step} of another length is called table {label}'s"
    return ""

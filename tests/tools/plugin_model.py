"""One communicator of one rank as the plugin keeps it, in words that can be compared: for ``protocol_model.py``.

A table is a generation and the buffer that it lies in; buffer 0 is empty for ever. Changes stand from the newest on, as
in switch.c. The clock counts a group at its launch; NCCL tells of it whenever it likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dynamiccl.envs.nccl.plugin.bindings import Plan, Span

NO_LIMIT = 10**6
#: Steps in a row that make a rhythm: four in the plugin, two where every order of events is looked at.
ALIKE = 2


class Table(NamedTuple):
    """A reference to a table."""

    generation: int
    buffer: int


EMPTY = Table(0, 0)


class Change(NamedTuple):
    span: Span
    trial: Table
    base: Table

    def table(self, count: int, looked_at: int) -> Table:
        """The table for a group that begins at ``count``, at or after ``since``."""
        return self.trial if count < self.span.until and is_due(self.span, count, looked_at) else self.base

    def holds(self, count: int) -> bool:
        """Whether its trial is under way."""
        return self.span.since <= count < self.span.until


def is_by_calls(span: Span) -> bool:
    """Whether a turn is one collective, picked out of so many."""
    return span.length == 1 and not span.a_step


def due_turn(span: Span, block: int) -> int:
    """The turn of a block that is the trial's: of two A B B A, of more not always the same one."""
    if span.one_of == 2:
        return 2 * block + ((block + span.swap) & 1)
    return block * span.one_of + (block * 5 >> 1) % span.one_of


def is_due(span: Span, count: int, looked_at: int) -> bool:
    """As in switch.c; where a turn is one collective, also if one is due that no group began with."""
    if not span.length:
        return True
    turn = (count - span.since) // span.length
    block = turn // span.one_of
    earliest = max(looked_at - span.since, 0) if is_by_calls(span) else turn
    due = due_turn(span, block)
    return earliest <= due <= turn or (block > 0 and earliest <= due_turn(span, block - 1))


class Clock(NamedTuple):
    """The communicator, and the thread that issues its groups."""

    at: int = 0  # groups of the script that are issued
    count: int = 0  # collectives that are launched
    told: int = 0  # of which NCCL has told
    limit: int = NO_LIMIT
    limiting: int = -1  # dynamiccl_limit has read this count and is about to set the limit
    is_refused: bool = False  # a limit was: too many changes are ahead
    changes: tuple[Change, ...] = ()
    thread: str = "asks"  # asks -> passed (the limit) -> reads -> asks or answered -> asks the next group
    n_asked: int = 0  # questions of the group that are answered
    reads: Table = EMPTY  # what the question was given
    looked_at: int = 0  # the first collective after the one that the last group began with
    seen: tuple[Table, ...] = ()  # tables that have answered in this step
    ended_at: int = 0  # collectives at the last end of a step, and of that step
    a_step: int = 0
    n_alike: int = 0  # steps in a row with so many

    def change_at(self, count: int) -> Change | None:
        """The change that holds at this count."""
        return next((change for change in self.changes if count >= change.span.since), None)

    def table(self, count: int) -> Table:
        """The table that holds for a group that begins at this count."""
        found = self.change_at(count)
        return found.table(count, self.looked_at) if found is not None else EMPTY

    def step_ended(self) -> Clock:
        """The count at the end of a step, and how it compares with the one before."""
        made = self.count - self.ended_at
        alike = self.n_alike + 1 if made == self.a_step else 1
        return self._replace(ended_at=self.count, a_step=made, n_alike=min(alike, ALIKE), seen=())

    def plan(self, count: int, buffers: Sequence[int]) -> Plan:
        """What it will answer from ``count`` on, as switch.c tells it. ``buffers``: the table in each, see Rank."""

        def rows(table: Table) -> int:
            return buffers[table.buffer - 1] if table.buffer else 0

        plan, before = Plan(count), NO_LIMIT
        for i, change in enumerate(self.may_hold(count)):
            span, last = change.span, min(change.span.until, before)
            before = span.since
            if i == 0:
                plan = plan._replace(stays=rows(change.base), since=span.since)
            if not plan.trial and span.until and (i == 0 or count < last):
                turns = 8 * (8 * span.length + span.a_step) + 4 * span.swap + span.one_of
                plan = plan._replace(trial=100 * turns + rows(change.trial) + 1, first=span.since, last=last)
        return plan

    def may_hold(self, count: int, before: int = NO_LIMIT) -> tuple[Change, ...]:
        """The changes that may still hold, if there is to be one from ``before`` on."""
        found: list[Change] = []
        for change in self.changes:
            if change.span.since >= before:
                continue
            found.append(change)
            before = change.span.since
            if change.span.since <= count:
                break
        return tuple(found)

    def may_answer(self, buffer: int, count: int) -> bool:
        """Whether a buffer holds a table that may still answer."""
        held = [
            table
            for change in self.may_hold(count)
            for table in ([change.trial] if count < change.span.until else []) + [change.base]
        ]
        return any(table.buffer == buffer for table in held)

    def switched(self, change: Change, count: int) -> Clock:
        """With another change."""
        return self._replace(changes=(change, *self.may_hold(count, change.span.since)))

    def stays(self) -> Table:
        """What holds after a trial."""
        return self.changes[0].base if self.changes else EMPTY

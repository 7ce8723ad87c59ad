"""One communicator of one rank as the plugin keeps it, in words that can be compared: for ``protocol_model.py``.

A table is a generation and the buffer that it lies in; buffer 0 is empty for ever. Changes stand from the newest on, as
in switch.c. The clock counts a group at its launch; NCCL tells of it whenever it likes.
"""

from __future__ import annotations

from typing import NamedTuple

NO_LIMIT = 10**6


class Table(NamedTuple):
    """A reference to a table."""

    generation: int
    buffer: int


EMPTY = Table(0, 0)


class Change(NamedTuple):
    since: int
    until: int  # 0: to stay
    trial: Table
    base: Table
    one_of: int  # the trial holds at one collective of so many; 0: at all

    def table(self, count: int) -> Table:
        """The table for a collective at or after ``since``."""
        return self.trial if count < self.until and is_due(self.one_of, count) else self.base


def is_due(one_of: int, count: int) -> bool:
    """One of each so many counts, not always the same one."""
    return one_of == 0 or count % one_of == (count // one_of * 5 >> 1) % one_of


class Clock(NamedTuple):
    """The communicator, and the thread that issues its groups."""

    at: int = 0  # groups of the script that are issued
    count: int = 0  # collectives that are launched
    told: int = 0  # of which NCCL has told
    limit: int = NO_LIMIT
    limiting: int = -1  # dynamiccl_limit has read this count and is about to set the limit
    is_refused: bool = False  # a limit was: too many changes are ahead
    is_frozen: bool = False
    changes: tuple[Change, ...] = ()
    thread: str = "asks"  # asks -> passed (the limit) -> reads -> asks or answered -> asks the next group
    n_asked: int = 0  # questions of the group that are answered
    reads: Table = EMPTY  # what the question was given

    def table(self, count: int) -> Table:
        """The table that holds at this count."""
        found = next((change for change in self.changes if count >= change.since), None)
        return found.table(count) if found is not None else EMPTY

    def may_hold(self, count: int, before: int = NO_LIMIT) -> tuple[Change, ...]:
        """The changes that may still hold, if there is to be one from ``before`` on."""
        found: list[Change] = []
        for change in self.changes:
            if change.since >= before:
                continue
            found.append(change)
            before = change.since
            if change.since <= count:
                break
        return tuple(found)

    def may_answer(self, buffer: int, count: int) -> bool:
        """Whether a buffer holds a table that may still answer."""
        held = [
            table
            for change in self.may_hold(count)
            for table in ([change.trial] if count < change.until else []) + [change.base]
        ]
        return any(table.buffer == buffer for table in held)

    def switched(self, change: Change, count: int) -> Clock:
        """With another change."""
        return self._replace(changes=(change, *self.may_hold(count, change.since)))

    def stays(self) -> Table:
        """What holds after a trial."""
        return self.changes[0].base if self.changes else EMPTY

    def frozen(self) -> Clock:
        """After a call that was captured, where collectives are told late: NCCL decides from here on."""
        return self._replace(is_frozen=True, changes=(), limit=NO_LIMIT)

"""Which ranks have come, as rank 0 hears of it, and for how long the next round waits for the others."""

from __future__ import annotations

import time
from collections.abc import Collection

from ....traces.reasons import NotAgreeing
from ..steps.user_numbers import attach_s
from .protocol import LeftOut, Vote
from .store import RoundStore

#: So long for those that were there before rank 0 lost its connection. Who has kept its own hears of the new life
#: within a second. Who has lost it too, as in a network break, may try again a minute later: nobody waits for it, and
#: a later round has it.
_BACK_S = 5.0


class Arrivals:
    """The ranks but rank 0."""

    def __init__(self, n_ranks: int) -> None:
        self.here: set[int] = set()  # who has cast a vote in this life: its key is in the store
        self.given_up: set[int] = (
            set()
        )  # who was silent in the last trial's round, which went on all the same
        self.late: set[int] = set()  # of the silent: whose vote in the round before came after its end
        self.older: list[Vote] = []  # the last votes of those that are silent
        self.are_all = True  # the last round has had all votes that it waited for
        self._known: set[int] = set()  # who was here in an earlier life
        self._absent = set(range(1, n_ranks))
        self._awaited = set(self._absent)  # by the next round
        self._until = time.monotonic() + attach_s()

    def begin_life(self, silent: set[int]) -> None:
        """Rank 0 has connected anew. Nobody has a key in this life yet, so everybody has to come again.

        The next round does not wait for those that were ``silent`` in the last one.
        """
        self._known |= self.here
        self._absent |= self.here
        if self.here and not self._awaited:
            self._awaited, self._until = self.here - silent, time.monotonic() + _BACK_S
        self.here = set()

    def hear(self, store: RoundStore) -> bool:
        """Whether ranks have come."""
        if store.are_there(sorted(self._absent)):
            here = set(self._absent)
        else:
            here = {rank for rank in self._absent if store.are_there([rank])}
        self.here |= here
        self._absent -= here
        return bool(here)

    def unheard(self, named: Collection[int]) -> dict[int, LeftOut]:
        """Communicators of silent ranks that none of the ranks that have voted has ``named``."""
        found = {}
        for vote in self.older:
            for comm in vote.comms.keys() - named:
                counts = {"n": 0, "of": vote.comms[comm].n_ranks}
                found[comm] = LeftOut(NotAgreeing.NOT_ALL_VOTED(rank=vote.rank, **counts))
        return found

    def are_awaited(self) -> bool:
        """Whether ranks may still come before the next round."""
        return bool(self._absent & self._awaited) and not self.is_late()

    def is_late(self) -> bool:
        """The next round waits for nobody any more."""
        return time.monotonic() > self._until

    def are_over(self) -> bool:
        """Whether nobody will come any more: a rank that was here before has only lost its connection."""
        return self.is_late() and not self._absent & self._known

    def begin_round(self) -> None:
        """Who comes from now on is in a later one."""
        self._awaited = set()

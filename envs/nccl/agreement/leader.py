"""What rank 0 knows between two rounds: the other ranks, the tables that are wanted, how the last round ended."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from ....traces.reasons import NotAgreeing
from ..shm import trial_of
from .mailbox import TableMailbox
from .protocol import Decision, LeftOut, Rhythms
from .store import RoundStore

#: How long rank 0 waits for ranks that have not taken a step yet, or whose NCCL has not loaded the tuner.
ATTACH_S = float(os.environ.get("DYNAMICCL_ATTACH_S", "60"))
_AGAIN_S = 0.2  # until a lost round is tried again, doubled each time
PATIENCE = 5  # so many lost rounds in a row, and rank 0 goes on without who does not vote


@dataclass
class LastTable:
    """The table that was decided last."""

    is_trial: bool = False
    generation: int = 0  # whose turns the next round checks; 0: none
    rhythms: Rhythms = field(
        default_factory=dict
    )  # of the communicators in these turns that rank 0 is not in
    #: Generations of which this round has shown that all communicators turn where rank 0's steps end, if they look
    #: whole.
    steady: list[int] = field(default_factory=list)

    def check(self, rhythms: Rhythms) -> None:
        """The next round: whether the communicators of the last turns have kept their rhythm on all ranks."""
        is_steady = all(rhythms.get(comm) == rhythm for comm, rhythm in self.rhythms.items())
        self.steady = [self.generation] if is_steady and self.generation else []
        self.generation, self.rhythms = 0, {}

    def take_turns(self, generation: int, foreign: Rhythms) -> None:
        """Turns begin. ``foreign``: the rhythms in them of communicators that rank 0 is not in.

        Rank 0 sees its own communicators only. Others may be turns late while its steps look whole, until the next
        round shows it.
        """
        if foreign:
            self.generation, self.rhythms = generation, foreign
        else:
            self.steady.append(generation)


class Leader:
    """What rank 0 knows of the other ranks, and which tables are wanted."""

    def __init__(self, n_ranks: int, published: TableMailbox) -> None:
        self.known: set[int] = set()  # ranks that are there, but rank 0
        self.silent: set[int] = set()  # of them, who has not voted in the last round
        self.gone: dict[int, str] = {}  # communicators that have left for good, and why
        self.switched: set[int] = set()  # communicators of the last round that was not lost
        self.news = False  # a rank or a communicator is new
        self.number, self.lost, self.why = (
            0,
            0,
            "",
        )  # the last round, lost ones in a row, why the last of them was
        self.not_before = 0.0  # of the next round
        self._absent, self._published = set(range(1, n_ranks)), published
        self._until = time.monotonic() + ATTACH_S
        self._wanted: tuple[int, bytes] | None = None  # to be in force, and is not
        self._stays = published.confirmed()  # the last table that was decided to stay, in this life or before
        self.last = LastTable()

    def look(self) -> None:
        """Whether the daemon has published another table."""
        if (found := self._published.take()) is not None:
            self._wanted, self.not_before = found, 0.0

    def hears(self, store: RoundStore) -> None:
        """Whether ranks have come, or communicators."""
        if not store.has_news():
            return
        self.news = True
        if store.are_there(sorted(self._absent)):
            here = set(self._absent)
        else:
            here = {rank for rank in self._absent if store.are_there([rank])}
        self.known |= here
        self._absent -= here

    def is_waiting(self, comms: frozenset[int]) -> bool:
        """Whether ranks, or rank 0's own communicators ``comms``, may still come before the first round."""
        return (bool(self._absent) or not comms) and self.number == 0 and time.monotonic() < self._until

    def misses(self) -> str:
        """Why no round can be led, not even later; empty if one can."""
        late = time.monotonic() > self._until
        return self.why if late and self.lost >= PATIENCE and not self.switched else ""

    def next(self) -> tuple[int, bytes] | None:
        """The table of the next round, if there is to be one: first what stays, for who does not have it yet."""
        if self._stays is not None and not self.last.is_trial and (self.news or not self.switched):
            return self._stays
        return self._wanted

    def ended(
        self,
        message: tuple[int, bytes],
        decision: Decision,
        left_out: dict[int, LeftOut],
        rhythms: Rhythms,
        own: Collection[int],
    ) -> None:
        """A round is over. ``own``: the communicators that rank 0 is in."""
        for comm, one in left_out.items():
            if comm and one.for_good:
                self.gone[comm] = one.why
        is_refused = 0 in left_out and left_out[0].for_good
        if not (decision.switches or is_refused):
            self._lose(left_out)
            return
        self.lost, self.news = 0, False
        if message == self._wanted:
            self._wanted = None
        if decision.switches:
            self._switch(message, decision, rhythms, own)

    def _lose(self, left_out: dict[int, LeftOut]) -> None:
        """No communicator has switched: the round is led again, later each time."""
        self.lost += 1
        reasons = [left_out[0]] if 0 in left_out else list(left_out.values())
        self.why = reasons[0].why if reasons else NotAgreeing.LATE_STORE()
        pause_s = _AGAIN_S * 2 ** min(self.lost, PATIENCE)
        self.not_before = time.monotonic() + pause_s

    def _switch(
        self, message: tuple[int, bytes], decision: Decision, rhythms: Rhythms, own: Collection[int]
    ) -> None:
        trial = trial_of(message[1])
        switched = set(decision.switches)
        last = self.last
        last.check(rhythms)
        if trial.turn_steps:
            foreign = {comm: rhythms[comm] for comm in switched.difference(own)}
            last.take_turns(decision.generation, foreign)
            # Turns need a rhythm: who has none keeps its table, and is in later rounds as before.
            switched |= self.switched
        self.switched = switched
        last.is_trial = trial.trial_steps > 0
        if not last.is_trial:
            self._stays = message

    def is_over(self, comms: frozenset[int]) -> bool:
        """Whether all of rank 0's communicators have left for good."""
        return bool(comms) and comms <= self.gone.keys()

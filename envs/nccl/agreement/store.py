"""The rounds of an agreement in the job's own store: what rank 0 proposes, the votes, the register of each round.

One connection of our own a rank, used by one thread. In a round who waits for a key asks the store to answer when it is
there. Whether a round begins is asked now and then: of a wait in vain PyTorch warns in the job's output.

torchrun keeps its store when it starts all workers anew. So rank 0 draws a name for each life of the job, below which
all keys lie, and every rank looks now and then whether there is a newer one.
"""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import timedelta
from typing import Any, NamedTuple

from ....traces.reasons import NotAgreeing
from ..steps.words import say
from .protocol import ABORT, CommVote, Decision, Vote

#: How long the register of a round is asked for: as long as NCCL's own watchdog waits for the other ranks.
_LOST_S = 600.0
_AGAIN_S = 0.1
_PAUSE_S, _A_RANK_S = 0.02, 1e-4  # between two looks for a round, with many ranks longer
_LIFE, _ROUND, _NEWS = "life", "round", "news"


class Proposal(NamedTuple):
    """What rank 0 proposes in a round."""

    number: int
    message: bytes  # of the table; b"": rank 0 leads no round any more
    n_votes: int  # of other ranks that rank 0 waits for


class RoundStore:
    """Connected at :meth:`connect`. Raises what the store raises, but in :meth:`settle`."""

    def __init__(self, make: Callable[[], Any], rank: int, n_ranks: int) -> None:
        """``make()`` gives a new connection of our own to the job's store."""
        self._make, self._rank, self._pause_s = make, rank, _PAUSE_S + _A_RANK_S * n_ranks
        self._store: Any = None
        self.life, self._heard = "", 0
        self.answer_s = 0.0  # how long the store took to answer at the beginning of the last round
        self.closing = False

    def connect(self) -> None:
        """Connect, and take part in the job's present life, which rank 0 begins."""
        self._store = self._make()
        if self._rank == 0:
            self.life, self._heard = secrets.token_hex(4), 0
            self._store.set(_LIFE, self.life)

    def is_new_life(self) -> bool:
        """Whether rank 0 has begun another life than this rank knows of; from then on this rank is in it."""
        if self._rank == 0 or not self._store.check([_LIFE]):
            return False
        life, self.life = self.life, bytes(self._store.get(_LIFE)).decode()
        return life != self.life

    def last_round(self) -> int:
        """The newest round of this life; 0 before the first."""
        key = self._key(_ROUND)
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self.life, *parts)))

    def _wait(self, key: str, seconds: float) -> bool:
        """Whether the key is there within so long. Raises where the store is away."""
        end = time.monotonic() + seconds
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except Exception:  # too early, or the store is away: then the next line raises
            return time.monotonic() < end and bool(self._store.check([key]))
        return True

    # -- every rank ------------------------------------------------------------------------------------------------

    def says_news(self) -> None:
        """Rank 0 shall look: this rank is there, or has a new communicator."""
        self._store.add(self._key(_NEWS), 1)

    def cast(self, vote: Vote, n_votes: int) -> None:
        """Send a vote; whoever is the last of ``n_votes`` tells rank 0."""
        self._store.set(self._key("vote", vote.rank), json.dumps(asdict(vote)))
        if n_votes and self._store.add(self._key(vote.round, "votes"), 1) >= n_votes:
            self._store.set(self._key(vote.round, "all"), "yes")

    def proposal(self, number: int, seconds: float) -> Proposal | None:
        """Round ``number``, once it is proposed; None if it is not within so long."""
        key, end = self._key(number, "table"), time.monotonic() + seconds
        while not self._store.check([key]):
            if time.monotonic() > end:
                return None
            time.sleep(self._pause_s)
        began = time.monotonic()
        n_votes, message = json.loads(bytes(self._store.get(key)))
        self.answer_s = time.monotonic() - began
        return Proposal(number, base64.b64decode(message), n_votes)

    def decision(self, number: int, seconds: float) -> Decision | None:
        """What was decided in a round; None if nothing is within so long."""
        key = self._key(number, "decision")
        return _decision(bytes(self._store.get(key))) if self._wait(key, seconds) else None

    def settle(self, number: int, decision: Decision) -> Decision:
        """Set the register of a round if it is free; what it holds. Only the store knows: it is asked until it answers.

        A store that nobody serves any more is the end of its job: no rank waits for a decision there.
        """
        word = json.dumps([decision.generation, {f"{comm:x}": at for comm, at in decision.switches.items()}])
        end, again = time.monotonic() + _LOST_S, False
        while True:
            try:
                if again:
                    self._store = self._make()
                return _decision(bytes(self._store.compare_set(self._key(number, "decision"), "", word)))
            except Exception as error:
                if isinstance(error, ConnectionRefusedError) or self.closing or time.monotonic() > end:
                    say(NotAgreeing.NO_STORE(rank=self._rank, error=error))
                    return ABORT
                again = True
                time.sleep(_AGAIN_S)

    # -- rank 0 ----------------------------------------------------------------------------------------------------

    def has_news(self) -> bool:
        """Whether a rank has said since the last question that there is something new."""
        before, self._heard = self._heard, int(self._store.add(self._key(_NEWS), 0))
        return self._heard != before

    def are_there(self, ranks: list[int]) -> bool:
        """Whether all these ranks have ever cast a vote in this life."""
        return not ranks or bool(self._store.check([self._key("vote", rank) for rank in ranks]))

    def propose(self, proposal: Proposal) -> None:
        """Begin a round."""
        word = json.dumps([proposal.n_votes, base64.b64encode(proposal.message).decode()])
        began = time.monotonic()
        self._store.set(self._key(proposal.number, "table"), word)
        self.answer_s = time.monotonic() - began
        self._store.set(self._key(_ROUND), str(proposal.number))

    def part(self, number: int) -> None:
        """Tell all ranks that this was the last round, and give them the time of two looks: it may go with us."""
        self.propose(Proposal(number, b"", 0))
        time.sleep(2 * self._pause_s)

    def votes(self, number: int, ranks: Iterable[int], seconds: float) -> list[Vote]:
        """The last votes of ``ranks``, as soon as all expected in this round are there, else after so long."""
        ranks = list(ranks)
        if ranks:
            self._wait(self._key(number, "all"), seconds)
        keys = [self._key("vote", rank) for rank in ranks]
        several = getattr(self._store, "has_extended_api", bool)()
        raws = (
            (self._store.multi_get(keys) if keys else [])
            if several
            else [self._store.get(key) for key in keys]
        )
        return [_vote(bytes(raw)) for raw in raws]

    def forget(self, number: int) -> None:
        """Drop a round that every rank is past."""
        for name in ("table", "votes", "all", "decision"):
            self._store.delete_key(self._key(number, name))


def _vote(raw: bytes) -> Vote:
    found = json.loads(raw)
    comms = {}
    for comm, one in found.pop("comms").items():
        one["marks"] = {int(at): mark for at, mark in one["marks"].items()}
        comms[int(comm)] = CommVote(**one)
    return Vote(**found, comms=comms)


def _decision(raw: bytes) -> Decision:
    generation, switches = json.loads(raw)
    return Decision(generation, {int(comm, 16): (since, until) for comm, (since, until) in switches.items()})

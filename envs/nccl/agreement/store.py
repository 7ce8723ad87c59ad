"""The rounds of an agreement in the job's own store: what rank 0 proposes, the votes, the register of each round.

One connection a rank, one thread. No request waits at the store for a key: PyTorch would warn. torchrun keeps its store
when workers start anew, so rank 0 draws a name for each life, above its rounds' keys.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from operator import index
from typing import Any, NamedTuple

from ....traces.outside import parse_json
from ....traces.reasons import NotAgreeing, Why
from .. import life
from ..plugin.bindings import Plan, Span
from ..steps.words import say
from .lookout import IDLE_S, Lookout
from .plans import Report, Told
from .protocol import ABORT, CommVote, Decision, Vote

#: How long the register of a round is asked for. PyTorch's watchdog ends a job whose other ranks wait for 600 s.
LOST_S = 480.0
#: So long a refused connection may be the network's fault (a firewall, a proxy); then nobody serves the store.
_REFUSED_S = 10.0
_AGAIN_S = 0.1
_PAUSE_S, _A_RANK_S = 0.02, 1e-4  # between two looks of rank 0 for the votes, with many ranks longer
_LOOKS = 3  # more for those that vote after who was not expected
_BEGUN, _NOW, _NEWS = "begun", "now", "news"
_PROCESS = re.compile(r"[0-9a-f]{16}")  # begins the name of a life: that of rank 0
_NO_ROUND = -1  # of what is no vote
#: What reading a text of another rank may raise: each of them may have other code, or none of ours.
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError)


class Proposal(NamedTuple):
    """What rank 0 proposes in a round."""

    number: int
    message: bytes  # of the table; b"": rank 0 leads no round any more
    n_votes: int  # of other ranks that rank 0 waits for
    again: bool = False  # the table to stay was led before: a communicator that has it changes nothing


class Parted(Exception):
    """Rank 0 leads no round of this life any more."""


class RoundStore:
    """Connected at :meth:`connect`. Raises what the store raises, but in :meth:`settle`."""

    def __init__(self, make: Callable[[], Any], rank: int, n_ranks: int) -> None:
        """``make()`` gives a new connection of our own to the job's store."""
        self._make = make
        self._rank = rank
        self._n_ranks = n_ranks
        self._pause_s = _PAUSE_S + _A_RANK_S * n_ranks
        self._store: Any = None
        self.life, self._round = "", 0
        self._heard = 0  # of the ranks' news
        self._begun = 0  # so much rank 0 has begun
        self._told = ""  # by rank 0: its life, and the round of now
        self._round_told = b""  # by rank 0: the same, as this rank has read it last
        self._seen = -1  # of it this rank has taken note
        self.newest = 0  # round of rank 0, as this rank has read it last
        self.lookout = Lookout("", rank, n_ranks)
        self.answer_s = 0.0  # how long the store took to answer at the beginning of the last round
        self.closing = False

    def connect(self, number: int = 0) -> None:
        """Connect, and take part in the job's present life, which rank 0 begins after round ``number``."""
        self._store, self._seen = self._make(), -1
        if self._rank == 0:
            self._heard = self._round = 0
            self._live(f"{life.own():016x}.{secrets.token_hex(4)}")
            self._told = (
                f"{self.life} {number}"  # then, of a round: votes to wait for, whether again, the table
            )
            self._store.set(_NOW, self._told)
            self._counts()

    def _live(self, life: str) -> None:
        self.life = life
        self.lookout.close()
        self.lookout = Lookout(life, self._rank, self._n_ranks)

    @property
    def start(self) -> int:
        """The start of the job that this rank is of: the life of rank 0's process; 0 where it has other code."""
        name = self.life.split(".")[0]
        return int(name, 16) if _PROCESS.fullmatch(name) else 0

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self.life, *parts)))

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def close(self) -> None:
        """This rank asks nothing more: its connection is closed."""
        self.lookout.close()
        self._make, self._store = _closed, None

    # -- every rank ------------------------------------------------------------------------------------------------

    def has_changed(self) -> bool:
        """Whether rank 0 has begun a life or a round since the last True. Call it often: the store is asked seldom.

        Raises Parted where rank 0 leads no round any more.
        """
        begun = self.lookout.newest(lambda: int(self._store.add(_BEGUN, 0)))
        if begun is None:
            raise Parted
        changed = begun not in (0, self._seen)
        self._seen = begun
        return changed

    def now(self) -> tuple[bool, int]:
        """(whether this is another life than this rank knew of, the newest round if it shall take part in it, else 0).

        Only after :meth:`has_changed`. Rounds before the newest are left out: this rank has no vote in them. So is one
        that was begun before rank 0 has ever heard of this rank.
        """
        began = time.monotonic()
        self._round_told = bytes(self._store.get(_NOW))
        self.answer_s = time.monotonic() - began
        life, text = self._round_told.decode().split()[:2]
        self.newest = number = int(text)
        before, self._round = self._round, number
        if life == self.life:
            return False, number if number > before else 0
        is_known = bool(self.life)
        self._live(life)
        return True, number if is_known else 0

    def leave_life(self) -> None:
        """Rank 0 leads no round of it any more: what this node shares says nothing of the next one."""
        self.lookout.close()
        self.lookout = Lookout("", self._rank, self._n_ranks)

    def is_over(self) -> bool:
        """Whether rank 0 has begun another life than the one that this rank knows."""
        return bytes(self._store.get(_NOW)).decode().split()[0] != self.life

    def tell_plans(self, number: int, plans: Mapping[int, Told]) -> None:
        """These are this rank's plans after round ``number``."""
        told = {f"{comm:x}": [one.n_ranks, *one.plan] for comm, one in plans.items()}
        self._store.set(self._key("plans", self._rank), json.dumps([number, told]))

    def says_news(self) -> None:
        """Rank 0 shall look: this rank is there, or has other plans."""
        self._store.add(self._key(_NEWS), 1)

    def cast(self, vote: Vote, n_votes: int) -> None:
        """Send a vote; whoever is the last of ``n_votes`` tells rank 0."""
        text = json.dumps(asdict(vote), default=Why.as_json)
        self._store.set(self._key("vote", vote.rank), text)
        if not n_votes:
            return
        n_cast = self._store.add(self._key(vote.round, "votes"), 1)
        if n_cast >= n_votes:
            self._store.set(self._key(vote.round, "all"), "yes")

    def proposal(self, number: int) -> Proposal | None:
        """Round ``number`` as :meth:`now` has read it; None where it is another, or cannot be read."""
        with contextlib.suppress(*_UNREADABLE):
            _life, found, n_votes, again, *message = self._round_told.decode().split()
            if int(found) == number:
                table = base64.urlsafe_b64decode(message[0]) if message else b""
                return Proposal(number, table, int(n_votes), bool(int(again)))
        return None

    def decision(self, number: int) -> Decision | None:
        """What was decided in a round; None if nothing is by now, or it cannot be read: the register is asked then."""
        key = self._key(number, "decision")
        if not self._has(key):
            return None
        return _decision(bytes(self._store.get(key)))

    def settle(self, number: int, decision: Decision) -> Decision:
        """Set the register of a round if it is free; return what it holds. Only the store knows: it is asked until it
        answers.

        A refused connection is silence; after ten seconds of it nobody serves the store any more, and no rank waits
        there. An answer that two connections cannot read stands there: the round is lost for all.
        """
        word = json.dumps(
            [decision.generation, {f"{comm:x}": span for comm, span in decision.switches.items()}]
        )
        lost, refused_until = time.monotonic() + LOST_S, 0.0
        again, unread = False, None
        while True:
            try:
                if again:
                    self._store = self._make()
                raw = bytes(self._store.compare_set(self._key(number, "decision"), "", word))
                if (found := _decision(raw, unread)) is not None:
                    return found
                again, unread = True, raw
            except Exception as error:
                now, again = time.monotonic(), True
                is_refused = isinstance(error, ConnectionRefusedError)
                if not is_refused:
                    refused_until = 0.0
                elif not refused_until:
                    refused_until = now + _REFUSED_S
                if self.closing:  # this rank leaves, and so may the store: no news
                    return ABORT
                if now > lost or (is_refused and now > refused_until):
                    say(str(NotAgreeing.NO_STORE(rank=self._rank, error=error)))
                    return ABORT
                time.sleep(_AGAIN_S)

    # -- rank 0 ----------------------------------------------------------------------------------------------------

    def _begins(self, told: str) -> None:
        """Tell all ranks that there is something new: a round, or one to come.

        Raises Parted where another life has begun: this process has made its group anew, on the same store.
        """
        before, self._told = self._told, told
        if bytes(self._store.compare_set(_NOW, before, self._told)).decode() != self._told:
            raise Parted
        self._counts()

    def _counts(self) -> None:
        self._begun = int(self._store.add(_BEGUN, 1))
        self.lookout.tell(self._begun)

    def keeps_watch(self) -> None:
        """Nobody on rank 0's node need ask the store. Call it often."""
        self.lookout.tell(self._begun)

    def wakes(self) -> float:
        """Before a round: seconds until all nodes look for it often again; 0.0 where they do."""
        if not self.lookout.is_quiet() or self.lookout.is_whole():
            return 0.0
        self._begins(self._told)
        return 1.25 * IDLE_S

    def has_news(self) -> bool:
        """Whether a rank has said since the last question that there is something new."""
        before = self._heard
        key = self._key(_NEWS)
        self._heard = int(self._store.add(key, 0))
        return self._heard != before

    def are_there(self, ranks: list[int]) -> bool:
        """Whether all these ranks have ever cast a vote in this life."""
        keys = [self._key("vote", rank) for rank in ranks]
        return not ranks or bool(self._store.check(keys))

    def propose(self, proposal: Proposal) -> None:
        """Begin a round."""
        message = base64.urlsafe_b64encode(proposal.message).decode()
        self._round = proposal.number
        began = time.monotonic()
        self._begins(f"{self.life} {proposal.number} {proposal.n_votes} {int(proposal.again)} {message}")
        self.answer_s = time.monotonic() - began

    def part(self, number: int) -> None:
        """Tell all ranks that this was the last round, and those of this node in time: the store may go with us.

        Where another life has begun there is nobody to be told.
        """
        with contextlib.suppress(Parted):
            self.propose(Proposal(number, b"", 0))
        self.lookout.tell_gone()
        time.sleep(self.lookout.pause_s() + self._pause_s)

    def votes(self, number: int, ranks: Iterable[int], seconds: float) -> list[Vote]:
        """The last votes of ``ranks``, as soon as all expected in this round are there, else after so long.

        Among those that came first may be one that was not expected: the others have some looks more.
        """
        ranks = list(ranks)
        end = time.monotonic() + seconds
        all_cast = self._key(number, "all")
        while ranks and not self._has(all_cast) and time.monotonic() < end:
            time.sleep(self._pause_s)
        soon = time.monotonic() + self.lookout.spread_s() + _LOOKS * self._pause_s
        found = self._last_votes(ranks)
        while True:
            missing = [rank for rank, vote in found.items() if vote.round != number]
            if not missing or time.monotonic() >= min(soon, end):
                break
            time.sleep(self._pause_s)
            found |= self._last_votes(missing)
        return list(found.values())

    def _last_votes(self, ranks: list[int]) -> dict[int, Vote]:
        return {rank: _vote(rank, raw) for rank, raw in self._words("vote", ranks).items()}

    def reports(self, ranks: Iterable[int]) -> dict[int, Report]:
        """The plans of these ranks, of those that can be read."""
        found = {rank: _report(raw) for rank, raw in self._words("plans", list(ranks)).items()}
        return {rank: report for rank, report in found.items() if report is not None}

    def _words(self, of: str, ranks: list[int]) -> dict[int, bytes]:
        """What ranks that are there have told last."""
        keys = [self._key(of, rank) for rank in ranks]
        several = getattr(self._store, "has_extended_api", bool)()
        if not keys:
            return {}
        raws = self._store.multi_get(keys) if several else map(self._store.get, keys)
        return {rank: bytes(raw) for rank, raw in zip(ranks, raws, strict=True)}

    def forget(self, number: int) -> None:
        """Drop a round that every rank is past."""
        for name in ("votes", "all", "decision"):
            self._store.delete_key(self._key(number, name))


def _closed() -> Any:
    raise ConnectionAbortedError("this rank has left the job's store")


def _vote(rank: int, raw: bytes) -> Vote:
    """The last vote of a rank. What cannot be read is one of no round: the rank counts as silent.

    A rank of another release may know other fields: its identity says that, and the rest is left out.
    """
    vote = Vote(rank, _NO_ROUND, "")
    with contextlib.suppress(*_UNREADABLE):
        found = parse_json(raw)
        vote = Vote(rank, index(found["round"]), _text(found["identity"]))
        comms = {int(comm): _comm_vote(one) for comm, one in found["comms"].items()}
        return replace(vote, comms=comms, refusal=_why(found["refusal"]), no_room=_why(found["no_room"]))
    return vote


def _comm_vote(found: dict[str, Any]) -> CommVote:
    """Raises what reading may raise."""
    marks = {int(at): index(mark) for at, mark in found.pop("marks").items()}
    why, pace = _text(found.pop("no_clock")), found.pop("calls_a_step")
    if not isinstance(pace, int | float):
        raise TypeError("no number")
    plan, has = _plan(found.pop("plan")), bool(index(found.pop("has")))
    wholes = {name: index(value) for name, value in found.items()}
    return CommVote(marks=marks, no_clock=why, calls_a_step=pace, plan=plan, has=has, **wholes)


def _plan(found: list[Any]) -> Plan:
    """Raises what reading may raise."""
    made, stays, since, trial, first, last, gave_up = map(index, found)
    return Plan(made, stays, since, trial, first, last, bool(gave_up))


def _report(raw: bytes) -> Report | None:
    """The plans that a rank has told; None if they cannot be read: the rank may have other code."""
    with contextlib.suppress(*_UNREADABLE):
        number, comms = parse_json(raw)
        told = {int(comm, 16): Told(index(n), _plan(plan)) for comm, (n, *plan) in comms.items()}
        return Report(index(number), told)
    return None


def _decision(raw: bytes, unread: bytes | None = None) -> Decision | None:
    """What stands in the register of a round; None if it cannot be read. It is lost if it was as ``unread`` before."""
    with contextlib.suppress(*_UNREADABLE):
        generation, switches = parse_json(raw)
        spans = {int(comm, 16): Span(*map(index, span)) for comm, span in switches.items()}
        return Decision(index(generation), spans)
    return ABORT if raw == unread else None


def _why(value: Any) -> Why | None:
    """Raises what reading may raise."""
    return None if value is None else Why.of(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value

"""How all ranks change to the next table at the same call: rules and order of events only, no input or output.

The number of collectives on a communicator is a clock that its ranks share. A table holds *from* collective N *until*
collective E. A change is a *round*:

1. *Propose.* Rank 0 writes the table into the job's store.
2. *Vote.* Each rank stages it and sets for each of its communicators a *limit* some calls ahead, at which its plugin
  answers no more. Only then it tells its limits, and hashes of what was issued so far.
3. *Decide.* Where all members have voted alike, the largest limit is N. Rank 0 writes the decision into one register of
  the store, by compare-and-set from nothing.
4. *Act.* Each rank tells its plugin N and E, and lifts its limits. Nobody has passed N: it is below nobody's limit.

A rank at its limit without a decision holds that call back and writes "abort" by the same compare-and-set; what it then
finds in the register holds. That is the only wait.

So a table changes on all ranks of a communicator at one call, or on none. A communicator with a member that has not
voted, or otherwise than the rest, is left out and keeps what it has. A trial ends at E with nobody alive to say so;
then holds again what was there to stay.

Turns of a step or two need a *rhythm*: the collectives of a step (L), and those at the end of the last step, less L
for each step since the rank attached (O). Where all tell the same, step s ends at collective O + L s on every rank.
*Long turns*, at most four, take the average L: communicators drift apart.

:func:`lead` and :func:`follow` are generators: they yield what is to be done, and are sent what came of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ....traces.reasons import NotAgreeing, Why
from ....traces.records import Trial
from ..plugin.bindings import Plan, Span
from . import plans

#: A trial whose calls a step nobody knows ends after so many calls.
SOME_CALLS = 64
#: Turns of two tables that make a whole: A B B A. Of more tables one turn of each ``one_of`` is the trial's.
QUAD = 4
#: Turns of so many steps or more are long: they need no rhythm.
LONG_STEPS = 8
#: Least collectives of a long turn: a turn of one is a turn of few calls.
_LEAST_LENGTH = 2
NO_PLAN = Plan()


@dataclass(frozen=True)
class CommVote:
    """One rank's word on one of its communicators."""

    n_ranks: int
    n_nodes: int
    limit: int  # collectives after which this rank's plugin answers no more until the round is over
    calls_a_step: float
    marks: Mapping[int, int]  # hash of the first so many collectives
    no_clock: str = ""  # why their number is not the same on all ranks; then there is no limit
    a_step: int = 0  # collectives of a step; 0: the last steps differed
    offset: int = (
        0  # collectives at the end of the last step, less `a_step` for each step since the ranks attached
    )
    plan: Plan = NO_PLAN  # as it was when this rank voted
    has: bool = False  # it has the table to stay that is led again: so it has no limit, and nothing changes
    steps: int = 0  # that have ended since the ranks attached

    @property
    def ended_at(self) -> int:
        """Collectives at the end of the last step."""
        return self.offset + self.a_step * self.steps

    @property
    def newest(self) -> int:
        """The last mark; 0: none, so nothing shows that this rank counts as the others do."""
        return max(self.marks, default=0)

    @property
    def takes_part(self) -> bool:
        """Whether it is a vote; else a report only: no limit could be set now."""
        return bool(self.limit or self.has or self.no_clock or self.plan.gave_up)


@dataclass(frozen=True)
class Vote:
    """One rank's word in a round."""

    rank: int
    round: int
    identity: (
        str  # what must be equal: the plugin's sources, the table's format, the interface, NCCL's release
    )
    comms: Mapping[int, CommVote] = field(default_factory=dict)  # by communicator
    refusal: Why | None = None  # the plugin does not take the table
    no_room: Why | None = None  # it has no room for it now


@dataclass(frozen=True)
class Decision:
    """What a round comes to: at which collectives of each communicator the table holds. Without any it is lost."""

    generation: int = 0
    switches: Mapping[int, Span] = field(default_factory=dict)


class LeftOut(NamedTuple):
    """Why a communicator has no part in a round."""

    why: Why
    for_good: bool = False
    is_refusal: bool = False  # by a plugin: no communicator may have this table
    is_mismatch: bool = False  # its members would run one collective under different tables


ABORT = Decision()
#: What the ranks of a communicator say of it; the same by communicator.
Words = list[CommVote]
WordsOf = Mapping[int, Words]
#: (collectives a step, offset) by communicator, see :class:`CommVote`.
Rhythms = dict[int, tuple[int, int]]
#: Communicators that have left for good, and why.
Reasons = Mapping[int, Why]
#: Whether a round is lost rather than go on without these communicators.
Loses = Callable[[Mapping[int, "LeftOut"]], bool]


def decide(
    votes: Sequence[Vote],
    generation: int,
    trial: Trial,
    gone: Reasons,
    stays: int | None = None,
    default: int = 0,
) -> tuple[Decision, dict[int, LeftOut]]:
    """The decision of a round, and the communicators without a part in it; as 0: why there is none for any of them.

    ``trial``: how it is tried; without steps it is to stay. ``gone``: communicators that have left, and why. ``stays``:
    hash of the rows that stay: where missing, nothing is tried. ``default``: of NCCL untouched; given also where plans
    differ.
    """
    sound, left_out = _sorted_out(votes, gone, is_default=stays == default and not trial.trial_steps)
    is_late = any(not one.for_good for one in left_out.values())  # the next round may find more
    if trial.trial_steps and stays is not None:
        for comm in _without(sound, stays):
            left_out[comm] = LeftOut(NotAgreeing.NOT_SERVED(rank=_first_on(comm, votes)))
            del sound[comm]
    if not trial.turn_steps:
        spans = {comm: _span(words, trial) for comm, words in sound.items()}
        return Decision(generation, spans), left_out
    spans, odd = _by_steps(sound, trial)
    if odd and not is_late:
        left_out[0] = LeftOut(NotAgreeing.NO_RHYTHM(rank=_first_on(odd[0], votes)), True)
    return Decision(generation, spans), left_out


def _by_steps(sound: WordsOf, trial: Trial) -> tuple[dict[int, Span], list[int]]:
    """Where a trial whose turns follow steps holds, and the communicators for whose sake it holds nowhere."""
    even = {comm: words for comm, words in sound.items() if _has_rhythm(words)}
    odd = _without_rhythm(sound, even)
    if not odd or trial.turn_steps < LONG_STEPS:
        return _turns(even, trial), odd
    used = {comm: words for comm, words in sound.items() if _pace(words) >= 1}
    return (_long_turns(used, trial), []) if used else (_turns(even, trial), odd)


def _without(sound: WordsOf, stays: int) -> list[int]:
    """The communicators that lack the rows that are there to stay."""
    return [comm for comm, words in sound.items() if any(one.plan.stays != stays for one in words)]


def _first_on(comm: int, votes: Sequence[Vote]) -> int:
    """The first rank that has voted on a communicator."""
    return next(vote.rank for vote in votes if comm in vote.comms)


def _sorted_out(
    votes: Sequence[Vote], gone: Reasons, is_default: bool
) -> tuple[dict[int, Words], dict[int, LeftOut]]:
    """The words on each communicator whose ranks are of one mind, and why the others are left out.

    Neither are those that have the table already. ``is_default``: the table leaves NCCL untouched, to stay.
    """
    sound: dict[int, Words] = {}
    left_out: dict[int, LeftOut] = {}
    strangers = [vote for vote in votes if not vote.comms and vote.identity != votes[0].identity]
    for comm, members in _members_of(votes).items():
        words = [vote.comms[comm] for vote in members]
        if comm in gone:
            left_out[comm] = LeftOut(gone[comm], True)
        elif odd := _odd(comm, members, strangers) or _other_plans(comm, members, is_default):
            left_out[comm] = odd
        elif not all(word.has for word in words):
            sound[comm] = words
    return sound, left_out


def _members_of(votes: Sequence[Vote]) -> dict[int, list[Vote]]:
    """The votes on each communicator."""
    found: dict[int, list[Vote]] = {}
    for vote in votes:
        for comm, word in vote.comms.items():
            if word.takes_part:
                found.setdefault(comm, []).append(vote)
    return dict(sorted(found.items()))


def _other_plans(comm: int, members: Sequence[Vote], is_default: bool) -> LeftOut | None:
    """Whether the members would run one collective under different tables. Then they may all get the default."""
    words = [vote.comms[comm] for vote in members]
    told = [(vote.rank, word.plan) for vote, word in zip(members, words, strict=True)]
    if not is_default and (why := plans.differ(told)):
        return LeftOut(why, is_mismatch=True)
    if 0 < sum(word.has for word in words) < len(words):
        return LeftOut(NotAgreeing.NOT_SERVED(rank=members[0].rank))
    return None


def _without_rhythm(sound: WordsOf, even: WordsOf) -> list[int]:
    """The communicators for whose sake tables cannot take turns by steps.

    One that is used in some steps only is none of them: it keeps its table.
    """
    if not even:
        return [*sound]
    uneven = [comm for comm in sound if comm not in even]
    return [comm for comm in uneven if _pace(sound[comm]) >= 1]


def _pace(words: Words) -> float:
    """Collectives of a communicator in a step, lately and on average."""
    return max(one.calls_a_step for one in words)


def _span(words: Words, trial: Trial) -> Span:
    """Where the table holds on a communicator if no step matters."""
    since = max(one.limit for one in words)
    if not trial.trial_steps:
        return Span(since)
    calls = trial.trial_steps * _pace(words)
    until = since + (math.ceil(calls) or SOME_CALLS)
    turn_calls = 1 if trial.one_of else 0
    return Span(since, until, turn_calls, 0, trial.one_of, trial.swap)


def rhythms_of(votes: Sequence[Vote]) -> Rhythms:
    """(collectives a step, offset) of each communicator whose ranks have all told the same."""
    words: dict[int, Words] = {}
    for vote in votes:
        for comm, word in vote.comms.items():
            words.setdefault(comm, []).append(word)
    found = {}
    for comm, told in words.items():
        if len(told) == told[0].n_ranks and _has_rhythm(told):
            found[comm] = told[0].a_step, told[0].offset
    return found


def _has_rhythm(words: Words) -> bool:
    """Whether the ranks of a communicator agree on where its steps end."""
    return words[0].a_step > 0 and len({(one.a_step, one.offset) for one in words}) == 1


def _turns(rhythms: WordsOf, trial: Trial) -> dict[int, Span]:
    """Where the table holds if it takes turns by steps: on all these communicators in the same steps."""
    if not rhythms:
        return {}
    turns = QUAD if trial.one_of == 2 else trial.one_of
    block = turns * trial.turn_steps
    steps = block * math.ceil(trial.trial_steps / block)
    ahead = []  # at this step no communicator is beyond its limit
    for words in rhythms.values():
        limit = max(one.limit for one in words)
        beyond = limit - words[0].offset
        ahead.append(math.ceil(beyond / words[0].a_step))
    begin = max(ahead)
    spans = {}
    for comm, words in rhythms.items():
        a_step = words[0].a_step
        since = words[0].offset + a_step * begin
        until = since + a_step * steps
        length = a_step * trial.turn_steps
        spans[comm] = Span(since, until, length, a_step, trial.one_of, trial.swap)
    return spans


def _long_turns(used: WordsOf, trial: Trial) -> dict[int, Span]:
    """Where the table holds in one quad of long turns: on all these communicators from about the same step on."""
    ahead = []  # at this step, as each communicator goes, it is not beyond its limit
    for words in used.values():
        limit = max(one.limit for one in words)
        beyond = limit - words[0].ended_at
        ahead.append(words[0].steps + beyond / _pace(words))
    begin = max(ahead)
    turns = QUAD if trial.one_of == 2 else trial.one_of
    spans = {}
    for comm, words in used.items():
        limit = max(one.limit for one in words)
        steps = begin - words[0].steps
        since = max(words[0].ended_at + math.ceil(steps * _pace(words)), limit)
        length = max(math.ceil(trial.turn_steps * _pace(words)), _LEAST_LENGTH)
        spans[comm] = Span(since, since + turns * length, length, 0, trial.one_of, trial.swap)
    return spans


def _odd(comm: int, members: Sequence[Vote], strangers: Sequence[Vote]) -> LeftOut | None:
    """Why the members of a communicator are not of one mind; None if they are.

    ``strangers``: ranks with other code that have named no communicator, since theirs refuses the table. If one is
    missing here, it is taken for one of them.
    """
    first, words = members[0], [vote.comms[comm] for vote in members]
    for vote in members:
        if vote.comms[comm].plan.gave_up:
            return LeftOut(NotAgreeing.GAVE_UP(rank=vote.rank), True)
        if why := vote.comms[comm].no_clock:
            return LeftOut(NotAgreeing.NO_CLOCK(rank=vote.rank, why=why), True)
    is_short = len(members) != words[0].n_ranks
    for other in (*members, *(strangers if is_short else ())):
        if other.identity != first.identity:
            ranks = {"rank": other.rank, "other": first.rank}
            identities = {"what": other.identity, "others": first.identity}
            return LeftOut(NotAgreeing.NOT_ALIKE(**ranks, **identities))
    if is_short or len({(one.n_ranks, one.n_nodes) for one in words}) > 1:
        counts = {"n": len(members), "of": words[0].n_ranks}
        return LeftOut(NotAgreeing.NOT_ALL_VOTED(rank=first.rank, **counts))
    return _other_calls(comm, members)


def _other_calls(comm: int, members: Sequence[Vote]) -> LeftOut | None:
    """Whether the members have issued other collectives, by the newest count of which all have a mark."""
    marks = {vote.rank: vote.comms[comm].marks for vote in members}

    def newest(vote: Vote) -> int:
        return vote.comms[comm].newest

    slowest = min(members, key=newest)
    fastest = max(members, key=newest)
    shared = set.intersection(*(set(known) for known in marks.values()))
    if not shared:
        ranks = {"rank": slowest.rank, "other": fastest.rank}
        count = newest(slowest)
        return LeftOut(NotAgreeing.NO_COMMON_COUNT(**ranks, count=count))
    at = max(shared)
    expected = marks[slowest.rank][at]
    for rank, known in marks.items():
        if known[at] != expected:
            ranks = {"rank": slowest.rank, "other": rank}
            return LeftOut(NotAgreeing.OTHER_CALLS(**ranks, count=at), True)
    return None


# -- what the two parts ask to have done ---------------------------------------------------------------------------


class Propose(NamedTuple):
    """Write the table into the store; nothing comes of it."""


class Stage(NamedTuple):
    """Lay the table ready; why the plugin refuses it, and why it has no room now, each empty if it does not."""


class Limit(NamedTuple):
    """Set the limits of all communicators that have a clock; {communicator: CommVote}, of the others too."""


class Cast(NamedTuple):
    """Send this rank's vote; nothing comes of it."""

    vote: Vote


class Gather(NamedTuple):
    """The votes of the other ranks that have come in time."""


class Settle(NamedTuple):
    """Set the register of the round if it is free; the decision that stands in it then."""

    decision: Decision


class Await(NamedTuple):
    """The decision of the round; None if none is known and a call is held back at a limit."""


class Switch(NamedTuple):
    """Tell the plugin at which collectives the staged table holds on a communicator."""

    comm: int
    span: Span


class Lift(NamedTuple):
    """No limits any more. ``generation`` of what was decided, 0 for nothing."""

    generation: int


def never(_left_out: Mapping[int, LeftOut]) -> bool:
    """Whoever is left out, the round goes on; as ``loses`` of :func:`lead`."""
    return False


Request = Propose | Stage | Limit | Cast | Gather | Settle | Await | Switch | Lift
Part = Generator[Request, Any, Decision]


def follow(rank: int, number: int, identity: str) -> Part:
    """A rank's part in round ``number``; the decision."""
    vote = yield from _vote(rank, number, identity)
    yield Cast(vote)
    decision = yield Await()
    if decision is None:
        decision = yield Settle(ABORT)
    yield from _act(vote, decision)
    return decision


def lead(
    number: int,
    identity: str,
    generation: int,
    trial: Trial,
    gone: Reasons,
    stays: int | None,
    loses: Loses,
    left_out: dict[int, LeftOut],
    rhythms: Rhythms,
    default: int = 0,
) -> Part:
    """Rank 0's part. ``left_out`` is filled with the communicators that have no part in the round, ``rhythms`` with
    what :func:`rhythms_of` its votes says.

    ``loses(left_out)``: whether the round is lost rather than go on without them. ``default``: see :func:`decide`.
    """
    yield Propose()
    others = yield Gather()
    own = yield from _vote(0, number, identity)
    votes = [own, *(vote for vote in others if vote.round == number)]
    decision, found = decide(votes, generation, trial, gone, stays, default)
    left_out.update(found)
    rhythms.update(rhythms_of(votes))
    if why := _why_no_round(votes):
        left_out[0] = why
    if 0 in left_out or not decision.switches or loses(left_out):
        decision = ABORT
    decision = yield Settle(decision)
    yield from _act(own, decision)
    return decision


def _why_no_round(votes: list[Vote]) -> LeftOut | None:
    """Why no communicator at all can switch in this round; None where some may.

    Ranks whose code is not rank 0's have no say: they share no communicator with those that switch.
    """
    alike = [vote for vote in votes if vote.identity == votes[0].identity]
    if refusal := next((vote.refusal for vote in alike if vote.refusal), None):
        return LeftOut(refusal, True, True)  # the bytes and the code are the same everywhere
    if no_room := next((vote.no_room for vote in alike if vote.no_room), None):
        return LeftOut(no_room)
    if any(vote.comms for vote in votes):
        return None
    return LeftOut(NotAgreeing.NOTHING_COUNTED())


def _vote(rank: int, number: int, identity: str) -> Generator[Request, Any, Vote]:
    refusal, no_room = yield Stage()
    comms = {} if refusal or no_room else (yield Limit())
    return Vote(rank, number, identity, comms, refusal, no_room)


def _act(vote: Vote, decision: Decision) -> Generator[Request, Any, None]:
    for comm, span in decision.switches.items():
        if comm in vote.comms and not vote.comms[comm].no_clock:
            yield Switch(comm, span)
    yield Lift(decision.generation if decision.switches else 0)

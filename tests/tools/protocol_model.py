"""Every order of events in a small job: the two parts of protocol.py, the words of the plugin, and threads that train.

A state is the store, each rank's plugin (count, limit and switches of each communicator, as comms.c has them), each
rank's part in the round (what it was sent so far: the generators of protocol.py are played again from it), and one
training thread for each communicator of a rank. ``explore`` visits all states that can be reached, with votes that come
late or never, ranks that die and threads of the agreement that stop, and says what is wrong in one of them.

``python tests/tools/protocol_model.py`` explores the larger scopes, which takes minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

from dynamiccl.envs.nccl.agreement import protocol
from dynamiccl.envs.nccl.agreement.protocol import CommVote, Decision, Vote

NO_LIMIT = 10**6
MARKS = {16: 1}


class Clock(NamedTuple):
    """One communicator on one rank, as the plugin has it, and its training thread."""

    count: int = 0
    limit: int = NO_LIMIT
    switches: tuple[tuple[int, int, int, int], ...] = ()  # from, until, trial, base
    thread: str = "asks"  # asks -> answered -> told -> asks; "answered" has passed the limit
    limiting: int = -1  # dynamiccl_limit has read this count and is about to set the limit

    def table(self) -> int:
        """The table that holds for the next collective."""
        for since, until, trial, base in reversed(self.switches):
            if self.count >= since:
                return trial if self.count < until else base
        return 0


class Rank(NamedTuple):
    """One rank."""

    clocks: tuple[Clock, ...]  # by its communicators
    round: int = 0  # in which it takes part, or took part last
    results: tuple[Any, ...] | None = None  # what its part was sent; None: in no round
    staged: int = 0
    alive: bool = True  # its training threads run
    agrees: bool = True  # its agreement's thread runs


class World(NamedTuple):
    ranks: tuple[Rank, ...]
    proposed: int = 0
    votes: tuple[Any, ...] = ()  # of the round proposed last, by rank: (limits by communicator)
    registers: tuple[Any, ...] = ()  # of each round: None, or the decision
    answers: tuple[tuple[int, int, int], ...] = ()  # (communicator, collective, table) of each first answer


@dataclass(frozen=True)
class Scope:
    """A small job. ``trials``: of each round, how many steps its table is tried for, 0 = to stay."""

    members: tuple[tuple[int, ...], ...]  # ranks by communicator
    trials: tuple[int, ...] = (1, 0)
    calls: int = 3  # of each communicator
    deaths: int = 0
    mutations: frozenset[str] = field(default_factory=frozenset)

    @property
    def n_ranks(self) -> int:
        return 1 + max(rank for ranks in self.members for rank in ranks)

    def comms(self, rank: int) -> tuple[int, ...]:
        return tuple(comm for comm, ranks in enumerate(self.members) if rank in ranks)


def explore(scope: Scope, most: int = 10**8) -> tuple[str, int]:
    """(what is wrong, in words, empty if nothing is; states seen). Raises RuntimeError beyond ``most`` states."""
    first = World(
        tuple(Rank(tuple(Clock() for _ in scope.comms(rank))) for rank in range(scope.n_ranks)),
        registers=(None,) * len(scope.trials),
    )
    seen, edge = {first}, [first]
    while edge:
        world = edge.pop()
        found = list(Steps(scope, world).all())
        if not found and (stuck := _stuck(scope, world)):
            return stuck, len(seen)
        for after in found:
            if isinstance(after, str):
                return after, len(seen)
            if after not in seen:
                if len(seen) >= most:
                    raise RuntimeError(f"more than {most} states")
                seen.add(after)
                edge.append(after)
    return "", len(seen)


def _stuck(scope: Scope, world: World) -> str:
    """Nobody can do anything any more: with all alive every collective must have been made."""
    if not all(rank.alive and rank.agrees for rank in world.ranks):
        return ""
    short = [c for rank in world.ranks for c in rank.clocks if c.count < scope.calls]
    return f"a thread waits for ever: {world}" if short else ""


class Steps:
    """What can happen next in a world."""

    def __init__(self, scope: Scope, world: World) -> None:
        self.scope, self.world = scope, world

    def all(self) -> Iterator[World | str]:
        deaths = sum((not rank.alive) + (not rank.agrees) for rank in self.world.ranks)
        for r, rank in enumerate(self.world.ranks):
            if rank.alive:
                yield from self._trains(r, rank)
            if rank.agrees:
                yield from self._agrees(r, rank)
            if deaths < self.scope.deaths and rank.agrees:
                yield self._with(r, rank._replace(agrees=False))
                yield self._with(r, rank._replace(agrees=False, alive=False))

    def _with(self, r: int, rank: Rank, **world: Any) -> World:
        ranks = self.world.ranks
        return self.world._replace(ranks=(*ranks[:r], rank, *ranks[r + 1 :]), **world)

    # -- training threads ------------------------------------------------------------------------------------------

    def _trains(self, r: int, rank: Rank) -> Iterator[World | str]:
        for i, (comm, clock) in enumerate(zip(self.scope.comms(r), rank.clocks, strict=True)):
            if clock.thread == "asks" and clock.count < self.scope.calls:
                if clock.count < clock.limit or "nobody waits at a limit" in self.scope.mutations:
                    yield self._clock(r, i, clock._replace(thread="passed"))
            elif clock.thread == "passed":
                yield self._answers(r, i, comm, clock)
            elif clock.thread == "answered":
                yield self._clock(r, i, clock._replace(thread="asks", count=clock.count + 1))

    def _answers(self, r: int, i: int, comm: int, clock: Clock) -> World | str:
        table = clock.table()
        known = {(one, at): given for one, at, given in self.world.answers}
        before = known.setdefault((comm, clock.count), table)
        if before != table:
            return f"collective {clock.count} of communicator {comm}: table {before} and, on rank {r}, table {table}"
        after = self._clock(r, i, clock._replace(thread="answered"))
        return after._replace(answers=tuple(sorted((*key, given) for key, given in known.items())))

    def _clock(self, r: int, i: int, clock: Clock, **rank: Any) -> World:
        clocks = self.world.ranks[r].clocks
        return self._with(
            r, self.world.ranks[r]._replace(clocks=(*clocks[:i], clock, *clocks[i + 1 :]), **rank)
        )

    # -- the agreement ---------------------------------------------------------------------------------------------

    def _agrees(self, r: int, rank: Rank) -> Iterator[World]:
        world, scope = self.world, self.scope
        if rank.results is None:
            if rank.round < (len(scope.trials) if r == 0 else world.proposed):
                yield self._with(r, rank._replace(round=rank.round + 1, results=()))
            return
        request = _request(scope, r, rank.round, rank.results)
        if isinstance(request, Decision):
            yield self._with(r, rank._replace(results=None))
            return
        register = world.registers[rank.round - 1]
        match request:
            case protocol.Propose():
                yield self._sent(r, None, proposed=rank.round, votes=(None,) * scope.n_ranks)
            case protocol.Stage():
                yield self._sent(r, "", staged=rank.round)
            case protocol.Limit():
                yield from self._limits(r, rank)
            case protocol.Cast(vote):
                limits = tuple((comm, one.limit) for comm, one in vote.comms.items())
                if rank.round == world.proposed:
                    yield self._sent(r, None, votes=(*world.votes[:r], limits, *world.votes[r + 1 :]))
                yield self._sent(r, None)  # it is lost
            case protocol.Gather():  # whatever has come by now
                yield self._sent(
                    r, tuple((i, limits) for i, limits in enumerate(world.votes) if limits is not None)
                )
            case protocol.Settle(decision):
                mine = _frozen(decision)
                found = (
                    mine
                    if register is None or "the register can be set twice" in scope.mutations
                    else register
                )
                registers = (*world.registers[: rank.round - 1], found, *world.registers[rank.round :])
                yield self._sent(r, found, registers=registers)
            case protocol.Await():
                if register is not None:
                    yield self._sent(r, register)
                elif any(clock.thread == "asks" and clock.count >= clock.limit for clock in rank.clocks):
                    yield self._sent(r, None)
            case protocol.Switch(comm, since, until):
                yield self._switches(r, rank, comm, since, until)
            case protocol.Lift():
                clocks = tuple(clock._replace(limit=NO_LIMIT) for clock in rank.clocks)
                yield self._sent(r, None, clocks=clocks)

    def _sent(self, r: int, result: Any, **changes: Any) -> World:
        rank = self.world.ranks[r]
        of_rank = {name: value for name, value in changes.items() if name in Rank._fields}
        of_world = {name: value for name, value in changes.items() if name in World._fields}
        return self._with(r, rank._replace(results=(*(rank.results or ()), result), **of_rank), **of_world)

    def _limits(self, r: int, rank: Rank) -> Iterator[World]:
        """dynamiccl_limit on one communicator after the other, in its single reads and writes."""
        done = [clock.limit != NO_LIMIT and clock.limiting < 0 for clock in rank.clocks]
        if all(done):
            yield self._sent(
                r, tuple(zip(self.scope.comms(r), (clock.limit for clock in rank.clocks), strict=True))
            )
            return
        i = done.index(False)
        clock = rank.clocks[i]
        if clock.limiting < 0:  # reads the count
            yield self._clock(r, i, clock._replace(limiting=clock.count))
        elif clock.limit == NO_LIMIT or clock.limit <= clock.limiting:  # sets the limit, a call from there
            least = clock.switches[-1][0] if clock.switches else 0
            yield self._clock(r, i, clock._replace(limit=max(clock.limiting + 1, least)))
        elif clock.count >= clock.limit and "a limit is not looked at again" not in self.scope.mutations:
            yield self._clock(r, i, clock._replace(limiting=clock.count))
        else:
            yield self._clock(r, i, clock._replace(limiting=-1))

    def _switches(self, r: int, rank: Rank, comm: int, since: int, until: int) -> World:
        i = self.scope.comms(r).index(comm)
        clock = rank.clocks[i]
        base = clock.switches[-1][3] if clock.switches else 0
        change = (since, until, rank.staged, base) if until else (since, 0, 0, rank.staged)
        if "a trial ends one call later on rank 1" in self.scope.mutations and r == 1 and until:
            change = (since, until + 1, rank.staged, base)
        clocks = (*rank.clocks[:i], clock._replace(switches=(*clock.switches, change)), *rank.clocks[i + 1 :])
        return self._sent(r, None, clocks=clocks)


def _frozen(decision: Decision | None) -> Any:
    return decision and (decision.generation, tuple(sorted(decision.switches.items())))


@cache
def _request(scope: Scope, r: int, number: int, results: tuple[Any, ...]) -> Any:
    """What a part of round ``number`` asks for next, or its decision at the end."""
    if r == 0:
        part = protocol.lead(number, "", number, scope.trials[number - 1], {}, set(), {})
    else:
        part = protocol.follow(r, number, "")
    try:
        request = next(part)
        for result in results:
            request = part.send(_thawed(scope, number, request, result))
    except StopIteration as end:
        return end.value
    return request


def _thawed(scope: Scope, number: int, request: Any, result: Any) -> Any:
    match request:
        case protocol.Limit():
            return _words(scope, result)
        case protocol.Gather():
            return [Vote(rank, number, "", _words(scope, limits)) for rank, limits in result]
        case protocol.Settle() | protocol.Await():
            return result and Decision(result[0], dict(result[1]))
    return result


def _words(scope: Scope, limits: Any) -> dict[int, CommVote]:
    return {comm: CommVote(len(scope.members[comm]), 1, limit, 1.0, MARKS) for comm, limit in limits}


ONE = Scope(((0, 1),), calls=4)
TWO = Scope(((0, 1), (0, 1)), trials=(1,), calls=2)
THREE = Scope(((0, 1, 2), (1, 2)), trials=(1,), calls=2)
BESIDE = Scope(((0, 1), (1, 2)), trials=(1,), calls=1)  # rank 1 has two threads
LARGE = (
    BESIDE,
    replace(ONE, trials=(1, 1, 0), calls=5, deaths=1),
    replace(TWO, calls=3, deaths=1),
    replace(THREE, deaths=1),
)


def main() -> None:
    for scope in LARGE:
        wrong, states = explore(scope)
        print(f"{scope}: {states:,} states, {wrong or 'nothing wrong'}", flush=True)
        if wrong:
            sys.exit(1)


if __name__ == "__main__":
    main()

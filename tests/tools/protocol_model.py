"""Every order of events in a small job: the two parts of protocol.py, the words of the plugin, and threads that train.

A state is the store, each rank's plugin (count, limit and changes of each communicator, the buffers of tables), each
rank's part in the round (what it was sent so far: the generators of protocol.py are played again from it), and one
training thread for each communicator of a rank. ``explore`` visits all states that can be reached, with votes that come
late or never, ranks that die and threads of the agreement that stop, and says what is wrong in one of them.

``python tests/tools/protocol_model.py`` explores the larger scopes, which takes minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

from dynamiccl.envs.nccl.agreement import protocol
from dynamiccl.envs.nccl.agreement.plans import differ
from dynamiccl.envs.nccl.agreement.protocol import Decision
from dynamiccl.envs.nccl.plugin.bindings import Plan, Span
from plugin_model import ALIKE, EMPTY, NO_LIMIT, Change, Clock, Table
from protocol_audit import expected, label_of, wrong_conclusion, wrong_label
from protocol_scopes import CAPTURED, LARGE, SUM, Scope
from protocol_words import thawed


class Rank(NamedTuple):
    """One rank."""

    clocks: tuple[Clock, ...]  # by its communicators
    round: int = 0  # in which it takes part, or took part last
    results: tuple[Any, ...] | None = None  # what its part was sent; None: in no round
    staged: Table = EMPTY
    buffers: tuple[int, ...] = ()  # generation of the table in each, from the second on
    left: int = 0  # what the agreement of a group that was destroyed has still to do: to stage, to lift
    steps: int = 0  # that have ended
    alive: bool = True  # its training threads run
    agrees: bool = True  # its agreement's thread runs
    untold: int = 0  # the round after which it has still to report its plans; 0: none


class World(NamedTuple):
    ranks: tuple[Rank, ...]
    proposed: int = 0
    votes: tuple[Any, ...] = ()  # of the round proposed last, by rank: (limits by communicator)
    registers: tuple[Any, ...] = ()  # of each round: None, or the decision
    answers: tuple[tuple[int, int, int], ...] = ()  # (communicator, group, generation) of each first answer
    reports: tuple[
        Any, ...
    ] = ()  # the last of each rank that has told: (rank, number, plans by communicator)


def _begins(scope: Scope, rank: int) -> Rank:
    """A rank at the beginning."""
    buffers = (0,) * (scope.buffers or len(scope.trials) + 1)
    left = 2 * (rank == scope.left and rank > 0)
    clocks = []
    for comm in scope.comms(rank):  # their rhythm is known from steps before, where they have one
        a_step = scope.steps[0][comm] if scope.steps else 0
        clocks.append(Clock(a_step=a_step, n_alike=1 if scope.is_uneven else ALIKE))
    return Rank(tuple(clocks), buffers=buffers, left=left)


def explore(scope: Scope, most: int = 10**8) -> tuple[str, int]:
    """(what is wrong, in words, empty if nothing is; states seen). Raises RuntimeError beyond ``most`` states."""
    least = min(scope.turn_steps, protocol.LONG_STEPS) if scope.is_uneven else protocol.LONG_STEPS
    with patch.object(protocol, "LONG_STEPS", least):  # turns of one step are long enough for a small job
        return _explored(scope, most)


def _explored(scope: Scope, most: int) -> tuple[str, int]:
    ranks = tuple(_begins(scope, rank) for rank in range(scope.n_ranks))
    first = World(ranks, registers=(None,) * len(scope.trials))
    seen, edge = {first}, [first]
    known: Known = {}
    while edge:
        world = edge.pop()
        found = list(Steps(scope, world, known).all())
        if not found and (stuck := _stuck(scope, world)):
            return stuck, len(seen)
        if scope.reports and (wrong := wrong_conclusion(scope, world)):
            return wrong, len(seen)
        for after in found:
            if isinstance(after, str):
                return after, len(seen)
            n = len(seen)
            seen.add(after)  # worked out once, its hash, which is most of the work
            if len(seen) > n:
                if n >= most:
                    raise RuntimeError(f"more than {most} states")
                edge.append(after)
    return "", len(seen)


def _stuck(scope: Scope, world: World) -> str:
    """Nobody can do anything any more: with all alive every collective must have been made."""
    if not all(rank.alive and rank.agrees for rank in world.ranks):
        return ""
    short = []
    for r, rank in enumerate(world.ranks):
        clocks = zip(scope.comms(r), rank.clocks, strict=True)
        short += [clock for comm, clock in clocks if clock.at < len(scope.groups_of(comm))]
    return f"a thread waits for ever: {world}" if short else ""


#: (rank, all else but the other ranks) -> what the rank makes of both: in how many worlds it stands does not matter.
Known = dict[tuple[int, Rank, tuple[Any, ...]], list[tuple[Rank, tuple[Any, ...]] | str]]


class Steps:
    """What can happen next in a world. A rank sees nothing of another but the store: its steps are worked out once."""

    def __init__(self, scope: Scope, world: World, known: Known) -> None:
        self.scope, self.world, self.known = scope, world, known

    def all(self) -> Iterator[World | str]:
        ranks, store = self.world.ranks, self.world[1:]
        deaths = sum((not rank.alive) + (not rank.agrees) for rank in ranks)
        for r, rank in enumerate(ranks):
            if (found := self.known.get((r, rank, store))) is None:
                found = [
                    one if isinstance(one, str) else (one.ranks[r], one[1:]) for one in self._of(r, rank)
                ]
                self.known[r, rank, store] = found
            before, behind = ranks[:r], ranks[r + 1 :]
            for one in found:
                yield one if isinstance(one, str) else World((*before, one[0], *behind), *one[1])
            if deaths < self.scope.deaths and rank.agrees:
                yield self._with(r, rank._replace(agrees=False))
                yield self._with(r, rank._replace(agrees=False, alive=False))

    def _of(self, r: int, rank: Rank) -> Iterator[World | str]:
        if rank.alive:
            yield from self._trains(r, rank)
        if rank.agrees:
            yield from self._agrees(r, rank)
            if rank.untold:
                yield self._reports(r, rank)
        if rank.left:
            yield self._leaves(r, rank)

    def _is(self, mutation: str) -> bool:
        return mutation in self.scope.mutations

    def _with(self, r: int, rank: Rank, **world: Any) -> World:
        ranks = self.world.ranks
        return self.world._replace(ranks=(*ranks[:r], rank, *ranks[r + 1 :]), **world)

    def _clock(self, r: int, i: int, clock: Clock, **rank: Any) -> World:
        clocks = self.world.ranks[r].clocks
        return self._with(
            r, self.world.ranks[r]._replace(clocks=(*clocks[:i], clock, *clocks[i + 1 :]), **rank)
        )

    def _count(self, clock: Clock) -> int:
        """What the plugin has counted."""
        return clock.told if self._is("what is told counts") else clock.count

    # -- training threads ------------------------------------------------------------------------------------------

    def _trains(self, r: int, rank: Rank) -> Iterator[World | str]:
        if self._is_step_over(r, rank):
            yield self._step_ends(r, rank)
            return
        for i, (comm, clock) in enumerate(zip(self.scope.comms(r), rank.clocks, strict=True)):
            if clock.told < clock.count:
                yield self._clock(r, i, clock._replace(told=clock.told + 1))
            if clock.thread == "asks" and clock.at < self._groups(comm, rank):
                yield from self._asks(r, i, clock)
            elif clock.thread == "passed":
                given = clock._replace(thread="reads", reads=self._table(r, comm, clock))
                if self.scope.buffers:  # else what it was given stays what it is
                    yield self._clock(r, i, given)
                else:
                    yield self._answers(r, i, comm, given)
            elif clock.thread == "reads":
                yield self._answers(r, i, comm, clock)
            elif clock.thread == "answered":
                yield self._launches(r, i, comm, clock)

    def _groups(self, comm: int, rank: Rank) -> int:
        """Groups of a communicator that may be made before the next end of a step."""
        if self.scope.steps:
            return self.scope.end_of(comm, rank.steps)
        return len(self.scope.groups_of(comm))

    def _is_step_over(self, r: int, rank: Rank) -> bool:
        if rank.steps >= len(self.scope.steps):
            return False
        clocks = zip(self.scope.comms(r), rank.clocks, strict=True)
        return all(clock.thread == "asks" and clock.at == self._groups(comm, rank) for comm, clock in clocks)

    def _step_ends(self, r: int, rank: Rank) -> World | str:
        label = label_of(rank.clocks, self.scope.mutations)
        if label is not None:
            comms = self.scope.comms(r)
            if wrong := wrong_label(self.scope, comms, rank.steps, label, self.world.answers):
                return wrong
        clocks = tuple(clock.step_ended() for clock in rank.clocks)
        return self._with(r, rank._replace(clocks=clocks, steps=rank.steps + 1))

    def _plan(self, clock: Clock, rank: Rank) -> Plan:
        plan = clock.plan(self._count(clock), rank.buffers)
        if self._is("a plan leaves its trial out"):
            return plan._replace(trial=0, first=0, last=0)
        if self._is("a plan tells what answered last"):
            return plan._replace(stays=clock.table(max(clock.count - 1, 0)).generation, since=0)
        return plan

    def _table(self, r: int, comm: int, clock: Clock) -> Table:
        """What a question is given."""
        own = self._is("few calls are picked by the rank") and r == 1
        moves = clock.n_asked if self._is("the count moves within a group") else 0
        count = self._count(clock) + own + moves
        change = clock.change_at(count)
        if change is None:
            return EMPTY
        span = change.span
        if self._is("turns are numbered by the absolute count"):
            span = span._replace(since=0)
        if self._is("each communicator has an order of its own"):
            span = span._replace(swap=(comm + 1) & 1)
        if self._is("a trial has no end"):
            span = span._replace(until=span.until and NO_LIMIT)
        if self._is("the table that stays is read at each answer"):
            change = change._replace(base=clock.stays())
        return change._replace(span=span).table(count, clock.looked_at)

    def _asks(self, r: int, i: int, clock: Clock) -> Iterator[World]:
        comm = self.scope.comms(r)[i]
        group = self.scope.groups_of(comm)[clock.at]
        if group == SUM and r not in self.scope.all_reduce:
            yield self._clock(r, i, clock._replace(at=clock.at + 1))
        elif group == CAPTURED:
            sends = self._is("sends launch all calls") and r == 1
            yield self._clock(r, i, clock._replace(at=clock.at + 1, count=clock.count + sends))
        elif self._count(clock) < clock.limit or self._is("nobody waits at a limit"):
            yield self._clock(r, i, clock._replace(thread="passed"))

    def _answers(self, r: int, i: int, comm: int, clock: Clock) -> World | str:
        buffer = clock.reads.buffer
        found = self.world.ranks[r].buffers[buffer - 1] if buffer else 0
        known = {(one, at): given for one, at, given in self.world.answers}
        before = known.setdefault((comm, clock.at), found)
        if before != found:
            return f"collective of group {clock.at} of communicator {comm}: table {before} and, on rank {r}, {found}"
        right = expected(self.scope, self.world.registers, comm, clock.at)
        if found != right:
            return f"collective of group {clock.at} of communicator {comm}: table {found}, and {right} was decided"
        asked = clock.n_asked + 1
        ends = asked == min(2, self.scope.size_of(comm, clock.at, r))  # two questions stand for any number
        thread = "answered" if ends else "passed"
        seen = tuple(sorted({*clock.seen, clock.reads})) if self.scope.steps else ()
        n_asked = 0 if ends else asked
        after = self._clock(r, i, clock._replace(thread=thread, n_asked=n_asked, reads=EMPTY, seen=seen))
        return after._replace(answers=tuple(sorted((*key, given) for key, given in known.items())))

    def _launches(self, r: int, i: int, comm: int, clock: Clock) -> World:
        count = clock.count + self.scope.size_of(comm, clock.at, r)
        told = clock.told if self.scope.late else count
        after = clock._replace(thread="asks", at=clock.at + 1, count=count, told=told)
        return self._clock(r, i, after._replace(looked_at=clock.count + 1 if self.scope.one_of else 0))

    def _leaves(self, r: int, rank: Rank) -> World:
        """The thread of another agreement of this process, whose group was destroyed, stages, then lifts its limits."""
        rank = rank._replace(left=rank.left - 1)
        if rank.left == 1 and self._is("there is one place for what is staged"):
            rank = rank._replace(staged=Table(99, 0))
        if rank.left == 0 and self._is("a lift lifts all limits"):
            rank = rank._replace(clocks=tuple(clock._replace(limit=NO_LIMIT) for clock in rank.clocks))
        return self._with(r, rank)

    # -- the agreement ---------------------------------------------------------------------------------------------

    def _agrees(self, r: int, rank: Rank) -> Iterator[World | str]:
        world, scope = self.world, self.scope
        if rank.results is None:
            if rank.round < (len(scope.trials) if r == 0 else world.proposed):
                yield self._with(r, rank._replace(round=rank.round + 1, results=()))
            return
        request = _request(scope, r, rank.round, rank.results)
        if isinstance(request, Decision):
            tells = scope.reports and r > 0 and bool(request.switches)
            yield self._with(r, rank._replace(results=None, untold=rank.round if tells else rank.untold))
            return
        register = world.registers[rank.round - 1]
        match request:
            case protocol.Propose():
                yield self._sent(r, None, proposed=rank.round, votes=(None,) * scope.n_ranks)
            case protocol.Stage():
                yield self._stages(r, rank)
            case protocol.Limit():
                yield from self._limits(r, rank)
            case protocol.Cast(vote):
                words = []
                for comm, one in vote.comms.items():
                    limit = -1 if one.no_clock else one.limit
                    words.append((comm, limit, one.a_step, one.offset, one.plan, one.has, one.steps))
                limits = tuple(words), vote.no_room
                if rank.round == world.proposed:
                    yield self._sent(r, None, votes=(*world.votes[:r], limits, *world.votes[r + 1 :]))
                yield self._sent(r, None)  # it is lost
            case protocol.Gather():  # whatever has come by now
                yield self._sent(
                    r, tuple((i, *vote) for i, vote in enumerate(world.votes) if vote is not None)
                )
            case protocol.Settle(decision):
                if r == 0 and (wrong := _differ(scope, rank)):
                    yield wrong
                yield from self._settles(r, rank, decision, register)
            case protocol.Await():
                if register is not None:
                    yield self._sent(r, register)
                elif any(
                    clock.thread == "asks" and self._count(clock) >= clock.limit for clock in rank.clocks
                ):
                    yield self._sent(r, None)
            case protocol.Switch(comm, span):
                yield self._switches(r, rank, comm, span)
            case protocol.Lift():
                clocks = tuple(clock._replace(limit=NO_LIMIT, is_refused=False) for clock in rank.clocks)
                yield self._sent(r, None, clocks=clocks)

    def _settles(self, r: int, rank: Rank, decision: Decision, register: Any) -> Iterator[World]:
        mine = _frozen(decision)
        found = mine if register is None or self._is("the register can be set twice") else register
        registers = (*self.world.registers[: rank.round - 1], found, *self.world.registers[rank.round :])
        yield self._sent(r, found, registers=registers)
        if (
            register is None and self.scope.reconnects
        ):  # the answer is lost with the connection: it is asked again
            if self._is("an answer that is lost is a refusal"):
                yield self._sent(r, _frozen(protocol.ABORT), registers=registers)
            else:
                yield self.world._replace(registers=registers)
        if self.scope.gives_up:  # the store is gone, and the job with it
            yield self._sent(r, _frozen(protocol.ABORT), alive=self._is("who gives up goes on"))

    def _stages(self, r: int, rank: Rank) -> World:
        generation = self.scope.generation(rank.round)
        if generation in self.scope.empty:
            return self._sent(r, (None, None), staged=EMPTY)
        held = [
            buffer
            for buffer in range(1, len(rank.buffers) + 1)
            if any(clock.may_answer(buffer, self._count(clock)) for clock in rank.clocks)
        ]
        free = [buffer for buffer in range(1, len(rank.buffers) + 1) if buffer not in held]
        if self._is("a buffer that may answer is filled"):
            free = [1]
        if not free:
            return self._sent(r, (None, "no room"), staged=EMPTY)
        buffers = (*rank.buffers[: free[0] - 1], generation, *rank.buffers[free[0] :])
        return self._sent(r, (None, None), staged=Table(generation, free[0]), buffers=buffers)

    def _sent(self, r: int, result: Any, **changes: Any) -> World:
        rank = self.world.ranks[r]
        of_rank = {name: value for name, value in changes.items() if name in Rank._fields}
        of_world = {name: value for name, value in changes.items() if name in World._fields}
        return self._with(r, rank._replace(results=(*(rank.results or ()), result), **of_rank), **of_world)

    def _limits(self, r: int, rank: Rank) -> Iterator[World]:
        """dynamiccl_limit on one communicator after the other, in its single reads and writes."""
        again = self.scope.is_again(rank.round)
        rows = rank.buffers[rank.staged.buffer - 1] if rank.staged.buffer else 0
        has = [again and _keeps(self._plan(clock, rank), rows) for clock in rank.clocks]
        done = [
            clock.is_refused or keeps or (clock.limit != NO_LIMIT and clock.limiting < 0)
            for clock, keeps in zip(rank.clocks, has, strict=True)
        ]
        if all(done):
            votes = zip(self.scope.comms(r), rank.clocks, has, strict=True)
            limits = []
            for comm, clock, keeps in votes:
                plan = self._plan(clock, rank)
                a_step = clock.a_step if clock.n_alike >= ALIKE else 0
                offset = clock.ended_at - a_step * rank.steps
                limit = 0 if clock.is_refused or keeps else clock.limit
                limits.append((comm, limit, a_step, offset, plan, keeps, rank.steps))
            yield self._sent(r, tuple(limits))
            return
        i = done.index(False)
        clock = rank.clocks[i]
        count = self._count(clock)
        if clock.limiting < 0 and len(clock.may_hold(count)) >= self.scope.places:
            yield self._clock(r, i, clock._replace(is_refused=True))
        elif clock.limiting < 0:  # reads the count
            yield self._clock(r, i, clock._replace(limiting=count))
        elif clock.limit == NO_LIMIT or clock.limit <= clock.limiting:  # sets the limit, a call from there
            least = clock.changes[0].span.since if clock.changes else 0
            yield self._clock(r, i, clock._replace(limit=max(clock.limiting + 1, least)))
        elif count >= clock.limit and not self._is("a limit is not looked at again"):
            yield self._clock(r, i, clock._replace(limiting=count))
        else:
            yield self._clock(r, i, clock._replace(limiting=-1))

    def _reports(self, r: int, rank: Rank) -> World:
        """The rank tells its plans."""
        plans = []
        for comm, clock in zip(self.scope.comms(r), rank.clocks, strict=True):
            plans.append((comm, self._plan(clock, rank)))
        others = [one for one in self.world.reports if one[0] != r]
        told = tuple(sorted([*others, (r, rank.untold, tuple(plans))]))
        return self._with(r, rank._replace(untold=0), reports=told)

    def _switches(self, r: int, rank: Rank, comm: int, span: Span) -> World:
        i = self.scope.comms(r).index(comm)
        clock = rank.clocks[i]
        if r == 1 and span.until:
            if self._is("a trial ends one call later on rank 1"):
                span = span._replace(until=span.until + 1)
            if self._is("the length of a turn is the rank's own"):
                span = span._replace(length=span.length + 1)
            if self._is("a lease begins at the rank's own limit"):
                span = span._replace(since=min(span.since, clock.limit))
        change = Change(span, rank.staged, clock.stays() if span.until else rank.staged)
        after = clock.switched(change, self._count(clock))
        if self._is("changes before the last are forgotten"):
            after = after._replace(changes=(change,))
        return self._sent(r, None, clocks=(*rank.clocks[:i], after, *rank.clocks[i + 1 :]))


def _keeps(plan: Plan, rows: int) -> bool:
    """As in ballot.py: in a round that leads a table again, its newest change is to that table."""
    return plan.stays == rows and plan.last <= plan.since


def _differ(scope: Scope, rank: Rank) -> str:
    """Whether rank 0 takes votes of a round for a mismatch."""
    assert rank.results is not None
    told = (
        {0: rank.results[3], **{one[0]: one[1] for one in rank.results[1]}} if len(rank.results) > 3 else {}
    )
    for comm in range(len(scope.members)):
        plans = []
        for r, words in told.items():
            plans += [(r, word[4]) for word in words if word[0] == comm]
        if why := differ(plans):
            return f"of communicator {comm}, though each collective has had one table: {why}"
    return ""


def _frozen(decision: Decision | None) -> Any:
    return decision and (decision.generation, tuple(sorted(decision.switches.items())))


@cache
def _request(scope: Scope, r: int, number: int, results: tuple[Any, ...]) -> Any:
    """What a part of round ``number`` asks for next, or its decision at the end."""
    if r == 0:
        table = scope.generation(number), scope.trial(number)
        part = protocol.lead(number, scope.identity(r), *table, {}, None, protocol.never, {}, {})
    else:
        part = protocol.follow(r, number, scope.identity(r))
    try:
        request = next(part)
        for result in results:
            request = part.send(thawed(scope, number, request, result))
    except StopIteration as end:
        return end.value
    return request


def main() -> None:
    for scope in LARGE:
        wrong, states = explore(scope)
        print(f"{scope}: {states:,} states, {wrong or 'nothing wrong'}", flush=True)
        if wrong:
            sys.exit(1)


if __name__ == "__main__":
    main()

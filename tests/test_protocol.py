"""The switch of all ranks to the next table, proven by exploring every state of the real protocol code.

The explorer drives :class:`dynamiccl.envs.nccl.protocol.Member` itself: one per rank, with a register, a store and a
network between them. In each state it takes every step that any rank, the daemon or bad luck could take next. What
must hold: whatever table a rank has when its k-th boundary is passed, every other rank has when it passes its k-th.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import pytest
from dynamiccl.envs.nccl.protocol import NO_TABLE, STOP, Member, State, closed


@dataclass
class World:
    """All that can change: the ranks, the job's store, what rank 0 sent, what the daemon published."""

    members: list[Member]
    boundaries: list[int]  # passed, by rank
    tables: dict[int, bytes] = field(default_factory=dict)  # boundary -> the table in force after it, on some rank
    arrived: int = 0
    gate: str = ""
    log: str = ""
    store: dict[int, bytes] = field(default_factory=dict)  # round -> table
    sent: dict[int, bytes] = field(default_factory=dict)  # round -> message
    broken: bool = False  # some rank has closed its connections
    published: int = 0  # generation in the table file
    dead: frozenset[int] = frozenset()
    faults: int = 0  # failures so far; a healthy network has none
    said: str = ""

    def key(self) -> bytes:
        """Identity of the state, 16 bytes; `said` and the history that led here do not count."""
        members = [(m.state.name, *(v for k, v in vars(m).items() if k != "state")) for m in self.members]
        parts = (self.boundaries, sorted(self.tables.items()), sorted(self.store.items()), sorted(self.sent.items()))
        scalars = (self.arrived, self.gate, self.log, self.broken, self.published, self.faults)
        dead = sorted(self.dead)
        return blake2b(repr((members, parts, scalars, dead)).encode(), digest_size=16).digest()


@dataclass(frozen=True)
class Scope:
    """How far to look."""

    n_ranks: int = 3
    boundaries: int = 5
    generations: int = 3
    faults: int = 1
    deaths: int = 1
    member: type[Member] = Member
    reduce: bool = True


Move = tuple[str, Callable[[World], None]]


def moves(world: World, scope: Scope) -> Iterator[Move]:
    """Every step that may come next, with its name.

    A step that touches nothing another rank could see or change before it commutes with all others: it is taken at
    once and alone, which leaves out orders that make no difference (tested against the full search).
    """
    if scope.reduce:
        for rank, member in enumerate(world.members):
            if rank not in world.dead and is_private(world, scope, rank, member):
                yield from rank_moves(world, scope, rank, member)
                return
    for rank, member in enumerate(world.members):
        if rank in world.dead:
            continue
        yield from rank_moves(world, scope, rank, member)
        # Between two steps that others can notice it makes no difference when a rank dies.
        noticed = member.state in (State.ARRIVE, State.GATE, State.WAIT, State.COMMIT, State.CLOSE_LOG)
        noticed = noticed or (rank == 0 and member.state is State.BEGIN)
        if len(world.dead) < scope.deaths and (noticed or not scope.reduce) and member.state is not State.STOPPED:
            yield f"rank {rank} dies", lambda w, r=rank: setattr(w, "dead", w.dead | {r})
    # A daemon that dies publishes nothing for a while; one that comes back goes on from what the file holds. Both
    # are among the orders in which tables are published late or never.
    if world.published < scope.generations:
        yield f"daemon publishes table {world.published + 1}", publish


def publish(w: World) -> None:
    w.published += 1


def is_private(world: World, scope: Scope, rank: int, member: Member) -> bool:
    """Nobody else sees this rank's next step: what it stores is read only once the log names it, what it reads from
    a closed log is there for good, and a boundary of another rank than 0 changes that rank alone."""
    steps_left = world.boundaries[rank] < scope.boundaries
    return (
        member.state in (State.LOG_TABLE, State.REPLAY)
        or (member.state is State.STOPPED and steps_left)
        or (member.state is State.TRAINING and steps_left and rank != 0)
    )


def rank_moves(world: World, scope: Scope, rank: int, member: Member) -> Iterator[Move]:
    """The outcomes that what this rank asks for can have at this moment."""
    who, state = f"rank {rank}", member.state
    may_fail = world.faults < scope.faults or world.broken or bool(world.dead)
    if state in (State.TRAINING, State.STOPPED, State.ARRIVE) and world.boundaries[rank] < scope.boundaries:
        if state is not State.ARRIVE:
            yield f"{who} ends a step", lambda w: boundary(w, rank)
        else:
            yield f"{who} arrives", lambda w: arrive(w, rank)
    if state is State.GATE:
        if world.gate == "":
            yield f"{who} is tired of waiting for the others", lambda w: gate(w, rank, "shut")
        else:
            yield f"{who} finds the gate {world.gate}", lambda w: gate(w, rank, w.gate)
    if state is State.CONNECT:
        yield f"{who} connects", lambda w: w.members[rank].connected()
        if may_fail:
            yield f"{who} cannot connect", lambda w: fail(w, rank)
    if state is State.WAIT:
        if member.round in world.sent:
            message = world.sent[member.round]
            yield f"{who} completes round {member.round}: {named(message)}", lambda w: receive(w, rank)
        if may_fail:
            yield f"{who} fails in round {member.round}", lambda w: fail(w, rank)
    if state is State.LOG_TABLE:
        yield f"{who} stores {named(member.wanted)} as round {member.round + 1}", lambda w: log_table(w, rank)
    if state is State.COMMIT:
        yield f"{who} sets the log", lambda w: commit(w, rank)
        if may_fail:
            yield f"{who} hears nothing from the log", lambda w: commit_unheard(w, rank)
    if state is State.BEGIN:
        yield f"{who} begins round {member.round + 1}", lambda w: begin(w, rank)
        if may_fail:
            yield f"{who} cannot begin round {member.round + 1}", lambda w: fail(w, rank)
    if state is State.CLOSE_LOG:
        yield f"{who} closes the log", lambda w: close_log(w, rank)
    if state is State.REPLAY:
        yield f"{who} reads round {member.round} in the log", lambda w: replay(w, rank)


def named(message: bytes) -> str:
    return message.decode() or "no table"


def settle(w: World, rank: int) -> None:
    """If the rank has passed its boundary, its table is on record: the next step runs under it."""
    member = w.members[rank]
    if member.state not in (State.TRAINING, State.STOPPED):
        return
    at = w.boundaries[rank]
    table = w.tables.setdefault(at, member.active)
    if table != member.active:
        w.said = f"after boundary {at} rank {rank} has {named(member.active)}, another rank {named(table)}"


def boundary(w: World, rank: int) -> None:
    w.boundaries[rank] += 1
    w.members[rank].boundary(f"table {w.published}".encode() if rank == 0 and w.published else NO_TABLE)
    settle(w, rank)


def arrive(w: World, rank: int) -> None:
    boundary(w, rank)
    w.arrived += 1
    if w.arrived == len(w.members) and w.gate == "":
        w.gate = "open"
    w.members[rank].arrived(w.arrived)


def gate(w: World, rank: int, answer: str) -> None:
    w.gate = w.gate or answer
    w.members[rank].gate(w.gate == "open")
    settle(w, rank)


def fail(w: World, rank: int) -> None:
    if not (w.broken or w.dead):
        w.faults += 1
    w.broken = True
    w.members[rank].failed()
    settle(w, rank)


def receive(w: World, rank: int) -> None:
    w.members[rank].received(w.sent[w.members[rank].round])
    settle(w, rank)


def log_table(w: World, rank: int) -> None:
    w.store[w.members[rank].round + 1] = w.members[rank].wanted
    w.members[rank].table_logged()


def commit(w: World, rank: int) -> None:
    member = w.members[rank]
    if w.log == member.log_before():
        w.log = member.log_after()
    member.committed(w.log)
    settle(w, rank)


def commit_unheard(w: World, rank: int) -> None:
    """The store did as it was asked, but rank 0 does not get to know."""
    member = w.members[rank]
    if w.log == member.log_before():
        w.log = member.log_after()
    fail(w, rank)


def begin(w: World, rank: int) -> None:
    member = w.members[rank]
    if rank == 0:
        w.sent[member.round + 1] = member.sent
    member.begun()
    settle(w, rank)


def close_log(w: World, rank: int) -> None:
    w.log = closed(w.log)
    w.members[rank].log_closed(w.log)
    settle(w, rank)


def replay(w: World, rank: int) -> None:
    w.members[rank].replayed(w.store.get(w.members[rank].round))
    settle(w, rank)


@dataclass(frozen=True)
class Result:
    """What an exploration found: how many states, and the shortest way to a violation if there is one."""

    states: int
    ends: int  # states in which every live rank is through
    switched: int  # ends in which some rank runs under a table
    outcomes: frozenset[tuple[tuple[int, bytes], ...]] = frozenset()  # tables by boundary, of each end
    violation: tuple[str, ...] = ()

    def story(self) -> str:
        return "\n".join(f"{i:3}. {step}" for i, step in enumerate(self.violation, 1))


def explore(scope: Scope) -> Result:
    """Breadth first, every state once: a violation is reached by a shortest story."""
    start = World([scope.member(rank, scope.n_ranks) for rank in range(scope.n_ranks)], [0] * scope.n_ranks)
    came_from: dict[bytes, tuple[bytes, str] | None] = {start.key(): None}
    frontier, ends, switched = [start], 0, 0
    outcomes = set()
    while frontier:
        level, frontier = frontier, []
        for world in level:
            moved = False
            for name, apply in moves(world, scope):
                moved = moved or not name.startswith(("daemon", "rank 0 dies", "rank 1 dies", "rank 2 dies"))
                after = copied(world)
                apply(after)
                key = after.key()
                if key in came_from and not after.said:
                    continue
                came_from.setdefault(key, (world.key(), name))
                if after.said:
                    story = [name, after.said]
                    at = came_from[world.key()]
                    while at is not None:
                        story.insert(0, at[1])
                        at = came_from[at[0]]
                    return Result(len(came_from), ends, switched, violation=tuple(story))
                frontier.append(after)
            if not moved:
                stuck = [
                    m.rank
                    for m in world.members
                    if m.rank not in world.dead and m.state not in (State.TRAINING, State.STOPPED)
                ]
                assert not stuck, f"ranks {stuck} wait for ever: {world}"
                ends += 1
                switched += any(m.active for m in world.members)
                outcomes.add(tuple(sorted(world.tables.items())))
    return Result(len(came_from), ends, switched, frozenset(outcomes))


def copied(world: World) -> World:
    after = copy.copy(world)
    after.members = [replace(m) for m in world.members]
    after.boundaries = list(world.boundaries)
    after.tables, after.store, after.sent = dict(world.tables), dict(world.store), dict(world.sent)
    return after


@pytest.mark.parametrize(
    "scope",
    [
        Scope(boundaries=4, generations=2, faults=0, deaths=0),
        Scope(n_ranks=2, boundaries=4, generations=2),
        Scope(n_ranks=3, boundaries=3, generations=1, deaths=0),
    ],
    ids=["healthy", "two ranks, a fault and a death", "three ranks, a fault"],
)
def test_no_interleaving_lets_two_ranks_differ(scope):
    result = explore(scope)
    print(f"{result.states} states, {result.ends} ends, {result.switched} of them under a table")
    assert not result.violation, "\n" + result.story()
    assert result.switched > 0


class FlipsAlone(Member):
    """Mutation: rank 0 does not wait for the round that carries the table."""

    def boundary(self, wanted: bytes = NO_TABLE) -> None:
        super().boundary(wanted)
        if self.wanted:
            self.active = self.wanted

    def received(self, message: bytes) -> None:
        super().received(self.wanted or message)


class KeepsTheOldTable(Member):
    """Mutation: a rank whose wait fails stops where it is and does not ask the log."""

    def failed(self) -> None:
        self.state = State.STOPPED


class SendsBeforeTheLog(Member):
    """Mutation: rank 0 sends the table although a rank has closed the log."""

    def committed(self, log: str) -> None:
        self.last, self.sent, self.state = self.round + 1, self.wanted, State.TRAINING


class ReplaysTooSoon(Member):
    """Mutation: a rank that fails to begin a round takes its outcome at once, not at the boundary where it is due."""

    def failed(self) -> None:
        super().failed()
        self.due = True


@pytest.mark.parametrize("mutant", [FlipsAlone, KeepsTheOldTable, SendsBeforeTheLog, ReplaysTooSoon])
def test_a_broken_protocol_is_refuted(mutant):
    result = explore(Scope(n_ranks=2, boundaries=5, generations=2, faults=1, deaths=1, member=mutant))
    assert result.violation
    print(f"{mutant.__name__}:\n{result.story()}")
    assert len(result.violation) < 40 and "another rank" in result.violation[-1]


def test_the_reduction_leaves_no_violation_out():
    """The full search of a small scope meets the same tables at the same boundaries as the reduced one."""
    small = Scope(n_ranks=2, boundaries=3, generations=2, faults=1, deaths=1)
    reduced, full = explore(small), explore(replace(small, reduce=False))
    assert not reduced.violation and not full.violation
    assert reduced.states < full.states and reduced.outcomes == full.outcomes


def test_stop_is_not_a_table():
    member = Member(1, 2, State.WAIT, round=1, due=True)
    member.received(STOP)
    assert member.state is State.STOPPED and member.active == NO_TABLE


if __name__ == "__main__":  # the whole scope: three ranks, three tables, a fault, a death, a daemon that comes back
    found = explore(Scope())
    print(found.story() or f"no violation in {found.states} states, {found.ends} ends, {found.switched} with a table")
    raise SystemExit(bool(found.violation))

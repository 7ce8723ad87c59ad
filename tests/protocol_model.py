"""A model of the agreement around the real protocol code, to be explored exhaustively by protocol_explore.py.

:class:`dynamiccl.envs.nccl.protocol.Member` itself is driven, one per rank, with a store, a network, a daemon and its
table file between them. In each state every step is taken that a rank, the daemon or bad luck could take next. Steps
and states have the code's names. Jobs are of any length: what makes the number of states finite is that states which
cannot be told apart any more are one (:meth:`Explorer.canonical`).

What must hold: whatever table a rank has when its k-th boundary is passed, every other rank has there too;
a generation stands for one table, also when the daemon died and came back; and no rank waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from dynamiccl.envs.nccl.protocol import NO_TABLE, Member, State, closed

Fields = tuple[Any, ...]
DEAD = -1
STATES = list(State)
(ARRIVE, GATE, CONNECT, TRAINING, WAIT, LOG_TABLE, COMMIT, BEGIN, CLOSE_LOG, REPLAY, STOPPED) = range(len(STATES))
PASSED = (ARRIVE, TRAINING, STOPPED)  # between two boundaries: the step runs under the table
#: Where others can see or hinder what a rank does next: between two such steps it makes no difference when it dies.
NOTICED = (ARRIVE, GATE, WAIT, COMMIT, CLOSE_LOG)


@dataclass(frozen=True)
class Scope:
    """How far to look."""

    n_ranks: int = 3
    generations: int = 3
    deaths: int = 1  # ranks that die
    faults: int = 1  # failures of a healthy network; after a death or a fault everything may fail
    restarts: int = 1  # times that the daemon dies (also while it writes) and comes back
    late: bool = True  # probes may join some steps later than the others'
    skew: int = 2  # steps that a rank may be ahead of the slowest one
    boundaries: int | None = None  # of each rank; None: any number
    member: type[Member] = Member
    reads_torn: bool = True  # a daemon that comes back finds the generation of a table that was half written
    reduce: bool = True  # merge and leave out what makes no difference


class World(NamedTuple):
    """All that can change. Rounds and boundaries are numbers; a table is its generation as text."""

    ranks: tuple[tuple[int, int], ...]  # (member: a number in Explorer.fields, boundaries begun) of each rank
    tables: tuple[tuple[int, bytes], ...]  # boundary -> the table in force after it, on some rank
    arrived: int
    gate: str
    log: str
    store: tuple[tuple[int, bytes], ...]  # round -> table
    sent: tuple[tuple[int, bytes], ...]  # round -> message
    broken: bool  # some rank has closed its connections
    faults: int
    file: int  # generation in the table file's head
    torn: bool  # the file is half written: its reader keeps what it read before
    shown: int  # newest generation that was whole in the file
    daemon: int  # the daemon's own count; DEAD while there is none
    restarts: int


Move = tuple[str, World, str]  # what happened, the world after it, what is wrong with it


class Explorer:
    """The worlds that a scope reaches."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.fields: list[Fields] = []  # rank 0?, state, round, active, wanted, sent, last, in_trouble, due
        self._number: dict[Fields, int] = {}
        self._calls: dict[tuple[Any, ...], int] = {}
        self._shifts: dict[tuple[int, int], int] = {}

    # -- members: the real class, each of its transitions computed once --------------------------------------------

    def number(self, fields: Fields) -> int:
        """The number that stands for a member in a world."""
        found = self._number.get(fields)
        if found is None:
            found = self._number[fields] = len(self.fields)
            self.fields.append(fields)
        return found

    def member(self, number: int) -> Member:
        """The member that a number stands for."""
        first, state, round_, *rest = self.fields[number]
        return self.scope.member(0 if first else 1, self.scope.n_ranks, STATES[state], round_, *rest)

    def call(self, number: int, method: str, *arguments: Any) -> int:
        """The member after one of its methods was called."""
        key = (number, method, arguments)
        found = self._calls.get(key)
        if found is None:
            member = self.member(number)
            getattr(member, method)(*arguments)
            found = self._calls[key] = self.number(encoded(member))
        return found

    def start(self) -> World:
        """No rank has taken a step, no table was published."""
        members = [self.number(encoded(self.scope.member(r, self.scope.n_ranks))) for r in range(self.scope.n_ranks)]
        return World(tuple((m, 0) for m in members), (), 0, "", "", (), (), False, 0, 0, False, 0, 0, 0)

    # -- one identity for worlds that nothing can tell apart --------------------------------------------------------

    def canonical(self, w: World) -> World:
        """The representative of all worlds that have the same future, as far as the properties go.

        * Ranks but 0 differ in their number only, which no code looks at: they are sorted.
        * A dead or stopped rank never reads its fields again, only ``active`` counts.
        * Numbers of rounds are only compared with one another, so they may be shifted, with the one exception of 0,
          "never". Below the lowest round that a live rank is at, they are only compared for equality between the log
          and what rank 0 believes is in it: such a pair becomes 1, and everything else that lies there is dropped.
        * Boundaries likewise; a table that all live ranks have passed is dropped.
        """
        live = [(self.fields[m], b) for m, b in w.ranks if m != DEAD]
        if not live:
            return w
        agreeing = [fields for fields, _ in live if fields[1] != STOPPED]
        lowest = min((fields[2] for fields in agreeing), default=0)
        down = max(0, lowest - 2)
        first = self.fields[w.ranks[0][0]] if w.ranks[0][0] != DEAD else None
        log = w.log
        if down:
            tail = log.removeprefix("stop:")
            if tail and first and first[1] != STOPPED and not first[7]:
                assert (first[6] == int(tail)) == (lower(first[6], down) == lower(int(tail), down)), w
            log = ("stop:" if log.startswith("stop:") else "") + (str(lower(int(tail), down)) if tail else "")
        behind = min(b for _, b in live)
        owed = min(b + (fields[1] in PASSED) for fields, b in live)  # the first boundary that some rank has to pass
        ranks = [(m if m == DEAD else self.shifted(m, down), 0 if m == DEAD else b - behind) for m, b in w.ranks]
        joining = any(fields[1] in (ARRIVE, GATE) for fields in agreeing)
        hurt = w.broken or len(live) < len(w.ranks)
        world = w._replace(
            ranks=(ranks[0], *sorted(ranks[1:])),
            tables=tuple((k - behind, table) for k, table in w.tables if k >= owed),
            arrived=w.arrived if joining else 0,
            gate=w.gate if joining else "",
            log=log,
            store=tuple((k - down, table) for k, table in w.store if k >= lowest),
            sent=tuple((k - down, message) for k, message in w.sent if k >= lowest),
            faults=self.scope.faults if hurt else w.faults,
        )
        if not agreeing:  # no rank asks the log, the store or the daemon for anything any more
            last = {"log": "", "store": (), "sent": (), "broken": False, "faults": 0}
            world = world._replace(**last, file=0, torn=False, shown=0, daemon=0, restarts=self.scope.restarts)
        return world

    def shifted(self, number: int, down: int) -> int:
        """A member with all rounds lower by ``down``."""
        found = self._shifts.get((number, down))
        if found is None:
            first, state, round_, active, wanted, sent, last, in_trouble, due = self.fields[number]
            if state == STOPPED:
                fields: Fields = (first, STOPPED, 0, active, NO_TABLE, NO_TABLE, 0, False, False)
            else:
                last = lower(last, down) if down else last
                fields = (first, state, round_ - down, active, wanted, sent, last, in_trouble, due)
            found = self._shifts[number, down] = self.number(fields)
        return found

    # -- every step that may come next --------------------------------------------------------------------------------

    def moves(self, w: World) -> Iterator[Move]:
        """A step that touches nothing another rank could see or change before it commutes with all others: it is taken
        at once and alone, which leaves out orders that make no difference. No circle of such steps leaves a rank out
        that could do something else: a rank that goes on alone is stopped by ``skew`` (tested against the full search).
        """
        if self.scope.reduce:
            for rank in range(len(w.ranks)):
                if self._is_private(w, rank):
                    yield from self._rank_moves(w, rank)
                    return
        n_dead = sum(m == DEAD for m, _ in w.ranks)
        for rank, (m, b) in enumerate(w.ranks):
            if m == DEAD:
                continue
            yield from self._rank_moves(w, rank)
            state = self.fields[m][1]
            noticed = state in NOTICED or (rank == 0 and state == BEGIN) or not self.scope.reduce
            if n_dead < self.scope.deaths and noticed and state != STOPPED:
                yield f"rank {rank} dies", w._replace(ranks=_with(w.ranks, rank, (DEAD, b))), ""
        yield from self._daemon_moves(w)

    def _daemon_moves(self, w: World) -> Iterator[Move]:
        """As ``Job`` and ``TableFile``: the next generation is one above the last, which is looked up at the start."""
        if w.daemon == DEAD:
            back = w.file if self.scope.reads_torn or not w.torn else 0
            yield f"the daemon comes back, at table {back}", w._replace(daemon=back), ""
            return
        if w.restarts < self.scope.restarts:
            gone = w._replace(daemon=DEAD, restarts=w.restarts + 1)
            yield "the daemon dies", gone, ""
        if w.shown >= self.scope.generations:
            return
        new = w.daemon + 1
        if w.restarts < self.scope.restarts:
            yield f"the daemon dies before it has written a byte of table {new}", gone._replace(torn=True), ""
            yield f"the daemon dies in the middle of table {new}", gone._replace(torn=True, file=new), ""
        wrong = "" if new > w.shown else f"there are two tables {new}"
        yield f"the daemon publishes table {new}", w._replace(daemon=new, file=new, torn=False, shown=new), wrong

    def _is_private(self, w: World, rank: int) -> bool:
        """Nobody else sees this rank's next step: what it stores is read only once the log names it, what it reads from
        a closed log is there for good, and a boundary of another rank than 0 changes that rank alone."""
        m, _ = w.ranks[rank]
        if m == DEAD:
            return False
        state = self.fields[m][1]
        steps = (state == STOPPED or (state == TRAINING and rank != 0)) and self._may_step(w, rank)
        return steps or state in (LOG_TABLE, REPLAY)

    def _may_step(self, w: World, rank: int) -> bool:
        """Whether the rank may end a step now."""
        mine = w.ranks[rank][1]
        within = self.scope.boundaries is None or mine < self.scope.boundaries
        return within and mine < min(b for m, b in w.ranks if m != DEAD) + self.scope.skew

    def _together(self, w: World, rank: int) -> bool:
        """Whether all other ranks are in this rank's step or beyond it: without them it cannot end."""
        others = (entry for i, entry in enumerate(w.ranks) if i != rank and entry[0] != DEAD)
        mine = w.ranks[rank][1]
        return all(b > mine or (b == mine and self.fields[m][1] in PASSED) for m, b in others)

    def _rank_moves(self, w: World, rank: int) -> Iterator[Move]:
        """The outcomes that what this rank asks for can have at this moment."""
        m, _ = w.ranks[rank]
        _, state, round_, _, wanted, sent, _, _, _ = self.fields[m]
        who = f"rank {rank}"
        hurt = w.broken or any(other == DEAD for other, _ in w.ranks)
        may_fail = hurt or w.faults < self.scope.faults
        failed = w._replace(broken=True, faults=w.faults + (not hurt))
        if state in (TRAINING, STOPPED) and self._may_step(w, rank):
            yield self._after(w, rank, f"{who} ends a step", self._boundary(w, rank), boundary=True)
        elif state == ARRIVE and self._may_step(w, rank) and self._together(w, rank):
            count = w.arrived + 1
            after = w._replace(arrived=count)
            if count == len(w.ranks) and not w.gate:
                after = after._replace(gate="open")
            member = self.call(self._boundary(w, rank), "arrived", count)
            yield self._after(after, rank, f"{who} ends a step and arrives", member, boundary=True)
            if self.scope.late:
                yield self._after(w, rank, f"{who} ends a step without its probe", m, boundary=True)
        elif state == GATE and not w.gate:
            after = w._replace(gate="shut")
            yield self._after(after, rank, f"{who} is tired of waiting for the others", self.call(m, "gate", False))
        elif state == GATE:
            yield self._after(w, rank, f"{who} finds the gate {w.gate}", self.call(m, "gate", w.gate == "open"))
        elif state == CONNECT:
            yield self._after(w, rank, f"{who} connects", self.call(m, "connected"))
            if may_fail:
                yield self._after(failed, rank, f"{who} cannot connect", self.call(m, "failed"))
        elif state == WAIT:
            message = dict(w.sent).get(round_)
            if message is not None:
                what = f"{who} completes round {round_}: {named(message)}"
                yield self._after(w, rank, what, self.call(m, "received", message))
            if may_fail:
                yield self._after(failed, rank, f"{who} fails in round {round_}", self.call(m, "failed"))
        elif state == LOG_TABLE:
            after = w._replace(store=_put(w.store, round_ + 1, wanted))
            what = f"{who} stores {named(wanted)} as round {round_ + 1}"
            yield self._after(after, rank, what, self.call(m, "table_logged"))
        elif state == COMMIT:
            member = self.member(m)
            log = member.log_after() if w.log == member.log_before() else w.log
            yield self._after(w._replace(log=log), rank, f"{who} sets the log", self.call(m, "committed", log))
            if may_fail:  # the store did as it was asked, but rank 0 does not get to know
                after = failed._replace(log=log)
                yield self._after(after, rank, f"{who} hears nothing from the log", self.call(m, "failed"))
        elif state == BEGIN:
            after = w._replace(sent=_put(w.sent, round_ + 1, sent)) if rank == 0 else w
            yield self._after(after, rank, f"{who} begins round {round_ + 1}", self.call(m, "begun"))
            if may_fail:
                yield self._after(failed, rank, f"{who} cannot begin round {round_ + 1}", self.call(m, "failed"))
        elif state == CLOSE_LOG:
            after = w._replace(log=closed(w.log))
            yield self._after(after, rank, f"{who} closes the log", self.call(m, "log_closed", after.log))
        elif state == REPLAY:
            found = dict(w.store).get(round_)
            yield self._after(w, rank, f"{who} reads round {round_} in the log", self.call(m, "replayed", found))

    def _boundary(self, w: World, rank: int) -> int:
        published = f"table {w.shown}".encode() if rank == 0 and w.shown and not w.torn else NO_TABLE
        return self.call(w.ranks[rank][0], "boundary", published)

    def _after(self, w: World, rank: int, what: str, member: int, boundary: bool = False) -> Move:
        """The world with this member in it. Where it has passed its boundary, its table is on record."""
        at = w.ranks[rank][1] + boundary
        after = w._replace(ranks=_with(w.ranks, rank, (member, at)))
        if self.fields[member][1] not in PASSED:
            return what, after, ""
        mine = self.fields[member][3]
        table = dict(w.tables).get(at)
        if table is None:
            return what, after._replace(tables=_put(w.tables, at, mine)), ""
        wrong = f"after boundary {at} rank {rank} has {named(mine)}, another rank {named(table)}"
        return what, after, "" if table == mine else wrong


def encoded(member: Member) -> Fields:
    """All of a member but its number."""
    m = member
    return m.rank == 0, STATES.index(m.state), m.round, m.active, m.wanted, m.sent, m.last, m.in_trouble, m.due


def lower(round_: int, down: int) -> int:
    """A round's number after a shift: 0 is "never", and what lies below the shift is 1."""
    return max(1, round_ - down) if round_ else 0


def named(message: bytes) -> str:
    """A message for people."""
    return message.decode() or "no table"


def _with(ranks: tuple[tuple[int, int], ...], rank: int, entry: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    return (*ranks[:rank], entry, *ranks[rank + 1 :])


def _put(pairs: tuple[tuple[int, bytes], ...], key: int, value: bytes) -> tuple[tuple[int, bytes], ...]:
    return tuple(sorted({**dict(pairs), key: value}.items()))

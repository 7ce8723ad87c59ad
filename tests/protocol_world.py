"""The worlds of protocol_model.py: how far to look, and all that can change."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from dynamiccl.envs.nccl.agreement.place import Progress
from dynamiccl.envs.nccl.agreement.protocol import Leader, Member, Phase

MEMBER, LEADER = [f.name for f in fields(Member)], [f.name for f in fields(Leader)]


@dataclass(frozen=True)
class Scope:
    """How far to look."""

    n_ranks: int = 2
    steps: int = 4  # collectives of the job
    skew: int = 1
    tables: int = 1  # that the daemon publishes
    attempts: int = 2
    deaths: int = 0  # ranks that die
    breaks: int = 0  # times that the network is lost and opened again
    skips: int = 0  # optimizer steps that one rank leaves out
    extras: int = 0  # backward passes that one rank makes alone
    daemon_deaths: int = 0  # times that the daemon dies, at any moment; another may come back
    closes: bool = False  # rank 0 may close the agreement at any time
    profiler: bool = True  # collectives can be counted
    member: type[Member] = Member
    leader: type[Leader] = Leader
    #: Mutations of what surrounds the two classes.
    broken: frozenset[str] = frozenset()


class Rank(NamedTuple):
    """One rank. ``made`` collectives are enqueued, ``owes`` the optimizer step after the last of them."""

    member: tuple[Any, ...]
    made: int = 0
    owes: bool = False
    backwards: int = 0
    steps: int = 0
    table: bytes = b""
    staged: bytes = b""


class World(NamedTuple):
    """All that can change."""

    ranks: tuple[Rank | None, ...]  # None: dead
    leader: tuple[Any, ...]
    acks: tuple[tuple[int, Progress], ...] = ()  # of the attempt, by rank
    stand: tuple[tuple[int, tuple[Progress, int]], ...] = ()
    up: tuple[tuple[Any, ...], ...] = ()  # messages of each rank to rank 0
    down: tuple[tuple[Any, ...], ...] = ()
    logs: tuple[tuple[int, str], ...] = ()
    asked: bool = False  # the store has taken rank 0's compare-and-set; rank 0 has not heard yet
    history: tuple[tuple[int, bytes], ...] = ()  # collective -> its table, while some rank has still to make it
    published: int = 0
    confirmed: tuple[bytes, ...] = (b"",)
    lost: bool = False  # the network
    breaks: int = 0
    skips: int = 0
    extras: int = 0
    daemon_deaths: int = 0
    daemon: bool = True  # it lives
    file: tuple[bytes, bool] | None = (
        None  # published and not taken by rank 0 yet: the table, and whether it is a trial
    )


def where_of(rank: Rank) -> Progress:
    """Without the rank's number, by which nothing is decided."""
    return Progress(0, rank.backwards, rank.steps)


def fingerprint(w: World) -> int:
    """64 bits; the same for worlds that differ only in which of the ranks above 0 is which."""
    if len(w.ranks) > 2:
        acks, stand = dict(w.acks), dict(w.stand)
        each = [(w.ranks[r], w.up[r], w.down[r], acks.get(r), stand.get(r)) for r in range(1, len(w.ranks))]
        rest = w._replace(ranks=w.ranks[:1], up=w.up[:1], down=w.down[:1], acks=acks.get(0), stand=stand.get(0))
        return hash((rest, tuple(sorted(hash(one) for one in each))))
    return hash(w)


def flipped(rank: Rank, member: Member) -> Rank:
    """Where the member is to change tables it does so now: the thread that trains does nothing in between."""
    if member.phase is Phase.FLIP:
        member.flipped()
        return rank._replace(member=pack(member, MEMBER), table=rank.staged)
    return rank._replace(member=pack(member, MEMBER))


def pack(state: Any, names: list[str]) -> tuple[Any, ...]:
    """The fields. Why the leader closes is for people: no world differs by it."""
    values = (getattr(state, name) for name in names)
    return tuple("why" if name == "closing" and value else value for name, value in zip(names, values, strict=True))


def at(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def put(pairs: tuple[tuple[int, Any], ...], key: int, value: Any) -> tuple[tuple[int, Any], ...]:
    return tuple(sorted({**dict(pairs), key: value}.items()))

"""The small jobs in which ``protocol_model.py`` explores every order of events."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from dynamiccl.traces.records import Trial

#: In a script, a call that goes into a CUDA graph.
CAPTURED = "captured"
#: In a script, an all-reduce: it counts, and a table answers it, on the ranks that have the option alone.
SUM = "sum"


@dataclass(frozen=True, eq=False)  # by identity: it is looked up with each request of each world
class Scope:
    """A small job. ``trials``: of each round, how many steps its table is tried for, 0 = to stay."""

    members: tuple[tuple[int, ...], ...]  # ranks by communicator
    trials: tuple[int, ...] = (1, 0)
    calls: int = 3  # groups of each communicator; of one collective each, unless there is a script
    script: tuple[Any, ...] = ()  # how many collectives each group has; or SUM, or CAPTURED: not launched
    all_reduce: tuple[int, ...] = ()  # ranks that have the option for all-reduces
    late: bool = False  # NCCL tells of what is launched at some later time
    one_of: int = 0  # a trial holds in one turn of so many
    turn_steps: int = 0  # a turn is so many steps; 0: one collective
    swap: int = 0
    steps: tuple[
        tuple[int, ...], ...
    ] = ()  # groups of each step, by communicator, in place of calls and script
    is_uneven: bool = False  # the steps before were not alike: no rhythm is known
    places: int = 7  # changes that may be ahead
    buffers: int = 0  # for tables, beside the empty one; 0: as many as rounds
    empty: tuple[int, ...] = ()  # rounds whose table is empty
    again: tuple[tuple[int, int], ...] = ()  # (round, earlier round whose table it leads again)
    reports: bool = False  # ranks report their plans after a round, and rank 0 compares them
    left: int = 0  # rank that has left another group, whose agreement is still to end; 0: none
    reconnects: bool = False  # connections to the store break
    gives_up: bool = False  # a rank may find the store gone, and its job with it
    deaths: int = 0
    mutations: frozenset[str] = field(default_factory=frozenset)

    def groups_of(self, comm: int) -> tuple[Any, ...]:
        return self._groups[comm]

    @cached_property
    def _groups(self) -> tuple[tuple[Any, ...], ...]:
        if self.steps:
            return tuple((1,) * ends[-1] for ends in self._ends)
        return (self.script or (1,) * self.calls,) * len(self.members)

    def size_of(self, comm: int, group: int, rank: int) -> int:
        """How many collectives of a group a rank counts."""
        size = self.groups_of(comm)[group]
        if size == SUM:
            return int(rank in self.all_reduce)
        return 0 if size == CAPTURED else int(size)

    def identity(self, rank: int) -> str:
        """What must be equal on all ranks."""
        is_told = "the option is in no identity" not in self.mutations
        return "all_reduce" if is_told and rank in self.all_reduce else ""

    def end_of(self, comm: int, step: int) -> int:
        """Groups of a communicator up to the end of a step."""
        return self._ends[comm][min(step + 1, len(self.steps))]

    @cached_property
    def _ends(self) -> tuple[tuple[int, ...], ...]:
        counts = ([step[comm] for step in self.steps] for comm in range(len(self.members)))
        return tuple(tuple(accumulate(made, initial=0)) for made in counts)

    def pace(self, comm: int) -> float:
        """Collectives of a communicator in a step, on average."""
        return self.end_of(comm, len(self.steps) - 1) / len(self.steps) if self.steps else 1.0

    def generation(self, number: int) -> int:
        """Of the table that a round leads."""
        return dict(self.again).get(number, number)

    def is_again(self, number: int) -> bool:
        return number in dict(self.again)

    def trial(self, number: int) -> Trial:
        """How the table of a round is tried."""
        steps = self.trials[number - 1]
        return Trial(steps, self.one_of, self.turn_steps, self.swap) if steps else Trial()

    @property
    def n_ranks(self) -> int:
        return 1 + max(rank for ranks in self.members for rank in ranks)

    def comms(self, rank: int) -> tuple[int, ...]:
        return self._comms[rank]

    @cached_property
    def _comms(self) -> tuple[tuple[int, ...], ...]:
        def of(rank: int) -> tuple[int, ...]:
            return tuple(comm for comm, ranks in enumerate(self.members) if rank in ranks)

        return tuple(of(rank) for rank in range(self.n_ranks))


ONE = Scope(((0, 1),), calls=4)
TWO = Scope(((0, 1), (0, 1)), trials=(1,), calls=2)
THREE = Scope(((0, 1, 2), (1, 2)), trials=(1,), calls=2)
BESIDE = Scope(((0, 1), (1, 2)), trials=(1,), calls=1)  # rank 1 has two threads
SMALL = replace(ONE, trials=(1,), calls=3)
#: What the plugin does beside counting calls one by one, each in a small job.
PARTS = {
    "told late": replace(SMALL, late=True, calls=2),
    "groups": replace(SMALL, script=(2, 1)),
    "captured": replace(SMALL, script=(1, CAPTURED, 1)),
    "few calls": replace(SMALL, one_of=2),
    "all-reduces count": replace(SMALL, script=(1, SUM, 1), all_reduce=(0, 1)),
    "all-reduces do not count": replace(SMALL, script=(1, SUM, 1)),
    "one rank counts all-reduces": replace(SMALL, script=(1, SUM, 1), all_reduce=(0,)),
    "few places for changes": replace(ONE, trials=(1, 1), calls=2, places=1),
    "few buffers": replace(ONE, trials=(1, 1), calls=2, buffers=1),
    "an empty table": replace(ONE, trials=(0, 0), calls=2, buffers=1, empty=(2,)),
    "another agreement ends": replace(SMALL, left=1),
    "connections break": replace(SMALL, reconnects=True),
    "the store is gone": replace(SMALL, gives_up=True),
}
#: Reports of plans: a table to stay, a trial before it, and a round again for who had no part in the first.
REPORTS = replace(SMALL, trials=(0,), calls=2, reports=True)
REPORT_PARTS = {
    "a trial, then a table to stay": replace(REPORTS, trials=(1, 0)),
    "a table is led again": replace(REPORTS, trials=(0, 0), again=((2, 1),)),
    "a trial is withdrawn": replace(REPORTS, trials=(1, 0), empty=(2,)),
    "captured": replace(REPORTS, script=(1, CAPTURED, 1)),
    "turns, then a table to stay": replace(REPORTS, trials=(1, 0), one_of=2, turn_steps=1, steps=((1,),) * 3),
    "connections break": replace(REPORTS, reconnects=True),
}
#: Turns that follow steps, whose ranks know their rhythm at the beginning.
TURNS = replace(SMALL, one_of=2, turn_steps=1, steps=((1,),) * 3)
TURN_PARTS = {
    "two calls a step": replace(TURNS, steps=((2,),) * 2, swap=1),
    "turns of two steps": replace(TURNS, turn_steps=2, steps=((1,),) * 4),
    "one turn in three": replace(TURNS, one_of=3, steps=((1,),) * 4),
    "an irregular step": replace(TURNS, steps=((1,), (2,), (1,))),
    "two communicators": replace(TURNS, members=((0, 1), (0, 1)), steps=((1, 1),) * 2),
    "a lease is renewed": replace(TURNS, trials=(1, 1)),
    "a table comes to stay": replace(TURNS, trials=(1, 0)),
}
#: Long turns: the ranks know no rhythm. Two communicators with other calls in each step are larger.
UNEVEN = replace(TURNS, is_uneven=True, steps=((1,), (2,)))
UNEVEN_PARTS = {
    "more steps": replace(UNEVEN, steps=((1,), (2,), (1,))),
    "a lease is renewed": replace(UNEVEN, trials=(1, 1)),
    "a table comes to stay": replace(UNEVEN, trials=(1, 0)),
}
#: With steps of other lengths on each communicator: larger.
LARGE_TURNS = (
    replace(TURNS, members=((0, 1), (0, 1)), steps=((1, 2),) * 2),
    replace(TURNS, steps=((1,),) * 5),
    replace(UNEVEN, members=((0, 1), (0, 1)), steps=((1, 2),)),
    replace(UNEVEN, members=((0, 1), (0, 1)), steps=((1, 1), (1, 2))),
)
LARGE = (
    BESIDE,
    replace(ONE, trials=(1, 1, 0), calls=5, deaths=1),
    replace(TWO, calls=3, deaths=1),
    replace(THREE, deaths=1),
    *(replace(scope, deaths=1) for scope in PARTS.values()),
    *(replace(scope, deaths=1) for scope in TURN_PARTS.values()),
    *(replace(scope, deaths=1) for scope in REPORT_PARTS.values()),
    *(replace(scope, deaths=1) for scope in UNEVEN_PARTS.values()),
    *LARGE_TURNS,
)

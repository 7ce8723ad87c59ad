"""A small sharded job whose collectives take a chosen share of a step, and its steps under tables that alternate.

A step gathers each layer's weights one layer ahead of its compute, and scatters each layer's gradients beside the
compute of the layer before it, as FSDP2 does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .....envs.nccl.steps import clock
from .....traces.records import Rule, decision_from
from .contention import Load, timed
from .rank import Buffers, Rank

#: Bytes of a layer's weights, layers, and the side of the matrices that it multiplies, by backend.
SHAPES = {"nccl": (2**23, 4, 2048), "emulated": (2**18, 2, 64)}
#: Steps of each arm before any counts: connections, first touches of memory.
WARM_UP = 3
#: Steps between two looks at the clock, after which their times are written.
BATCH = 20


@dataclass(frozen=True)
class Arm:
    """One side of a race: a communicator, and the table under which it runs (``""``: untouched)."""

    name: str
    comm: str
    table: str = ""

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rows of its table, written as ``func:bytes:decision;...``. Raises ValueError."""
        return rules_of(self.table)


def rules_of(text: str) -> tuple[Rule, ...]:
    """``all_gather:8388608:ring/simple/4;...`` -> rows of a table. Raises ValueError for other text."""
    rows = []
    for part in filter(None, text.split(";")):
        func, n_bytes, decision = part.split(":")
        rows.append(Rule(0, 0, func, int(n_bytes), int(n_bytes), decision_from(decision)))
    return tuple(rows)


class Model:
    """The job on one rank. ``share``: of the collectives in the time of collectives and compute, each alone."""

    def __init__(self, rank: Rank, share: float, pieces: int = 0) -> None:
        n_bytes, layers, side = SHAPES[rank.backend]
        self.rank = rank
        self.gathers = [Buffers("all_gather", n_bytes, rank.device) for _ in range(layers)]
        self.scatters = [Buffers("reduce_scatter", n_bytes, rank.device) for _ in range(layers)]
        self.load = Load(rank, "gemm", side)
        group = rank.comms["nccl"]
        self._collectives(group)  # the first use connects
        alone = sorted(timed(rank, lambda: self._collectives(group)) for _ in range(3))[1]
        self.collectives_us = rank.agreed(alone)
        if pieces:
            self.load.pieces = pieces
        else:
            compute_us = self.collectives_us * (1 - share) / share
            self.load.last_for(compute_us / (3 * layers))  # forward once, backward twice

    def _collectives(self, group: Any) -> None:
        for buffers in (*self.gathers, *self.scatters):
            buffers.call(group)

    def step(self, group: Any) -> None:
        """Enqueue one step, or on the emulated cluster do it."""
        waiting = self.gathers[0].call(group, later=True)
        for after in (*self.gathers[1:], None):
            waiting.wait()
            if after is not None:
                waiting = after.call(group, later=True)
            self.load.run()
        works = []
        for buffers in reversed(self.scatters):
            self.load.run()
            self.load.run()
            works.append(buffers.call(group, later=True))
        for work in works:
            work.wait()

    def step_us(self, arm: Arm) -> float:
        """Microseconds of one step under an arm; the maximum over ranks, who meet at its end."""
        rank = self.rank
        rank.set_table(arm.rules)
        begin = clock.now_ns()
        self.step(rank.comms[arm.comm])
        rank.finish()
        return rank.agreed((clock.now_ns() - begin) / 1e3)


def run(
    model: Model, race: str, arms: Sequence[Arm], steps: int, until: float, begin: int = 0
) -> dict[str, Any]:
    """Steps of a race in the order A B B A, written as they come; how many, and what the tuner was asked and answered.

    ``until``: time.monotonic() at which it ends before its ``steps``, though not before the first BATCH. ``begin``:
    number of its first step.
    """
    for arm in arms:
        for _ in range(WARM_UP):
            model.step_us(arm)
    calls = {arm.name: [0, 0] for arm in arms}
    rows: list[dict[str, Any]] = []
    done = 0
    for at, arm in zip(range(begin, begin + steps), order(arms), strict=False):
        if done % BATCH == 0:
            model.rank.write("steps", rows)
            rows = []
            if done and not has_time(model.rank, until):
                break
        before = asked(model.rank)
        us = model.step_us(arm)
        after = asked(model.rank)
        calls[arm.name][0] += after[0] - before[0]
        calls[arm.name][1] += after[1] - before[1]
        rows.append({"race": race, "arm": arm.name, "at": at, "us": round(us, 2)})
        done += 1
    model.rank.write("steps", rows)
    return {"steps": done, "asked_answered": calls}


def order(arms: Sequence[Arm]) -> Iterator[Arm]:
    """A B B A A B B A ... without end; of one arm that arm."""
    first, last = arms[0], arms[-1]
    while True:
        yield from (first, last, last, first)


def has_time(rank: Rank, until: float) -> bool:
    """Whether all ranks have time left until then."""
    return rank.agreed(float(time.monotonic() > until)) == 0


def asked(rank: Rank) -> tuple[int, int]:
    """Collectives about which NCCL asked our tuner on this rank, and those in which a table had its word."""
    return rank.ring.calls() if rank.ring is not None else (0, 0)

"""Smoke and sweep: is the plugin loaded and obeyed, are results right, and how long does each config take?"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from .....traces import records as rec
from .....traces.records import ALGOS, AUTO, PROTOS, TUNED_FUNCS, Decision
from .ours import is_ours
from .rank import Buffers, Plan, Rank, plans_of

#: Channels that are asked for.
CHANNELS = (1, 2, 4, 8, 16)
#: Timed calls of one config, by backend.
CALLS = {"nccl": 20, "emulated": 5}
#: NCCL's own choice is measured again before every so many configs, so that drift can be seen.
AGAIN = 10
#: What may be wrong with a config, counted.
WRONG = ("not obeyed", "ranks differ", "wrong results")
QUANTILES = {"p10_us": 0.1, "p50_us": 0.5, "p90_us": 0.9}
#: Over sockets LL takes five times as long as Simple: beyond this size it comes last.
LARGE_LL = 2**23


def smoke(rank: Rank) -> dict[str, Any]:
    """Small collectives: has NCCL loaded tuner and profiler on every rank, do kernel times come, are results right?"""
    small = Buffers("all_gather", 1 << 14, rank.device)
    small.call(None)
    rank.finish()
    has_ring = rank.open_ring()
    if rank.plugin is not None:
        rank.plugin.sample(has_ring)
    small.output.fill_(float("nan"))
    small.call(None)
    rank.finish()
    right = torch.equal(small.output, small.right)
    has_times = False
    if has_ring:
        records = rank.records(small, rec.KERNEL)
        has_times = len(small.of(records, rec.KERNEL)) > 0
    tuner, profiler = 0, 0
    if rank.plugin is not None:
        rank.plugin.sample(False)
        tuner, profiler = rank.plugin.abi
    mine = {"ring": has_ring, "tuner": tuner, "profiler": profiler, "kernel_times": has_times, "right": right}
    found = rank.gather(mine)
    ours = [name for name, value in os.environ.items() if is_ours(name, value)]
    is_well = all(all(one.values()) for one in found)
    return {"ok": is_well, "ranks": found, "our_variables": sorted(ours)}


@dataclass(frozen=True)
class Cell:
    """One config of one collective on one communicator."""

    comm: str
    func: str
    n_bytes: int
    decision: Decision = AUTO

    @property
    def own(self) -> Cell:
        """The same call with everything left to NCCL."""
        return Cell(self.comm, self.func, self.n_bytes)


class Sweep:
    """Times of all configs. ``first``: sizes that later parts need, measured before the others."""

    def __init__(self, rank: Rank, sizes: list[int], first: list[int]) -> None:
        self.rank = rank
        self.first = set(first)
        self.draw = random.Random(1)  # the same order on all ranks
        self.buffers: dict[tuple[str, int], Buffers] = {}
        for n_bytes in sizes:
            for func in TUNED_FUNCS:
                self.buffers[func, n_bytes] = Buffers(func, n_bytes, rank.device)
        self.offers: dict[Cell, Any] = {}  # of NCCL's own choice: the offer
        self.seen: set[tuple[Cell, str]] = set()  # plans that have been measured
        self.counts = dict.fromkeys(("cells", "timed", *WRONG), 0)

    def run(self) -> dict[str, Any]:
        """Measure until all is measured or the time is over."""
        cells = self._all_cells()
        for at, cell in enumerate(cells):
            if not self.rank.has_time():
                break
            if at % AGAIN == AGAIN - 1:
                self._measure(cell.own)
            self._measure(cell)
        wrong = sum(self.counts[name] for name in WRONG)
        is_well = self.counts["timed"] > 0 and wrong == 0
        return {**self.counts, "of": len(cells), "ok": is_well}

    def _all_cells(self) -> list[Cell]:
        """Every config that NCCL offers, in the order in which they are measured; asking for its offer measures its own
        choice."""
        cells = []
        for comm in ("nccl", "raised"):
            for func, n_bytes in self.buffers:
                if not self.rank.has_time():
                    break
                own = Cell(comm, func, n_bytes)
                self._measure(own)
                for algo, proto in self._offered(own):
                    for channels in CHANNELS:
                        decision = Decision(algo, proto, channels)
                        cells.append(replace(own, decision=decision))
        return sorted(cells, key=self._priority)

    def _offered(self, own: Cell) -> list[tuple[str, str]]:
        """The pairs that NCCL has for a call; rank 0 says which."""
        offer = self.offers.get(own)
        mine = []
        if offer is not None:
            costs = rec.pair_costs(offer["cost_us"])
            priced = zip(rec.PAIRS, costs, strict=True)
            mine = [pair for pair, cost in priced if cost >= 0]
        found: list[tuple[str, str]] = self.rank.gather(mine)[0]
        return found

    def _priority(self, cell: Cell) -> tuple[int, float]:
        is_slow = cell.decision.proto == "ll" and cell.n_bytes > LARGE_LL
        turn = 0 if cell.n_bytes in self.first else 2 if is_slow else 1
        return turn, self.draw.random()

    def _measure(self, cell: Cell) -> None:
        """One config: its first call apart, then timed calls if no other config came to the same plan."""
        rank = self.rank
        buffers = self.buffers[cell.func, cell.n_bytes]
        group = rank.comms[cell.comm]
        assert rank.ring is not None
        rank.ring.drain()
        rank.set_table(buffers.rules(cell.decision))
        buffers.output.fill_(float("nan"))  # so that a collective that writes nothing is found out
        rank.meet()
        begin = rank.mark()
        buffers.call(group)
        end = rank.mark()
        rank.finish()
        right = torch.equal(buffers.output, buffers.right)
        row = self._checked(cell, buffers, right)
        mine_us = rank.us(begin, end)
        [first_us] = rank.slowest([mine_us])
        plan = cell.own, row["ran"]
        times: list[float] = []
        is_new = cell.decision.is_auto or plan not in self.seen
        if row["agreed"] and is_new:  # all ranks know the same of both
            self.seen.add(plan)
            times = self._timed(buffers, group)
        self._file(row, first_us, times)

    def _checked(self, cell: Cell, buffers: Buffers, right: bool) -> dict[str, Any]:
        """The row of a config without its times: what ran on each rank, and whether that is what was asked for."""
        records = self.rank.records(buffers, rec.COLL)
        offers = buffers.of(records, rec.OFFER).view(rec.OFFER_DTYPE)
        if len(offers):
            self.offers[cell.own] = offers[-1]
        offer = self.offers.get(cell.own)
        ran = plans_of(buffers.of(records, rec.COLL))
        obeyed = len(ran) == 1 and _is_obeyed(cell.decision, ran[0], offer)
        ranks = self.rank.gather((right, obeyed, ran))
        first = ranks[0][2]  # of rank 0: all ranks go by it
        return {
            "comm": cell.comm,
            "func": cell.func,
            "n_bytes": cell.n_bytes,
            "asked": str(cell.decision),
            "ran": "/".join(map(str, first[0])) if first else "",
            "right": all(one[0] for one in ranks),
            "obeyed": all(one[1] for one in ranks),
            "agreed": all(one[2] == first for one in ranks),
        }

    def _timed(self, buffers: Buffers, group: Any) -> list[float]:
        """Microseconds of calls that follow one another: the first of them waits for the last rank, and is left out."""
        rank = self.rank
        rank.meet()
        marks = [rank.mark()]
        for _ in range(CALLS[rank.backend] + 1):
            buffers.call(group)
            marks.append(rank.mark())
        rank.finish()
        times = [rank.us(begin, end) for begin, end in pairwise(marks[1:])]
        return rank.slowest(times)

    def _file(self, row: dict[str, Any], first_us: float, times: list[float]) -> None:
        self.counts["cells"] += 1
        if times:
            self.counts["timed"] += 1
        self.counts["not obeyed"] += not row["obeyed"]
        self.counts["ranks differ"] += not row["agreed"]
        self.counts["wrong results"] += not row["right"]
        row |= {"calls": len(times), "first_us": round(first_us, 2)}
        if times:
            for name, part in QUANTILES.items():
                us = float(np.quantile(times, part))
                row[name] = round(us, 2)
        self.rank.write("sweep", [row])


def _is_obeyed(asked: Decision, ran: Plan, offer: Any) -> bool:
    """Whether a call ran as the table said, or as NCCL chose where the table said nothing."""
    algo, proto, channels = ran
    if not asked.is_auto:
        return (algo, proto) == (asked.algo, asked.proto) and channels <= asked.n_channels
    if offer is None:
        return True
    own = ALGOS[offer["algo"]], PROTOS[offer["proto"]]
    return (algo, proto) == own


def sweep(rank: Rank, sizes: list[int], first: list[int]) -> dict[str, Any]:
    """The whole sweep, see :class:`Sweep`."""
    return Sweep(rank, sizes, first).run()

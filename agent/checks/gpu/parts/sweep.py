"""Smoke and sweep: is the plugin loaded and obeyed, are results right, and how long does each config take?"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .....traces import records as rec
from .....traces.records import ALGOS, AUTO, PROTOS, TUNED_FUNCS, Decision, Rule
from ..session import is_ours
from .rank import Buffers, Rank

#: Channels that are asked for.
CHANNELS = (1, 2, 4, 8, 16)
#: Timed calls of one config, by backend.
CALLS = {"nccl": 20, "emulated": 5}
#: NCCL's own choice is measured again before every so many configs, so that drift can be seen.
AGAIN = 10
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
    has_times = has_ring and len(small.of(rank.records(small, rec.KERNEL), rec.KERNEL)) > 0
    tuner, profiler = 0, 0
    if rank.plugin is not None:
        rank.plugin.sample(False)
        tuner, profiler = rank.plugin.abi
    ours = sorted(name for name, value in os.environ.items() if is_ours(name, value))
    mine = {"ring": has_ring, "tuner": tuner, "profiler": profiler, "kernel_times": has_times, "right": right}
    found = rank.gather(mine)
    return {"ok": all(all(one.values()) for one in found), "ranks": found, "our_variables": ours}


@dataclass(frozen=True)
class Cell:
    """One config of one collective on one communicator."""

    comm: str
    func: str
    n_bytes: int
    decision: Decision = AUTO

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The table that sets this config and nothing else."""
        if self.decision.is_auto:
            return ()
        return (Rule(0, 0, self.func, self.n_bytes, self.n_bytes, self.decision),)

    @property
    def own(self) -> Cell:
        """The same call with everything left to NCCL."""
        return Cell(self.comm, self.func, self.n_bytes)


class Sweep:
    """Times of all configs. ``first``: sizes that later parts need, measured before the others."""

    def __init__(self, rank: Rank, sizes: list[int], first: list[int]) -> None:
        self.rank, self.first = rank, set(first)
        self.draw = random.Random(1)  # the same order on all ranks
        self.buffers = {(func, n): Buffers(func, n, rank.device) for n in sizes for func in TUNED_FUNCS}
        self.offers: dict[Cell, Any] = {}  # of NCCL's own choice: the offer
        self.seen: set[tuple[Cell, str]] = set()  # plans that have been measured
        self.counts = {"cells": 0, "timed": 0, "not obeyed": 0, "ranks differ": 0, "wrong results": 0}

    def run(self) -> dict[str, Any]:
        """Measure until all is measured or the time is over."""
        cells = self._all_cells()
        for at, cell in enumerate(cells):
            if not self.rank.has_time():
                break
            if at % AGAIN == AGAIN - 1:
                self._measure(cell.own)
            self._measure(cell)
        wrong = sum(self.counts[name] for name in ("not obeyed", "ranks differ", "wrong results"))
        return {**self.counts, "of": len(cells), "ok": self.counts["timed"] > 0 and wrong == 0}

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
                for pair in self._offered(own):
                    cells += [Cell(comm, func, n_bytes, Decision(*pair, n)) for n in CHANNELS]
        return sorted(cells, key=self._priority)

    def _offered(self, own: Cell) -> list[tuple[str, str]]:
        """The pairs that NCCL has for a call; rank 0 says which."""
        offer = self.offers.get(own)
        costs = [] if offer is None else list(rec.pair_costs(offer["cost_us"]))
        mine = [pair for pair, cost in zip(rec.PAIRS, costs, strict=False) if cost >= 0]
        found: list[tuple[str, str]] = self.rank.gather(mine)[0]
        return found

    def _priority(self, cell: Cell) -> tuple[int, float]:
        is_slow = cell.decision.proto == "ll" and cell.n_bytes > LARGE_LL
        turn = 0 if cell.n_bytes in self.first else 2 if is_slow else 1
        return turn, self.draw.random()

    def _measure(self, cell: Cell) -> None:
        """One config: its first call apart, then timed calls if no other config came to the same plan."""
        rank, buffers = self.rank, self.buffers[cell.func, cell.n_bytes]
        group = rank.comms[cell.comm]
        assert rank.ring is not None
        rank.ring.drain()
        rank.set_table(cell.rules)
        buffers.output.fill_(float("nan"))  # so that a collective that writes nothing is found out
        rank.meet()
        begin = rank.mark()
        buffers.call(group)
        end = rank.mark()
        rank.finish()
        right = torch.equal(buffers.output, buffers.right)
        row = self._checked(cell, buffers, right)
        [first_us] = rank.slowest([rank.us(begin, end)])
        plan = cell.own, row["ran"]
        times: list[float] = []
        if cell.decision.is_auto or plan not in self.seen:
            self.seen.add(plan)
            times = self._timed(buffers, group)
        self._file(row, first_us, times)

    def _checked(self, cell: Cell, buffers: Buffers, right: bool) -> dict[str, Any]:
        """The row of a config without its times: what ran on each rank, and whether that is what was asked for."""
        records = self.rank.records(buffers, rec.COLL)
        events = buffers.of(records, rec.COLL)
        offers = buffers.of(records, rec.OFFER).view(rec.OFFER_DTYPE)
        if len(offers):
            self.offers[cell.own] = offers[-1]
        ran = sorted({(ALGOS[e["algo"]], PROTOS[e["proto"]], int(e["n_channels"])) for e in events})
        obeyed = len(ran) == 1 and _is_obeyed(cell.decision, ran[0], self.offers.get(cell.own))
        ranks = self.rank.gather((right, obeyed, ran))
        return {
            "comm": cell.comm,
            "func": cell.func,
            "n_bytes": cell.n_bytes,
            "asked": str(cell.decision),
            "ran": "/".join(map(str, ran[0])) if ran else "",
            "right": all(one[0] for one in ranks),
            "obeyed": all(one[1] for one in ranks),
            "agreed": all(one[2] == ran for one in ranks),
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
        times = [rank.us(a, b) for a, b in zip(marks[1:], marks[2:], strict=False)]
        return rank.slowest(times)

    def _file(self, row: dict[str, Any], first_us: float, times: list[float]) -> None:
        self.counts["cells"] += 1
        self.counts["timed"] += bool(times)
        self.counts["not obeyed"] += not row["obeyed"]
        self.counts["ranks differ"] += not row["agreed"]
        self.counts["wrong results"] += not row["right"]
        row |= {"calls": len(times), "first_us": round(first_us, 2)}
        if times:
            low, middle, high = np.quantile(times, (0.1, 0.5, 0.9))
            row |= {"p10_us": round(low, 2), "p50_us": round(middle, 2), "p90_us": round(high, 2)}
        self.rank.write("sweep", [row])


def _is_obeyed(asked: Decision, ran: tuple[str, str, int], offer: Any) -> bool:
    """Whether a call ran as the table said, or as NCCL chose where the table said nothing."""
    algo, proto, channels = ran
    if asked.is_auto:
        return offer is None or (algo, proto) == (ALGOS[offer["algo"]], PROTOS[offer["proto"]])
    return (algo, proto) == (asked.algo, asked.proto) and channels <= asked.n_channels


def sweep(rank: Rank, sizes: list[int], first: list[int]) -> dict[str, Any]:
    """The whole sweep, see :class:`Sweep`."""
    return Sweep(rank, sizes, first).run()

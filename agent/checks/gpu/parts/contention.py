"""Does a faster collective lengthen the step? Compute alone and beside a collective, by channels and protocol."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .....traces.records import AUTO, Decision
from .rank import Buffers, Rank

#: Side of the square matrices that are multiplied: one with few tiles (128 of 128 x 256 on 132 SMs), one with many.
GEMMS = {"nccl": (2048, 4096), "emulated": (128,)}
#: Bytes that a copy reads.
COPY = {"nccl": 2**28, "emulated": 2**18}
#: Bytes of the collective's whole buffer.
COLLECTIVE = {"nccl": 2**24, "emulated": 2**20}
#: The compute lasts so many times as long as the collective alone, so that the collective lies within it.
LONGER = 1.5
#: Measurements of each cell, alternately alone and beside.
CALLS = {"nccl": 6, "emulated": 3}
#: What the collective is forced to, as far as it is offered.
PAIRS = (("ring", "simple"), ("ring", "ll"), ("ring", "ll128"), ("pat", "simple"))
CHANNELS = (1, 2, 4, 8, 16)


class Load:
    """A chain of equal pieces of compute. ``size``: side of a matrix, or bytes of a copy."""

    def __init__(self, rank: Rank, kind: str, size: int) -> None:
        self.rank, self.kind, self.size, self.pieces = rank, kind, size, 1
        dtype = torch.float32 if rank.backend == "emulated" else torch.bfloat16
        shape = (size, size) if kind == "gemm" else (size // dtype.itemsize,)
        self._a = torch.ones(shape, dtype=dtype, device=rank.device)
        self._b = torch.empty_like(self._a)

    def run(self) -> None:
        """Enqueue the chain."""
        for _ in range(self.pieces):
            if self.kind == "gemm":
                torch.mm(self._a, self._a, out=self._b)
            else:
                self._b.copy_(self._a)

    def last_for(self, us: float) -> None:
        """Set the number of pieces so that the chain takes about this long on every rank."""
        self.pieces = 1
        self.run()
        one_us = max(timed(self.rank, self.run), 1e-3)
        pieces = max(1.0, us / one_us)
        self.pieces = round(self.rank.agreed(pieces))


def timed(rank: Rank, work: Callable[[], object]) -> float:
    """Microseconds of some work on this rank, alone on its GPU's streams."""
    rank.meet()
    begin = rank.mark()
    work()
    end = rank.mark()
    rank.finish()
    return rank.us(begin, end)


def beside(rank: Rank, load: Load, buffers: Buffers | None, group: Any) -> tuple[float, float]:
    """Microseconds until the compute, and until compute and collective have ended; the maximum over ranks.

    On the emulated cluster compute learns of what it lost when the collective is waited for: there only the second
    figure shows it.
    """
    rank.meet()
    begin = rank.mark()
    work = buffers.call(group, later=True) if buffers is not None else None
    load.run()
    computed = rank.mark()
    if work is not None:
        work.wait()
    end = rank.mark()
    rank.finish()
    mine = [rank.us(begin, computed), rank.us(begin, end)]
    compute_us, total_us = rank.slowest(mine)
    return compute_us, total_us


def decisions() -> list[tuple[str, Decision]]:
    """What the collective is run as: (communicator, decision), NCCL's own choice first."""
    found = [("nccl", AUTO), ("raised", AUTO)]
    for algo, proto in PAIRS:
        found += [("raised", Decision(algo, proto, n)) for n in CHANNELS]
    return found


def contention(rank: Rank) -> dict[str, Any]:
    """Rows of contention.csv until all is measured or the time is over."""
    rank.open_ring()
    backend = rank.backend
    loads = [Load(rank, "gemm", size) for size in GEMMS[backend]]
    loads.append(Load(rank, "copy", COPY[backend]))
    rows = 0
    for func in ("all_gather", "reduce_scatter"):
        buffers = Buffers(func, COLLECTIVE[backend], rank.device)
        for comm, decision in decisions():
            for load in loads:
                if not rank.has_time():
                    return {"ok": rows > 0, "rows": rows}
                rows += _cell(rank, load, buffers, comm, decision)
    return {"ok": rows > 0, "rows": rows}


def _cell(rank: Rank, load: Load, buffers: Buffers, comm: str, decision: Decision) -> int:
    """One collective beside one load, alternating with the load alone; the number of rows, 0 where the decision is not
    offered."""
    group = rank.comms[comm]
    rank.set_table(buffers.rules(decision))
    if rank.ring is not None:
        rank.ring.drain()
    buffers.call(group)  # a first use costs
    rank.finish()
    ran = rank.ran(buffers)
    pairs = {(algo, proto) for algo, proto, _ in ran}
    is_offered = decision.is_auto or pairs == {(decision.algo, decision.proto)}
    if not rank.agreed(float(is_offered), dist.ReduceOp.MIN):
        return 0
    alone_us = timed(rank, lambda: buffers.call(group))
    load.last_for(LONGER * rank.agreed(alone_us))
    alone, together = [], []
    for _ in range(CALLS[rank.backend]):
        alone.append(beside(rank, load, None, group))
        together.append(beside(rank, load, buffers, group))
    told = {
        "compute": load.kind,
        "size": load.size,
        "comm": comm,
        "n_bytes": buffers.n_bytes,
        "asked": str(decision),
    }
    rank.write("contention", [_row(told, "none", alone), _row(told, buffers.func, together)])
    return 2


def _row(told: dict[str, Any], func: str, times: list[tuple[float, float]]) -> dict[str, Any]:
    compute_us = statistics.median(compute for compute, _ in times)
    total_us = statistics.median(total for _, total in times)
    row = {**told, "func": func, "calls": len(times)}
    return row | {"compute_us": round(compute_us, 2), "total_us": round(total_us, 2)}

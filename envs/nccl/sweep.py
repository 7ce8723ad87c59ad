"""One rank of a sweep: all (algorithm, protocol) that NCCL offers x channel counts x sizes, each forced by a table.

``python -m dynamiccl.envs.nccl.sweep --backend nccl --out FILE`` under a launcher, with the run folder's environment.
For each collective and size NCCL's own way runs first; then the table names one config after the other, and every rank
checks that the events say what the table said (obedience) and that the result is bit for bit that of NCCL's own way.
The data are small whole numbers, so that the order of additions cannot matter. Rank 0 writes one JSON line a config;
what a sweep that hangs or runs out of time has found is there to read.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist

from ...traces.records import (
    ALGOS,
    AUTO,
    COLL,
    COLL_DTYPE,
    COMM,
    FUNCS,
    KERNEL,
    KERNEL_DTYPE,
    OFFER,
    OFFER_DTYPE,
    PAIRS,
    PROTOS,
    Decision,
    Rule,
    Table,
    pair_costs,
)
from . import step_clock
from .plugin import Plugin
from .rings import Ring
from .shm import encode_table

SWEPT = ("all_gather", "reduce_scatter")
_PATIENCE_S = 0.3  # how long kernel times may lag behind the end of the collective
_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Buffers:
    """Input, output and NCCL's own result for one collective and size (float32)."""

    def __init__(self, func: str, n_bytes: int, device: torch.device) -> None:
        whole, size = n_bytes // 4, dist.get_world_size()
        n_in, n_out = (whole // size, whole) if func == "all_gather" else (whole, whole // size)
        generator = torch.Generator().manual_seed(1000 * dist.get_rank() + n_bytes % 997)
        self.func, self.reference = func, torch.empty(0)
        self.input = torch.randint(-4, 5, (n_in,), generator=generator).float().to(device)
        self.output = torch.empty(n_out, device=device)

    def call(self) -> None:
        """The collective, enqueued (cuda) or done (cpu)."""
        (_GATHER if self.func == "all_gather" else _SCATTER)(self.output, self.input)

    def spoil(self) -> None:
        """So that a collective that writes nothing is found out."""
        self.output.fill_(float("nan"))

    def is_same(self) -> bool:
        """Whether the output has the reference's bits; the first call makes the reference."""
        bits = self.output.view(torch.int32)
        if not len(self.reference):
            self.reference = bits.clone()
        return bool(torch.equal(bits, self.reference))


class NotLoaded(Exception):
    """NCCL has not loaded the plugin on some rank."""


class Sweep:
    """One rank's part."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device, self.rank = args, device, dist.get_rank()
        self.plugin = Plugin.load()
        self.generation = 0
        self.ring: Ring | None = None
        self.control = dist.new_group(backend="gloo")  # not NCCL's: what is said here must not be swept
        self.lags = True  # kernel times are worth waiting for
        self.started = time.monotonic()
        self.lines: TextIO | None = args.out.open("w") if self.rank == 0 else None

    def run(self) -> None:
        """The whole sweep; every cell (collective, size) gets its share of the time that is left."""
        cells = [(func, n_bytes) for n_bytes in self.args.sizes for func in SWEPT]
        self._load_check()
        for i, (func, n_bytes) in enumerate(cells):
            share = (self.args.budget - (time.monotonic() - self.started)) / (len(cells) - i)
            self._cell(func, n_bytes, time.monotonic() + share)

    def _load_check(self) -> None:
        """One small collective of each kind: has NCCL loaded the tuner and the profiler, on every rank?"""
        seen: set[int] = set()
        for func in SWEPT:
            buffers = Buffers(func, 1 << 14, self.device)
            buffers.call()
            self._finish()
        if self.plugin.open():
            self.ring = Ring.of_this_process(Path(os.environ["DYNAMICCL_RUN"]))
            seen = {int(kind) for kind in self.ring.drain()["kind"]}
        self.plugin.sample(True)
        ranks = self._gather({"tuner": OFFER in seen, "profiler": COLL in seen, "communicator": COMM in seen})
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if self.device.type == "cuda" else None
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else "emulated"
        self._write({"loaded": ranks, "device": name, "nccl": nccl, "n_ranks": dist.get_world_size()})
        if not all(all(rank.values()) for rank in ranks):
            dist.barrier()  # the first rank that fails ends the others: what was found must be written
            raise NotLoaded("the plugin was not loaded on every rank")

    def _cell(self, func: str, n_bytes: int, deadline: float) -> None:
        buffers = Buffers(func, n_bytes, self.device)
        default, records = self._measure(buffers, n_bytes, AUTO)
        offers = records[(records["kind"] == OFFER) & (records["n_bytes"] == n_bytes)].view(OFFER_DTYPE)
        costs = pair_costs(offers["cost_us"][-1]) if len(offers) else np.full(len(PAIRS), -1.0)
        offered = [pair for pair, cost in zip(PAIRS, costs, strict=True) if cost >= 0]
        own = (ALGOS[offers["algo"][-1]], PROTOS[offers["proto"][-1]]) if len(offers) else ("", "")
        default |= {"offered": ["/".join(pair) for pair in offered], "own": "/".join(own)}
        default["obeyed"] = default["ran"][:2] == list(own)  # a silent table leaves NCCL's plan as it is
        configs = [Decision(*pair, n) for pair in offered for n in self.args.channels]
        random.Random(n_bytes).shuffle(configs)  # a drift of the machine must not look like a config's doing
        cell = {"func": func, "n_bytes": n_bytes, "n_configs": len(configs)}
        self._write(cell | default)
        for config in configs:
            row, _ = self._measure(buffers, n_bytes, config)
            self._write(cell | row)
            if self._gather(time.monotonic() > deadline)[0]:  # rank 0's clock counts
                break
        again, _ = self._measure(buffers, n_bytes, AUTO)  # A/A: how far two measurements of the same differ
        again["obeyed"] = again["ran"][:2] == list(own)
        self._write(cell | again)

    def _measure(self, buffers: Buffers, n_bytes: int, decision: Decision) -> tuple[dict[str, Any], Any]:
        """One config on all ranks: a first call that may connect, then ``reps`` timed ones."""
        assert self.ring is not None
        self.generation += 1
        rules = () if decision.is_auto else (Rule(0, 0, buffers.func, n_bytes, n_bytes, decision),)
        buffers.spoil()
        self.plugin.activate(encode_table(Table(self.generation, rules)))
        self._meet()
        buffers.call()
        self._finish()
        same = buffers.is_same()
        self._meet()
        begin = step_clock.now_ns()
        for _ in range(self.args.reps):
            buffers.call()
        self._finish()
        wall_us = (step_clock.now_ns() - begin) / 1e3 / self.args.reps
        same = same and buffers.is_same()
        records = self._records(buffers.func, n_bytes)
        events = _of(records, COLL, buffers.func, n_bytes).view(COLL_DTYPE)
        ran = sorted({(int(e["algo"]), int(e["proto"]), int(e["n_channels"])) for e in events})
        asked = decision.is_auto or all((ALGOS[a], PROTOS[p]) == (decision.algo, decision.proto) for a, p, _ in ran)
        asked = asked and len(ran) > 0 and (decision.n_channels == 0 or all(n <= decision.n_channels for *_, n in ran))
        kernels = _of(records, KERNEL, buffers.func, n_bytes).view(KERNEL_DTYPE)
        took = (kernels["end_ns"] - kernels["start_ns"])[-self.args.reps :] / 1e3
        ranks = self._gather((same, asked, ran, len(events), wall_us, took.tolist()))
        shortest = [min(times) for times in zip(*(rank[5] for rank in ranks), strict=False)]
        first = ranks[0][2][0] if ranks[0][2] else (0, 0, 0)
        return {
            "decision": str(decision),
            "channels_asked": decision.n_channels,
            "ran": [ALGOS[first[0]], PROTOS[first[1]], first[2]],
            "n_events": sum(rank[3] for rank in ranks),
            "obeyed": all(rank[1] for rank in ranks),
            "ranks_agree": all(rank[2] == ranks[0][2] and len(rank[2]) == 1 for rank in ranks),
            "same_bits": all(rank[0] for rank in ranks),
            # Of the rank that came last, so that no waiting counts; None where the profiler gave no kernel times.
            "kernel_us": float(np.median(shortest)) if shortest else None,
            "wall_us": max(rank[4] for rank in ranks),
        }, records

    def _records(self, func: str, n_bytes: int) -> Any:
        """What the ring has got since the last time, the kernel times of all calls included if they come."""
        assert self.ring is not None
        parts, end = [self.ring.drain()], time.monotonic() + (_PATIENCE_S if self.lags else 0)
        while True:
            records = np.concatenate(parts)
            kernels = len(_of(records, KERNEL, func, n_bytes))
            if kernels > self.args.reps or time.monotonic() > end:
                self.lags = self.lags and kernels > 0
                return records
            time.sleep(0.002)
            parts.append(self.ring.drain())

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _meet(self) -> None:
        self._finish()
        dist.barrier(self.control)

    def _gather(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine, group=self.control)
        return found

    def _write(self, row: dict[str, Any]) -> None:
        if self.lines:
            self.lines.write(json.dumps(row) + "\n")
            self.lines.flush()


def _of(records: Any, kind: int, func: str, n_bytes: int) -> Any:
    """The records of one kind, collective and size."""
    return records[(records["kind"] == kind) & (records["func"] == FUNCS.index(func)) & (records["n_bytes"] == n_bytes)]


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a sweep's file, also of one that was cut off."""
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # the last one, half written
                return


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("nccl", "emulated"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="bytes of the whole buffer")
    parser.add_argument("--channels", type=int, nargs="+", required=True, help="0 leaves the number to NCCL")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--budget", type=float, default=120, help="seconds")
    args = parser.parse_args()
    device = torch.device("cpu")
    torch.set_num_threads(1)
    if args.backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(args.backend)
    status = 0
    try:
        Sweep(args, device).run()
    except NotLoaded as error:
        print(error, file=sys.stderr, flush=True)
        status = 1
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(status)  # gloo's threads can abort a process that tears down


if __name__ == "__main__":
    sys.exit(main())

"""One rank of a sweep: each (algorithm, protocol) that NCCL offers x channel counts x sizes, each forced by a table.

``torchrun -m dynamiccl.agent.checks.gpu_sweep JSON``, with a run folder's environment; the JSON is what :class:`Sweep`
takes. For each collective and size NCCL's own way runs first and last. Every rank checks its results, and that the
events say what the table said. Rank 0 writes one JSON line a config: what a sweep that is cut off has found is there to
read.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from ...envs.nccl.plugin.bindings import Plugin
from ...envs.nccl.rings import Ring
from ...envs.nccl.shm import encode_table
from ...envs.nccl.steps import clock as step_clock
from ...traces import records as rec
from ...traces.records import ALGOS, AUTO, CHANNELS, FUNCS, PROTOS, TUNED_FUNCS, Decision

REPS = 5  # timed calls under each config
#: PyTorch 2.13 gave them other names.
_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Buffers:
    """Input, output and the right output for one collective and size.

    The data are small whole numbers in float32, so that the order of additions cannot matter.
    """

    def __init__(self, func: str, n_bytes: int, device: torch.device) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        shard = n_bytes // 4 // size
        self.func, self.n_bytes = func, shard * size * 4
        generator = torch.Generator().manual_seed(n_bytes)  # all ranks draw the same
        whole = torch.randint(-4, 5, (shard * size,), generator=generator).float().to(device)
        mine = whole[rank * shard : (rank + 1) * shard]
        self.input, self.right = mine.clone(), whole
        if func == "reduce_scatter":
            self.input, self.right = whole * (rank + 1), mine * (size * (size + 1) // 2)
        self.output = torch.empty_like(self.right)

    def call(self) -> None:
        """The collective, enqueued (cuda) or done (cpu)."""
        (_GATHER if self.func == "all_gather" else _SCATTER)(self.output, self.input)

    def of(self, records: Any, kind: int) -> Any:
        """The records of one kind that are of this collective and size."""
        func, n_bytes = FUNCS.index(self.func), self.n_bytes
        return records[(records["kind"] == kind) & (records["func"] == func) & (records["n_bytes"] == n_bytes)]


class Sweep:
    """All cells (collective, size), in the order of ``sizes`` (bytes of the whole buffer), in ``budget_s`` seconds."""

    def __init__(self, backend: str, out: str, sizes: Sequence[int], budget_s: float) -> None:
        self.sizes, self.budget_s = sizes, budget_s
        self.device = torch.device("cpu")
        if backend == "nccl":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        dist.init_process_group(backend)
        self.control = dist.new_group(backend="gloo")  # not NCCL's: what is said here must not be swept
        self.plugin, self.generation = Plugin.load(), 0
        self.ring: Ring | None = None
        self.patience_s = 0.3  # with kernel times, which may come after the end of the collective
        self.out = Path(out)

    def run(self) -> bool:
        """Each cell in its share of the time that is left; False: the plugin is not loaded."""
        end = time.monotonic() + self.budget_s
        cells = [(func, n_bytes) for n_bytes in self.sizes for func in TUNED_FUNCS]
        if not self._loaded():
            return False
        for i, (func, n_bytes) in enumerate(cells):
            now = time.monotonic()
            self._cell(Buffers(func, n_bytes, self.device), now + (end - now) / (len(cells) - i))
        return True

    def _loaded(self) -> bool:
        """One small collective of each kind: has NCCL loaded the tuner and the profiler, on every rank?"""
        for func in TUNED_FUNCS:
            Buffers(func, 1 << 14, self.device).call()
        self._finish()
        if has_ring := self.plugin.open():
            self.ring = Ring.of_this_process(Path(os.environ["DYNAMICCL_RUN"]))
        self.plugin.sample(True)
        tuner, profiler = self.plugin.abi
        ranks = self._gather({"ring": has_ring, "tuner": tuner, "profiler": profiler, "asked": self.plugin.asked()})
        loaded = all(all(rank.values()) for rank in ranks)
        self._write({"loaded": loaded, "ranks": ranks})
        self._meet()  # the first rank that fails ends the others: what was found must be written
        return loaded

    def _cell(self, buffers: Buffers, deadline: float) -> None:
        default, records = self._measure(buffers, AUTO)
        offer = buffers.of(records, rec.OFFER).view(rec.OFFER_DTYPE)[-1]
        own = ALGOS[offer["algo"]], PROTOS[offer["proto"]]
        offered = [pair for pair, cost in zip(rec.PAIRS, rec.pair_costs(offer["cost_us"]), strict=True) if cost >= 0]
        configs = [Decision(*pair, n_channels) for pair in offered for n_channels in CHANNELS]
        random.Random(buffers.n_bytes).shuffle(configs)  # a drift of the machine must not look like a config's doing
        self._write({**default, "obeyed": default["ran"][:2] == own})  # an empty table leaves NCCL's plan as it is
        for config in configs:
            self._write(self._measure(buffers, config)[0])
            if self._gather(time.monotonic() > deadline)[0]:  # rank 0's clock counts
                break
        again, _ = self._measure(buffers, AUTO)  # A/A: how far two measurements of the same differ
        self._write({**again, "obeyed": again["ran"][:2] == own})

    def _measure(self, buffers: Buffers, decision: Decision) -> tuple[dict[str, Any], Any]:
        """One config on all ranks, a first call that may connect and then ``reps`` timed ones: (its row, records)."""
        func, n_bytes = buffers.func, buffers.n_bytes
        self.generation += 1
        rules = () if decision.is_auto else (rec.Rule(0, 0, func, n_bytes, n_bytes, decision),)
        self.plugin.activate(encode_table(rec.Table(self.generation, rules)))
        buffers.output.fill_(float("nan"))  # so that a collective that writes nothing is found out
        self._meet()
        buffers.call()
        right = torch.equal(buffers.output, buffers.right)
        self._meet()
        begin = step_clock.now_ns()
        for _ in range(REPS):
            buffers.call()
        self._finish()
        wall_us = (step_clock.now_ns() - begin) / 1e3 / REPS
        right = right and torch.equal(buffers.output, buffers.right)
        records = self._records(buffers)
        events = buffers.of(records, rec.COLL)
        ran = sorted({(ALGOS[e["algo"]], PROTOS[e["proto"]], int(e["n_channels"])) for e in events})
        obeyed = {(algo, proto) for algo, proto, _ in ran} == {(decision.algo, decision.proto)}
        obeyed = obeyed and (decision.n_channels == 0 or all(n <= decision.n_channels for *_, n in ran))
        kernels = buffers.of(records, rec.KERNEL).view(rec.KERNEL_DTYPE)[-REPS:]
        took = ((kernels["end_ns"] - kernels["start_ns"]) / 1e3).tolist()
        ranks = pd.DataFrame(self._gather({"right": right, "obeyed": obeyed, "ran": ran, "us": wall_us, "took": took}))
        shortest = [min(times) for times in zip(*ranks["took"], strict=False)]
        row = {"func": func, "n_bytes": n_bytes, "decision": str(decision), "ran": ran[0] if ran else ("", "", 0)}
        row |= {
            "obeyed": bool(ranks["obeyed"].all()),
            "ranks_agree": len(ran) == 1 and all(other == ran for other in ranks["ran"]),
            "right": bool(ranks["right"].all()),
            # Of the rank that came last, so that no waiting counts; None where the profiler gave no kernel times.
            "kernel_us": float(np.median(shortest)) if shortest else None,
            "wall_us": float(ranks["us"].max()),
        }
        return row, records

    def _records(self, buffers: Buffers) -> Any:
        """What the ring has got since the last time, the kernel times of all calls included if they come."""
        assert self.ring is not None
        records, end = self.ring.drain(), time.monotonic() + self.patience_s
        while len(buffers.of(records, rec.KERNEL)) <= REPS and time.monotonic() < end:
            time.sleep(0.002)
            records = np.concatenate([records, self.ring.drain()])
        if not len(buffers.of(records, rec.KERNEL)):
            self.patience_s = 0.0  # there are none
        return records

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
        if dist.get_rank() == 0:
            with self.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


def main() -> None:
    """The command."""
    loaded = Sweep(**json.loads(sys.argv[1])).run()
    if not loaded:
        print("the plugin was not loaded on every rank", file=sys.stderr, flush=True)
    dist.destroy_process_group()
    os._exit(0 if loaded else 1)  # gloo's threads can abort a process that tears down


if __name__ == "__main__":
    main()

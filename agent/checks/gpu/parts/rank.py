"""One rank of a session: it makes the communicators, then does the parts that it is told on its standard input.

Every rank is told the same parts in the same order. Whether time is left the ranks decide together.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .....envs.nccl.plugin.bindings import Plugin
from .....envs.nccl.rings import Ring
from .....envs.nccl.shm import encode_table
from .....envs.nccl.steps import clock
from .....traces import records as rec
from .....traces.records import FUNCS, Decision, Rule, Table
from ...results.files import append

#: PyTorch 2.13 gave them other names.
GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
#: Seconds to wait for a record.
PATIENCE_S = 2.0
#: Algorithm, protocol and channels that a collective ran with.
Plan = tuple[str, str, int]


class Buffers:
    """Input, output and the right output for one collective and size.

    The data are small whole numbers in float32, so that the order of additions cannot matter.
    """

    def __init__(self, func: str, n_bytes: int, device: torch.device) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        shard = n_bytes // 4 // size
        self.func = func
        self.n_bytes = shard * size * 4
        generator = np.random.default_rng(n_bytes)  # all ranks draw the same
        drawn = generator.integers(-4, 5, shard * size)
        numbers = drawn.astype(np.float32)
        whole = torch.from_numpy(numbers).to(device)
        begin = rank * shard
        mine = whole[begin : begin + shard]
        if func == "all_gather":
            self.input, self.right = mine.clone(), whole
        else:
            self.input = whole * (rank + 1)
            self.right = mine * (size * (size + 1) // 2)
        self.output = torch.empty_like(self.right)

    def call(self, group: Any, later: bool = False) -> Any:
        """The collective on a communicator; ``later``: returns its work, for whoever waits for it."""
        function = GATHER if self.func == "all_gather" else SCATTER
        return function(self.output, self.input, group=group, async_op=later)

    def rules(self, decision: Decision) -> tuple[Rule, ...]:
        """The table that sets this collective of this size and nothing else."""
        if decision.is_auto:
            return ()
        return (Rule(0, 0, self.func, self.n_bytes, self.n_bytes, decision),)

    def of(self, records: Any, kind: int) -> Any:
        """The records of one kind that are of this collective and size."""
        number = FUNCS.index(self.func)
        is_ours = records["n_bytes"] == self.n_bytes
        is_ours &= records["func"] == number
        is_ours &= records["kind"] == kind
        return records[is_ours]


class Rank:
    """What all parts need: device, communicators, table, clock, and the way to say what was found.

    ``comms``: ``nccl`` as NCCL makes it; ``raised`` and ``second`` with more channels. ``control`` is gloo: what the
    ranks tell each other there is not measured.
    """

    def __init__(self, backend: str, folder: str, answers: str, raised: int, kind: str) -> None:
        self.backend = backend
        self.folder = Path(folder)
        self.kind = kind
        self.device = _device(backend)
        dist.init_process_group(backend)
        self.control = dist.new_group(backend="gloo")
        self.comms = {"nccl": dist.group.WORLD}
        if kind == "tuner":  # the others only run NCCL untouched
            self.comms["raised"] = self._more_channels(raised)
            self.comms["second"] = self._more_channels(raised)
        self.number, self.size = dist.get_rank(), dist.get_world_size()
        self.plugin = None if kind == "none" else Plugin.load()
        self.ring: Ring | None = None
        self.generation = 0
        self.ends = (
            0.0  # time.monotonic() at which the part is to end: one clock for all processes of a machine
        )
        self._answers = Path(answers)
        self._connect()

    def _connect(self) -> None:
        """Have NCCL make all communicators now: it makes one at its first call, which takes seconds."""
        small = Buffers("all_gather", 1 << 12, self.device)
        for group in self.comms.values():
            small.call(group)
        self.meet()

    def _more_channels(self, raised: int) -> Any:
        if self.backend != "nccl":
            return dist.new_group(backend=self.backend)  # the emulated cluster's channels are its preset's
        options = dist.ProcessGroupNCCL.Options()
        options.config.min_ctas = raised
        options.config.max_ctas = raised
        return dist.new_group(backend="nccl", pg_options=options)

    def serve(self, parts: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
        """Do parts until standard input ends."""
        for line in sys.stdin:
            told = json.loads(line)
            self.ends = told["ends"]
            self.set_table(())
            answer = parts[told["part"]](self, **told["options"])
            self.meet()
            if os.environ["LOCAL_RANK"] == "0":
                with self._answers.open("a") as file:
                    file.write(json.dumps(answer) + "\n")

    # -- what the ranks decide together ----------------------------------------------------------------------------

    def agreed(self, value: float, how: Any = dist.ReduceOp.MAX) -> float:
        """One number of all ranks: the largest, or another reduction. Ranks meet here, their GPUs too."""
        self.finish()
        cell = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(cell, op=how, group=self.control)
        return float(cell.item())

    def has_time(self) -> bool:
        """Whether every rank has time left for this part."""
        return self.agreed(self.ends - time.monotonic(), dist.ReduceOp.MIN) > 0

    def meet(self) -> None:
        """Wait until all ranks are here and their GPUs idle."""
        self.agreed(0.0)

    def gather(self, mine: Any) -> list[Any]:
        """What every rank has to say, in their order."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self.control)
        return found

    def write(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows to a table of the results; rank 0 does."""
        if self.number == 0:
            append(self.folder, table, rows)

    # -- table and records -----------------------------------------------------------------------------------------

    def set_table(self, rules: tuple[Rule, ...]) -> None:
        """From the next collective on this rank runs under these rules; none: our tuner is silent.

        Every rank must call it at the same place between two collectives.
        """
        if self.plugin is None or self.kind != "tuner":
            return
        self.generation += 1
        table = Table(self.generation, rules)
        self.plugin.activate(encode_table(table))

    def open_ring(self) -> bool:
        """Whether NCCL has loaded the plugin on this rank, and it records."""
        if self.kind != "tuner" or self.plugin is None:
            return False
        if self.ring is None and self.plugin.open():
            folder = Path(os.environ["DYNAMICCL_RUN"])
            self.ring = Ring.of_this_process(folder)
        return self.ring is not None

    def records(self, buffers: Buffers, kind: int) -> Any:
        """The records since the last time, one of this kind included, which may come late."""
        assert self.ring is not None
        found = self.ring.drain()
        end = time.monotonic() + PATIENCE_S
        while not len(buffers.of(found, kind)) and time.monotonic() < end:
            time.sleep(0.002)
            found = np.concatenate([found, self.ring.drain()])
        return found

    def ran(self, buffers: Buffers) -> list[Plan]:
        """Plans of this collective since the last time, as the profiler saw them; none without a ring."""
        if self.ring is None:
            return []
        records = self.records(buffers, rec.COLL)
        return plans_of(buffers.of(records, rec.COLL))

    # -- time ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until the GPU has done all that was enqueued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def mark(self) -> Any:
        """A point in the GPU's stream of work; on the emulated cluster, now."""
        if self.device.type != "cuda":
            return clock.now_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def us(self, begin: Any, end: Any) -> float:
        """Microseconds between two marks that the GPU has passed."""
        if self.device.type != "cuda":
            return (end - begin) / 1e3
        return 1e3 * float(begin.elapsed_time(end))

    def slowest(self, times: list[float]) -> list[float]:
        """For each of some times the maximum over ranks."""
        cells = torch.tensor(times, dtype=torch.float64)
        largest = dist.ReduceOp.MAX
        dist.all_reduce(cells, op=largest, group=self.control)
        return [float(value) for value in cells]


def _device(backend: str) -> torch.device:
    """Of this rank; its GPU becomes the current one."""
    if backend != "nccl":
        return torch.device("cpu")
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def plans_of(events: Any) -> list[Plan]:
    """What collectives ran as, by their COLL records: each plan once."""
    found = set()
    for event in events:
        algo = rec.ALGOS[event["algo"]]
        proto = rec.PROTOS[event["proto"]]
        found.add((algo, proto, int(event["n_channels"])))
    return sorted(found)

"""The probe in the job: sees each optimizer step end, says how long it took, and takes part in the agreement.

It hangs on PyTorch's hook after every optimizer step. A boundary is an optimizer stepping that has stepped since the
last boundary: a wrapper such as ZeroRedundancyOptimizer fires a second time in a step, a second optimizer fires in
between, and neither makes a boundary of its own.
It never raises into the job, starts no thread (rank 0 a short one for each new table) and loads the plugin at the
first steps, not at import.
"""

from __future__ import annotations

import atexit
import os
import struct
import sys
import time
import weakref
from collections import deque
from pathlib import Path
from typing import Any

from ...traces.records import STEP, STEP_DTYPE, UNSET
from .agreement import Agreement, Local, Published
from .gauges import Gauges, Reading
from .plugin import Plugin

# STEP_DTYPE as one struct: packing it is five times faster than filling a numpy record.
_STEP = struct.Struct("<QBBBBBBHQQII" + "IIqqQQdff" + "32x")
assert _STEP.size == STEP_DTYPE.itemsize
_NAN = float("nan")
_GAUGES_EVERY_NS = 500_000_000  # the driver takes a lock for each
#: Kernel times are taken in one step of so many; 0 = never.
SAMPLE_EVERY = int(os.environ.get("DYNAMICCL_SAMPLE_EVERY", "8"))


class Probe:
    """One process's probe. Called by PyTorch after every optimizer step."""

    def __init__(self, run: str) -> None:
        """``run`` is the run folder of the job; on other nodes than rank 0's it need not exist."""
        self._published = Published(Path(run) / "table")
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that stepped since the last boundary
        self._plugin: Plugin | None = None
        self._step = 0
        self._last_ns = 0
        self._world: Any = None
        self._attempts = 0
        self._agreement: Agreement | Local | None = None
        self._clock: _CudaClock | None = None
        self._gauges: Gauges | None = None
        self._reading = Reading()
        self._read_ns = 0
        self._rank = 0
        self._tried = self._off = False
        self._measures = True

    def __call__(self, optimizer: Any, *_args: Any) -> None:
        """An optimizer has stepped. Whatever goes wrong here is said once, and the probe is off from then on."""
        if self._off:
            return
        if optimizer not in self._seen:
            self._seen.add(optimizer)
            return
        # By program order alone, so that all ranks agree: not by which object the garbage collector has taken.
        self._seen = weakref.WeakSet((optimizer,))
        try:
            self._boundary()
        except Exception as error:
            self._off = True
            _say(f"probe off: {type(error).__name__}: {error}")

    def _boundary(self) -> None:
        import torch

        cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if cuda and torch.cuda.is_current_stream_capturing():
            return  # a step captured into a CUDA graph: nothing runs now
        if not self._tried:
            self._tried = True
            self._load()
        if self._measures and self._plugin is not None:
            try:
                self._measure(self._plugin, bool(cuda))
            except Exception as error:  # the ranks go on agreeing: others must not switch without this one
                self._measures = False
                _say(f"steps are no longer measured: {type(error).__name__}: {error}")
        agreement = self._attached()
        if agreement is not None:
            agreement.boundary()

    def _load(self) -> None:
        try:
            self._plugin = Plugin.load()
            self._plugin.open()
        except Exception as error:
            _say(f"no plugin in this process: {error}")

    def _measure(self, plugin: Plugin, cuda: bool) -> None:
        now = time.monotonic_ns()
        if self._clock is None and cuda:
            import torch

            self._clock, self._gauges = _CudaClock(plugin), Gauges(torch.cuda)
            self._last_ns = 0
        if self._last_ns:
            self._end_step(plugin, now)
        elif self._clock:
            self._clock.mark(None)
        self._last_ns = now
        if SAMPLE_EVERY:
            plugin.sample(self._step % SAMPLE_EVERY == 0)

    def _end_step(self, plugin: Plugin, now: int) -> None:
        if self._gauges and now - self._read_ns > _GAUGES_EVERY_NS:
            self._reading, self._read_ns = self._gauges.read(), now
        ended = (STEP, UNSET, UNSET, UNSET, 0, UNSET, 0, 0, 0, self._step, plugin.generation)
        seen = self._reading
        figures = (seen.memory_used, seen.memory_total, _NAN, seen.sm_utilization, seen.power_w)
        if self._clock:
            self._clock.mark((ended, self._rank, now, figures))
            plugin.begin_step(self._step + 1)
        else:
            plugin.step(_STEP.pack(0, *ended, self._rank, 0, now, now - self._last_ns, *figures))
        self._step += 1

    def _attached(self) -> Agreement | Local | None:
        """The agreement of the process group of now; a new group gets a new one."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            if self._world is None and self._agreement is None and int(os.environ.get("WORLD_SIZE", "1")) == 1:
                self._agreement = Local(self._plugin, self._published)
            if isinstance(self._agreement, Agreement):  # the groups were destroyed: the table stays as it is
                self._agreement = self._world = None
            return self._agreement
        world = dist.group.WORLD
        if world is not self._world:
            self._world, self._rank = world, dist.get_rank()
            self._attempts += 1
            if dist.get_world_size() == 1:
                self._agreement = Local(self._plugin, self._published)
            else:
                store = dist.distributed_c10d._get_default_store()
                self._agreement = Agreement(self._plugin, self._published, world, store, self._attempts)
        return self._agreement

    def close(self) -> None:
        """The interpreter exits: what the GPU clock still owes is written if it is ready."""
        if isinstance(self._agreement, Agreement):
            self._agreement.join(2.0)
        if self._clock:
            self._clock.settle()


class _CudaClock:
    """Step times from CUDA events at the boundaries, read when the GPU has passed them: no synchronisation."""

    def __init__(self, plugin: Plugin) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._plugin = plugin
        self._marks: deque[tuple[Any, Any]] = deque()
        self._free: list[Any] = []

    def mark(self, record: Any) -> None:
        """A boundary; ``record`` is what the STEP record of the step it ends holds beside the duration."""
        event = self._free.pop() if self._free else self._cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((event, record))
        self.settle()

    def settle(self) -> None:
        """Write the records of the steps whose ends the GPU has passed."""
        while len(self._marks) > 1 and self._marks[1][0].query():
            begin, _ = self._marks.popleft()
            end, (ended, rank, end_ns, figures) = self._marks[0]
            duration_ns = int(begin.elapsed_time(end) * 1e6)
            self._plugin.emit(_STEP.pack(0, *ended, rank, 0, end_ns, duration_ns, *figures))
            self._free.append(begin)


_probe: Probe | None = None


def install() -> None:
    """Hang the probe on PyTorch's optimizer hook; once a process."""
    global _probe
    if _probe is not None:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    probe = _probe = Probe(os.environ["DYNAMICCL_RUN"])
    call: Any = None

    def hook(*args: Any) -> None:
        nonlocal call
        if call is None:
            # Inside a compiled step the hook runs between graphs, and the compiler must not follow it. Optimizers
            # import the compiler, so nothing is imported here that the job would not.
            dynamo = sys.modules.get("torch._dynamo")
            disable = getattr(dynamo, "disable", None)
            call = disable(probe.__call__) if disable else probe.__call__
        call(*args)

    hook._torchdynamo_disable = True  # type: ignore[attr-defined]
    register_optimizer_step_post_hook(hook)
    atexit.register(probe.close)


def _say(text: str) -> None:
    print(f"dynamiccl: {text}", file=sys.stderr, flush=True)

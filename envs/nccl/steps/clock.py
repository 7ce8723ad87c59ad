"""The STEP records of one process: how long each step took, under which table, and how full the GPU is."""

from __future__ import annotations

import contextlib
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from ....traces.records import FLAG_SAMPLED, FLAG_WHOLE, STEP, STEP_DTYPE, UNSET
from ..plugin.bindings import Plugin
from .sampling import Sampling
from .user_numbers import sample_every
from .words import say

# STEP_DTYPE as a struct: packing it is quicker than filling a numpy record.
STEP_PACKED = struct.Struct("<QBBBBBBHQQIIIIqqQQI44x")
assert STEP_PACKED.size == STEP_DTYPE.itemsize
#: Nanoseconds at the end of a step; an emulated job puts its own clock here.
now_ns: Callable[[], int] = time.monotonic_ns


class Ended(NamedTuple):
    """A step whose end the GPU has still to pass."""

    head: tuple[int, ...]  # of its STEP record, up to the duration
    memory: tuple[int, int]  # bytes used, and there
    trial: int  # generation of the trial in which it began
    sampled: bool
    generation: int


class CudaClock:
    """Step times from CUDA events at the boundaries, read when the GPU has passed them: no synchronisation."""

    def __init__(self, cuda: Any, device: int, plugin: Plugin, sampling: Sampling) -> None:
        self._cuda, self._device, self._plugin, self._sampling = cuda, device, plugin, sampling
        self._marks: deque[tuple[Any, Ended | None]] = deque()
        self._free: list[Any] = []

    def mark(self, ended: Ended | None) -> None:
        """A boundary, and the step that ends with it."""
        with self._cuda.device(self._device):
            event = self._free.pop() if self._free else self._cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((event, ended))
            self._settle()

    def settle(self) -> None:
        """Write the records of the steps whose ends the GPU has passed."""
        with self._cuda.device(self._device):
            self._settle()

    def _settle(self) -> None:
        while len(self._marks) > 1 and self._marks[1][0].query():
            begin, _ = self._marks.popleft()
            end, ended = self._marks[0]
            assert ended is not None  # only the first mark has no step before it
            duration_ns = int(begin.elapsed_time(end) * 1e6)
            self._plugin.emit(STEP_PACKED.pack(*ended.head, duration_ns, *ended.memory, ended.trial))
            self._sampling.ended(ended.sampled, duration_ns, ended.generation)
            self._free.append(begin)


def device_of(optimizer: Any, cuda: Any) -> int | None:
    """The GPU that a step of ``optimizer`` ends on; None: none is known. ``cuda`` is torch.cuda, initialised.

    The current device need not be the rank's: programs that name their device may never set it. To touch device 0 then
    makes each rank a context there, of hundreds of MB.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.is_cuda:
                return int(parameter.device.index)
    # The optimizer's part is on the host: the current device, if the process has tensors there. An allocator of the
    # job's own may not say.
    with contextlib.suppress(Exception):
        current = int(cuda.current_device())
        return current if cuda.memory_reserved(current) else None
    return None


#: Seconds between two looks at the GPU's memory: one takes some tens of microseconds.
EVERY_S = 2.0


class Memory:
    """How full a GPU's memory is, as the driver says; ``cuda`` is torch.cuda, initialised.

    It looks in the thread that calls: from another one it could break a graph's capture.
    """

    def __init__(self, cuda: Any, device: int) -> None:
        self._cuda, self._device = cuda, device
        self._last, self._looked = (0, 0), float("-inf")

    def latest(self) -> tuple[int, int]:
        """Bytes used by all processes on the GPU and bytes there are, at most ``EVERY_S`` old; zeros: unknown.

        Never raises: what fails once is not asked again.
        """
        now = time.monotonic()
        if now - self._looked > EVERY_S:
            self._looked = now
            try:
                free, total = self._cuda.mem_get_info(self._device)
                self._last = total - free, total
            except Exception:
                self._last, self._looked = (0, 0), float("inf")
        return self._last


class StepRecorder:
    """Writes a record a step into the plugin's ring. What goes wrong is said once, and steps are recorded no more."""

    def __init__(self, torch: Any, plugin: Plugin) -> None:
        self.step = 0  # under way
        self._cuda, self._plugin = torch.cuda, plugin
        self._sampling = Sampling(sample_every())
        self._sampled = False  # kernel times are being taken
        self._clock: CudaClock | None = None
        self._memory: Memory | None = None
        self._last_ns = 0
        self._works = True

    def ended(self, rank: int, now: int, optimizer: Any) -> None:
        """A step of ``rank`` has ended at ``now``, nanoseconds, with a step of ``optimizer``."""
        record = None
        if self._works:
            try:
                self._find_gpu(optimizer)
                record = self._record(rank, now)
            except Exception as error:
                self._works = self._sampled = False
                say(f"steps are no longer measured: {type(error).__name__}: {error}")
        self._plugin.boundary(record, self.step, self._sampled)

    def _find_gpu(self, optimizer: Any) -> None:
        """From the first step on whose GPU is known, that GPU's clock counts. The host's does until then."""
        if self._clock is not None or not self._cuda.is_initialized():
            return
        device = device_of(optimizer, self._cuda)
        if device is not None:
            self._clock = CudaClock(self._cuda, device, self._plugin, self._sampling)
            self._memory = Memory(self._cuda, device)
            self._last_ns = 0

    def _record(self, rank: int, now: int) -> bytes | None:
        """The record of the step that has ended, None if it is not known (yet); decides on the next step."""
        memory = self._memory.latest() if self._memory else (0, 0)
        record, end = None, self._plugin.ended()
        if self._last_ns:
            flags = (FLAG_SAMPLED if self._sampled else 0) | (FLAG_WHOLE if end.is_whole else 0)
            which = (self.step, end.generation, rank, self._sampling.every, now)
            head = (0, STEP, UNSET, UNSET, UNSET, 0, UNSET, flags, 0, 0, *which)
            if self._clock:
                self._clock.mark(Ended(head, memory, end.trial, self._sampled, end.generation))
            else:
                record = STEP_PACKED.pack(*head, now - self._last_ns, *memory, end.trial)
                self._sampling.ended(self._sampled, now - self._last_ns, end.generation)
            self.step += 1
        elif self._clock:
            self._clock.mark(None)
        self._last_ns = now
        self._sampled = self._sampling.wants(self.step, end.block)
        return record

    def close(self) -> None:
        """The interpreter exits: what the GPU clock still owes is written if it is ready."""
        if self._clock and self._works:
            # A CUDA error that has ended the job comes again at each call: the last words are to be the job's.
            with contextlib.suppress(Exception):
                self._clock.settle()

"""The STEP records of one process: how long each step took, under which table, and how full the GPU is."""

from __future__ import annotations

import os
import time
from typing import Any

from ....traces.records import FLAG_SAMPLED, STEP, UNSET
from ..plugin.bindings import Plugin
from ..steps import clock as step_clock
from ..steps.sampling import Sampling
from ..steps.words import say

#: Seconds between two looks at the GPU's memory: one takes some tens of microseconds.
EVERY_S = 2.0


class Memory:
    """How full the current CUDA device's memory is, as the driver says; ``cuda`` is torch.cuda, initialised.

    It looks in the thread that calls: from another one it could break a graph's capture.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._last, self._looked = (0, 0), float("-inf")

    def latest(self) -> tuple[int, int]:
        """Bytes used by all processes on the GPU and bytes there are, at most ``EVERY_S`` old; zeros: unknown.

        Never raises: what fails once is not asked again.
        """
        now = time.monotonic()
        if now - self._looked > EVERY_S:
            self._looked = now
            try:
                free, total = self._cuda.mem_get_info()
                self._last = total - free, total
            except Exception:
                self._last, self._looked = (0, 0), float("inf")
        return self._last


class StepRecorder:
    """Writes a record a step into the plugin's ring. What goes wrong is said once, and steps are recorded no more."""

    def __init__(self, torch: Any, plugin: Plugin) -> None:
        self.step = 0  # under way
        self._cuda, self._plugin = torch.cuda, plugin
        fixed = os.environ.get("DYNAMICCL_SAMPLE_EVERY")
        self._sampling = Sampling(int(fixed) if fixed else None)
        self._sampled = False  # kernel times are being taken
        self._clock: step_clock.CudaClock | None = None
        self._memory: Memory | None = None
        self._last_ns = 0
        self._works = True

    def ended(self, rank: int, now: int) -> None:
        """A step of ``rank`` has ended at ``now``, nanoseconds."""
        record = None
        if self._works:
            try:
                record = self._record(rank, now)
            except Exception as error:
                self._works = self._sampled = False
                say(f"steps are no longer measured: {type(error).__name__}: {error}")
        self._plugin.boundary(record, self.step, self._sampled)

    def _record(self, rank: int, now: int) -> bytes | None:
        """The record of the step that has ended, None if it is not known (yet); decides on the next step."""
        if self._clock is None and self._cuda.is_initialized():
            self._clock = step_clock.CudaClock(self._cuda, self._plugin, self._sampling)
            self._memory = Memory(self._cuda)
            self._last_ns = 0
        memory = self._memory.latest() if self._memory else (0, 0)
        record, generation = None, self._plugin.ended()
        if self._last_ns:
            flags = FLAG_SAMPLED if self._sampled else 0
            which = (self.step, generation, rank, self._sampling.every, now)
            head = (0, STEP, UNSET, UNSET, UNSET, 0, UNSET, flags, 0, 0, *which)
            if self._clock:
                self._clock.mark(step_clock.Ended(head, memory, self._sampled, generation))
            else:
                record = step_clock.STEP_PACKED.pack(*head, now - self._last_ns, *memory)
                self._sampling.ended(self._sampled, now - self._last_ns, generation)
            self.step += 1
        elif self._clock:
            self._clock.mark(None)
        self._last_ns = now
        self._sampled = self._sampling.wants(self.step)
        return record

    def close(self) -> None:
        """The interpreter exits: what the GPU clock still owes is written if it is ready."""
        if self._clock:
            self._clock.settle()

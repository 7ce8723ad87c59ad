"""STEP records as the probe packs them, and the times of steps that a GPU takes."""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from ....traces.records import STEP_DTYPE
from ..plugin.bindings import Plugin
from .sampling import Sampling

# STEP_DTYPE as a struct: packing it is quicker than filling a numpy record.
STEP_PACKED = struct.Struct("<QBBBBBBHQQIIIIqqQQ48x")
assert STEP_PACKED.size == STEP_DTYPE.itemsize
#: Nanoseconds at the end of a step; an emulated job puts its own clock here.
now_ns: Callable[[], int] = time.monotonic_ns


class Ended(NamedTuple):
    """A step whose end the GPU has still to pass."""

    head: tuple[int, ...]  # of its STEP record, up to the duration
    memory: tuple[int, int]  # bytes used, and there
    sampled: bool
    generation: int


class CudaClock:
    """Step times from CUDA events at the boundaries, read when the GPU has passed them: no synchronisation."""

    def __init__(self, cuda: Any, plugin: Plugin, sampling: Sampling) -> None:
        self._cuda, self._plugin, self._sampling = cuda, plugin, sampling
        self._marks: deque[tuple[Any, Ended | None]] = deque()
        self._free: list[Any] = []

    def mark(self, ended: Ended | None) -> None:
        """A boundary, and the step that ends with it."""
        event = self._free.pop() if self._free else self._cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((event, ended))
        self.settle()

    def settle(self) -> None:
        """Write the records of the steps whose ends the GPU has passed."""
        while len(self._marks) > 1 and self._marks[1][0].query():
            begin, _ = self._marks.popleft()
            end, ended = self._marks[0]
            assert ended is not None  # only the first mark has no step before it
            duration_ns = int(begin.elapsed_time(end) * 1e6)
            self._plugin.emit(STEP_PACKED.pack(*ended.head, duration_ns, *ended.memory))
            self._sampling.ended(ended.sampled, duration_ns, ended.generation)
            self._free.append(begin)

"""The clock of one emulated rank: it advances by the work that is counted and by the waits that the model says.

Nothing sleeps. Every operation of PyTorch is counted, and takes the longer of what a GPU needs for its multiplications
and for its memory: so a step takes the same emulated time on a quiet machine, on a busy one and on another one.
(Processor time, measured instead, scattered by 17 % from step to step beside other processes, and its median lay 19 %
above its minimum.) Python itself takes no emulated time; the threads of a rank share its clock, and take turns on it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

#: What a GPU does in a nanosecond: an H100's bf16 rate at the 40 % that training reaches, and its memory's (data sheet:
#: 989 TFLOP/s dense, 3.35 TB/s).
FLOPS_PER_NS, BYTES_PER_NS = 400e3, 3350.0
_TRACED = (FakeTensor, FunctionalTensor)
#: Operations that only make a tensor or name it anew; those that PyTorch calls views are known.
_FREE = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "set_",
    "resize_",
    "_unsafe_view",
}
_FREE |= {"_local_scalar_dense", "record_stream", "is_same_size", "sym_size", "sym_numel", "sym_stride"}


@dataclass
class Collective:
    """One collective in flight. ``start_ns`` and ``end_ns`` are 0 until this rank waits for it."""

    order: int  # on the communicator's stream
    duration_ns: int
    beside: tuple[float, float, float]  # what it does to compute, and takes of the links: see Fabric.beside
    n_kernels: int  # channels whose kernel times the profiler wants
    handle: int | None  # the profiler's
    start_ns: int = 0
    end_ns: int = 0

    @property
    def slowdown(self) -> float:
        """Time that compute loses to it, for each time that both run."""
        return self.beside[0]


class Clock:
    """``cell`` holds the time of the last look, in nanoseconds; the plugin reads it in place of CLOCK_MONOTONIC.

    Begins at CLOCK_MONOTONIC; ranks meet in their first collective. All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self.cell = ctypes.c_int64(time.monotonic_ns())
        self._lock = threading.RLock()
        self._work_ns = 0.0
        self._running: list[Collective] = []
        self._unknown = 0  # collectives that were enqueued and whose start and end are not known yet ...
        self._computed: deque[tuple[int, int]] = deque(maxlen=4096)  # ... and what was computed meanwhile

    def count(self, ns: float) -> None:
        """Work of ``ns`` nanoseconds was done."""
        self._work_ns += ns

    def now(self) -> int:
        """The time after all work counted so far, and what it lost to the collectives that ran beside it."""
        with self._lock:
            begin, work = self.cell.value, int(self._work_ns)
            if work:
                self._work_ns -= work
                end = begin + work
                if self._unknown:
                    self._computed.append((begin, end))
                self.cell.value = end + round(
                    sum(_overlap(c, begin, end) * c.slowdown for c in self._running)
                )
                self._forget()
            return self.cell.value

    def enqueued(self) -> int:
        """A collective is enqueued: now, which is returned."""
        with self._lock:
            now = self.now()
            self._unknown += 1
            return now

    def known(self, collective: Collective) -> int:
        """Its start and end are known: what was computed beside it has taken longer than was thought. Returns now."""
        with self._lock:
            self.now()
            lost = (
                sum(_overlap(collective, begin, end) for begin, end in self._computed) * collective.slowdown
            )
            self.cell.value += round(lost)
            self._unknown -= 1
            if not self._unknown:
                self._computed.clear()
            self._running.append(collective)
            self._forget()
            return self.cell.value

    def wait_until(self, ns: int) -> int:
        """Wait for something that ends at ``ns``; returns the time after that."""
        with self._lock:
            self.cell.value = max(self.now(), ns)
            self._forget()
            return self.cell.value

    def _forget(self) -> None:
        self._running = [c for c in self._running if c.end_ns > self.cell.value]


def _overlap(c: Collective, begin: int, end: int) -> int:
    return max(0, min(c.end_ns, end) - max(c.start_ns, begin))


class CountedWork(TorchDispatchMode):
    """Counts what PyTorch computes in the thread that enters it: ``scale`` GPU operations for each of the job's."""

    def __init__(self, clock: Clock, scale: float) -> None:
        super().__init__()
        self._clock, self._scale = clock, scale
        self._kinds: dict[Any, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and count it."""
        kwargs = kwargs or {}
        if types and any(issubclass(t, _TRACED) for t in types):
            return func(*args, **kwargs)  # nothing is computed
        if any(t is not torch.Tensor and t is not torch.nn.Parameter for t in types):
            return NotImplemented  # a tensor made of others: what is done to those comes here
        out = func(*args, **kwargs)
        kind = self._kinds.get(func, self)
        if kind is self:
            kind = self._kinds[func] = _kind(func)
        if kind is not None:
            ns = _touched(*args, *kwargs.values(), out) / BYTES_PER_NS
            if ns and kind is not _touched:
                ns = max(ns, kind(*args, **kwargs, out_val=out) / FLOPS_PER_NS)
            self._clock.count(ns * self._scale)
        return out


def _kind(func: Any) -> Any:
    """How to count ``func``: its formula, :func:`_touched` for what memory alone counts, None for what is free."""
    name = getattr(func, "_opname", "")
    if getattr(func, "namespace", "") != "aten" or name in _FREE or getattr(func, "is_view", False):
        return None
    if name in _ATTENTION:
        return _ATTENTION[name]
    return flop_registry.get(func.overloadpacket, _touched)


def _attention(q: Any, k: Any, v: Any, *_args: Any, **_more: Any) -> float:
    return float(sdpa_flop_count(q.shape, k.shape, v.shape))


def _attention_backward(grad: Any, q: Any, k: Any, v: Any, *_args: Any, **_more: Any) -> float:
    return float(sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape))


#: Attention on a CPU, of which PyTorch's own counter knows nothing.
_ATTENTION: dict[str, Any] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}


def _touched(*values: Any) -> float:
    """Bytes of the tensors among ``values`` and in lists of them: each is read or written once."""
    n_bytes = 0
    for value in values:
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                n_bytes += tensor.numel() * tensor.element_size()
    return n_bytes

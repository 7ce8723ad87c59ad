"""The two halves of the plugin as NCCL of each release loads and calls them: the tuner and the profiler."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint8, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
from dynamiccl.envs.sim.emulated.nccl_caller import (
    CALL,
    COLL,
    KERNEL,
    MASKS,
    check,
    layout,
    pointers,
)  # fmt: skip
from dynamiccl.traces.records import ALGOS, FUNCS, N_ALGOS, N_PROTOS, PROTOS

DTYPE_BYTES = {
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float16": 2,
    "bfloat16": 2,
}
DTYPE_BYTES |= {"float32": 4, "float64": 8, "float8e4m3": 1, "float8e5m2": 1}

# Which symbols a release tries, newest first; the first that the library exports is loaded.
# 2.32.6 was read, not recorded: it looks for interface 7, whose functions are those of 6, and wraps a 6 else.
_TUNERS = {
    (2, 22): (3,),
    (2, 24): (4, 3),
    (2, 28): (5, 4, 3),
    (2, 30): (6, 5, 4, 3),
    (2, 32, 6): (7, 6, 5, 4, 3),
}
_PROFILERS = {(2, 22): (), (2, 27): (4,), (2, 28): (5, 4), (2, 29): (6, 5, 4), (2, 31): (7, 6, 5, 4)}

#: In the environment: whoever calls NCCL keeps Python's lock, as an extension may that does not release it.
KEEPS_LOCK = "STAND_IN_KEEPS_LOCK"
_FUNCTION = ctypes.PYFUNCTYPE if os.environ.get(KEEPS_LOCK) else ctypes.CFUNCTYPE

_INT4 = (c_int, c_int, c_int)
_INFO = (c_void_p, c_int, c_size_t, c_int, c_void_p, c_int, c_int)
_TUNER_INIT = {
    3: _FUNCTION(c_int, c_size_t, c_size_t, c_void_p, POINTER(c_void_p)),
    5: _FUNCTION(c_int, POINTER(c_void_p), c_uint64, c_size_t, c_size_t, c_void_p, c_void_p, c_void_p),
}
_TUNER_INFO = {
    3: _FUNCTION(c_int, *_INFO, POINTER(c_int)),
    4: _FUNCTION(c_int, *_INFO, c_int, POINTER(c_int)),
}
_PROFILER_INIT = {
    4: _FUNCTION(c_int, POINTER(c_void_p), POINTER(c_int), c_char_p, c_uint64, *_INT4, c_void_p),
    5: _FUNCTION(c_int, POINTER(c_void_p), c_uint64, POINTER(c_int), c_char_p, *_INT4, c_void_p),
}
_START_EVENT = _FUNCTION(c_int, c_void_p, POINTER(c_void_p), c_void_p)
_STATE = _FUNCTION(c_int, c_void_p, c_int, POINTER(c_uint64))
_ONE_POINTER = _FUNCTION(c_int, c_void_p)
_CHUNK_SIZE = _FUNCTION(c_int, c_void_p, c_int, c_size_t, c_int, c_int, c_int, POINTER(c_size_t))

EVENT_GROUP, EVENT_COLL, EVENT_KERNEL_CH, KERNEL_CH_STOP = 1, 2, 64, 22
EVENT_GROUP_API, EVENT_COLL_API, EVENT_KERNEL_LAUNCH = 256, 512, 2048
# NCCL tells of an event whose bit is in the mask, and of these (4 and 1024 are sends) where one of the bits below is.
_BELOW = {
    EVENT_GROUP: 0xDF,
    EVENT_COLL: 0xDA,
    4: 0xDC,
    EVENT_COLL_API: 0xDA,
    1024: 0xDC,
    EVENT_GROUP_API: 0xEDF,
}


# v4 is NCCL 2.27's; v5 and v6, of 2.28 on, have one layout.
_BODY_V4 = layout(ctypes.Union, coll=layout(ctypes.Structure, **COLL), kernel=KERNEL, whole=c_uint8 * 80)
_BODY_V5 = layout(
    ctypes.Union,
    coll=layout(ctypes.Structure, **COLL, parent_group=c_void_p),
    call=layout(ctypes.Structure, **CALL),
    kernel=KERNEL,
    whole=c_uint8 * 88,
)
_EVENT_V4 = layout(ctypes.Structure, type=c_uint8, parent=c_void_p, rank=c_int, body=_BODY_V4)
_EVENT_V5 = layout(ctypes.Structure, type=c_uint64, parent=c_void_p, rank=c_int, body=_BODY_V5)
assert ctypes.sizeof(_EVENT_V4) == 104 and ctypes.sizeof(_EVENT_V5) == 112


def versions(release: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tuner and profiler versions that NCCL ``release`` ("2.29.7") tries, newest first. Raises ValueError."""
    parts = number(release)
    if len(parts) < 2 or parts < (2, 22):
        raise ValueError(f"NCCL {release} is not a release that loads this plugin: 2.22 is the first")
    return (
        next(v for since, v in reversed(_TUNERS.items()) if parts >= since),
        next(v for since, v in reversed(_PROFILERS.items()) if parts >= since),
    )


def number(release: str) -> tuple[int, ...]:
    """A release as numbers, to be compared; () where it is none."""
    try:
        return tuple(int(part) for part in release.split(".")[:3])
    except ValueError:
        return ()


@dataclass(frozen=True)
class Call:
    """One collective that a program calls, and how NCCL runs it. ``count`` as in :meth:`Communicator.start_coll`."""

    func: str
    count: int
    datatype: str = "int8"
    n_channels: int = 1
    algo: str = "ring"
    proto: str = "simple"


class Tuner:
    """The tuner half of the plugin, as one communicator asks it."""

    def __init__(self, library: ctypes.CDLL, release: str, comm_id: int, n_ranks: int, n_nodes: int) -> None:
        self.version = first(library, "ncclTunerPlugin_v", versions(release)[0])
        n_functions = 5 if self.version > 5 else 4
        _, init, info, finalize, *chunk = pointers(library, f"ncclTunerPlugin_v{self.version}", n_functions)
        self._info: Callable[..., int] = _TUNER_INFO[min(self.version, 4)](info)
        self._finalize = _ONE_POINTER(finalize)
        self._chunk_size = _CHUNK_SIZE(chunk[0]) if chunk and chunk[0] else None
        # Kept for every call, as in the profiler: ctypes objects are slow to make.
        self._channels, self._cost = c_int(), np.empty((N_ALGOS, N_PROTOS), np.float32)
        self._channels_ref, self._cost_at = byref(self._channels), self._cost.ctypes.data
        self.context = c_void_p()
        if self.version < 5:
            check(_TUNER_INIT[3](init)(n_ranks, n_nodes, None, byref(self.context)))
        else:
            self._given = (
                (c_int * 3)(n_nodes, 1, n_ranks),
                (c_uint8 * 1152)(),
            )  # NVLink domains, tuning constants
            given = (ctypes.addressof(part) for part in self._given)
            check(_TUNER_INIT[5](init)(byref(self.context), comm_id, n_ranks, n_nodes, None, *given))

    def ask(
        self,
        func: str,
        n_bytes: int,
        cost: np.ndarray[Any, Any],
        n_pipe_ops: int = 1,
        n_channels: int = 0,
        is_registered: bool = False,
    ) -> int:
        """One question; ``cost`` (7, 3) float32 is changed in place. Returns the channel count."""
        self._cost[:] = cost
        self._channels.value = n_channels
        registered = () if self.version == 3 else (int(is_registered),)
        head = (self.context, FUNCS.index(func), n_bytes, n_pipe_ops, self._cost_at, N_ALGOS, N_PROTOS)
        check(self._info(*head, *registered, self._channels_ref))
        cost[:] = self._cost
        return self._channels.value

    def ask_chunks(self, call: Call, n_bytes: int) -> None:
        """Ask for the size of a chunk: of the first channel, those between and the last."""
        if self._chunk_size is not None:
            cell = ALGOS.index(call.algo), PROTOS.index(call.proto)
            for _ in range(min(3, call.n_channels)):
                size = byref(c_size_t(2**19))
                check(self._chunk_size(self.context, FUNCS.index(call.func), n_bytes, *cell, 1, size))

    def finalize(self) -> None:
        """The communicator is destroyed."""
        check(self._finalize(self.context))


class Profiler:
    """The profiler half of the plugin, as one communicator tells it; version 0 where there is none."""

    def __init__(
        self,
        library: ctypes.CDLL,
        wanted: tuple[int, ...],
        comm_id: int,
        shape: tuple[int, int, int],
        name: str,
    ) -> None:
        """``shape``: nodes, ranks, this rank."""
        self.version = first(library, "ncclProfiler_v", wanted)
        self._event_type = _EVENT_V4 if self.version == 4 else _EVENT_V5
        self._context, self._handle, self._timer = c_void_p(), c_void_p(), c_uint64()
        self._mask, self._kernel = c_int(0), self.event(EVENT_KERNEL_CH, rank=shape[-1])
        if not self.version:
            return
        self._mask = MASKS.setdefault(library._name, self._mask)
        _, init, start, stop, state, finalize = pointers(library, f"ncclProfiler_v{self.version}", 6)
        self._start, self._stop = _START_EVENT(start), _ONE_POINTER(stop)
        self._record_state, self._finalize = _STATE(state), _ONE_POINTER(finalize)
        context, mask, label = byref(self._context), byref(self._mask), name.encode()
        if self.version == 4:
            check(_PROFILER_INIT[4](init)(context, mask, label, comm_id, *shape, None))
        else:
            check(_PROFILER_INIT[5](init)(context, comm_id, mask, label, *shape, None))

    @property
    def mask(self) -> int:
        """Events that the plugin asks for at this moment, for the whole process."""
        return int(self._mask.value)

    def event(self, kind: int, **members: Any) -> Any:
        """A new event of that kind, in this version's layout."""
        return self._event_type(type=kind, **members)

    def start(self, event: Any) -> int | None:
        """Tell of an event; its handle, None where nobody asked for it."""
        if not self.mask & (event.type | _BELOW.get(event.type, 0)):
            return None
        self._handle.value = None
        check(self._start(self._context, byref(self._handle), byref(event)))
        return self._handle.value

    def stop(self, handle: int | None) -> None:
        """The event is over."""
        if handle is not None:
            check(self._stop(handle))

    def kernel(self, handle: int | None, channel: int, start_ns: int, stop_ns: int) -> None:
        """Report one channel of a collective's kernel, as NCCL's proxy thread does for a sampled one."""
        self.stop_kernel(self.start_kernel(handle, channel, start_ns), stop_ns)

    def start_kernel(self, parent: int | None, channel: int, start_ns: int) -> int | None:
        """The first half of :meth:`kernel`, told whatever the mask says by now; a handle for the second."""
        if parent is None:  # not sampled when it was enqueued
            return None
        self._kernel.parent = parent
        self._kernel.body.kernel = (channel, start_ns)
        self._handle.value = None
        check(self._start(self._context, byref(self._handle), byref(self._kernel)))
        return self._handle.value

    def stop_kernel(self, handle: int | None, stop_ns: int) -> None:
        """The second half of :meth:`kernel`."""
        if handle is not None:
            self._timer.value = stop_ns
            check(self._record_state(handle, KERNEL_CH_STOP, byref(self._timer)))
            self.stop(handle)

    def finalize(self) -> None:
        """The communicator is destroyed."""
        if self.version:
            check(self._finalize(self._context))


def first(library: ctypes.CDLL, prefix: str, wanted: tuple[int, ...]) -> int:
    return next((v for v in wanted if hasattr(library, f"{prefix}{v}")), 0)

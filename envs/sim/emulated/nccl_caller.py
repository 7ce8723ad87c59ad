"""A miniature NCCL: loads the plugin as a given release does and calls it in that release's order.

The emulated backend runs on it, and the tests drive the plugin through every version with it. What it calls, and in
which order, is what six releases were recorded to call (``tests/data/nccl_calls.json``).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint8, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ....traces.records import ALGOS, FUNCS, N_ALGOS, N_PROTOS, PROTOS

DTYPE_BYTES = {"int8": 1, "uint8": 1, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8, "float16": 2, "bfloat16": 2}
DTYPE_BYTES |= {"float32": 4, "float64": 8, "float8e4m3": 1, "float8e5m2": 1}
_DTYPE_OF_SIZE = {1: "int8", 2: "float16", 4: "float32", 8: "float64"}
_SHARDED = ("all_gather", "reduce_scatter")  # NCCL counts the elements of one rank, and asks for those of all
#: As the profiler hears them: AllGather, ReduceScatter ...
_FUNC_NAMES = {func: func.title().replace("_", "").encode() for func in FUNCS}

# Which symbols a release tries, newest first; the first that the library exports is loaded.
_TUNERS = {(2, 22): (3,), (2, 24): (4, 3), (2, 28): (5, 4, 3), (2, 30): (6, 5, 4, 3)}
_PROFILERS = {(2, 22): (), (2, 27): (4,), (2, 28): (5, 4), (2, 29): (6, 5, 4), (2, 31): (7, 6, 5, 4)}

_INT4 = (c_int, c_int, c_int)
_INFO = (c_void_p, c_int, c_size_t, c_int, c_void_p, c_int, c_int)
_TUNER_INIT = {
    3: ctypes.CFUNCTYPE(c_int, c_size_t, c_size_t, c_void_p, POINTER(c_void_p)),
    5: ctypes.CFUNCTYPE(c_int, POINTER(c_void_p), c_uint64, c_size_t, c_size_t, c_void_p, c_void_p, c_void_p),
}
_TUNER_INFO = {
    3: ctypes.CFUNCTYPE(c_int, *_INFO, POINTER(c_int)),
    4: ctypes.CFUNCTYPE(c_int, *_INFO, c_int, POINTER(c_int)),
}
_PROFILER_INIT = {
    4: ctypes.CFUNCTYPE(c_int, POINTER(c_void_p), POINTER(c_int), c_char_p, c_uint64, *_INT4, c_void_p),
    5: ctypes.CFUNCTYPE(c_int, POINTER(c_void_p), c_uint64, POINTER(c_int), c_char_p, *_INT4, c_void_p),
}
_START_EVENT = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(c_void_p), c_void_p)
_STATE = ctypes.CFUNCTYPE(c_int, c_void_p, c_int, POINTER(c_uint64))
_ONE_POINTER = ctypes.CFUNCTYPE(c_int, c_void_p)
_CHUNK_SIZE = ctypes.CFUNCTYPE(c_int, c_void_p, c_int, c_size_t, c_int, c_int, c_int, POINTER(c_size_t))

EVENT_GROUP, EVENT_COLL, EVENT_KERNEL_CH, KERNEL_CH_STOP = 1, 2, 64, 22
EVENT_GROUP_API, EVENT_COLL_API, EVENT_KERNEL_LAUNCH = 256, 512, 2048
# NCCL tells of an event whose bit is in the mask, and of these (4 and 1024 are sends) where one of the bits below is.
_BELOW = {EVENT_GROUP: 0xDF, EVENT_COLL: 0xDA, 4: 0xDC, EVENT_COLL_API: 0xDA, 1024: 0xDC, EVENT_GROUP_API: 0xEDF}


def _layout(base: type, **members: Any) -> Any:
    """A structure or union of C with these members in their order."""
    return type(base)("_layout", (base,), {"_fields_": tuple(members.items())})


# A profiler's events as NCCL lays them out on 64-bit Linux, declared a second time: a slip in the plugin's own would
# show. v4 is NCCL 2.27's; v5 and v6, of 2.28 on, have one layout.
_COLL = {"seq": c_uint64, "func": c_char_p, "send_buffer": c_void_p, "recv_buffer": c_void_p, "count": c_size_t}
_COLL |= {"root": c_int, "datatype": c_char_p, "n_channels": c_uint8, "n_warps": c_uint8}
_COLL |= {"algo": c_char_p, "proto": c_char_p}
_CALL = {"func": c_char_p, "count": c_size_t, "datatype": c_char_p, "root": c_int, "stream": c_void_p}
_KERNEL = _layout(ctypes.Structure, channel=c_uint8, timer=c_uint64)
_BODY_V4 = _layout(ctypes.Union, coll=_layout(ctypes.Structure, **_COLL), kernel=_KERNEL, whole=c_uint8 * 80)
_BODY_V5 = _layout(
    ctypes.Union,
    coll=_layout(ctypes.Structure, **_COLL, parent_group=c_void_p),
    call=_layout(ctypes.Structure, **_CALL, graph_captured=ctypes.c_bool),
    kernel=_KERNEL,
    whole=c_uint8 * 88,
)
_EVENT_V4 = _layout(ctypes.Structure, type=c_uint8, parent=c_void_p, rank=c_int, body=_BODY_V4)
_EVENT_V5 = _layout(ctypes.Structure, type=c_uint64, parent=c_void_p, rank=c_int, body=_BODY_V5)
assert ctypes.sizeof(_EVENT_V4) == 104 and ctypes.sizeof(_EVENT_V5) == 112

# NCCL keeps one event mask for the whole process and hands its address to every communicator.
_MASKS: dict[str, Any] = {}


class CallerError(RuntimeError):
    """The plugin returned something other than success: NCCL would have failed the job."""


def versions(release: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tuner and profiler versions that NCCL ``release`` ("2.29.7") tries, newest first. Raises ValueError."""
    number = _number(release)
    if len(number) < 2 or number < (2, 22):
        raise ValueError(f"NCCL {release} is not a release that loads this plugin: 2.22 is the first")
    return (
        next(v for since, v in reversed(_TUNERS.items()) if number >= since),
        next(v for since, v in reversed(_PROFILERS.items()) if number >= since),
    )


def _number(release: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in release.split(".")[:2])
    except ValueError:
        return ()


def choose(cost: np.ndarray[Any, Any]) -> tuple[int, int]:
    """NCCL's choice from a ``(n_algos, n_protos)`` cost table: the first of the smallest >= 0, else (-1, -1)."""
    flat = np.where(cost >= 0, cost, np.inf).ravel()
    best = int(flat.argmin())
    return divmod(best, cost.shape[1]) if np.isfinite(flat[best]) else (-1, -1)


@dataclass(frozen=True)
class Call:
    """One collective that a program calls, and how NCCL runs it. ``count`` as in :meth:`Communicator.start_coll`."""

    func: str
    count: int
    datatype: str = "int8"
    n_channels: int = 1
    algo: str = "ring"
    proto: str = "simple"


class Communicator:
    """One rank's communicator. Calls are made by one thread at a time, as NCCL does per communicator."""

    def __init__(
        self,
        plugin_path: Path | str,
        comm_id: int,
        n_ranks: int,
        n_nodes: int,
        rank: int,
        release: str = "2.29.7",
        name: str = "",
        with_profiler: bool = True,
    ) -> None:
        """Initialise profiler and tuner in NCCL's order. Raises ValueError, OSError, CallerError."""
        library = ctypes.CDLL(os.fspath(plugin_path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        tuners, profilers = versions(release)
        self.comm_id, self.n_ranks, self.n_nodes, self.rank = comm_id, n_ranks, n_nodes, rank
        self._release = _number(release)
        self.profiler_version = _first(library, "ncclProfiler_v", profilers) if with_profiler else 0
        self.tuner_version = _first(library, "ncclTunerPlugin_v", tuners)
        self._mask = _MASKS.setdefault(os.fspath(plugin_path), c_int(0))
        self._profiler, self._tuner = c_void_p(), c_void_p()
        self._group_api: int | None = None  # handles of the group under way, and of the program's calls in it
        self._group: int | None = None
        self._calls: list[int | None] = []
        if self.profiler_version:
            self._init_profiler(library, name)
        self._init_tuner(library)

    def _init_profiler(self, library: ctypes.CDLL, name: str) -> None:
        _, init, start, stop, state, finalize = _pointers(library, f"ncclProfiler_v{self.profiler_version}", 6)
        self._start_event, self._stop_event = _START_EVENT(start), _ONE_POINTER(stop)
        self._record_state, self._finalize_profiler = _STATE(state), _ONE_POINTER(finalize)
        context, mask, label = byref(self._profiler), byref(self._mask), name.encode()
        size = (self.n_nodes, self.n_ranks, self.rank)
        if self.profiler_version == 4:
            _check(_PROFILER_INIT[4](init)(context, mask, label, self.comm_id, *size, None))
        else:
            _check(_PROFILER_INIT[5](init)(context, self.comm_id, mask, label, *size, None))
        # Kept for every call: ctypes objects are slow to make.
        self._event_type = _EVENT_V4 if self.profiler_version == 4 else _EVENT_V5
        self._coll, self._kernel = self._event_type(type=EVENT_COLL), self._event_type(type=EVENT_KERNEL_CH)
        self._coll.rank = self._kernel.rank = self.rank
        self._coll_body, self._kernel_body = self._coll.body.coll, self._kernel.body.kernel
        self._kernel_ref = byref(self._kernel)
        self._handle, self._timer = c_void_p(), c_uint64()
        self._handle_ref, self._timer_ref = byref(self._handle), byref(self._timer)

    def _init_tuner(self, library: ctypes.CDLL) -> None:
        self._functions = _pointers(
            library, f"ncclTunerPlugin_v{self.tuner_version}", 5 if self.tuner_version > 5 else 4
        )
        _, init, info, finalize = self._functions[:4]
        self._finalize_tuner = _ONE_POINTER(finalize)
        self._info: Callable[..., int] = _TUNER_INFO[min(self.tuner_version, 4)](info)
        self._channels, self._cost = c_int(), np.empty((N_ALGOS, N_PROTOS), np.float32)
        self._channels_ref, self._cost_at = byref(self._channels), self._cost.ctypes.data
        if self.tuner_version < 5:
            _check(_TUNER_INIT[3](init)(self.n_ranks, self.n_nodes, None, byref(self._tuner)))
        else:
            self._domains, self._constants = (c_int * 3)(self.n_nodes, 1, self.n_ranks), (c_uint8 * 1152)()
            given = (ctypes.addressof(part) for part in (self._domains, self._constants))
            context = byref(self._tuner)
            _check(_TUNER_INIT[5](init)(context, self.comm_id, self.n_ranks, self.n_nodes, None, *given))

    def get_coll_info(
        self, func: str, n_bytes: int, cost: np.ndarray[Any, Any], n_channels: int = 0, captured: bool = False
    ) -> int:
        """Ask the tuner; ``cost`` (7, 3) float32 microseconds is changed in place. Returns the channel count.

        ``n_channels`` is what NCCL has in the variable before: 0, and it stays so unless the table says otherwise.
        ``captured``: the call goes into a CUDA graph.
        """
        self._begin([func], captured)
        self._ask_aside(func, n_bytes // self.n_ranks if func in _SHARDED else n_bytes)
        return self._ask(func, n_bytes, cost, n_channels=n_channels)

    def _ask(
        self, func: str, n_bytes: int, cost: np.ndarray[Any, Any], n_pipe_ops: int = 1, n_channels: int = 0
    ) -> int:
        self._cost[:] = cost
        self._channels.value = n_channels
        registered = () if self.tuner_version == 3 else (0,)
        head = (self._tuner, FUNCS.index(func), n_bytes, n_pipe_ops, self._cost_at, N_ALGOS, N_PROTOS)
        _check(self._info(*head, *registered, self._channels_ref))
        cost[:] = self._cost
        return self._channels.value

    def start_coll(
        self, func: str, seq: int, count: int, datatype: str | int, n_channels: int, n_warps: int, algo: str, proto: str
    ) -> int | None:
        """Tell the profiler that a collective is enqueued; a handle for :meth:`kernel` and :meth:`stop`, or None.

        ``count`` is NCCL's: elements of one rank for all_gather and reduce_scatter. ``datatype`` is a name
        ("bfloat16") or an element size in bytes. As NCCL does, an all_gather is reported as bytes.
        """
        dtype = _DTYPE_OF_SIZE[datatype] if isinstance(datatype, int) else datatype
        call = Call(func, count, dtype, n_channels, algo, proto)
        self._launch([call])
        return self._tell(call, seq, n_warps, next(iter(self._calls), None))

    def _tell(self, call: Call, seq: int, n_warps: int, parent: int | None) -> int | None:
        if not self.profiler_version or (self.profiler_version == 4 and self._group is None):
            return None
        count, dtype = call.count, call.datatype
        if call.func == "all_gather":
            count, dtype = count * DTYPE_BYTES[dtype], "int8"
        body = self._coll_body
        body.seq, body.func, body.count = seq, _FUNC_NAMES[call.func], count
        body.datatype = b"nccl" + dtype.capitalize().encode()
        body.n_channels, body.n_warps = call.n_channels, n_warps
        body.algo, body.proto = call.algo.upper().encode(), call.proto.upper().encode()
        if self.profiler_version == 4:
            self._coll.parent = self._group
        else:
            self._coll.parent, body.parent_group = parent, self._group
        return self._start(self._coll)

    def _begin(self, funcs: Sequence[str], captured: bool = False, kind: int = EVENT_COLL_API) -> list[int | None]:
        """The program's calls, as NCCL tells of them before it asks anything: their handles."""
        self._calls = [None] * len(funcs)
        if self.profiler_version < 5:
            return self._calls
        self._group_api = self._start(self._event_type(type=EVENT_GROUP_API))
        for i, func in enumerate(funcs):
            event = self._event_type(type=kind, parent=self._group_api)
            event.body.call = (_FUNC_NAMES[func], 1, b"ncclInt8", 0, None, captured)
            self._calls[i] = self._start(event)
            self._stop(self._calls[i])
        return self._calls

    def _ask_aside(self, func: str, n_bytes: int) -> None:
        """2.32 also prices another way to make the call, in which it has none of the tuner's algorithms."""
        if self._release >= (2, 32) and func in (*_SHARDED, "all_reduce"):
            for _ in range(2):
                self._ask(func, max(1024, n_bytes), np.full((N_ALGOS, N_PROTOS), -1, np.float32), n_pipe_ops=0)

    def _launch(self, calls: Sequence[Call], launches: bool = True) -> None:
        """What is between the last question and the first collective: chunks, the kernel, the group."""
        for call in calls if len(self._functions) > 4 and self._functions[4] else ():
            cell = ALGOS.index(call.algo), PROTOS.index(call.proto)
            for _ in range(min(3, call.n_channels)):  # the first channel, those between, the last
                head = (self._tuner, FUNCS.index(call.func), self._n_bytes(call))
                _check(_CHUNK_SIZE(self._functions[4])(*head, *cell, 1, byref(c_size_t(2**19))))
        self._group = None
        if launches and self.profiler_version:
            if self.profiler_version > 4:
                self._stop(self._start(self._event_type(type=EVENT_KERNEL_LAUNCH, parent=self._group_api)))
            self._group = self._start(self._event_type(type=EVENT_GROUP))

    def _end(self, handles: Sequence[int | None], group: bool = True) -> None:
        """Everything that was started is stopped; without ``group`` only what the program began."""
        for handle in handles:
            self._stop(handle)
        if group:
            self._stop(self._group)
            self._group = None
        self._stop(self._group_api)
        self._group_api, self._calls = None, []

    def _n_bytes(self, call: Call) -> int:
        whole = call.count * DTYPE_BYTES[call.datatype]
        return whole * self.n_ranks if call.func in _SHARDED else whole

    def _start(self, event: Any) -> int | None:
        if not self.profiler_version or not self._mask.value & (event.type | _BELOW.get(event.type, 0)):
            return None
        self._handle.value = None
        _check(self._start_event(self._profiler, self._handle_ref, byref(event)))
        return self._handle.value

    def _stop(self, handle: int | None) -> None:
        if handle is not None:
            _check(self._stop_event(handle))

    def kernel(self, handle: int | None, channel: int, start_ns: int, stop_ns: int) -> None:
        """Report one channel of a collective's kernel, as NCCL's proxy thread does for a sampled one."""
        self.stop_kernel(self.start_kernel(handle, channel, start_ns), stop_ns)

    def start_kernel(self, handle: int | None, channel: int, start_ns: int) -> int | None:
        """The first half of :meth:`kernel`; a handle for the second."""
        if handle is None:  # not sampled when it was enqueued
            return None
        self._kernel.parent = handle
        self._kernel_body.channel, self._kernel_body.timer = channel, start_ns
        self._handle.value = None
        _check(self._start_event(self._profiler, self._handle_ref, self._kernel_ref))
        return self._handle.value

    def stop_kernel(self, handle: int | None, stop_ns: int) -> None:
        """The second half of :meth:`kernel`."""
        if handle is not None:
            self._timer.value = stop_ns
            _check(self._record_state(handle, KERNEL_CH_STOP, self._timer_ref))
            _check(self._stop_event(handle))

    def stop(self, handle: int | None) -> None:
        """Tell the profiler that enqueueing is over (not that the collective is)."""
        self._end([handle])

    @property
    def mask(self) -> int:
        """Events that the plugin asks for at this moment, for the whole process."""
        return int(self._mask.value)

    def finalize(self) -> None:
        """Destroy the communicator; further calls are not allowed."""
        _check(self._finalize_tuner(self._tuner))
        if self.profiler_version:
            _check(self._finalize_profiler(self._profiler))


def _first(library: ctypes.CDLL, prefix: str, wanted: tuple[int, ...]) -> int:
    return next((v for v in wanted if hasattr(library, f"{prefix}{v}")), 0)


def _pointers(library: ctypes.CDLL, symbol: str, n: int) -> tuple[int, ...]:
    return tuple((c_void_p * n).in_dll(library, symbol))


def _check(result: int) -> None:
    if result:
        raise CallerError(f"the plugin returned {result}: NCCL would fail the collective")

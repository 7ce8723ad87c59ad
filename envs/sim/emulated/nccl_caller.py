"""A miniature NCCL: it calls the plugin as NCCL 2.29 does, and of all events tells those that the plugin asks for.

The emulated backend runs on it. How each release calls, and what it tells besides, is in
``tests/helpers/nccl_releases.py``, which is held against the recorded calls of six.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint8, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from ....traces.records import FUNCS, N_ALGOS, N_PROTOS

SHARDED = ("all_gather", "reduce_scatter")  # NCCL counts the elements of one rank, and asks for those of all
#: As the profiler hears of collectives: AllGather, ReduceScatter ...; and of elements of each size.
FUNC_NAMES = {func: func.title().replace("_", "").encode() for func in FUNCS}
DTYPE_OF_SIZE = {1: "int8", 2: "float16", 4: "float32", 8: "float64"}
EVENT_COLL, EVENT_KERNEL_CH, KERNEL_CH_STOP = 2, 64, 22
EVENT_GROUP_API, EVENT_COLL_API, EVENT_KERNEL_LAUNCH = 256, 512, 2048

_CONTEXT, _INT4, _INT3 = POINTER(c_void_p), (c_int, c_size_t, c_int, c_void_p), (c_int, c_int, c_int)
_TUNER_INIT = ctypes.CFUNCTYPE(c_int, _CONTEXT, c_uint64, c_size_t, c_size_t, c_void_p, c_void_p, c_void_p)
_TUNER_INFO = ctypes.CFUNCTYPE(c_int, c_void_p, *_INT4, *_INT3, POINTER(c_int))
_PROFILER_INIT = ctypes.CFUNCTYPE(c_int, _CONTEXT, c_uint64, POINTER(c_int), c_char_p, *_INT3, c_void_p)
_START_EVENT = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(c_void_p), c_void_p)
_STATE = ctypes.CFUNCTYPE(c_int, c_void_p, c_int, POINTER(c_uint64))
_ONE_POINTER = ctypes.CFUNCTYPE(c_int, c_void_p)


def layout(base: type, **members: Any) -> Any:
    """A structure or union of C with these members in their order."""
    return type(base)("layout", (base,), {"_fields_": tuple(members.items())})


# A profiler's events as NCCL lays them out on 64-bit Linux, declared a second time: a slip in the plugin's own would
# show.
COLL = {
    "seq": c_uint64,
    "func": c_char_p,
    "send_buffer": c_void_p,
    "recv_buffer": c_void_p,
    "count": c_size_t,
}
COLL |= {"root": c_int, "datatype": c_char_p, "n_channels": c_uint8, "n_warps": c_uint8}
COLL |= {"algo": c_char_p, "proto": c_char_p}
KERNEL = layout(ctypes.Structure, channel=c_uint8, timer=c_uint64)
_COLL = layout(ctypes.Structure, **COLL, parent_group=c_void_p)
CALL = {"func": c_char_p, "count": c_size_t, "datatype": c_char_p, "root": c_int, "stream": c_void_p}
CALL |= {"graph_captured": ctypes.c_bool}
_CALL = layout(ctypes.Structure, **CALL)
_BODY = layout(ctypes.Union, coll=_COLL, call=_CALL, kernel=KERNEL, whole=c_uint8 * 88)
_EVENT = layout(ctypes.Structure, type=c_uint64, parent=c_void_p, rank=c_int, body=_BODY)

#: By library: NCCL keeps one event mask for the whole process and hands its address to every communicator.
MASKS: dict[str, Any] = {}


class CallerError(RuntimeError):
    """The plugin returned something other than success: NCCL would have failed the job."""


class Communicator:
    """One rank's communicator. Calls are made by one thread at a time, as NCCL does per communicator."""

    def __init__(self, plugin_path: Path | str, comm_id: int, n_ranks: int, n_nodes: int, rank: int) -> None:
        """Initialise profiler and tuner in NCCL's order. Raises OSError, CallerError."""
        library = ctypes.CDLL(os.fspath(plugin_path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        self.rank, self._mask = rank, MASKS.setdefault(library._name, c_int(0))
        # Kept for every call: ctypes objects are slow to make.
        self._cost, self._channels = np.empty((N_ALGOS, N_PROTOS), np.float32), c_int()
        self._handle, self._timer = c_void_p(), c_uint64()
        self._kernel = _EVENT(type=EVENT_KERNEL_CH, rank=rank)
        self._group, self._launch = _EVENT(type=EVENT_GROUP_API), _EVENT(type=EVENT_KERNEL_LAUNCH)
        self._call: int | None = None  # the handle of the call under way
        self._told, self._asked = c_void_p(), c_void_p()  # the contexts of the profiler and of the tuner
        _, init, start, stop, state, end_told = pointers(library, "ncclProfiler_v6", 6)
        self._start, self._stop, self._state = _START_EVENT(start), _ONE_POINTER(stop), _STATE(state)
        shape = n_nodes, n_ranks, rank
        check(_PROFILER_INIT(init)(byref(self._told), comm_id, byref(self._mask), b"", *shape, None))
        _, init, ask, end_asked = pointers(library, "ncclTunerPlugin_v5", 4)
        self._ask, self._ends = _TUNER_INFO(ask), (_ONE_POINTER(end_asked), _ONE_POINTER(end_told))
        self._given = (c_int * 3)(n_nodes, 1, n_ranks), (c_uint8 * 1152)()  # NVLink domains, tuning constants
        given = (ctypes.addressof(part) for part in self._given)
        check(_TUNER_INIT(init)(byref(self._asked), comm_id, n_ranks, n_nodes, None, *given))

    @property
    def is_sampled(self) -> bool:
        """The plugin wants the times of kernels at this moment."""
        return bool(self._mask.value & EVENT_KERNEL_CH)

    def get_coll_info(self, func: str, n_bytes: int, cost: np.ndarray[Any, Any]) -> int:
        """The program calls: ask the tuner; ``cost`` (7, 3) float32 microseconds is changed in place. Returns the
        channel count, 0 where the table says nothing."""
        if self._mask.value & EVENT_COLL:
            call = _EVENT(type=EVENT_COLL_API, rank=self.rank)
            call.body.call = (FUNC_NAMES[func], n_bytes, b"ncclInt8", 0, None, False)
            self._begin(self._group)
            self._call = self._begin(call)
            self.stop(self._call)
        self._cost[:] = cost
        self._channels.value = 0
        table = self._cost.ctypes.data, N_ALGOS, N_PROTOS
        check(self._ask(self._asked, FUNCS.index(func), n_bytes, 1, *table, 0, byref(self._channels)))
        cost[:] = self._cost
        return self._channels.value

    def start_coll(
        self, func: str, seq: int, count: int, element_bytes: int, n_channels: int, algo: str, proto: str
    ) -> int | None:
        """Tell the profiler that the call is launched and its collective enqueued.

        Returns a handle for :meth:`stop` and :meth:`kernel`, None where nobody asks for it. ``count``: elements, of one
        rank for all_gather and reduce_scatter.
        """
        if not self._mask.value & EVENT_COLL:
            return None
        if func == "all_gather":  # NCCL tells of it as bytes
            count, element_bytes = count * element_bytes, 1
        if self._mask.value & EVENT_KERNEL_LAUNCH:
            self._begin(self._launch)
        event = _EVENT(type=EVENT_COLL, rank=self.rank, parent=self._call)
        body = event.body.coll
        body.seq, body.func, body.count = seq, FUNC_NAMES[func], count
        body.datatype = DTYPE_OF_SIZE[element_bytes].capitalize().encode()
        body.n_channels, body.n_warps = n_channels, 16
        body.algo, body.proto = algo.upper().encode(), proto.upper().encode()
        return self._begin(event)

    def kernel(self, handle: int | None, channel: int, start_ns: int, stop_ns: int) -> None:
        """Report one channel of a collective's kernel, as NCCL's proxy thread does for a sampled one, whatever the
        mask says by now."""
        if handle is None:  # not sampled when it was enqueued
            return
        self._kernel.parent, self._kernel.body.kernel = handle, (channel, start_ns)
        if (kernel := self._begin(self._kernel)) is not None:
            self._timer.value = stop_ns
            check(self._state(kernel, KERNEL_CH_STOP, byref(self._timer)))
            self.stop(kernel)

    def _begin(self, event: Any) -> int | None:
        self._handle.value = None
        check(self._start(self._told, byref(self._handle), byref(event)))
        return self._handle.value

    def stop(self, handle: int | None) -> None:
        """Tell the profiler that enqueueing is over (not that the collective is)."""
        if handle is not None:
            check(self._stop(handle))

    def finalize(self) -> None:
        """Destroy the communicator; further calls are not allowed."""
        for end, context in zip(self._ends, (self._asked, self._told), strict=True):
            check(end(context))


def pointers(library: ctypes.CDLL, symbol: str, n: int) -> tuple[int, ...]:
    """The first ``n`` pointers of a table of functions that the plugin exports."""
    return tuple((c_void_p * n).in_dll(library, symbol))


def check(result: int) -> None:
    """Raises CallerError."""
    if result:
        raise CallerError(f"the plugin returned {result}: NCCL would fail the collective")

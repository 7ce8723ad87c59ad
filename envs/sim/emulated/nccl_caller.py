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
EVENT_COLL = 2
EVENT_KERNEL_CH = 64
KERNEL_CH_STOP = 22
EVENT_GROUP_API = 256
EVENT_COLL_API = 512
EVENT_KERNEL_LAUNCH = 2048

#: Arrays of costs, (N_ALGOS, N_PROTOS) float32 microseconds.
Costs = np.ndarray[Any, Any]


def function(*arguments: Any) -> Any:
    """The type of a C function with these arguments, which returns NCCL's result code."""
    return ctypes.CFUNCTYPE(c_int, *arguments)


# The plugin's functions, their arguments in order. A context is the plugin's own state of one communicator.
_CONTEXT_OUT = POINTER(c_void_p)
_TUNER_SIZES = (c_size_t, c_size_t)  # ranks, nodes
_TUNER_GIVEN = (c_void_p, c_void_p, c_void_p)  # the logger, NVLink domains, tuning constants
_TUNER_INIT = function(_CONTEXT_OUT, c_uint64, *_TUNER_SIZES, *_TUNER_GIVEN)
_TUNER_CALL = (c_int, c_size_t, c_int)  # the function, its bytes, calls at once
_TUNER_TABLE = (c_void_p, c_int, c_int)  # costs, their rows and columns
_TUNER_INFO = function(c_void_p, *_TUNER_CALL, *_TUNER_TABLE, c_int, POINTER(c_int))
_PROFILER_MASK = POINTER(c_int)
_PROFILER_SHAPE = (c_int, c_int, c_int)  # nodes, ranks, this rank
_PROFILER_NAMED = (c_uint64, _PROFILER_MASK, c_char_p)  # the communicator's id, the mask, a name
_PROFILER_INIT = function(_CONTEXT_OUT, *_PROFILER_NAMED, *_PROFILER_SHAPE, c_void_p)
_START_EVENT = function(c_void_p, POINTER(c_void_p), c_void_p)
_STATE = function(c_void_p, c_int, POINTER(c_uint64))
_ONE_POINTER = function(c_void_p)


def layout(base: type, **members: Any) -> Any:
    """A structure or union of C with these members in their order."""
    fields = tuple(members.items())
    kind = type(base)
    return kind("layout", (base,), {"_fields_": fields})


# A profiler's events as NCCL lays them out on 64-bit Linux, declared a second time: a slip in the plugin's own would
# show.
COLL = {
    "seq": c_uint64,  # of the communicator's calls of this function
    "func": c_char_p,
    "send_buffer": c_void_p,
    "recv_buffer": c_void_p,
    "count": c_size_t,  # elements
    "root": c_int,
    "datatype": c_char_p,
    "n_channels": c_uint8,
    "n_warps": c_uint8,
    "algo": c_char_p,
    "proto": c_char_p,
}
KERNEL = layout(
    ctypes.Structure,
    channel=c_uint8,
    timer=c_uint64,  # ns, by the GPU's clock
)
_COLL = layout(ctypes.Structure, **COLL, parent_group=c_void_p)
CALL = {
    "func": c_char_p,
    "count": c_size_t,  # elements
    "datatype": c_char_p,
    "root": c_int,
    "stream": c_void_p,
    "graph_captured": ctypes.c_bool,
}
_CALL = layout(ctypes.Structure, **CALL)
_BODY = layout(
    ctypes.Union,
    coll=_COLL,
    call=_CALL,
    kernel=KERNEL,
    whole=c_uint8 * 88,  # its size in bytes
)
_EVENT = layout(
    ctypes.Structure,
    type=c_uint64,  # one of EVENT_COLL and the others
    parent=c_void_p,  # the plugin's handle of the event around it
    rank=c_int,
    body=_BODY,  # which part of it: by the type
)

#: By library: NCCL keeps one event mask for the whole process and hands its address to every communicator.
MASKS: dict[str, Any] = {}


class CallerError(RuntimeError):
    """The plugin returned something other than success: NCCL would have failed the job."""


class _Profiler:
    """The profiler's half of the plugin on one communicator."""

    def __init__(self, library: ctypes.CDLL, comm_id: int, shape: tuple[int, int, int]) -> None:
        """``shape``: nodes, ranks, this rank. Raises CallerError."""
        nothing_asked = c_int(0)
        self.mask = MASKS.setdefault(library._name, nothing_asked)
        self._handle = c_void_p()
        self._context = c_void_p()
        _, init, start, stop, state, finalize = pointers(library, "ncclProfiler_v6", 6)
        self._start = _START_EVENT(start)
        self._stop = _ONE_POINTER(stop)
        self._state = _STATE(state)
        self._finalize = _ONE_POINTER(finalize)
        begin = _PROFILER_INIT(init)
        context = byref(self._context)
        mask = byref(self.mask)
        result = begin(context, comm_id, mask, b"", *shape, None)
        check(result)

    def asks_for(self, event: int) -> bool:
        """Whether the plugin wants events of this kind at this moment."""
        return bool(self.mask.value & event)

    def begin(self, event: Any) -> int | None:
        """Tell of an event; returns the plugin's handle, None where it wants none."""
        self._handle.value = None
        handle = byref(self._handle)
        result = self._start(self._context, handle, byref(event))
        check(result)
        return self._handle.value

    def end(self, handle: int | None) -> None:
        """Tell of an event's end."""
        if handle is not None:
            result = self._stop(handle)
            check(result)

    def tell_stop(self, handle: int, timer: c_uint64) -> None:
        """Tell when a channel of a kernel stopped, by the GPU's clock."""
        result = self._state(handle, KERNEL_CH_STOP, byref(timer))
        check(result)

    def finalize(self) -> None:
        """Leave the communicator."""
        check(self._finalize(self._context))


class _Tuner:
    """The tuner's half of the plugin on one communicator."""

    def __init__(self, library: ctypes.CDLL, comm_id: int, n_ranks: int, n_nodes: int) -> None:
        """Raises CallerError."""
        # Kept for every call: ctypes objects are slow to make.
        self._cost = np.empty((N_ALGOS, N_PROTOS), np.float32)
        self._channels = c_int()
        self._context = c_void_p()
        _, init, ask, finalize = pointers(library, "ncclTunerPlugin_v5", 4)
        self._ask = _TUNER_INFO(ask)
        self._finalize = _ONE_POINTER(finalize)
        nvlink_domains = (c_int * 3)(n_nodes, 1, n_ranks)
        constants = (c_uint8 * 1152)()
        self._given = nvlink_domains, constants  # kept: the plugin has their addresses
        given = [ctypes.addressof(part) for part in self._given]
        begin = _TUNER_INIT(init)
        context = byref(self._context)
        result = begin(context, comm_id, n_ranks, n_nodes, None, *given)
        check(result)

    def ask(self, func: str, n_bytes: int, cost: Costs) -> int:
        """Ask for a setting; ``cost`` is changed in place. Returns the channel count, 0 if the table names none."""
        self._cost[:] = cost
        self._channels.value = 0
        costs = self._cost.ctypes.data
        table = costs, N_ALGOS, N_PROTOS
        number = FUNCS.index(func)
        call = number, n_bytes, 1
        channels = byref(self._channels)
        result = self._ask(self._context, *call, *table, 0, channels)
        check(result)
        cost[:] = self._cost
        return self._channels.value

    def finalize(self) -> None:
        """Leave the communicator."""
        check(self._finalize(self._context))


class Communicator:
    """One rank's communicator. Calls are made by one thread at a time, as NCCL does per communicator."""

    def __init__(self, plugin_path: Path | str, comm_id: int, n_ranks: int, n_nodes: int, rank: int) -> None:
        """Initialise profiler and tuner in NCCL's order. Raises OSError, CallerError."""
        mode = os.RTLD_NOW | os.RTLD_LOCAL
        path = os.fspath(plugin_path)
        library = ctypes.CDLL(path, mode=mode)
        self.rank = rank
        shape = n_nodes, n_ranks, rank
        self._profiler = _Profiler(library, comm_id, shape)
        self._tuner = _Tuner(library, comm_id, n_ranks, n_nodes)
        # Kept for every call: ctypes objects are slow to make.
        self._kernel = _EVENT(type=EVENT_KERNEL_CH, rank=rank)
        self._timer = c_uint64()
        self._group = _EVENT(type=EVENT_GROUP_API)
        self._launch = _EVENT(type=EVENT_KERNEL_LAUNCH)
        self._call: int | None = None  # the handle of the call under way

    @property
    def is_sampled(self) -> bool:
        """The plugin wants the times of kernels at this moment."""
        return self._profiler.asks_for(EVENT_KERNEL_CH)

    def get_coll_info(self, func: str, n_bytes: int, cost: Costs) -> int:
        """The program calls: ask the tuner; ``cost`` (7, 3) float32 microseconds is changed in place. Returns the
        channel count, 0 where the table says nothing."""
        if self._profiler.asks_for(EVENT_COLL):
            call = _EVENT(type=EVENT_COLL_API, rank=self.rank)
            name = FUNC_NAMES[func]
            call.body.call = (name, n_bytes, b"ncclInt8", 0, None, False)
            self._launch.parent = self._profiler.begin(self._group)
            self._call = self._profiler.begin(call)
            self.stop(self._call)
        return self._tuner.ask(func, n_bytes, cost)

    def start_coll(
        self,
        func: str,
        seq: int,
        count: int,  # elements, of one rank for all_gather and reduce_scatter
        element_bytes: int,
        n_channels: int,
        algo: str,
        proto: str,
    ) -> int | None:
        """Tell the profiler that the call is launched and its collective enqueued.

        Returns a handle for :meth:`stop` and :meth:`kernel`, None where nobody asks for it.
        """
        if not self._profiler.asks_for(EVENT_COLL):
            return None
        if func == "all_gather":  # NCCL tells of it as bytes
            count = count * element_bytes
            element_bytes = 1
        if self._profiler.asks_for(EVENT_KERNEL_LAUNCH):
            self._profiler.begin(self._launch)
        event = _EVENT(type=EVENT_COLL, rank=self.rank, parent=self._call)
        body = event.body.coll
        body.seq = seq
        body.func = FUNC_NAMES[func]
        body.count = count
        dtype = DTYPE_OF_SIZE[element_bytes]
        body.datatype = dtype.capitalize().encode()
        body.n_channels = n_channels
        body.n_warps = 16
        body.algo = algo.upper().encode()
        body.proto = proto.upper().encode()
        return self._profiler.begin(event)

    def kernel(self, handle: int | None, channel: int, start_ns: int, stop_ns: int) -> None:
        """Report one channel of a collective's kernel, as NCCL's proxy thread does for a sampled one, whatever the
        mask says by now."""
        if handle is None:  # not sampled when it was enqueued
            return
        self._kernel.parent = handle
        self._kernel.body.kernel = channel, start_ns
        kernel = self._profiler.begin(self._kernel)
        if kernel is not None:
            self._timer.value = stop_ns
            self._profiler.tell_stop(kernel, self._timer)
            self.stop(kernel)

    def stop(self, handle: int | None) -> None:
        """Tell the profiler that enqueueing is over (not that the collective is)."""
        self._profiler.end(handle)

    def finalize(self) -> None:
        """Destroy the communicator; further calls are not allowed."""
        self._tuner.finalize()
        self._profiler.finalize()


def pointers(library: ctypes.CDLL, symbol: str, n: int) -> tuple[int, ...]:
    """The first ``n`` pointers of a table of functions that the plugin exports."""
    table = (c_void_p * n).in_dll(library, symbol)
    return tuple(table)


def check(result: int) -> None:
    """Raises CallerError."""
    if result:
        raise CallerError(f"the plugin returned {result}: NCCL would fail the collective")

"""A miniature NCCL of every release: loads the plugin as that release does and calls it in its order.

What it calls, and in which order, is what six releases were recorded to call (``tests/data/nccl_calls.json``). Where
``nccl_late`` says so it tells of collectives later, from another thread.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from dynamiccl.envs.sim.emulated.nccl_caller import DTYPE_OF_SIZE, FUNC_NAMES, SHARDED
from dynamiccl.traces.records import N_ALGOS, N_PROTOS
from nccl_halves import (
    DTYPE_BYTES,
    EVENT_COLL,
    EVENT_COLL_API,
    EVENT_GROUP,
    EVENT_GROUP_API,
    EVENT_KERNEL_LAUNCH,
    Call,
    Profiler,
    Tuner,
    number,
    versions,
)
from nccl_late import HostStream, Told

#: First line of a program of its own that imports from this folder.
REACH = f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n"
#: Of a collective that was told: the plugin's handle, None where it wants none, or what will come of it.
Handle = int | Told | None


def choose(cost: np.ndarray[Any, Any]) -> tuple[int, int]:
    """NCCL's choice from a ``(n_algos, n_protos)`` cost table: the first of the smallest >= 0, else (-1, -1)."""
    flat = np.where(cost >= 0, cost, np.inf).ravel()
    best = int(flat.argmin())
    return divmod(best, cost.shape[1]) if np.isfinite(flat[best]) else (-1, -1)


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
        profilers = versions(release)[1] if with_profiler else ()
        self.comm_id, self.n_ranks, self.rank, self.release = comm_id, n_ranks, rank, number(release)
        self.profiler = Profiler(library, profilers, comm_id, (n_nodes, n_ranks, rank), name)
        self.tuner = Tuner(library, release, comm_id, n_ranks, n_nodes)
        self.host_stream = HostStream.of((comm_id, rank))
        self._is_late = False  # the group under way is told later
        self.group_handle: int | None = (
            None  # handles of the group under way, and of the program's calls in it
        )
        self._group_api: int | None = None
        self._calls: list[int | None] = []

    def get_coll_info(
        self, func: str, n_bytes: int, cost: np.ndarray[Any, Any], n_channels: int = 0, captured: bool = False
    ) -> int:
        """Ask the tuner; ``cost`` (7, 3) float32 microseconds is changed in place. Returns the channel count.

        ``n_channels`` is what NCCL has in the variable before: 0, and it stays so unless the table says otherwise.
        ``captured``: the call goes into a CUDA graph.
        """
        self.begin([func], captured, counts=[n_bytes])
        self._a_moment_passes()
        self.ask_aside(func, n_bytes // self.n_ranks if func in SHARDED else n_bytes)
        return self.tuner.ask(func, n_bytes, cost, n_channels=n_channels)

    def start_coll(
        self,
        func: str,
        seq: int,
        count: int,
        datatype: str | int,
        n_channels: int,
        n_warps: int,
        algo: str,
        proto: str,
    ) -> Handle:
        """Tell the profiler that a collective is enqueued; a handle for :meth:`is_timed` and :meth:`stop`.

        ``count`` is NCCL's: elements of one rank for all_gather and reduce_scatter. ``datatype`` is a name
        ("bfloat16") or an element size in bytes. As NCCL does, an all_gather is reported as bytes.
        """
        dtype = DTYPE_OF_SIZE[datatype] if isinstance(datatype, int) else datatype
        call = Call(func, count, dtype, n_channels, algo, proto)
        self.launch([call])
        return self.tell(call, seq, n_warps, next(iter(self._calls), None))

    def is_timed(self, handle: Handle) -> bool:
        """Whether the plugin wants the times of that collective's kernel."""
        return self.handle_of(handle) is not None

    def handle_of(self, handle: Handle) -> int | None:
        """The plugin's handle: by the time that the kernel runs, NCCL has told of the collective."""
        if not isinstance(handle, Told):
            return handle
        if self.host_stream is not None:
            self.host_stream.catches_up(handle)
        return handle.handle

    def catches_up(self) -> None:
        """NCCL has told of all that was launched."""
        if self.host_stream is not None:
            self.host_stream.catches_up()

    def _a_moment_passes(self) -> None:
        if self.host_stream is not None:
            self.host_stream.comes()

    def coll_event(self, call: Call, seq: int, n_warps: int) -> Any:
        """The event by which NCCL tells of a collective."""
        count, dtype = call.count, call.datatype
        if call.func == "all_gather":
            count, dtype = count * DTYPE_BYTES[dtype], "int8"
        event = self.profiler.event(EVENT_COLL, rank=self.rank)
        body = event.body.coll
        body.seq, body.func, body.count = seq, FUNC_NAMES[call.func], count
        body.datatype = b"nccl" + dtype.capitalize().encode()
        body.n_channels, body.n_warps = call.n_channels, n_warps
        body.algo, body.proto = call.algo.upper().encode(), call.proto.upper().encode()
        return event

    def tell(self, call: Call, seq: int, n_warps: int, parent: int | None) -> Handle:
        """Tell the profiler of a collective; ``parent`` is the program's call."""
        event = self.coll_event(call, seq, n_warps)
        event.parent = parent
        if self._is_late and self.host_stream is not None:
            return self.host_stream.add(lambda: self._tell_late(event), self.profiler.stop)
        return self._start(event, self.group_handle)

    def _tell_late(self, event: Any) -> int | None:
        """On the thread of CUDA's, with a group of NCCL's own around it."""
        return self._start(event, self.profiler.start(self.profiler.event(EVENT_GROUP)))

    def _start(self, event: Any, group: int | None) -> int | None:
        if self.profiler.version > 4:
            event.body.coll.parent_group = group
        elif group is None:  # 2.27 tells of none whose group has no handle
            return None
        else:
            event.parent = group
        return self.profiler.start(event)

    def begin(
        self,
        funcs: Sequence[str],
        captured: bool = False,
        kind: int = EVENT_COLL_API,
        counts: Sequence[int] = (),
    ) -> list[int | None]:
        """The program's calls, as NCCL tells of them before it asks anything: their handles."""
        self._calls = [None] * len(funcs)
        if self.profiler.version < 5:
            return self._calls
        self._group_api = self.profiler.start(self.profiler.event(EVENT_GROUP_API))
        for i, func in enumerate(funcs):
            event = self.profiler.event(kind, parent=self._group_api)
            count = counts[i] if counts else 1
            event.body.call = (FUNC_NAMES[func], count, b"ncclInt8", 0, None, captured)
            self._calls[i] = self.profiler.start(event)
            self.profiler.stop(self._calls[i])
        return self._calls

    def ask_aside(self, func: str, n_bytes: int) -> None:
        """2.32 also prices another way to make the call, in which it has none of the tuner's algorithms."""
        if self.release >= (2, 32) and func in (*SHARDED, "all_reduce"):
            for _ in range(2):
                self.tuner.ask(
                    func, max(1024, n_bytes), np.full((N_ALGOS, N_PROTOS), -1, np.float32), n_pipe_ops=0
                )

    def launch(self, calls: Sequence[Call], launches: bool = True) -> None:
        """What is between the last question and the first collective: chunks, the kernel, the group."""
        for call in calls:
            self.tuner.ask_chunks(call, self.n_bytes(call))
        self.group_handle = None
        if launches:
            if self.profiler.version > 4:
                kernel = self.profiler.event(EVENT_KERNEL_LAUNCH, parent=self._group_api)
                self.profiler.stop(self.profiler.start(kernel))
            self._a_moment_passes()
            self._is_late = self.host_stream is not None and self.host_stream.draws()
            if not self._is_late:
                self.group_handle = self.profiler.start(self.profiler.event(EVENT_GROUP))

    def end(self, handles: Sequence[Handle], group: bool = True) -> None:
        """Everything that was started is stopped; without ``group`` only what the program began."""
        for handle in handles:
            if not isinstance(handle, Told):  # that is stopped by who tells of it
                self.profiler.stop(handle)
        if group:
            self.profiler.stop(self.group_handle)
            self.group_handle = None
        self.profiler.stop(self._group_api)
        self._group_api, self._calls = None, []

    def n_bytes(self, call: Call) -> int:
        """What NCCL asks with: of all ranks."""
        whole = call.count * DTYPE_BYTES[call.datatype]
        return whole * self.n_ranks if call.func in SHARDED else whole

    def stop(self, handle: Handle) -> None:
        """Tell the profiler that enqueueing is over (not that the collective is)."""
        self.end([handle])

    def finalize(self) -> None:
        """Destroy the communicator; further calls are not allowed."""
        if self.host_stream is not None:
            self.host_stream.ends()
        self.tuner.finalize()
        self.profiler.finalize()

"""The emulated timeline of one communicator: what NCCL would choose, and when each collective would end.

The order of events is NCCL's: the plugin's tuner is asked with the cost table that NCCL would offer on this cluster,
the smallest cost wins, the profiler hears of the collective, and the kernel runs on the communicator's stream, after
the one before it and not before the last rank arrived. How long it takes is the fabric's word, not NCCL's.

All times are nanoseconds of the emulated rank's clock (clock.py). A collective's start and end are known when this rank
waits for it, in the order of the program: so they do not depend on how fast the ranks really run.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import tempfile
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ....traces.names import ALL_REDUCE, TUNABLE_FUNCS
from ....traces.records import N_ALGOS, UNSET, WAIT, WAIT_DTYPE
from ...nccl.plugin.bindings import PROCESSES
from ...nccl.plugin.build import plugin_path
from ...nccl_model.channels import RING
from ...nccl_model.clusters import Cluster, cluster, resize
from ...nccl_model.cost_model import channels, choice, cost_table
from ..fabric.fabric import Fabric
from .clock import Clock, Collective
from .nccl_caller import Communicator
from .settings import Emulated

Array = np.ndarray[Any, Any]
#: The collectives that take emulated time; the others (broadcast, barrier ...) only happen at set-up.
TIMED = TUNABLE_FUNCS
DEPTH = 1024  # collectives that one rank may be ahead of another
#: WAIT_DTYPE as a struct: a head of 40 bytes without entries but the kind, then rank, spare, begin and end.
WAIT_PACKED = struct.Struct("<QBBBBBBHQQIIIIqq64x")
assert WAIT_PACKED.size == WAIT_DTYPE.itemsize
_WAIT_HEAD = (0, WAIT, UNSET, UNSET, UNSET, 0, UNSET, 0, 0, 0, 0, 0)

#: The communicators of this process: they share the rank's links. One thread at a time deals with them.
_LINES: weakref.WeakSet[Timeline] = weakref.WeakSet()
_LOCK = threading.RLock()
#: What collectives of two communicators cost each other beside the links: SMs, proxy threads, the launch queue. Drawn.
CROWD = 0.05
#: Of a link that others fill, a collective still gets this part.
LEAST_LINK = 0.1


def with_neighbours(c: Collective, others: Iterable[Collective]) -> int:
    """Nanoseconds that a collective takes which starts at ``c.start_ns``, beside those of other communicators.

    Links are shared: who comes later gets what the earlier leave free, so that together they take as long as if they
    shared evenly (the law of the simulated jobs, :class:`.step.Law`), and none's end has to be taken back.
    """
    left = float(c.duration_ns)
    now = 0.0  # since its start: a machine's clock has more digits than a float
    begin = c.start_ns
    known = list(others)
    while True:
        known = [other for other in known if other.end_ns - begin > now]
        if not known:
            return round(now + left)
        # Who waits for it first is known first: a neighbour may begin later than ``c``.
        beside = [other for other in known if other.start_ns - begin <= now]
        starts = [other.start_ns - begin for other in known if other.start_ns - begin > now]
        ends = [other.end_ns - begin for other in beside]
        pace = _pace(c, beside)
        passed = min(min(starts + ends) - now, left * pace)
        left = left - passed / pace
        now = now + passed
        if left <= 0.0:
            return round(now)


def _pace(c: Collective, beside: Sequence[Collective]) -> float:
    """How many times as long ``c`` takes while those ``beside`` it run: by the link that is fullest, and the crowd."""
    pace = 1.0
    for link in (1, 2):  # within the node, and the network: see Fabric.beside
        taken = sum(other.beside[link] for other in beside)
        free = 1.0 - min(taken, 1.0 - LEAST_LINK)
        pace = max(pace, c.beside[link] / free)
    crowd = 1.0 + CROWD * len(beside)
    return pace * crowd


def _page_of_all(store: Any, size: int, n_processes: int) -> mmap.mmap:
    """Rank 0's: a page whose name is gone once all have opened it, or one of them never came."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    fd, path = tempfile.mkstemp(prefix="dynamiccl-arrivals-", dir=folder)
    try:
        with os.fdopen(fd, "r+b"):
            os.ftruncate(fd, size)
            page = mmap.mmap(fd, size)
        store.set("arrivals", path)
        for other in range(1, n_processes):
            store.get(f"arrivals-open-{other}")
        return page
    finally:
        os.unlink(path)


def _page_of_rank_0(store: Any, size: int, rank: int) -> mmap.mmap:
    path = store.get("arrivals").decode()
    with open(path, "r+b") as file:
        page = mmap.mmap(file.fileno(), size)
    store.set(f"arrivals-open-{rank}", "1")
    return page


class Arrivals:
    """When did each rank enqueue its n-th collective? A ring of arrival times in a small page that the ranks share.

    A real collective starts when its last rank arrives. Each rank notes its arrival here, by its emulated clock, before
    it hands the bytes to gloo; gloo is done only after every rank took part, so by then all arrivals can be read and
    every rank computes the same start: the ranks' clocks meet in it.
    """

    def __init__(self, store: Any, rank: int, n_processes: int) -> None:
        shape = (DEPTH, n_processes, 2)  # the sequence number and the nanosecond
        size = int(np.prod(shape)) * 8  # bytes
        self._map = (
            _page_of_all(store, size, n_processes) if rank == 0 else _page_of_rank_0(store, size, rank)
        )
        cells = np.frombuffer(self._map, np.int64)
        self._array: Array = cells.reshape(shape)
        self._rank = rank

    def note(self, seq: int, now_ns: int) -> None:
        """This rank enqueues its ``seq``-th collective (from 1) at ``now_ns``."""
        place = seq % DEPTH
        cell = self._array[place, self._rank]
        cell[1] = now_ns
        cell[0] = seq

    def last(self, seq: int) -> int:
        """The latest arrival noted for collective ``seq``, ns; ranks that have not arrived do not count."""
        row = self._array[seq % DEPTH]
        has_arrived = row[:, 0] == seq
        arrivals_ns = np.where(has_arrived, row[:, 1], 0)
        return int(arrivals_ns.max())


class Timeline:
    """The stream of one communicator in one process."""

    def __init__(
        self,
        emulated: Emulated,
        clock: Clock,
        store: Any,
        rank: int,
        ranks: Sequence[int],
        world: int,
        comm_id: int,
    ) -> None:
        self._emulated = emulated
        self._clock = clock
        whole = cluster(emulated.cluster)
        part = part_of(whole, ranks, world)
        self._cluster = part
        self._fabric = Fabric.of(part, seed=emulated.seed)
        n_processes = len(ranks)
        PROCESSES[comm_id] = n_processes
        plugin = plugin_path()
        self._nccl = Communicator(plugin, comm_id, part.n_ranks, part.n_nodes, rank)
        self._rank = rank
        self._library = ctypes.CDLL(str(plugin))
        cell = ctypes.byref(clock.cell)
        self._library.dynamiccl_clock(cell)
        self._arrivals = Arrivals(store, rank, n_processes)
        self._comm_id = comm_id
        self._connected: set[str] = set()
        self._order = 0
        self._seq = dict.fromkeys(TIMED, 0)
        self._stream_end = 0
        self._queue: deque[Collective] = deque()  # enqueued, nobody has waited for them
        self._running: deque[Collective] = deque()  # known, perhaps not over
        _LINES.add(self)

    def enqueue(self, func: str, n_bytes: float, element_bytes: int) -> Collective:
        """Plan a collective of ``n_bytes`` (whole buffer, before scaling) and put it on the stream."""
        with _LOCK:
            now = self._clock.enqueued()
            unit = element_bytes
            if func != ALL_REDUCE:  # the others count the elements of one rank
                unit = element_bytes * self._cluster.n_ranks
            scaled = n_bytes * self._emulated.bytes_scale
            count = max(1, round(scaled / unit))
            n_bytes = count * unit
            self._order += 1
            self._seq[func] += 1
            algo, proto, n_channels = self._plan(func, n_bytes)
            self._arrivals.note(self._order, now)
            sampled = self._nccl.is_sampled
            seq = self._seq[func]
            setting = n_channels, algo, proto
            handle = self._nccl.start_coll(func, seq, count, element_bytes, *setting)
            self._nccl.stop(handle)
            call = func, n_bytes, algo, proto, n_channels
            duration_ns = self._duration_ns(*call)
            collective = Collective(
                order=self._order,
                duration_ns=duration_ns,
                beside=self._fabric.beside(*call),
                n_kernels=n_channels if sampled else 0,
                handle=handle,
            )
            self._queue.append(collective)
            return collective

    def finish(self, collective: Collective) -> int:
        """The emulated end of a collective; its bytes have been moved, so every rank has arrived."""
        with _LOCK:
            while collective.end_ns == 0:
                oldest = self._queue.popleft()
                self._resolve(oldest)
            return collective.end_ns

    def wait_for(self, collective: Collective) -> None:
        """The rank stands still until the emulated end. Of a sampled collective the ring is told for how long."""
        end = self.finish(collective)
        begin = self._clock.now()
        self._clock.wait_until(end)
        if collective.n_kernels and end > begin:
            record = WAIT_PACKED.pack(*_WAIT_HEAD, self._rank, 0, begin, end)
            self._library.dynamiccl_emit(record)

    def close(self) -> None:
        """The communicator is destroyed."""
        self._nccl.finalize()
        _LINES.discard(self)

    def _plan(self, func: str, n_bytes: int) -> tuple[str, str, int]:
        """Ask NCCL's model and the plugin, as ncclPrepareTasks does, and clip as the scheduler does."""
        message = self._cluster, func, n_bytes
        cost = cost_table(*message).copy()
        if func == ALL_REDUCE:  # as with NCCL_ALGO=allreduce:ring: the fabric has no law for trees
            cost[np.arange(N_ALGOS) != RING] = -1.0
        asked = self._nccl.get_coll_info(func, n_bytes, cost)
        algo, proto = choice(*message, cost)
        n_channels, _ = channels(*message, algo, proto, asked)
        return algo, proto, n_channels

    def _duration_ns(self, func: str, n_bytes: int, algo: str, proto: str, n_channels: int) -> int:
        us = self._fabric.time_us(func, n_bytes, algo, proto, n_channels)
        # Every rank draws the same noise: the collective is one event, not one a rank.
        comm_id = self._comm_id & 0xFFFFFFFF
        key = self._emulated.seed, comm_id, self._order
        rng = np.random.default_rng(key)
        us *= self._fabric.noise(rng)
        if algo not in self._connected:  # NCCL connects an algorithm at its first use
            self._connected.add(algo)
            us += float(self._fabric.truth.connect_us[0])
        return int(us * 1e3)

    def _resolve(self, c: Collective) -> None:
        """All ranks have arrived: fix start and end, and tell the profiler."""
        last_arrival = self._arrivals.last(c.order)
        c.start_ns = max(self._stream_end, last_arrival)
        beside: list[Collective] = []
        for line in tuple(_LINES):
            if line is not self:
                beside += line._running
        c.duration_ns = with_neighbours(c, beside)
        c.end_ns = c.start_ns + c.duration_ns
        self._stream_end = c.end_ns
        for channel in range(c.n_kernels):
            self._nccl.kernel(c.handle, channel, c.start_ns, c.end_ns)
        self._running.append(c)
        now = self._clock.known(c)
        while self._running and self._running[0].end_ns <= now:
            self._running.popleft()


def part_of(cluster: Cluster, ranks: Sequence[int], world: int) -> Cluster:
    """The share of the cluster that a group stands for: ``ranks`` of ``world`` processes, each of which stands for as
    many GPUs, in order. So neighbours share a node, and a group of one process of each node has all of them.
    """
    each = cluster.n_ranks / world
    nodes = set[int]()
    for rank in ranks:
        first = int(rank * each)
        stop = int((rank + 1) * each)
        gpus = range(first, max(first + 1, stop))
        nodes |= {gpu // cluster.gpus_per_node for gpu in gpus}
    n_nodes = len(nodes)
    n_ranks = max(2, round(each * len(ranks)))  # NCCL asks no tuner for one
    gpus_per_node = max(1, round(n_ranks / n_nodes))
    resized = resize(cluster, n_nodes)
    return replace(resized, gpus_per_node=gpus_per_node)


def comm_id_of(name: str) -> int:
    """A communicator's id from its group name: equal on all ranks, never 0 (0 means any in a table)."""
    forward = name.encode()
    backward = name[::-1].encode()
    both = zlib.crc32(forward) << 32 | zlib.crc32(backward)
    return both or 1

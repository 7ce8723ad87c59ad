"""Channels that NCCL gives a collective: its own limit, and what of it really runs.

From NCCL 2.28.9 to 2.30.7, src/enqueue.cc. ``fleet`` is :class:`.clusters.ClusterArrays`, or what has its columns that
are asked for: the daemon knows them of a running job, of which it has no cluster. All arguments broadcast.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import asarray, maximum, minimum, where

from ...traces.records import ALGOS, N_PROTOS, PAIRS, PROTOS

Array = np.ndarray[Any, Any]

RING = ALGOS.index("ring")
DIRECT = ALGOS.index("collnet_direct")
NVLS = ALGOS.index("nvls")
LL, LL128, SIMPLE = range(N_PROTOS)
PAIR_ALGOS = np.array([ALGOS.index(a) for a, _ in PAIRS])
PAIR_PROTOS = np.array([PROTOS.index(p) for _, p in PAIRS])


def heuristic_channels(fleet: Any, n_bytes: Array, pair: Array) -> tuple[Array, Array]:
    """NCCL's own channel limit and warps of a block for ``pair`` (index into PAIRS). 2.30.7 src/enqueue.cc,
    topoGetAlgoInfo."""
    n_bytes = asarray(n_bytes)
    algo = PAIR_ALGOS[asarray(pair)]
    proto = PAIR_PROTOS[asarray(pair)]
    ring = algo == RING
    simple = proto == SIMPLE
    threads = _threads_at_first(fleet, ring, proto)
    # Bytes that a thread must have: LL pays for itself with little, times the ranks of the ring.
    by_proto = where(proto == LL, 8 * fleet.n_ranks, 8)
    least = where(simple, 64, by_proto)
    full = threads * least
    channels = np.clip(n_bytes // full, 1, fleet.comm_channels)
    for _ in range(4):  # 640 halves to 320, 160, 80 at most, and only while it divides by 128
        has_few = n_bytes < channels * threads * least
        few = has_few & (threads % 128 == 0) & ring
        threads = where(few, threads // 2, threads)
    threads = where(ring & simple, threads + 32, threads)
    warps = maximum(threads, 96) // 32
    over_nodes = minimum(fleet.nvls_channels, fleet.comm_channels)
    nvls = where(fleet.n_nodes > 1, over_nodes, fleet.nvls_channels)
    return where(algo == NVLS, nvls, channels), warps


def _threads_at_first(fleet: Any, ring: Array, proto: Array) -> Array:
    """Threads of a block before small messages have fewer."""
    gbs = fleet.ring.bw_intra * fleet.ring.channels
    narrow = (gbs <= 12.0) & (fleet.release < 23100)
    of_a_ring = where((proto == SIMPLE) & narrow, 256, 512)
    return where(ring & (proto != LL128), of_a_ring, 640)


def rounded_up(a: Any, b: Any) -> Any:
    """``a / b`` rounded up."""
    return -(-a // b)


def planned_channels(fleet: Any, n_bytes: Array, pair: Array, limit: Array) -> Array:
    """Channels of all_gather, reduce_scatter that really run when the limit of one alone in its group is ``limit``."""
    pair = asarray(pair)
    n = fleet.n_ranks.astype(np.int64)
    algo = PAIR_ALGOS[pair]
    most = where(algo == NVLS, fleet.nvls_channels, fleet.comm_channels)
    limit = maximum(minimum(limit, most), 1)
    shard = rounded_up(asarray(n_bytes, np.int64), n)
    filled = filled_channels(fleet.release, shard, n, PAIR_PROTOS[pair], limit)
    ran = minimum(filled, maximum(most, 1))
    return where(algo == DIRECT, limit, ran)


def filled_channels(release: Any, size: Any, traffic: Any, proto: Any, limit: Any) -> Array:
    """Channels that ``size`` bytes fill, each of which makes ``traffic`` bytes of traffic.

    NCCL cuts the work into cells of at least 32 KiB of traffic (16 KiB up to 2.28) and gives each channel whole cells.
    2.30.7 src/enqueue.cc, scheduleCollTasksToPlan.
    """
    early = release < 22900
    least = where(early, 16 << 10, 32 << 10)
    by_byte = traffic * where(proto == LL, 4, 1)  # NCCL counts LL's traffic four times
    all_traffic = maximum(size * by_byte, least)
    each = all_traffic // limit
    in_words = rounded_up(each, 16) * 16
    each = where(early, maximum(each, least), in_words)
    cell = rounded_up(rounded_up(least, by_byte), 16) * 16
    cells = maximum(rounded_up(size, cell), 1)
    wanted = maximum(rounded_up(each, cell * by_byte), 1)
    a_channel = minimum(cells, wanted)
    return asarray(rounded_up(cells, a_channel))

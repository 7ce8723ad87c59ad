"""Channels that NCCL gives a collective: its own limit, and what of it really runs.

From NCCL 2.28.9 to 2.30.7, src/enqueue.cc. ``fleet`` is :class:`.clusters.ClusterArrays`, or what has its columns that
are asked for: the daemon knows them of a running job, of which it has no cluster. All arguments broadcast.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...traces.records import ALGOS, N_PROTOS, PAIRS, PROTOS

Array = np.ndarray[Any, Any]

RING, DIRECT, NVLS = (ALGOS.index(a) for a in ("ring", "collnet_direct", "nvls"))
LL, LL128, SIMPLE = range(N_PROTOS)
PAIR_ALGOS = np.array([ALGOS.index(a) for a, _ in PAIRS])
PAIR_PROTOS = np.array([PROTOS.index(p) for _, p in PAIRS])


def heuristic_channels(fleet: Any, n_bytes: Array, pair: Array) -> tuple[Array, Array]:
    """NCCL's own channel limit and warps of a block for ``pair`` (index into PAIRS). 2.30.7 src/enqueue.cc,
    topoGetAlgoInfo."""
    n_bytes, algo, proto = np.asarray(n_bytes), PAIR_ALGOS[np.asarray(pair)], PAIR_PROTOS[np.asarray(pair)]
    ring, simple = algo == RING, proto == SIMPLE
    narrow = (fleet.ring.bw_intra * fleet.ring.channels <= 12.0) & (fleet.release < 23100)
    threads = np.where(ring & (proto != LL128), np.where(simple & narrow, 256, 512), 640)
    # Bytes that a thread must have: LL pays for itself with little, times the ranks of the ring.
    least = np.where(simple, 64, np.where(proto == LL, 8 * fleet.n_ranks, 8))
    channels = np.clip(n_bytes // (threads * least), 1, fleet.comm_channels)
    for _ in range(4):  # 640 halves to 320, 160, 80 at most, and only while it divides by 128
        few = (n_bytes < channels * threads * least) & (threads % 128 == 0) & ring
        threads = np.where(few, threads // 2, threads)
    threads = np.maximum(np.where(ring & simple, threads + 32, threads), 96)
    nvls = np.where(
        fleet.n_nodes > 1, np.minimum(fleet.nvls_channels, fleet.comm_channels), fleet.nvls_channels
    )
    return np.where(algo == NVLS, nvls, channels), threads // 32


def rounded_up(a: Any, b: Any) -> Any:
    """``a / b`` rounded up."""
    return -(-a // b)


def planned_channels(fleet: Any, n_bytes: Array, pair: Array, limit: Array) -> Array:
    """Channels of all_gather, reduce_scatter that really run when the limit of one alone in its group is ``limit``."""
    pair, n = np.asarray(pair), fleet.n_ranks.astype(np.int64)
    algo = PAIR_ALGOS[pair]
    most = np.where(algo == NVLS, fleet.nvls_channels, fleet.comm_channels)
    limit = np.maximum(np.minimum(limit, most), 1)
    shard = rounded_up(np.asarray(n_bytes, np.int64), n)
    ran = filled_channels(fleet.release, shard, n, PAIR_PROTOS[pair], limit)
    return np.where(algo == DIRECT, limit, np.minimum(ran, np.maximum(most, 1)))


def filled_channels(release: Any, size: Any, traffic: Any, proto: Any, limit: Any) -> Array:
    """Channels that ``size`` bytes fill, each of which makes ``traffic`` bytes of traffic.

    NCCL cuts the work into cells of at least 32 KiB of traffic (16 KiB up to 2.28) and gives each channel whole cells.
    2.30.7 src/enqueue.cc, scheduleCollTasksToPlan.
    """
    early = release < 22900
    least = np.where(early, 16 << 10, 32 << 10)
    by_byte = traffic * np.where(proto == LL, 4, 1)  # NCCL counts LL's traffic four times
    each = np.maximum(size * by_byte, least) // limit
    each = np.where(early, np.maximum(each, least), rounded_up(each, 16) * 16)
    cell = rounded_up(rounded_up(least, by_byte), 16) * 16
    cells = np.maximum(rounded_up(size, cell), 1)
    a_channel = np.minimum(cells, np.maximum(rounded_up(each, cell * by_byte), 1))
    return np.asarray(rounded_up(cells, a_channel))

"""Channels that NCCL gives a collective: its own limit, and what of it really runs.

From NCCL 2.28.9 to 2.30.7, src/enqueue.cc. ``fleet`` is :class:`.clusters.ClusterArrays`, or what has its columns that
are asked for: the daemon knows them of a running job, of which it has no cluster. All arguments broadcast.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import asarray, maximum, minimum, where

from ...traces.names import ALL_REDUCE, TUNABLE_FUNCS
from ...traces.records import ALGOS, N_PROTOS, PAIRS_OF, PROTOS

Array = np.ndarray[Any, Any]

RING = ALGOS.index("ring")
TREE = ALGOS.index("tree")
DIRECT = ALGOS.index("collnet_direct")
NVLS = ALGOS.index("nvls")
LL, LL128, SIMPLE = range(N_PROTOS)
#: Numbers of the algorithm and the protocol of each pair: a row for each of TUNABLE_FUNCS.
PAIR_ALGOS = np.array([[ALGOS.index(a) for a, _ in PAIRS_OF[func]] for func in TUNABLE_FUNCS])
PAIR_PROTOS = np.array([[PROTOS.index(p) for _, p in PAIRS_OF[func]] for func in TUNABLE_FUNCS])
_SUM = TUNABLE_FUNCS.index(ALL_REDUCE)
#: Bytes of traffic that NCCL counts for a byte of an all_reduce; of the others one a rank (src/include/enqueue.h).
_TRAFFIC_OF_SUM = 2


def heuristic_channels(fleet: Any, n_bytes: Array, pair: Array, func: Array | int = 0) -> tuple[Array, Array]:
    """NCCL's own channel limit and warps of a block for ``pair`` (index into PAIRS_OF) of ``func`` (into
    TUNABLE_FUNCS). 2.30.7 src/enqueue.cc, topoGetAlgoInfo."""
    n_bytes = asarray(n_bytes)
    pair = asarray(pair)
    algo = PAIR_ALGOS[func, pair]
    proto = PAIR_PROTOS[func, pair]
    ring = algo == RING
    tree = algo == TREE
    simple = proto == SIMPLE
    threads = _threads_at_first(fleet, ring, tree, proto)
    # Bytes that a thread must have: LL pays for itself with little, times the ranks of the ring.
    of_ll = where(tree, 8, 8 * fleet.n_ranks)
    by_proto = where(proto == LL, of_ll, 8)
    least = where(simple, 64, by_proto)
    full = threads * least
    filled = n_bytes // full
    channels = np.clip(filled, 1, fleet.comm_channels)
    for _ in range(4):  # 640 halves to 320, 160, 80 at most, and only while it divides by 128
        has_few = n_bytes < channels * threads * least
        divides = threads % 128 == 0
        few = has_few & divides & ring
        threads = where(few, threads // 2, threads)
    is_simple_ring = ring & simple
    threads = where(is_simple_ring, threads + 32, threads)
    threads = where(tree, 640, threads)
    warps = maximum(threads, 96) // 32
    on_a_node = fleet.nvls_channels
    over_nodes = minimum(on_a_node, fleet.comm_channels)
    has_network = fleet.n_nodes > 1
    nvls = where(has_network, over_nodes, on_a_node)
    is_nvls = algo == NVLS
    channels = where(is_nvls, nvls, channels)
    return channels, warps


def _threads_at_first(fleet: Any, ring: Array, tree: Array, proto: Array) -> Array:
    """Threads of a block before small messages have fewer."""
    graph = fleet.ring
    gbs = graph.bw_intra * graph.channels
    early = fleet.release < 23100
    narrow = (gbs <= 12.0) & early
    is_simple = proto == SIMPLE
    of_a_ring = where(is_simple & narrow, 256, 512)
    is_ll128 = proto == LL128
    is_usual = ring & ~is_ll128
    of_others = where(tree & ~is_ll128, 512, 640)
    return where(is_usual, of_a_ring, of_others)


def rounded_up(a: Any, b: Any) -> Any:
    """``a / b`` rounded up."""
    return -(-a // b)


def planned_channels(fleet: Any, n_bytes: Array, pair: Array, limit: Array, func: Array | int = 0) -> Array:
    """Channels of ``func`` (into TUNABLE_FUNCS) that really run when the limit of one alone in its group is
    ``limit``."""
    pair = asarray(pair)
    n_ranks = fleet.n_ranks
    n = n_ranks.astype(np.int64)
    algo = PAIR_ALGOS[func, pair]
    of_nvls = fleet.nvls_channels
    of_comm = fleet.comm_channels
    is_nvls = algo == NVLS
    most = where(is_nvls, of_nvls, of_comm)
    limit = minimum(limit, most)
    limit = maximum(limit, 1)
    n_bytes = asarray(n_bytes, np.int64)
    is_sum = asarray(func) == _SUM
    part = where(is_sum, n_bytes, rounded_up(n_bytes, n))
    traffic = where(is_sum, _TRAFFIC_OF_SUM, n)
    proto = PAIR_PROTOS[func, pair]
    release = fleet.release
    filled = filled_channels(release, part, traffic, proto, limit)
    most = maximum(most, 1)
    ran = minimum(filled, most)
    return where(algo == DIRECT, limit, ran)


def filled_channels(release: Any, size: Any, traffic: Any, proto: Any, limit: Any) -> Array:
    """Channels that ``size`` bytes fill, each of which makes ``traffic`` bytes of traffic.

    NCCL cuts the work into cells of at least 32 KiB of traffic (16 KiB up to 2.28) and gives each channel whole cells.
    2.30.7 src/enqueue.cc, scheduleCollTasksToPlan.
    """
    early = release < 22900
    least = where(early, 16 << 10, 32 << 10)
    times = where(proto == LL, 4, 1)  # NCCL counts LL's traffic four times
    by_byte = traffic * times
    all_traffic = size * by_byte
    all_traffic = maximum(all_traffic, least)
    each = all_traffic // limit
    in_words = rounded_up(each, 16) * 16
    at_least = maximum(each, least)
    each = where(early, at_least, in_words)
    cell = rounded_up(least, by_byte)
    cell = rounded_up(cell, 16) * 16
    of_a_cell = cell * by_byte
    cells = rounded_up(size, cell)
    cells = maximum(cells, 1)
    wanted = rounded_up(each, of_a_cell)
    wanted = maximum(wanted, 1)
    a_channel = minimum(cells, wanted)
    channels = rounded_up(cells, a_channel)
    return asarray(channels)

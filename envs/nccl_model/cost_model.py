"""NCCL's view of a cluster: the cost table that it hands to a tuner, its own choice, its channels.

Written from the constants and formulas in NCCL 2.28.9 to 2.30.7, src/graph/tuning.cc (model) and
src/enqueue.cc (choice, channels, cutting work into cells of traffic); the tests compare with plans of the real
library. Prices of ten releases, 2.27.3 to 2.32.3, are within 0.5 % of this, but for NVLS in 2.32.3: 0.6 % off on one
node of 8, for a reason that we do not know. Units: microseconds, bytes, GB/s. Everything is computed for a whole
:class:`ClusterArrays` at once; the functions on one cluster cache their answers.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ...traces.records import ALGOS, N_ALGOS, N_PROTOS, PAIRS, PROTOS, TUNED_FUNCS
from . import all_reduce
from .all_reduce import LL_MAX, ring_ll128_channel
from .clusters import Cluster, ClusterArrays

Array = np.ndarray[Any, Any]

TREE, RING, COLLNET, NVLS, PAT = (ALGOS.index(a) for a in ("tree", "ring", "collnet_direct", "nvls", "pat"))
LL, LL128, SIMPLE = range(N_PROTOS)
PAIR_ALGOS = np.array([ALGOS.index(a) for a, _ in PAIRS])
PAIR_PROTOS = np.array([PROTOS.index(p) for _, p in PAIRS])

# Latencies in us, [LL, LL128, SIMPLE].
_BASE_RING = np.array([6.6, 14.0, 8.4])
_BASE_PAT = 8.0
_HW_RING = np.array([[0.6, 1.9, 3.4], [1.0, 2.5, 5.7]])  # rows: NVLink, PCI
_NET_RING = np.array([2.7, 4.0, 14.0])
_NET_TREE = np.array([5.0, 8.5, 14.0])
_HW_NVLS, _NET_NVLS = np.array([25.0, 0.0]), 18.0
_HW_COLLNET, _NET_COLLNET = 3.7, 31.0
_NET_PAT = 14.0
_NVLS_EFFICIENCY = np.array([1.0, 1.0, 0.85, 0.74])


def terms(fleet: ClusterArrays) -> tuple[Array, Array]:
    """Latency (us) and algorithm bandwidth (GB/s; 0 = not offered) of PAIRS, both (n, len(PAIRS)).

    A message of ``b`` bytes is priced at ``latency + b / (1000 * bandwidth)``, all_gather and reduce_scatter
    alike.
    """
    n, nodes, per_node = fleet.n_ranks.astype(float), fleet.n_nodes, fleet.gpus_per_node
    steps, many = n - 1, nodes > 1
    late = fleet.release >= 23100  # the model was rearranged in 2.31
    lat, bw = np.zeros((len(fleet), len(PAIRS))), np.zeros((len(fleet), len(PAIRS)))

    # Ring. Up to 2.30 the bandwidth within a node counts up to two nodes, from 2.31 on a single one only.
    near = np.where(late, nodes == 1, nodes <= 2)
    bus = fleet.ring_channels * np.where(near, fleet.ring_bw_intra, fleet.ring_bw_inter)
    row = np.where(many, fleet.amd.astype(int), fleet.generation)
    ll_max = LL_MAX[row, np.minimum(nodes, 3) - 1]
    bus_ll128 = np.minimum(0.92 * bus, fleet.ring_channels * ring_ll128_channel(fleet)) * fleet.ll128
    bw[:, :3] = np.stack([np.minimum(ll_max, 0.5 * bus), bus_ll128, bus], axis=1) * (n / steps)[:, None]
    link = _HW_RING[np.where(fleet.ring_nvl, 0, 1)]
    lone = (per_node == 1) & ~late
    net = np.where(lone[:, None], _NET_TREE, _NET_RING) + fleet.ring_latency[:, None] * np.array([1, 1, 2])
    overhead = np.where(many, np.where(fleet.amd, 2.0, 1.0), 0.0)[:, None] * np.array([1, 1, 3])
    n_net = np.where(many, nodes - 1, 0)
    lat[:, :3] = _BASE_RING + (steps - n_net)[:, None] * np.maximum(link, overhead) + n_net[:, None] * net

    # NVLS: one step within the node; one node less one share travels, and from 2.31 on counted as for a ring.
    heads = np.maximum(fleet.nvls_graph_channels, 1)
    share = _NVLS_EFFICIENCY[fleet.generation] * (heads - 1) / heads * (per_node - 1) / per_node
    within, between = fleet.nvls_bw_intra * share, fleet.nvls_bw_inter
    early = fleet.release < 22800  # 2.27 had no efficiency of its own for NVLS
    within = np.where(early, fleet.nvls_bw_intra * (per_node - 1) / per_node, within)
    nvls = heads * np.minimum(within, np.where(early, 0.9 * between, between)) * fleet.nvls
    bw[:, 3] = nvls * np.where(late, n / steps, 1.0)
    lat[:, 3] = _HW_NVLS[0] + np.where(many, _NET_NVLS + 2 * fleet.nvls_latency, 0.0)

    # CollNet direct: only with a switch that reduces.
    bw[:, 4] = fleet.tree_channels * per_node * np.minimum(fleet.tree_bw_intra, 0.9 * fleet.tree_bw_inter)
    bw[:, 4] *= fleet.collnet & many & (per_node <= 8)
    within = np.minimum(1, per_node - 1) * _HW_COLLNET + 0.4 * (per_node - 1)
    lat[:, 4] = 2 * within + _NET_COLLNET + 2 * fleet.tree_latency

    # PAT runs on the tree's graph.
    tree = np.where(nodes <= 2, fleet.tree_bw_intra, fleet.tree_bw_inter)
    tree = np.where(late, np.minimum(fleet.tree_bw_intra, fleet.tree_bw_inter), tree)
    bw[:, 5] = fleet.tree_channels * tree * np.where(fleet.release < 22400, 0.85, 0.75) * fleet.pat
    log_nodes = np.floor(np.log2(np.maximum(nodes, 1)))
    lat[:, 5] = _BASE_PAT + log_nodes * (_NET_PAT + 2 * fleet.tree_latency) / 3.5 + 2.8 * n
    return lat, bw


def pair_cost_rows(fleet: ClusterArrays, n_bytes: Array, n_pipe_ops: int = 1) -> Array:
    """Costs of PAIRS, one message a cluster: ``n_bytes`` (n,) -> (n, len(PAIRS)) us, -1 = not offered."""
    lat, bw = terms(fleet)
    return _price(lat, bw, np.asarray(n_bytes, np.float64)[:, None], _counts(fleet.release[:, None], n_pipe_ops))


def _counts(release: Any, n_pipe_ops: int) -> Array:
    """How often the latency is paid: a ring pays per collective of a group, the others per batch of them."""
    batch = np.where(np.asarray(release) >= 23000, 8, 10)
    return np.where(PAIR_ALGOS == RING, n_pipe_ops, _up(n_pipe_ops, batch))


def _price(lat: Array, bw: Array, n_bytes: Any, counts: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.where(bw > 0, lat * counts + n_bytes / (1000.0 * bw), -1.0).astype(np.float32)


@functools.lru_cache(maxsize=64)
def _one(cluster: Cluster) -> tuple[ClusterArrays, Array, Array]:
    fleet = ClusterArrays.of([cluster])
    lat, bw = terms(fleet)
    return fleet, lat[0], bw[0]


@functools.lru_cache(maxsize=65536)
def _table(cluster: Cluster, func: str, n_bytes: int, n_pipe_ops: int) -> Array:
    if func == "all_reduce":
        table = all_reduce.cost_table(cluster, n_bytes, n_pipe_ops)
    elif func in TUNED_FUNCS:
        fleet, lat, bw = _one(cluster)
        table = np.full((N_ALGOS, N_PROTOS), -1.0, np.float32)
        table[PAIR_ALGOS, PAIR_PROTOS] = _price(lat, bw, float(n_bytes), _counts(fleet.release, n_pipe_ops))
    else:
        raise ValueError(f"no cost model for {func}: it covers all_gather, reduce_scatter and all_reduce")
    table.flags.writeable = False
    return table


def cost_table(cluster: Cluster, func: str, n_bytes: int, n_pipe_ops: int = 1) -> Array:
    """NCCL's cost table for one collective: (7, 3) float32 us, -1 = not offered; read-only, cached.

    ``n_bytes`` is NCCL's: the whole buffer (``n_ranks`` x shard). Raises ValueError for another collective.
    """
    return _table(cluster, func, int(n_bytes), n_pipe_ops)


def choice(cluster: Cluster, func: str, n_bytes: int, cost: Array | None = None) -> tuple[str, str]:
    """(algo, proto) that NCCL takes: the smallest entry >= 0, the first one on a tie.

    ``cost`` (7, 3) may be a table that a tuner has changed. Raises ValueError when nothing is offered.
    """
    if cost is None:
        return _own_choice(cluster, func, int(n_bytes))
    flat = np.where(cost >= 0, cost, np.inf).ravel()
    best = int(flat.argmin())
    if not np.isfinite(flat[best]):
        raise ValueError("the cost table offers nothing: every entry is below zero")
    return ALGOS[best // N_PROTOS], PROTOS[best % N_PROTOS]


@functools.lru_cache(maxsize=65536)
def _own_choice(cluster: Cluster, func: str, n_bytes: int) -> tuple[str, str]:
    return choice(cluster, func, n_bytes, cost_table(cluster, func, n_bytes))


def heuristic_channels(fleet: ClusterArrays, n_bytes: Array, pair: Array) -> tuple[Array, Array]:
    """NCCL's own channel limit and warps of a block for ``pair`` (index into PAIRS): two arrays.

    ``n_bytes`` and ``pair`` broadcast against the fleet's (n,). 2.30.7 src/enqueue.cc, topoGetAlgoInfo.
    """
    n_bytes, pair = np.asarray(n_bytes), np.asarray(pair)
    algo, proto = PAIR_ALGOS[pair], PAIR_PROTOS[pair]
    ring, simple = algo == RING, proto == SIMPLE
    narrow = (fleet.ring_bw_intra * fleet.ring_channels <= 12.0) & (fleet.release < 23100)
    threads = np.where(ring & (proto != LL128), np.where(simple & narrow, 256, 512), 640)
    # Bytes that a thread must have: LL pays for itself with little, times the ranks of the ring.
    least = np.where(simple, 64, np.where(proto == LL, 8 * fleet.n_ranks, 8))
    channels = np.clip(n_bytes // (threads * least), 1, fleet.comm_channels)
    for _ in range(4):  # 640 halves to 320, 160, 80 at most, and only while it divides by 128
        few = (n_bytes < channels * threads * least) & (threads % 128 == 0) & ring
        threads = np.where(few, threads // 2, threads)
    threads = np.maximum(np.where(ring & simple, threads + 32, threads), 96)
    nvls = np.where(fleet.n_nodes > 1, np.minimum(fleet.nvls_channels, fleet.comm_channels), fleet.nvls_channels)
    channels = np.where(algo == NVLS, nvls, channels)
    return channels, threads // 32


def _up(a: Any, b: Any) -> Any:
    """``a / b`` rounded up."""
    return -(-a // b)


def planned_channels(fleet: ClusterArrays, n_bytes: Array, pair: Array, limit: Array) -> Array:
    """Channels that really run when the limit of a collective alone in its group is ``limit`` (1..64).

    NCCL cuts the work into cells of at least 32 KiB of traffic (16 KiB up to 2.28) and gives each channel
    whole cells; the arguments broadcast. 2.30.7 src/enqueue.cc, scheduleCollTasksToPlan.
    """
    algo, proto = PAIR_ALGOS[np.asarray(pair)], PAIR_PROTOS[np.asarray(pair)]
    n, early = fleet.n_ranks.astype(np.int64), fleet.release < 22900
    least = np.where(early, 16 << 10, 32 << 10)
    most = np.where(algo == NVLS, fleet.nvls_channels, fleet.comm_channels)
    limit = np.maximum(np.minimum(limit, most), 1)
    shard = _up(np.asarray(n_bytes, np.int64), n)
    by_byte = n * np.where(proto == LL, 4, 1)  # NCCL counts LL's traffic four times
    traffic = np.maximum(shard * by_byte, least)
    each = traffic // limit
    each = np.where(early, np.maximum(each, least), _up(each, 16) * 16)
    cell = _up(_up(least, by_byte), 16) * 16
    cells = np.maximum(_up(shard, cell), 1)
    a_channel = np.minimum(cells, np.maximum(_up(each, cell * by_byte), 1))
    count = _up(cells, a_channel)
    return np.where(algo == COLLNET, limit, np.minimum(count, np.maximum(most, 1)))


@functools.lru_cache(maxsize=65536)
def _channels(cluster: Cluster, n_bytes: int, pair: int, asked: int) -> tuple[int, int]:
    fleet = _one(cluster)[0]
    own, warps = heuristic_channels(fleet, np.array(n_bytes), np.array(pair))
    limit = np.where(fleet.release >= 23100, np.minimum(own, asked), asked) if asked else own
    return int(planned_channels(fleet, np.array(n_bytes), np.array(pair), limit)[0]), int(warps[0])


def channels(cluster: Cluster, func: str, n_bytes: int, algo: str, proto: str, asked: int = 0) -> tuple[int, int]:
    """(n_channels, n_warps) that run for (algo, proto); ``asked`` is the tuner's count, 0 = NCCL's own.

    From 2.31 on a tuner can only lower NCCL's count. Raises ValueError for a pair that the collective never
    has.
    """
    if func == "all_reduce":
        return all_reduce.channels(cluster, int(n_bytes), algo, proto, asked)
    if func not in TUNED_FUNCS or (algo, proto) not in PAIRS:
        raise ValueError(f"{func} is never planned with {algo}/{proto}")
    return _channels(cluster, int(n_bytes), PAIRS.index((algo, proto)), asked)

"""NCCL's prices for all_reduce: what a tuner is offered there too, though only the other two collectives are tuned.

From NCCL 2.28.9 to 2.30.7, src/graph/tuning.cc. The tree is taken to be balanced, as NCCL's search finds it on
NVSwitch machines (a plain chain of GPUs would cost it another 15 % of bandwidth).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ...traces.records import ALGOS, N_ALGOS, N_PROTOS
from .clusters import GENERATIONS, Cluster, ClusterArrays, release_number

Array = np.ndarray[Any, Any]
_TREE, _RING, _DIRECT, _CHAIN, _NVLS, _NVLS_TREE = (
    ALGOS.index(a) for a in ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree")
)
LL, LL128, SIMPLE = range(3)
#: GB/s of LL at most, for the other collectives too; rows V, A, H, B; columns 1, 2, more nodes.
LL_MAX = np.array([[39.0, 39.0, 20.4], [87.7, 22.5, 19.0], [141.0, 45.0, 35.0], [282.0, 90.0, 70.0]])
#: GB/s of one channel of a ring with LL128, rows as above.
_RING_LL128_CHANNEL = np.array([20.0, 20.0, 36.7, 40.0])
_BASE = {_TREE: (6.8, 14.0, 8.4), _RING: (6.6, 14.0, 8.4)}
# us within a node over NVLink and over PCI, and between nodes.
_HW = {
    _TREE: ((0.6, 1.25, 4.0), (1.0, 1.9, 4.0), (5.0, 8.5, 14.0)),
    _RING: ((0.6, 1.9, 3.4), (1.0, 2.5, 5.7), (2.7, 4.0, 14.0)),
}
_HW_CHAIN = 2.8, 30.0
_TREE_GBS = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (38.7, 41.4, 36.0), (70.0, 42.8, 24.0))
_TREE_LL128_GBS = ((20.0, 20.0, 20.0), (20.0, 20.0, 20.0), (36.7, 36.7, 29.0), (55.6, 31.67, 20.0))
_NVLS_TREE_GBS = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (0.0, 57.7, 45.5), (0.0, 96.0, 80.0))
_NVLS_EFFICIENCY = (0.0, 0.0, 0.85, 0.74)
#: Trees of medium sizes, powers of two from 64 B on: share of the bandwidth that the model gives them.
_CORRECTION = np.array(
    [
        [1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1],
        [*[0.9] * 7, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9],
    ]
)


def ring_ll128_channel(fleet: ClusterArrays) -> Array:
    """GB/s that one ring channel carries with LL128, (n,); Blackwell's figure was changed three times."""
    limit = _RING_LL128_CHANNEL[fleet.generation]
    blackwell, scale = fleet.generation == 3, np.minimum(fleet.n_nodes, 3) - 1
    for first, row in ((22803, (73.4, 73.4, 73.4)), (22809, (73.4, 34.6, 73.4)), (22902, (34.5, 34.6, 34.5))):
        limit = np.where(blackwell & (fleet.release >= first), np.array(row)[scale], limit)
    return np.where(blackwell & (fleet.release >= 22907), 40.0, limit)


@functools.lru_cache(maxsize=64)
def terms(c: Cluster) -> tuple[Array, Array]:
    """Latency (us) and algorithm bandwidth (GB/s, 0 = not offered) of all_reduce, both (7, 3), before corrections."""
    n, nodes = c.n_ranks, c.n_nodes
    per_node, steps = n / nodes, 2 * (n - 1)
    gen, scale = GENERATIONS.index(c.generation), min(nodes, 3) - 1
    lat, bw = np.zeros((N_ALGOS, N_PROTOS)), np.zeros((N_ALGOS, N_PROTOS))
    amd = c.cpu in ("amd", "mixed")
    ll_max = LL_MAX[gen if nodes == 1 else int(amd), scale]
    overhead = 0.0 if nodes == 1 else (2.0 if amd else 1.0)
    for a, graph in ((_TREE, c.tree), (_RING, c.ring)):
        bus = graph.channels * (graph.bw_intra if nodes <= 2 else graph.bw_inter)
        for p in (LL, LL128, SIMPLE):
            rate = bus
            if a == _TREE:
                rate = min(bus * 0.92, graph.channels * _TREE_GBS[gen][scale])
                if p == LL:
                    rate = min(rate / 3.8, ll_max)
                elif p == LL128:
                    part = 7 / 9 if nodes == 1 else 120 / 128
                    rate = min(rate * part, graph.channels * _TREE_LL128_GBS[gen][scale])
            elif p == LL:
                rate = min(ll_max, 0.5 * bus)
            elif p == LL128:
                rate = min(0.92 * bus, graph.channels * float(ring_ll128_channel(ClusterArrays.of([c]))[0]))
            bw[a, p] = rate * (0.5 if a == _TREE else n / steps)
            near = _HW[a][0 if graph.type_intra == "NVL" else 1][p]
            far = _HW[_TREE if per_node == 1 else a][2][p] + graph.latency_inter * (2 if p == SIMPLE else 1)
            if a == _RING:
                between = 0 if nodes == 1 else 2 * (nodes - 1)
                near = max(near, overhead * (3 if p == SIMPLE else 1))
                lat[a, p] = _BASE[a][p] + (steps - between) * near + between * far
            else:
                lat[a, p] = _BASE[a][p] + 2 * ((n // nodes - 1) * near + int(math.log2(nodes)) * far)
    if not c.offers_ll128:
        bw[:, LL128] = 0
    _nvls(c, lat, bw)
    if c.collnet and nodes > 1:
        _collnet(c, lat, bw)
    return lat, bw


def _nvls(c: Cluster, lat: Array, bw: Array) -> None:
    n, nodes, graph = c.n_ranks, c.n_nodes, c.nvls
    gen, scale = GENERATIONS.index(c.generation), min(nodes, 3) - 1
    if gen < 2 or graph.channels < 2 or not c.nvls_channels:
        return
    early = release_number(c.nccl) < 22800
    ratio = 5 / 6 if early else n / (2 * (n - 1))
    # The switch adds on the way: an all_reduce moves each byte once in each direction.
    within = graph.bw_intra * (_NVLS_EFFICIENCY[gen] * (graph.channels - 1) / graph.channels * 2 if not early else 1)
    if nodes == 1 or c.collnet:
        bw[_NVLS, SIMPLE] = graph.channels * min(within, graph.bw_inter) * ratio
        lat[_NVLS, SIMPLE] = 25.0 + (18.0 + 2 * graph.latency_inter if nodes > 1 else 0.0)
    if nodes > 1:
        # Blackwell on many nodes was given more in 2.30.
        cap = 43.8 if gen == 3 and scale == 2 and release_number(c.nccl) < 23000 else _NVLS_TREE_GBS[gen][scale]
        if early:
            rate = min(graph.bw_intra, graph.bw_inter / (1 if nodes <= 2 else 2))
        else:
            rate = min(within, graph.bw_inter * (2 if nodes <= 2 else 1), cap)
        bw[_NVLS_TREE, SIMPLE] = graph.channels * rate * ratio
        hop = (14.0 if early else 20.9) + 2 * graph.latency_inter
        lat[_NVLS_TREE, SIMPLE] = 25.0 + 2 * int(math.log2(nodes)) * hop


def _collnet(c: Cluster, lat: Array, bw: Array) -> None:
    local, graph = c.gpus_per_node, c.tree
    bus, far = graph.channels * graph.bw_intra, graph.latency_inter * 2
    factor = local / graph.channels
    hopper = 0.85 if c.generation in ("H", "B") else 1.0
    bw[_DIRECT, SIMPLE] = 0.5 * hopper * bus / (factor - (factor - 1) / 2)
    lat[_DIRECT, SIMPLE] = 2 * (min(1, local - 1) * 3.7 + 0.4 * (local - 1)) + 31.0 + far
    bw[_CHAIN, SIMPLE] = 0.5 * bus
    lat[_CHAIN, SIMPLE] = 2 * (local - 1) * _HW_CHAIN[0] + _HW_CHAIN[1] + far


def cost_table(c: Cluster, n_bytes: int, n_pipe_ops: int = 1) -> Array:
    """NCCL's cost table of an all_reduce: (7, 3) float32 us, -1 = not offered."""
    lat, bw = (x.copy() for x in terms(c))
    log_size = int(math.log2(n_bytes >> 6)) if n_bytes >= 64 else -1
    if 0 <= log_size < 23:
        bw[_TREE] *= _CORRECTION[:, log_size]
        if c.generation == "B" and release_number(c.nccl) >= 22900 and c.cpu in ("intel", "amd", "mixed"):
            bw[_NVLS_TREE] *= _CORRECTION[:, log_size]
    if c.n_nodes > 1 and n_bytes / (c.comm_channels * c.n_ranks) >= 64:
        lat[_RING, SIMPLE] *= 1.9 if c.generation == "V" else 1.4  # a plateau that NCCL saw on many nodes
    batch = 8 if release_number(c.nccl) >= 23000 else 10
    count = np.full((N_ALGOS, 1), -(-n_pipe_ops // batch))
    count[_RING] = n_pipe_ops
    with np.errstate(divide="ignore"):
        return np.where(bw > 0, lat * count + n_bytes / (1000.0 * bw), -1.0).astype(np.float32)


def channels(c: Cluster, n_bytes: int, algo: str, proto: str, asked: int = 0) -> tuple[int, int]:
    """(n_channels, n_warps) of an all_reduce; ``asked`` as in :func:`cost_model.channels`."""
    a, p, n = ALGOS.index(algo), ("ll", "ll128", "simple").index(proto), c.n_ranks
    release = release_number(c.nccl)
    narrow = c.ring.bw_intra * c.ring.channels <= 12.0 and release < 23100
    threads = 640 if p == LL128 or a not in (_RING, _TREE) else 256 if narrow and a == _RING and p == SIMPLE else 512
    least = 64 if p == SIMPLE else 8 if p == LL128 or a == _TREE else 8 * n
    count, most = c.comm_channels, c.comm_channels
    if a in (_NVLS, _NVLS_TREE):
        count = most = min(c.nvls_channels, c.comm_channels) if c.n_nodes > 1 and a == _NVLS else c.nvls_channels
    elif a != _DIRECT:
        count = min(max(n_bytes // (threads * least), 1), c.comm_channels)
        while n_bytes < count * threads * least and threads % 128 == 0:
            threads //= 2
    if p == SIMPLE:
        threads += 32 if a == _RING else 128 if a == _TREE else 0
    threads = 640 if a == _TREE else max(threads, 96)
    if asked:
        count = min(asked, count) if release >= 23100 else min(asked, most)
    # Two bytes of traffic for each byte of data, whatever the number of ranks; LL counts four times.
    floor, by_byte = (16 << 10) if release < 22900 else (32 << 10), 2 * (4 if p == LL else 1)
    each = max(n_bytes * by_byte, floor) // count
    each = max(each, floor) if release < 22900 else -(-each // 16) * 16
    cell = -(-(-(-floor // by_byte)) // 16) * 16  # noqa: B002 - two roundings up, not a decrement
    cells = max(-(-n_bytes // cell), 1)
    a_channel = min(cells, max(-(-each // (cell * by_byte)), 1))
    ran = count if a in (_DIRECT, _CHAIN) else min(-(-cells // a_channel), most)
    return ran, threads // 32

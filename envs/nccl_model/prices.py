"""The constants and formulas of NCCL's prices for all_gather, reduce_scatter and all_reduce.

From NCCL 2.28.9 to 2.30.7, src/graph/tuning.cc. Units: microseconds, bytes, GB/s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import asarray, floor, log2, maximum, minimum, stack, where, zeros

from ...traces.names import ALL_REDUCE_PAIRS
from ...traces.records import PAIRS, PROTOS
from .clusters import ClusterArrays

Array = np.ndarray[Any, Any]

#: GB/s of LL at most; rows V, A, H, B; columns 1, 2, more nodes.
_LL_MAX = np.array([[39.0, 39.0, 20.4], [87.7, 22.5, 19.0], [141.0, 45.0, 35.0], [282.0, 90.0, 70.0]])
#: GB/s of one channel of a ring with LL128, rows as above.
_RING_LL128_CHANNEL = np.array([20.0, 20.0, 36.7, 40.0])
#: Blackwell's, from a release on; columns as of _LL_MAX.
_BLACKWELL_LL128 = ((22803, (73.4, 73.4, 73.4)), (22809, (73.4, 34.6, 73.4)), (22902, (34.5, 34.6, 34.5)))
# Latencies in us, [LL, LL128, SIMPLE].
BASE_RING = np.array([6.6, 14.0, 8.4])
_HW_RING = np.array([[0.6, 1.9, 3.4], [1.0, 2.5, 5.7]])  # rows: NVLink, PCI
_NET_RING = np.array([2.7, 4.0, 14.0])
_NET_TREE = np.array([5.0, 8.5, 14.0])
_HW_NVLS = 25.0
_NET_NVLS = 18.0
_HW_COLLNET = 3.7
_NET_COLLNET = 31.0
_BASE_PAT = 8.0
_NET_PAT = 14.0
_NVLS_EFFICIENCY = np.array([1.0, 1.0, 0.85, 0.74])
_BASE_TREE = np.array([6.8, 14.0, 8.4])
_HW_TREE = np.array([[0.6, 1.25, 4.0], [1.0, 1.9, 4.0]])  # rows: NVLink, PCI
_NET_NVLS_TREE = 20.9
#: GB/s of one channel of a tree: any protocol, LL128; rows V, A, H, B; columns 1, 2, more nodes.
_TREE_CHANNEL = np.array([[26.5, 18.5, 10.0], [24.0, 23.6, 17.8], [38.7, 41.4, 36.0], [70.0, 42.8, 24.0]])
_TREE_LL128 = np.array([[20.0, 20.0, 20.0], [20.0, 20.0, 20.0], [36.7, 36.7, 29.0], [55.6, 31.67, 20.0]])
#: GB/s of one channel of NVLS Tree, columns 2 and more nodes; Blackwell's last is 80 from 2.30 on.
_NVLS_TREE_CHANNEL = np.array([[18.5, 10.0], [23.6, 17.8], [57.7, 45.5], [96.0, 43.8]])
#: What NCCL makes of a tree's bandwidth by the message's size, from 64 B in powers of two; beyond it is 1.
_TREE_BY_SIZE = np.array(
    [
        [1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1],
        [0.9] * 7 + [0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9],
    ]
)
#: Under Simple over nodes a ring's latency counts so many times, from 64 bytes a channel and rank on.
_PLATEAU, _PLATEAU_BYTES, _PLATEAU_OF_VOLTA = 1.4, 64, 1.9


def _ll_max(fleet: ClusterArrays) -> Array:
    """GB/s of LL at most, (n,): by the generation on one node, by the CPU between nodes."""
    by_cpu = fleet.amd.astype(int)
    row = where(fleet.n_nodes > 1, by_cpu, fleet.generation)
    column = minimum(fleet.n_nodes, 3) - 1
    return asarray(_LL_MAX[row, column])


def _ring_ll128_channel(fleet: ClusterArrays) -> Array:
    """GB/s that one ring channel carries with LL128, (n,); Blackwell's figure was changed three times."""
    limit = _RING_LL128_CHANNEL[fleet.generation]
    blackwell = fleet.generation == 3
    scale = minimum(fleet.n_nodes, 3) - 1
    for first, row in _BLACKWELL_LL128:
        changed = blackwell & (fleet.release >= first)
        by_scale = np.array(row)
        limit = where(changed, by_scale[scale], limit)
    last = blackwell & (fleet.release >= 22907)
    return where(last, 40.0, limit)


def price(lat: Array, bw: Array, n_bytes: Any) -> Array:
    """Microseconds of messages by the :func:`terms` of their prices, float32; -1 = not offered. All broadcast."""
    with np.errstate(divide="ignore"):
        us = lat + n_bytes / (1000.0 * bw)
    offered = where(bw > 0, us, -1.0)
    return offered.astype(np.float32)


def terms(fleet: ClusterArrays) -> tuple[Array, Array]:
    """Latency (us) and algorithm bandwidth (GB/s; 0 = not offered) of PAIRS, both (n, len(PAIRS)).

    A message of ``b`` bytes is priced at ``latency + b / (1000 * bandwidth)``, all_gather and reduce_scatter
    alike.
    """
    shape = len(fleet), len(PAIRS)
    lat = zeros(shape)
    bw = zeros(shape)
    lat[:, :3], bw[:, :3] = _ring(fleet)
    lat[:, 3], bw[:, 3] = _nvls(fleet)
    lat[:, 4], bw[:, 4] = _collnet(fleet)
    lat[:, 5], bw[:, 5] = _pat(fleet)
    return lat, bw


def _is_late(fleet: ClusterArrays) -> Array:
    """The model was rearranged in 2.31."""
    return fleet.release >= 23100


def _ring(fleet: ClusterArrays) -> tuple[Array, Array]:
    """By protocol, (n, 3) each. Up to 2.30 the bandwidth within a node counts up to two nodes, from 2.31 on a single
    one only."""
    ring = fleet.ring
    nodes = fleet.n_nodes
    n = fleet.n_ranks.astype(float)
    late = _is_late(fleet)
    within = nodes <= where(late, 1, 2)
    channel = where(within, ring.bw_intra, ring.bw_inter)
    bus = ring.channels * channel
    by_channel = ring.channels * _ring_ll128_channel(fleet)
    ll = minimum(_ll_max(fleet), 0.5 * bus)
    ll128 = minimum(0.92 * bus, by_channel)
    ll128 = ll128 * fleet.offers_ll128
    per_rank = n / (n - 1)
    bw = stack([ll, ll128, bus], axis=1) * per_rank[:, None]

    lone = (fleet.gpus_per_node == 1) & ~late
    net = where(lone[:, None], _NET_TREE, _NET_RING)
    passes = np.array([1, 1, 2])
    net = net + ring.latency[:, None] * passes
    many = nodes > 1
    by_cpu = where(fleet.amd, 2.0, 1.0)
    overhead = where(many, by_cpu, 0.0)
    path = where(ring.nvlink, 0, 1)
    times = np.array([1, 1, 3])
    link = maximum(_HW_RING[path], overhead[:, None] * times)
    n_net = where(many, nodes - 1, 0)
    n_link = n - 1 - n_net
    lat = BASE_RING + n_link[:, None] * link
    lat = lat + n_net[:, None] * net
    return lat, bw


def _nvls(fleet: ClusterArrays) -> tuple[Array, Array]:
    """One step within the node; one node less one share travels, and from 2.31 on counted as for a ring."""
    nvls = fleet.nvls
    per_node = fleet.gpus_per_node
    n = fleet.n_ranks.astype(float)
    many = fleet.n_nodes > 1
    heads = maximum(nvls.channels, 1)
    share = _NVLS_EFFICIENCY[fleet.generation]
    share = share * (heads - 1) / heads
    share = share * (per_node - 1) / per_node
    early = fleet.release < 22800  # 2.27 had no efficiency of its own for NVLS
    plain = nvls.bw_intra * (per_node - 1) / per_node
    within = where(early, plain, nvls.bw_intra * share)
    between = where(early, 0.9 * nvls.bw_inter, nvls.bw_inter)
    bw = heads * minimum(within, between)
    bw = bw * fleet.offers_nvls
    per_rank = where(_is_late(fleet), n / (n - 1), 1.0)
    over_nodes = _NET_NVLS + 2 * nvls.latency
    lat = _HW_NVLS + where(many, over_nodes, 0.0)
    return lat, bw * per_rank


def _collnet(fleet: ClusterArrays) -> tuple[Array, Array]:
    """Direct: only with a switch that reduces."""
    tree = fleet.tree
    per_node = fleet.gpus_per_node
    many = fleet.n_nodes > 1
    channel = minimum(tree.bw_intra, 0.9 * tree.bw_inter)
    bw = tree.channels * per_node * channel
    is_able = fleet.collnet & many & (per_node <= 8)
    bw = bw * is_able
    others = per_node - 1
    within = minimum(1, others) * _HW_COLLNET + 0.4 * others
    lat = 2 * within + _NET_COLLNET + 2 * tree.latency
    return lat, bw


def _pat(fleet: ClusterArrays) -> tuple[Array, Array]:
    """PAT runs on the tree's graph."""
    tree = fleet.tree
    nodes = fleet.n_nodes
    n = fleet.n_ranks.astype(float)
    gbs = where(nodes <= 2, tree.bw_intra, tree.bw_inter)
    least = minimum(tree.bw_intra, tree.bw_inter)
    gbs = where(_is_late(fleet), least, gbs)
    efficiency = where(fleet.release < 22400, 0.85, 0.75)
    bw = tree.channels * gbs * efficiency
    bw = bw * fleet.offers_pat
    log_nodes = floor(log2(maximum(nodes, 1)))
    over_nodes = log_nodes * (_NET_PAT + 2 * tree.latency) / 3.5
    lat = _BASE_PAT + over_nodes + 2.8 * n
    return lat, bw


def price_of_sums(fleet: ClusterArrays, n_bytes: Array) -> Array:
    """Prices of ALL_REDUCE_PAIRS, one message a cluster: ``n_bytes`` (n,) -> (n, 6) us, -1 = not offered."""
    size = asarray(n_bytes, np.float64)
    ring_lat, ring_bw = _ring(fleet)
    ring_lat = 2 * ring_lat - BASE_RING  # twice round the ring
    per_place = fleet.comm_channels * fleet.n_ranks
    is_long = (fleet.n_nodes > 1) & (size // per_place >= _PLATEAU_BYTES)
    plateau = where(fleet.generation == 0, _PLATEAU_OF_VOLTA, _PLATEAU)
    ring_lat[:, 2] *= where(is_long, plateau, 1.0)
    tree_lat, tree_bw = _tree(fleet)
    octave = log2(maximum(size // 64, 1)).astype(int)
    is_corrected = (size >= 64) & (octave < _TREE_BY_SIZE.shape[1])
    factor = _TREE_BY_SIZE[:, minimum(octave, _TREE_BY_SIZE.shape[1] - 1)].T
    tree_bw = tree_bw * where(is_corrected[:, None], factor, 1.0)
    order = [PROTOS.index(proto) for algo, proto in ALL_REDUCE_PAIRS if algo == "tree"]
    lat = np.concatenate([ring_lat, tree_lat[:, order]], axis=1)
    bw = np.concatenate([ring_bw / 2, tree_bw[:, order]], axis=1)
    return price(lat, bw, size[:, None])


def _by_generation(fleet: ClusterArrays, rows: Array) -> Array:
    """Of a constant by generation and number of nodes, (n,)."""
    column = minimum(fleet.n_nodes, 3) - 1
    return asarray(rows[fleet.generation, column])


def _tree(fleet: ClusterArrays) -> tuple[Array, Array]:
    """By protocol, (n, 3) each. Where a node has one GPU, all its traffic passes that, and NCCL takes 15 % off."""
    tree = fleet.tree
    nodes = fleet.n_nodes
    per_node = fleet.gpus_per_node
    channel = where(nodes <= 2, tree.bw_intra, tree.bw_inter)
    bus = minimum(0.92 * tree.channels * channel, tree.channels * _by_generation(fleet, _TREE_CHANNEL))
    ll = minimum(bus / 3.8, _ll_max(fleet))
    of_ll128 = where(nodes == 1, 7 / 9, 120 / 128)
    ll128 = minimum(bus * of_ll128, tree.channels * _by_generation(fleet, _TREE_LL128))
    ll128 = ll128 * fleet.offers_ll128
    one_path = where(per_node == 1, 0.85, 1.0)
    bw = stack([ll, ll128, bus], axis=1) * one_path[:, None] / 2
    net = _NET_TREE + tree.latency[:, None] * np.array([1, 1, 2])
    link = _HW_TREE[where(tree.nvlink, 0, 1)]
    hops = floor(log2(maximum(nodes, 1)))
    lat = _BASE_TREE + 2 * ((per_node - 1)[:, None] * link + hops[:, None] * net)
    return lat, bw


def price_of_switches(fleet: ClusterArrays, n_bytes: Array) -> Array:
    """Prices of an all_reduce under (nvls/simple, nvls_tree/simple), (n, 2) us, -1 = not offered. No table has these:
    they tell what NCCL leaves to Ring and Tree. CollNet's are not here."""
    nvls = fleet.nvls
    nodes = fleet.n_nodes
    heads = maximum(nvls.channels, 1)
    n = fleet.n_ranks.astype(float)
    within = 2 * nvls.bw_intra * _NVLS_EFFICIENCY[fleet.generation] * (heads - 1) / heads
    able = (fleet.generation >= 2) & (nvls.channels >= 2) & (fleet.nvls_channels > 0)
    most = _NVLS_TREE_CHANNEL[fleet.generation, where(nodes > 2, 1, 0)]
    is_late_blackwell = (fleet.generation == 3) & (fleet.release >= 23000) & (nodes > 2)
    most = where(is_late_blackwell, 80.0, most)
    between = nvls.bw_inter * where(nodes <= 2, 2, 1)
    bus = heads[:, None] * stack(
        [minimum(within, nvls.bw_inter), minimum(minimum(within, between), most)], axis=1
    )
    offered = stack([able & ((nodes == 1) | fleet.collnet), able & (nodes > 1)], axis=1)
    bw = bus * (n / (2 * (n - 1)))[:, None] * offered
    hops = floor(log2(maximum(nodes, 1)))
    of_nvls = _HW_NVLS + where(nodes > 1, _NET_NVLS + 2 * nvls.latency, 0.0)
    of_tree = _HW_NVLS + 2 * hops * (_NET_NVLS_TREE + 2 * nvls.latency)
    lat = stack([of_nvls, of_tree], axis=1)
    return price(lat, bw, asarray(n_bytes, np.float64)[:, None])

"""The constants and formulas of NCCL's prices for all_gather and reduce_scatter.

From NCCL 2.28.9 to 2.30.7, src/graph/tuning.cc. Units: microseconds, bytes, GB/s.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...traces.records import PAIRS
from .clusters import ClusterArrays

Array = np.ndarray[Any, Any]

#: GB/s of LL at most; rows V, A, H, B; columns 1, 2, more nodes.
_LL_MAX = np.array([[39.0, 39.0, 20.4], [87.7, 22.5, 19.0], [141.0, 45.0, 35.0], [282.0, 90.0, 70.0]])
#: GB/s of one channel of a ring with LL128, rows as above.
_RING_LL128_CHANNEL = np.array([20.0, 20.0, 36.7, 40.0])
# Latencies in us, [LL, LL128, SIMPLE].
BASE_RING = np.array([6.6, 14.0, 8.4])
_HW_RING = np.array([[0.6, 1.9, 3.4], [1.0, 2.5, 5.7]])  # rows: NVLink, PCI
_NET_RING, _NET_TREE = np.array([2.7, 4.0, 14.0]), np.array([5.0, 8.5, 14.0])
_HW_NVLS, _NET_NVLS = 25.0, 18.0
_HW_COLLNET, _NET_COLLNET = 3.7, 31.0
_BASE_PAT, _NET_PAT = 8.0, 14.0
_NVLS_EFFICIENCY = np.array([1.0, 1.0, 0.85, 0.74])


def _ll_max(fleet: ClusterArrays) -> Array:
    """GB/s of LL at most, (n,): by the generation on one node, by the CPU between nodes."""
    row = np.where(fleet.n_nodes > 1, fleet.amd.astype(int), fleet.generation)
    return np.asarray(_LL_MAX[row, np.minimum(fleet.n_nodes, 3) - 1])


def _ring_ll128_channel(fleet: ClusterArrays) -> Array:
    """GB/s that one ring channel carries with LL128, (n,); Blackwell's figure was changed three times."""
    limit = _RING_LL128_CHANNEL[fleet.generation]
    blackwell, scale = fleet.generation == 3, np.minimum(fleet.n_nodes, 3) - 1
    for first, row in ((22803, (73.4, 73.4, 73.4)), (22809, (73.4, 34.6, 73.4)), (22902, (34.5, 34.6, 34.5))):
        limit = np.where(blackwell & (fleet.release >= first), np.array(row)[scale], limit)
    return np.where(blackwell & (fleet.release >= 22907), 40.0, limit)


def price(lat: Array, bw: Array, n_bytes: Any) -> Array:
    """Microseconds of messages by the :func:`terms` of their prices, float32; -1 = not offered. All broadcast."""
    with np.errstate(divide="ignore"):
        return np.where(bw > 0, lat + n_bytes / (1000.0 * bw), -1.0).astype(np.float32)


def terms(fleet: ClusterArrays) -> tuple[Array, Array]:
    """Latency (us) and algorithm bandwidth (GB/s; 0 = not offered) of PAIRS, both (n, len(PAIRS)).

    A message of ``b`` bytes is priced at ``latency + b / (1000 * bandwidth)``, all_gather and reduce_scatter
    alike.
    """
    n, nodes, per_node = fleet.n_ranks.astype(float), fleet.n_nodes, fleet.gpus_per_node
    many, late = nodes > 1, fleet.release >= 23100  # the model was rearranged in 2.31
    lat, bw = np.zeros((len(fleet), len(PAIRS))), np.zeros((len(fleet), len(PAIRS)))

    # Ring. Up to 2.30 the bandwidth within a node counts up to two nodes, from 2.31 on a single one only.
    bus = fleet.ring.channels * np.where(
        nodes <= np.where(late, 1, 2), fleet.ring.bw_intra, fleet.ring.bw_inter
    )
    bus_ll128 = np.minimum(0.92 * bus, fleet.ring.channels * _ring_ll128_channel(fleet)) * fleet.offers_ll128
    bw[:, :3] = (
        np.stack([np.minimum(_ll_max(fleet), 0.5 * bus), bus_ll128, bus], axis=1) * (n / (n - 1))[:, None]
    )
    lone = (per_node == 1) & ~late
    net = np.where(lone[:, None], _NET_TREE, _NET_RING) + fleet.ring.latency[:, None] * np.array([1, 1, 2])
    overhead = np.where(many, np.where(fleet.amd, 2.0, 1.0), 0.0)[:, None] * np.array([1, 1, 3])
    link = np.maximum(_HW_RING[np.where(fleet.ring.nvlink, 0, 1)], overhead)
    n_net = np.where(many, nodes - 1, 0)
    lat[:, :3] = BASE_RING + (n - 1 - n_net)[:, None] * link + n_net[:, None] * net

    # NVLS: one step within the node; one node less one share travels, and from 2.31 on counted as for a ring.
    heads = np.maximum(fleet.nvls.channels, 1)
    share = _NVLS_EFFICIENCY[fleet.generation] * (heads - 1) / heads * (per_node - 1) / per_node
    within, between = fleet.nvls.bw_intra * share, fleet.nvls.bw_inter
    early = fleet.release < 22800  # 2.27 had no efficiency of its own for NVLS
    within = np.where(early, fleet.nvls.bw_intra * (per_node - 1) / per_node, within)
    nvls = heads * np.minimum(within, np.where(early, 0.9 * between, between)) * fleet.offers_nvls
    bw[:, 3] = nvls * np.where(late, n / (n - 1), 1.0)
    lat[:, 3] = _HW_NVLS + np.where(many, _NET_NVLS + 2 * fleet.nvls.latency, 0.0)

    # CollNet direct: only with a switch that reduces.
    bw[:, 4] = fleet.tree.channels * per_node * np.minimum(fleet.tree.bw_intra, 0.9 * fleet.tree.bw_inter)
    bw[:, 4] *= fleet.collnet & many & (per_node <= 8)
    within = np.minimum(1, per_node - 1) * _HW_COLLNET + 0.4 * (per_node - 1)
    lat[:, 4] = 2 * within + _NET_COLLNET + 2 * fleet.tree.latency

    # PAT runs on the tree's graph.
    tree = np.where(nodes <= 2, fleet.tree.bw_intra, fleet.tree.bw_inter)
    tree = np.where(late, np.minimum(fleet.tree.bw_intra, fleet.tree.bw_inter), tree)
    bw[:, 5] = fleet.tree.channels * tree * np.where(fleet.release < 22400, 0.85, 0.75) * fleet.offers_pat
    log_nodes = np.floor(np.log2(np.maximum(nodes, 1)))
    lat[:, 5] = _BASE_PAT + log_nodes * (_NET_PAT + 2 * fleet.tree.latency) / 3.5 + 2.8 * n
    return lat, bw

"""NCCL's prices for all_reduce: what a tuner is offered there too, though only the other two collectives are tuned.

From NCCL 2.28.9 to 2.30.7, src/graph/tuning.cc. The tree is taken to be balanced, as NCCL's search finds it on
NVSwitch machines (a plain chain of GPUs would cost it another 15 % of bandwidth).
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np

from ...traces.records import ALGOS, N_ALGOS, N_PROTOS, PROTOS
from . import prices
from .channels import CHAIN, DIRECT, LL128, NVLS, NVLS_TREE, RING, SIMPLE, TREE, filled_channels, own_channels
from .clusters import GENERATIONS, Cluster, ClusterArrays

Array = np.ndarray[Any, Any]
#: The last release whose all_reduce is known: later ones are priced as this one.
_LAST = "2.30.7"
# Of the tree by protocol [LL, LL128, SIMPLE]: us at the beginning, within a node over NVLink and over PCI.
_BASE_TREE, _HW_TREE = np.array([6.8, 14.0, 8.4]), np.array([[0.6, 1.25, 4.0], [1.0, 1.9, 4.0]])
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


@functools.lru_cache(maxsize=64)
def terms(c: Cluster) -> tuple[Array, Array]:
    """Latency (us) and algorithm bandwidth (GB/s, 0 = not offered) of all_reduce, both (7, 3), before corrections."""
    lat, bw = np.zeros((N_ALGOS, N_PROTOS)), np.zeros((N_ALGOS, N_PROTOS))
    known = c if c.release < 23100 else replace(c, nccl=_LAST)
    fleet = ClusterArrays.of([known])
    (once, *_), (rate, *_) = (values[:, :3] for values in prices.terms(fleet))
    # Round the ring twice: as reduce_scatter and as all_gather.
    lat[RING], bw[RING] = 2 * once - prices.BASE_RING, rate / 2
    lat[TREE], bw[TREE] = _tree(c, float(prices.ll_max(fleet)[0]))
    if not c.offers_ll128:
        bw[:, LL128] = 0
    _nvls(c, lat, bw)
    if c.collnet and c.n_nodes > 1:
        _collnet(c, lat, bw)
    return lat, bw


def _tree(c: Cluster, ll_max: float) -> tuple[Array, Array]:
    """Latency and bandwidth of the tree by protocol, both (3,)."""
    graph, gen, scale = c.tree, GENERATIONS.index(c.generation), min(c.n_nodes, 3) - 1
    bus = graph.channels * (graph.bw_intra if c.n_nodes <= 2 else graph.bw_inter)
    rate = min(bus * 0.92, graph.channels * _TREE_GBS[gen][scale])
    ll128 = min(rate * (7 / 9 if c.n_nodes == 1 else 120 / 128), graph.channels * _TREE_LL128_GBS[gen][scale])
    near = _HW_TREE[0 if graph.type_intra == "NVL" else 1]
    far = prices.NET_TREE + graph.latency_inter * np.array([1, 1, 2])
    hops = (c.gpus_per_node - 1) * near + int(math.log2(c.n_nodes)) * far
    return _BASE_TREE + 2 * hops, np.array([min(rate / 3.8, ll_max), ll128, rate]) / 2


def _nvls(c: Cluster, lat: Array, bw: Array) -> None:
    n, nodes, graph, gen = c.n_ranks, c.n_nodes, c.nvls, GENERATIONS.index(c.generation)
    if gen < 2 or graph.channels < 2 or not c.nvls_channels:
        return
    early = c.release < 22800
    part = graph.channels * (5 / 6 if early else n / (2 * (n - 1)))
    # The switch adds on the way: an all_reduce moves each byte once in each direction.
    within = graph.bw_intra * (1 if early else _NVLS_EFFICIENCY[gen] * (graph.channels - 1) / graph.channels * 2)
    if nodes == 1 or c.collnet:
        bw[NVLS, SIMPLE] = part * min(within, graph.bw_inter)
        lat[NVLS, SIMPLE] = 25.0 + (18.0 + 2 * graph.latency_inter if nodes > 1 else 0.0)
    if nodes > 1:
        rate = min(graph.bw_intra, graph.bw_inter / min(nodes - 1, 2)) if early else _nvls_tree_rate(c, within)
        bw[NVLS_TREE, SIMPLE] = part * rate
        hop = (14.0 if early else 20.9) + 2 * graph.latency_inter
        lat[NVLS_TREE, SIMPLE] = 25.0 + 2 * int(math.log2(nodes)) * hop


def _nvls_tree_rate(c: Cluster, within: float) -> float:
    """GB/s of a channel, from 2.28 on; Blackwell on many nodes was given more in 2.30."""
    gen, scale = GENERATIONS.index(c.generation), min(c.n_nodes, 3) - 1
    cap = 43.8 if gen == 3 and scale == 2 and c.release < 23000 else _NVLS_TREE_GBS[gen][scale]
    return min(within, c.nvls.bw_inter * (2 if c.n_nodes <= 2 else 1), cap)


def _collnet(c: Cluster, lat: Array, bw: Array) -> None:
    local, graph = c.gpus_per_node, c.tree
    bus, far = graph.channels * graph.bw_intra, graph.latency_inter * 2
    factor = local / graph.channels
    hopper = 0.85 if c.generation in ("H", "B") else 1.0
    bw[DIRECT, SIMPLE] = 0.5 * hopper * bus / (factor - (factor - 1) / 2)
    lat[DIRECT, SIMPLE] = 2 * (min(1, local - 1) * 3.7 + 0.4 * (local - 1)) + 31.0 + far
    bw[CHAIN, SIMPLE] = 0.5 * bus
    lat[CHAIN, SIMPLE] = 2 * (local - 1) * _HW_CHAIN[0] + _HW_CHAIN[1] + far


def cost_table(c: Cluster, n_bytes: int) -> Array:
    """NCCL's cost table of an all_reduce: (7, 3) float32 us, -1 = not offered."""
    lat, bw = (x.copy() for x in terms(c))
    log_size = int(math.log2(n_bytes >> 6)) if n_bytes >= 64 else -1
    if 0 <= log_size < 23:
        bw[TREE] *= _CORRECTION[:, log_size]
        if c.generation == "B" and c.release >= 22900 and c.cpu in ("intel", "amd", "mixed"):
            bw[NVLS_TREE] *= _CORRECTION[:, log_size]
    if c.n_nodes > 1 and n_bytes / (c.comm_channels * c.n_ranks) >= 64:
        lat[RING, SIMPLE] *= 1.9 if c.generation == "V" else 1.4  # a plateau that NCCL saw on many nodes
    return prices.price(lat, bw, n_bytes)


@functools.lru_cache(maxsize=65536)
def channels(c: Cluster, n_bytes: int, algo: str, proto: str, asked: int = 0) -> tuple[int, int]:
    """(n_channels, n_warps) of an all_reduce; ``asked`` as in :func:`cost_model.channels`."""
    a, p = ALGOS.index(algo), PROTOS.index(proto)
    known, warps = own_channels(ClusterArrays.of([c]), np.array(n_bytes), a, p)
    own = int(known[0]) if a != DIRECT else c.comm_channels
    most = own if a in (NVLS, NVLS_TREE) else c.comm_channels
    limit = min(asked, own if c.release >= 23100 else most) if asked else own
    # Two bytes of traffic for each byte of data, whatever the number of ranks.
    ran = limit if a in (DIRECT, CHAIN) else min(int(filled_channels(c.release, n_bytes, 2, p, limit)), most)
    return ran, int(warps[0])

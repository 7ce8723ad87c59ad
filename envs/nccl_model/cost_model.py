"""NCCL's view of a cluster: the cost table that it hands to a tuner, its own choice, its channels.

Source: NCCL 2.28.9 to 2.30.7, src/graph/tuning.cc (model) and src/enqueue.cc (choice, channels). Prices of ten
releases, 2.27.3 to 2.32.3, are within 0.5 % of this; NVLS in 2.32.3 0.6 % on one node of 8, unexplained. Units:
microseconds, bytes, GB/s.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy import asarray, isfinite, minimum, where

from ...traces.names import ALL_REDUCE, TUNABLE_FUNCS
from ...traces.records import ALGOS, N_ALGOS, N_PROTOS, PAIRS_OF, PROTOS
from .channels import PAIR_ALGOS, PAIR_PROTOS, heuristic_channels, planned_channels
from .clusters import Cluster, ClusterArrays
from .prices import price, price_of_sums, price_of_switches, terms

Array = np.ndarray[Any, Any]
_SWITCHES = ALGOS.index("nvls"), ALGOS.index("nvls_tree")
_SIMPLE = PROTOS.index("simple")


def pair_cost_rows(fleet: ClusterArrays, n_bytes: Array) -> Array:
    """Costs of PAIRS, one message a cluster: ``n_bytes`` (n,) -> (n, len(PAIRS)) us, -1 = not offered."""
    sizes = asarray(n_bytes, np.float64)
    lat, bw = terms(fleet)
    return price(lat, bw, sizes[:, None])


@functools.lru_cache(maxsize=64)
def _one(cluster: Cluster) -> tuple[ClusterArrays, Array, Array]:
    fleet = ClusterArrays.of([cluster])
    lat, bw = terms(fleet)
    return fleet, lat[0], bw[0]


def _number_of(func: str) -> int:
    """Index into TUNABLE_FUNCS. Raises ValueError."""
    if func not in TUNABLE_FUNCS:
        raise ValueError(f"no cost model for {func}: it covers all_gather, reduce_scatter and {ALL_REDUCE}")
    return TUNABLE_FUNCS.index(func)


@functools.lru_cache(maxsize=65536)
def cost_table(cluster: Cluster, func: str, n_bytes: int) -> Array:
    """NCCL's cost table for one collective alone in its group: (7, 3) float32 us, -1 = not offered; read-only.

    ``n_bytes`` is NCCL's: the whole buffer (``n_ranks`` x shard). Raises ValueError for another collective.
    """
    number = _number_of(func)
    fleet, lat, bw = _one(cluster)
    table = np.full((N_ALGOS, N_PROTOS), -1.0, np.float32)
    prices = price(lat, bw, float(n_bytes))
    if func == ALL_REDUCE:
        size = np.array([n_bytes])
        (prices,) = price_of_sums(fleet, size)
        table[_SWITCHES, _SIMPLE] = price_of_switches(fleet, size)[0]
    table[PAIR_ALGOS[number], PAIR_PROTOS[number]] = prices
    table.flags.writeable = False
    return table


def choice(cluster: Cluster, func: str, n_bytes: int, cost: Array | None = None) -> tuple[str, str]:
    """(algo, proto) that NCCL takes: the smallest entry >= 0, the first one on a tie.

    ``cost`` (7, 3) may be a table that a tuner has changed. Raises ValueError when nothing is offered.
    """
    if cost is None:
        cost = cost_table(cluster, func, n_bytes)
    offered = where(cost >= 0, cost, np.inf)
    flat = offered.ravel()
    best = int(flat.argmin())
    if not isfinite(flat[best]):
        raise ValueError("the cost table offers nothing: every entry is below zero")
    algo, proto = divmod(best, N_PROTOS)
    return ALGOS[algo], PROTOS[proto]


@functools.lru_cache(maxsize=65536)
def channels(
    cluster: Cluster, func: str, n_bytes: int, algo: str, proto: str, asked: int = 0
) -> tuple[int, int]:
    """(n_channels, n_warps) that run for (algo, proto); ``asked`` is the tuner's count, 0 = NCCL's own.

    From 2.31 on a tuner can only lower NCCL's count. Raises ValueError for a pair that the collective never
    has.
    """
    number = _number_of(func)
    if (algo, proto) not in PAIRS_OF[func]:
        raise ValueError(f"no channels of {func} with {algo}/{proto}: only of {_named(func)}")
    fleet, _, _ = _one(cluster)
    size = np.array(n_bytes)
    pair = np.array(PAIRS_OF[func].index((algo, proto)))
    own, warps = heuristic_channels(fleet, size, pair, number)
    limit = own
    if asked:
        lowered = minimum(own, asked)
        limit = where(fleet.release >= 23100, lowered, asked)
    planned = planned_channels(fleet, size, pair, limit, number)
    return int(planned[0]), int(warps[0])


def _named(func: str) -> str:
    return ", ".join("/".join(pair) for pair in PAIRS_OF[func])

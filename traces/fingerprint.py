"""Fingerprints: what a slot looks like to a policy. The only place where features are defined.

All functions work on a batch of ``n`` slots at once (the simulator passes thousands, the daemon one), so that
simulated and live observations cannot drift apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .records import PAIRS, TUNED_FUNCS

Array = np.ndarray[Any, Any]

#: What NCCL prices above this multiple of its best offer is not tried: its price list is the net under exploration.
PRICE_CAP = 4.0


@dataclass
class Fingerprint:
    """One slot in one job, or ``n`` of them: each field is an array of shape ``(n,)`` unless a shape is given.

    Sources: ``cost_us`` is the row that NCCL hands to the tuner (:func:`dynamiccl.traces.records.pair_costs`);
    ``own_pair``/``own_channels`` are what NCCL ran when left alone; ``comm_channels`` is the most channels ever seen
    on the communicator; ``share`` comes from the events of a default window.
    """

    func: Array  # index into TUNABLE_FUNCS
    n_bytes: Array  # of one call: the whole buffer
    calls: Array  # per step
    n_ranks: Array
    n_nodes: Array
    cost_us: Array  # (n, len(PAIRS)) microseconds, -1 = not offered; an all_reduce has others in their places
    own_pair: Array  # index into PAIRS_OF of NCCL's own choice
    own_channels: Array
    comm_channels: Array
    share: Array  # time of this slot's calls / step time, under NCCL's own choice
    memory_pressure: Array  # memory used / total, 0 = unknown

    @property
    def offered(self) -> Array:
        """(n, len(PAIRS)) True where a pair is offered and within PRICE_CAP of NCCL's best price."""
        cost = np.asarray(self.cost_us, np.float64)
        live = cost >= 0
        offers = np.where(live, cost, np.inf)
        best = offers.min(axis=1, keepdims=True)
        return live & (cost <= PRICE_CAP * best)

    def vector(self) -> Array:
        """Features, shape ``(n, N_FEATURES)`` float32, each roughly within [-1, 1]."""
        cost = np.asarray(self.cost_us, np.float64)
        live = cost >= 0
        offers = np.where(live, cost, np.inf)
        best = offers.min(axis=1)
        ratio = np.maximum(cost, 1e-3) / best[:, None]
        relative = np.where(live, np.log2(ratio), 3.0)
        per_rank = np.asarray(self.n_bytes) / self.n_ranks
        per_node = np.asarray(self.n_ranks) / self.n_nodes
        columns = [
            np.minimum(self.func, len(TUNED_FUNCS) - 1),
            _log2(self.n_bytes) / 32 - 0.5,
            _log2(per_rank) / 32 - 0.5,
            _log2(self.calls) / 8,
            np.log2(self.n_ranks) / 10,
            np.log2(self.n_nodes) / 8,
            np.log2(per_node) / 4,
            np.log10(np.maximum(best, 1e-1)) / 4,
            _log2(self.own_channels) / 6,
            _log2(self.comm_channels) / 6,
            np.asarray(self.share, np.float64),
            np.asarray(self.memory_pressure, np.float64),
        ]
        own_pair = np.asarray(self.own_pair, np.int64)
        own = np.eye(len(PAIRS))[own_pair]
        prices = np.clip(relative, 0, 3) / 3
        features = np.concatenate([np.stack(columns, axis=1), prices, own], axis=1)
        return np.clip(features, -2, 2).astype(np.float32)


def _log2(values: Array) -> Array:
    """Logarithm to the base 2, of values below 1 that of 1."""
    return np.asarray(np.log2(np.maximum(values, 1)))


#: Features of a slot in the order of :meth:`Fingerprint.vector`, and what they are.
FEATURES = {
    "adds": "1: reduce-scatter, all-reduce, 0: all-gather",
    "bytes": "log2(bytes of one call) / 32 - 0.5",
    "bytes_per_rank": "log2(bytes of one call / ranks) / 32 - 0.5",
    "calls": "log2(calls per step) / 8",
    "ranks": "log2(ranks of the communicator) / 10",
    "nodes": "log2(nodes of the communicator) / 8",
    "ranks_per_node": "log2(ranks / nodes) / 4",
    "best_price": "log10(NCCL's lowest price in microseconds) / 4",
    "own_channels": "log2(channels of the default) / 6",
    "comm_channels": "log2(channels of the communicator) / 6",
    "share": "share of the step time that the slot's calls take under the default",
    "memory_pressure": "used / total GPU memory; 0: unknown",
}
FEATURES |= {
    f"price_{algo}_{proto}": "log2(NCCL's price / its lowest price) / 3, at most 1; 1: not offered"
    for algo, proto in PAIRS
}
FEATURES |= {f"own_{algo}_{proto}": "1: the default runs this" for algo, proto in PAIRS}
N_FEATURES = len(FEATURES)

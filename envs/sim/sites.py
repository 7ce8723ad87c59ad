"""Where jobs run: their clusters, and what is true of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..nccl_model.clusters import ClusterArrays
from ..nccl_model.columns import Columns
from .fabric.params import FabricParams
from .family import World
from .noise import log_uniform
from .step import Law
from .worlds import Extras

Array = np.ndarray[Any, Any]


@dataclass
class SampledClusters(Columns):
    """Where ``n`` jobs run: what another job on the same clusters has in common with them. Arrays (n, ...)."""

    fleet: ClusterArrays
    truth: FabricParams
    #: (n, 2, 6, N_COUNTS) what the formulas miss, far in message size from where truth.effect holds
    other: Array
    turn: Array  # pi / 2 / octaves of message size from the one to the other
    touch: Array  # calls slow the compute so many times as much as the fabric says
    law: Law
    world: Array  # index into WORLDS
    extras: Extras

    def truth_at(self, rows: Array, n_bytes: Array) -> FabricParams:
        """The fabrics at ``rows`` (m,), with what the formulas miss of messages of ``n_bytes`` (m,) there."""
        truth = self.truth.take(rows)
        shard = n_bytes / self.fleet.n_ranks[rows]
        octave = np.log2(shard)
        turned = self.turn[rows] * (octave - 20.0)
        angle = turned[:, None, None, None]
        here = np.cos(angle) * truth.effect
        elsewhere = np.sin(angle) * self.other[rows]
        return replace(truth, effect=here + elsewhere)


def draw_law(kind: World, fleet: ClusterArrays, rng: np.random.Generator) -> Law:
    """How the calls of each job disturb each other."""
    n = len(fleet)
    contention = kind.contention
    most = 2 * fleet.comm_channels

    def some(share: float, value: Callable[[], Array]) -> Array:
        has = rng.random(n) < share
        drawn = value()
        return np.where(has, drawn, 0.0)

    def limit() -> Array:
        part = rng.uniform(*contention.limit, n)
        return part * most

    def port() -> Array:
        return log_uniform(rng, contention.port_size, n)

    # The order of draws is the order of jobs.
    return Law(
        crowd=rng.uniform(*kind.crowd, n),
        power=rng.uniform(*kind.power, n),
        saturation=rng.uniform(*kind.saturation, n),
        drag=rng.uniform(*kind.drag, n),
        budget=some(contention.budget, limit),
        squeeze=log_uniform(rng, contention.squeeze, n),
        serial=some(contention.serial, limit),
        port=some(contention.port, port),
        knee=np.zeros(n),
        steep=np.zeros(n),
    )

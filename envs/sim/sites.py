"""Where jobs run: their clusters, and what is true of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..nccl_model.clusters import ClusterArrays
from ..nccl_model.columns import Columns
from .fabric.params import FabricParams
from .step import Law
from .worlds import Extras

Array = np.ndarray[Any, Any]


@dataclass
class SampledClusters(Columns):
    """Where ``n`` jobs run: what another job on the same clusters has in common with them. Arrays (n, ...)."""

    fleet: ClusterArrays
    truth: FabricParams
    other: (
        Array  # (n, 2, 6, N_COUNTS) what the formulas miss, far in message size from where truth.effect holds
    )
    turn: Array  # pi / 2 / octaves of message size from the one to the other
    touch: Array  # calls slow the compute so many times as much as the fabric says
    law: Law
    world: Array  # index into WORLDS
    extras: Extras

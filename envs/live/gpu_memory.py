"""Which settings a job's GPUs have no memory for.

The first call of an algorithm on a communicator allocates buffers; if they do not fit, the job fails. So all that is
tried takes at most half of what this node's fullest GPU has left, and leaves KEPT_FREE. Sizes of buffers come from the
tuner's environment and NCCL's files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from ...traces.here import configured
from ...traces.queries.slots import SlotProfile, of_class
from ...traces.reasons import RowRefused, Why
from ...traces.records import PAIRS_OF, Slot
from ...traces.spaces import N_CHANNELS, N_PAIRS
from ..nccl_model.gpu_memory import of_first_use

Array = np.ndarray[Any, Any]

#: Bytes that the job may still need itself. Not measured.
KEPT_FREE = 1 << 30


def take_out(
    profiles: Sequence[SlotProfile], masks: Sequence[Array], events: pd.DataFrame, free: int
) -> list[Why]:
    """Take out of ``masks``, (1, N_CONFIGS) bool for each slot, the algorithms that there is no memory for.

    Args:
        profiles: slots; the largest share gets memory first.
        masks: changed in place.
        events: show which algorithms are connected.
        free: bytes on the fullest GPU; 0: unknown, nothing is taken out.

    Returns:
        One reason for each algorithm and class of communicators.
    """
    whys: list[Why] = []
    if not free:
        return whys
    settings = configured()
    left: float = min(free / 2, free - KEPT_FREE)
    has_room: dict[tuple[int, int, str], bool] = {}
    for profile, mask in zip(profiles, masks, strict=True):
        slot = profile.slot
        by_pair = mask.reshape(N_PAIRS, N_CHANNELS)
        for pair, (algo, _) in enumerate(PAIRS_OF[slot.func], 1):
            if not by_pair[pair].any():
                continue
            key = slot.n_ranks, slot.n_nodes, algo
            if key not in has_room:
                each = of_first_use(algo, profile.fingerprint, settings)
                lacking = _not_connected(events, slot, algo)
                needs = each * lacking if lacking else 0
                has_room[key] = needs == 0 or needs <= left
                if has_room[key]:
                    left -= needs
                else:
                    facts = {"of": slot.n_ranks, "needs": needs / 2**30, "free": free / 2**30}
                    whys.append(RowRefused.NO_MEMORY(algo=algo, **facts))
            by_pair[pair] &= has_room[key]
    return whys


def _not_connected(events: pd.DataFrame, slot: Slot, algo: str) -> int:
    """The most communicators of the slot's class that one process uses, and that have not run the algorithm."""
    calls = of_class(events, slot)
    has_run = calls["algo"].eq(algo).groupby([calls["pid"], calls["comm_id"]]).any()
    lacks = (~has_run).groupby(level="pid").sum()
    return int(lacks.max())

"""A fault of NCCL that a table could bring into a job with registered buffers: NVIDIA/nccl#2389.

Over nodes, a collective with Simple that follows one with LL on the same communicator can hang, if buffers are
registered with the network. The plugin closes what it sees in one message: LL, and Simple where NCCL runs LL. It does
not see that another message of the communicator runs with LL, while a table replaces LL128 by Simple.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ...traces.queries.slots import SlotProfile, of_class
from ...traces.reasons import RowRefused
from ...traces.records import PAIRS, Offer
from ...traces.spaces import N_CHANNELS, N_PAIRS

Array = np.ndarray[Any, Any]

_SIMPLE = [pair for pair, (_, proto) in enumerate(PAIRS, 1) if proto == "simple"]


def take_out_simple(
    profiles: Sequence[SlotProfile],
    masks: Sequence[Array],
    events: pd.DataFrame,
    offers: Mapping[tuple[int, str, int], Offer],
) -> list[str]:
    """Takes Simple out of the masks, (1, N_CONFIGS) bool each, of slots where it would newly follow LL.

    ``events``: of all functions, in some default steps. Returns one text for each such slot.
    """
    registers = {comm_id for (comm_id, _, _), offer in offers.items() if offer.is_registered}
    texts = []
    for profile, mask in zip(profiles, masks, strict=True):
        slot = profile.slot
        calls = of_class(events, slot)
        has_ll = (calls["proto"] == "ll").any()
        has_registered = calls["comm_id"].isin(registers).any()
        is_new = slot.n_nodes > 1 and profile.proto != "simple"
        if is_new and has_ll and has_registered:
            mask.reshape(N_PAIRS, N_CHANNELS)[_SIMPLE] = False
            texts.append(RowRefused.AFTER_LL(slot=slot))
    return texts

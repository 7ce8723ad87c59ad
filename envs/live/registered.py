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
from ...traces.records import AUTO, PAIRS, Decision, Offer, Slot
from ...traces.spaces import N_CHANNELS, N_CONFIGS, N_PAIRS, config_of

Array = np.ndarray[Any, Any]

_SIMPLE = [pair for pair, (_, proto) in enumerate(PAIRS, 1) if proto == "simple"]


def registering(offers: Mapping[tuple[int, str, int], Offer]) -> set[int]:
    """Communicators with registered buffers, as far as NCCL has told."""
    found = set[int]()
    for (comm_id, _, _), offer in offers.items():
        if offer.is_registered:
            found.add(comm_id)
    return found


def take_out_simple(
    profiles: Sequence[SlotProfile],
    masks: Sequence[Array],
    events: pd.DataFrame,
    offers: Mapping[tuple[int, str, int], Offer],
) -> list[str]:
    """Takes Simple out of the masks, (1, N_CONFIGS) bool each, of slots where it would newly follow LL.

    ``events``: of all functions, in some default steps. Returns one text for each such slot.
    """
    registers = registering(offers)
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


class Open:
    """What may be tried in each slot. Buffers may be registered later, as by a first capture: then it gets less."""

    def __init__(
        self,
        profiles: Sequence[SlotProfile],
        masks: Sequence[Array],
        events: pd.DataFrame,
        offers: Mapping[tuple[int, str, int], Offer],
    ) -> None:
        """See :func:`take_out_simple`, which takes out of the ``masks``."""
        self._profiles = profiles
        self._events = events
        self._registers = registering(offers)
        self.texts = take_out_simple(profiles, masks, events, offers)
        none = np.zeros((0, N_CONFIGS), bool)
        self.mask: Array = np.concatenate([none, *masks])  # (s, N_CONFIGS), as the search has it

    def close(self, offers: Mapping[tuple[int, str, int], Offer]) -> list[str]:
        """Close what has become dangerous; a text for each slot, once more communicators have registered buffers."""
        registers = registering(offers)
        if registers <= self._registers:
            return []
        self._registers = registers
        masks = [row[None] for row in self.mask]
        texts = take_out_simple(self._profiles, masks, self._events, offers)
        self.texts += texts
        return texts

    def rows(self, rows: Mapping[Slot, Decision]) -> dict[Slot, Decision]:
        """The rows of a table that may still run."""
        kept = dict(rows)
        for profile, is_open in zip(self._profiles, self.mask, strict=True):
            decision = kept.get(profile.slot, AUTO)
            if not is_open[config_of(decision)]:
                del kept[profile.slot]
        return kept

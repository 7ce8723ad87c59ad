"""A fault of NCCL that a table could bring into a job with registered buffers: NVIDIA/nccl#2389.

Over nodes a collective with Simple that follows one with LL on the same communicator can hang. The plugin closes what
it sees in one message. It does not see that another message runs with LL, while a table replaces LL128 by Simple.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from ...traces.queries.slots import SlotProfile, of_class
from ...traces.reasons import RowRefused, Why
from ...traces.records import PAIRS_OF, Decision, Slot
from ...traces.spaces import N_CHANNELS, N_PAIRS

Array = np.ndarray[Any, Any]


def _with_ll(events: pd.DataFrame, slot: Slot) -> set[int]:
    """The communicators of the slot's class, where some of its calls run LL over nodes; else none."""
    if slot.n_nodes < 2:
        return set()
    calls = of_class(events, slot)
    has_ll = (calls["proto"] == "ll").any()
    return set(calls["comm_id"]) if has_ll else set()


class Guard:
    """Which settings must not run in each slot. Buffers may be registered later, as by a first capture: then more."""

    def __init__(self, profiles: Sequence[SlotProfile], events: pd.DataFrame) -> None:
        """``events``: of all functions, in some default steps."""
        self._profiles = profiles
        self._ll = {profile.slot: _with_ll(events, profile.slot) for profile in profiles}
        self.slots = set[Slot]()  # in which Simple would newly follow LL

    def look(self, assembler: Any) -> list[Why]:
        """What has become dangerous since the last look: a reason for each slot."""
        registered = set[int]()
        for key, offer in assembler.offers.items():
            if offer.is_registered:
                registered.add(key[0])
        whys = []
        for profile in self._profiles:
            slot = profile.slot
            if slot in self.slots or profile.proto == "simple":
                continue
            if self._follows_ll(slot, registered, assembler):
                self.slots.add(slot)
                whys.append(RowRefused.AFTER_LL(slot=slot))
        return whys

    def _follows_ll(self, slot: Slot, registered: set[int], assembler: Any) -> bool:
        """Whether calls of the slot's class run LL over nodes, and a communicator of the class has registered buffers.
        It may be one that came later: a table's rows hold for the class."""
        here = self._ll[slot]
        if not here or not registered:
            return False
        known = getattr(assembler, "comms", {})
        for comm_id in registered:
            comm = known.get(comm_id)
            if comm_id in here:
                return True
            if comm is None:
                continue
            if comm.n_ranks == slot.n_ranks and comm.n_nodes == slot.n_nodes:
                return True
        return False

    def close(self, masks: Sequence[Array]) -> None:
        """Take Simple out of the masks, (1, N_CONFIGS) bool each, of these slots."""
        for profile, mask in zip(self._profiles, masks, strict=True):
            if profile.slot in self.slots:
                pairs = mask.reshape(N_PAIRS, N_CHANNELS)
                of_func = PAIRS_OF[profile.slot.func]
                simple = [pair for pair, (_, proto) in enumerate(of_func, 1) if proto == "simple"]
                pairs[simple] = False

    def may_run(self, slot: Slot, decision: Decision) -> bool:
        """Whether a row is not dangerous."""
        is_safe = slot not in self.slots
        return is_safe or decision.proto != "simple"

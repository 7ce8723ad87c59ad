"""What may make a step far too long is tried at few of a step's calls first: their times say whether all may run so.

A table that holds at about one call a step hardly makes it far too long, and how long such a call takes says what all
of them would do. So which config is to be feared is known before a step is at stake.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .belief import Belief
from .canary import GIVE_UP, Canary
from .windows import Plan

Array = np.ndarray[Any, Any]

#: What is likelier than this to make a step far too long is tried at single calls first, in slots that have so many in
#: a step; of what is likelier still one call may do it.
DARING, FEWEST, MAD = 0.01, 8, 0.7
#: Calls of each slot that such a window is to hold.
HEARD = 2


@dataclass
class FewCalls:
    """Of one search, whose are ``calls`` (s,) a step, the belief, the canary and ``tried`` (s, N_CONFIGS)."""

    calls: Array
    has_times: Array  # (s,) bool: times of the slot's calls are measured on this job
    belief: Belief
    canary: Canary
    tried: Array
    heard: Array  # (s, N_CONFIGS) bool: a time of single calls was measured, or is not needed
    silent: Array = field(init=False)  # (s, N_CONFIGS) bool: the last window at few calls gave no time

    def __post_init__(self) -> None:
        self.silent = np.zeros_like(self.heard)

    def took(self, configs: Array, is_timed: Array) -> None:
        """A window of few calls under configs (s,) has ended. Only a measured time (``is_timed`` (s,)) is evidence: a
        config without one never runs at all calls on the strength of this window."""
        slots = np.arange(len(configs))
        self.heard[slots, configs] |= is_timed
        self.silent[slots, configs] = ~is_timed

    def before(self, plan: Plan, in_force: Array) -> Plan:
        """The window that is to come before this one, in which what is daring of it runs at about one call a step;
        itself where nothing is. ``in_force`` (s,): configs that hold at all other calls."""
        pairs = enumerate(zip(plan.configs, in_force, strict=True))
        asked = np.array([config != own and self.is_daring(slot)[config] for slot, (config, own) in pairs])
        if not asked.any():
            return plan
        one_of, configs = math.ceil(self.calls[asked].max()), np.where(asked, plan.configs, in_force)
        n_steps = math.ceil(HEARD * one_of / self.calls[asked].min())
        return replace(plan, configs=configs, n_steps=n_steps, one_of=one_of, others=in_force.copy())

    def is_daring(self, slot: int) -> Array:
        """(N_CONFIGS,) bool: configs of a slot of which single calls are to be tried first."""
        can_tell = self.calls[slot] >= FEWEST and self.has_times[slot] and self.belief.has_calls
        is_new = can_tell & (self.tried[slot] == 0) & ~self.heard[slot]
        return np.asarray(is_new & (self.canary.risk(slot, self.belief, self.tried) > DARING))

    def risk(self, slot: int) -> Array:
        """(N_CONFIGS,) how likely a trial of each config of a slot is to make a step far too long."""
        at_all = self.canary.risk(slot, self.belief, self.tried)
        at_few = self.belief.too_long(slot, 1 + self.calls[slot] * (GIVE_UP - 1))
        is_cheap = self.is_daring(slot) & ~self.silent[slot] & (at_all < MAD)
        return np.where(is_cheap, np.minimum(at_all, at_few), at_all)

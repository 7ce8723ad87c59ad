"""Configs that make a step far too long: how likely each is to, and what it means when one did."""

from __future__ import annotations

from typing import Any

import numpy as np

from .belief import Belief

Array = np.ndarray[Any, Any]

#: A step that takes so many default steps ends its window.
GIVE_UP = 1.5
#: Standard deviation of the log time of one step that was far too long; and where something else was the likelier
#: cause: steps that save a checkpoint, or wait for a late rank, come about once in so many windows.
ONE_STEP, STRAGGLER, STRAY = 0.15, 2.0, 0.1
#: The blame for one step. A config with more makes each step far too long: a checkpoint would not come twice.
ONCE = 1.0001


def is_new(configs: Array, tried: Array) -> Array:
    """(s,) bool: which of these configs (s,) were never measured; AUTO is never new. ``tried`` (s, N_CONFIGS)."""
    return np.asarray((configs > 0) & (tried[np.arange(len(configs)), configs] == 0))


class Canary:
    """Of one search, whose are ``tried`` (s, N_CONFIGS), windows measured."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.blame = np.zeros(
            shape
        )  # of far too long steps, by how likely a cause a config was beside the others

    def struck(self, configs: Array, tried: Array, belief: Belief) -> bool:
        """A step was far too long: new configs share the blame. Returns whether one has that of more than one step."""
        new = np.flatnonzero(is_new(configs, tried))
        risks = np.array([belief.too_long(s, GIVE_UP)[configs[s]] + 1e-6 for s in new.tolist()])
        self.blame[new, configs[new]] += risks / risks.sum()
        return bool((self.blame[new, configs[new]] > ONCE).any())

    def noise(self, configs: Array, tried: Array, belief: Belief) -> float:
        """Of the log of a step that was far too long: less where that is these configs' doing rather than chance."""
        new = np.flatnonzero(is_new(configs, tried))
        is_likely = any(belief.too_long(s, GIVE_UP)[configs[s]] > STRAY for s in new.tolist())
        return ONE_STEP if is_likely or (self.blame[new, configs[new]] > 0).any() else STRAGGLER

    def risk(self, slot: int, belief: Belief, tried: Array) -> Array:
        """(N_CONFIGS,) how likely each config of a slot is to make a step far too long; 0 of what was measured."""
        likely = np.where(self.blame[slot] > ONCE, 1.0, belief.too_long(slot, GIVE_UP))
        return np.asarray(np.where(tried[slot] == 0, likely, 0.0))

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


def is_new(configs: Array, tried: Array) -> Array:
    """(s,) bool: which of these configs (s,) were never measured; AUTO is never new. ``tried`` (s, N_CONFIGS)."""
    return np.asarray((configs > 0) & (tried[np.arange(len(configs)), configs] == 0))


class Canary:
    """Of one search, whose are ``tried`` (s, N_CONFIGS), windows measured."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.hits = np.zeros(shape)

    def struck(self, configs: Array, tried: Array) -> bool:
        """A step was far too long. Returns whether it was so before with one of this window's new configs."""
        new = is_new(configs, tried)
        self.hits[np.flatnonzero(new), configs[new]] += 1
        return self.is_guilty(configs, tried)

    def is_guilty(self, configs: Array, tried: Array, often: int = 2) -> bool:
        """One of these configs (s,) has made a step far too long so often, and was never measured."""
        return bool((is_new(configs, tried) & (self.hits[np.arange(len(configs)), configs] >= often)).any())

    def noise(self, configs: Array, tried: Array, belief: Belief) -> float:
        """Of the log of a step that was far too long: less where that is these configs' doing rather than chance."""
        is_likely = (self.risk(s, belief, tried)[config] > STRAY for s, config in enumerate(configs))
        return ONE_STEP if self.is_guilty(configs, tried, 1) or any(is_likely) else STRAGGLER

    def risk(self, slot: int, belief: Belief, tried: Array) -> Array:
        """(N_CONFIGS,) how likely each config of a slot is to make a step far too long; 0 of what was measured."""
        likely = np.where(self.hits[slot] > 1, 1.0, belief.too_long(slot, GIVE_UP))
        return np.asarray(np.where(tried[slot] == 0, likely, 0.0))

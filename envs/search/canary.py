"""Configs that make a step far too long: how likely each is to, and what it means when one did."""

from __future__ import annotations

from typing import Any

import numpy as np

from .belief import Belief

Array = np.ndarray[Any, Any]

#: A step that takes so many default steps ends its window.
GIVE_UP = 1.5
#: Windows that a config may end by a step that was far too long. A checkpoint may end one, but not two.
MOST_ENDED = 1


def is_new(configs: Array, tried: Array) -> Array:
    """(s,) bool: which of these configs (s,) were never measured; AUTO is never new. ``tried`` (s, N_CONFIGS)."""
    return np.asarray((configs > 0) & (tried[np.arange(len(configs)), configs] == 0))


class Canary:
    """Of one search, whose are ``tried`` (s, N_CONFIGS), windows measured."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.ended = np.zeros(shape, np.int64)  # windows that a config ended as the likeliest cause

    def struck(self, configs: Array, tried: Array, belief: Belief) -> bool:
        """A step was far too long: the likeliest of the new configs is taken for the cause. Returns whether it was the
        cause before."""
        new = np.flatnonzero(is_new(configs, tried)).tolist()
        if not new:
            return False
        slot = max(new, key=lambda s: float(belief.too_long(s, GIVE_UP)[configs[s]]))
        self.ended[slot, configs[slot]] += 1
        return bool(self.ended[slot, configs[slot]] > MOST_ENDED)

    def risk(self, slot: int, belief: Belief, tried: Array) -> Array:
        """(N_CONFIGS,) how likely each config of a slot is to make a step far too long; 0 of what was measured."""
        likely = np.where(self.ended[slot] > MOST_ENDED, 1.0, belief.too_long(slot, GIVE_UP))
        return np.asarray(np.where(tried[slot] == 0, likely, 0.0))

"""Configs that make a step far too long: what is not tried for fear of it, and what goes no further after it."""

from __future__ import annotations

from typing import Any

import numpy as np

from .belief import Belief, too_long

Array = np.ndarray[Any, Any]

#: A step that takes so many default steps ends its window: what was new in it goes no further.
GIVE_UP = 1.5
#: Standard deviation of the log time of one step that was far too long; and where something else was the likelier
#: cause: steps that save a checkpoint, or wait for a late rank, come about once in so many windows.
ONE_STEP, STRAGGLER, STRAY = 0.15, 2.0, 0.1
#: A config whose step is so likely to be far too long is not tried.
RECKLESS = 0.35


class Canary:
    """Of one search, whose are ``tried`` (s, N_CONFIGS), windows measured, and ``banned``, configs closed for good."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.hits = np.zeros(shape)

    def struck(self, configs: Array, tried: Array, banned: Array) -> None:
        """A step was far too long: this window's new configs go no further where it happens again."""
        for s, config in enumerate(configs):
            if config and tried[s, config] == 0:
                self.hits[s, config] += 1
                banned[s, config] = self.hits[s, config] > 1

    def noise(self, configs: Array, tried: Array, belief: Belief) -> float:
        """Of the log of a step that was far too long: less where that is these configs' doing rather than chance."""
        again = any(self.hits[s, c] > 0 and tried[s, c] == 0 for s, c in enumerate(configs) if c)
        return ONE_STEP if again or too_long(GIVE_UP, *belief.saving(configs)) > STRAY else STRAGGLER

    @staticmethod
    def feared(belief: Belief, tried: Array, reckless: float = RECKLESS) -> Array:
        """(s, N_CONFIGS) bool: untried, and more likely than ``reckless`` to be far too long."""
        figures = [belief.figures(s) for s in range(len(tried))]
        mean, deviation = np.array([f[0] for f in figures]), np.array([f[1] for f in figures])
        return np.asarray((too_long(GIVE_UP, mean, deviation) > reckless) & (tried == 0))

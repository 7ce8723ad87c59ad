"""Rules on the belief over a job, nothing trained: expected improvement and Thompson sampling, a slot's turn at a time.

All speak SB3's ``predict`` on the observations of ``envs.search.turns``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...envs.search import turns
from ...traces.spaces import actions_of

Array = np.ndarray[Any, Any]


class ExpectedImprovement:
    """Run what promises most: ``foresight`` windows of the expected improvement over the best, less what the trial
    itself is expected to cost (Jones et al. 1998)."""

    def __init__(self, foresight: float = 20.0, least: float = 2e-4, risk: float = 0.3, later: float = 600.0) -> None:
        """``least``: expected improvement, as a part of the step, below which nothing is tried any more. ``risk``: how
        many standard deviations worse a config is taken to be. ``later``: the foresight after the verdict, when a trial
        is of one slot and holds up nothing; ``least`` is by so much less then."""
        self.foresight, self.least, self.risk, self.later = foresight, least, risk, later

    def predict(
        self, observation: Array, state: Any = None, episode_start: Array | None = None, deterministic: bool = True
    ) -> tuple[Array, Any]:
        """See ``envs.search.windows.Policy``."""
        seen = turns.seen(observation)
        later = seen.context["refining"][:, None] > 0.5
        foresight = np.where(later, self.later, self.foresight)
        worth = foresight * seen.worth + seen.ahead - self.risk * seen.learned
        is_known = (foresight * seen.worth <= self.foresight * self.least) | (later & seen.in_force)
        worth = np.where(seen.open & ~is_known, worth, -np.inf)
        best = np.where(seen.open, np.where(later, seen.in_force, seen.ahead), -np.inf).argmax(axis=1)
        pick = worth.argmax(axis=1)
        chosen = np.where(worth[np.arange(len(pick)), pick] > 0, pick, best)
        return actions_of(chosen if np.ndim(observation) == 2 else chosen[0]), state


class ThompsonSampling:
    """Run the best of one draw from the belief (Thompson 1933); the best mean once no draw is likely to beat it."""

    def __init__(self, seed: int = 0, least: float = 2e-4, calm: float = 1.0) -> None:
        """``calm`` divides the standard deviations of the draw."""
        self.rng, self.least, self.calm = np.random.default_rng(seed), least, calm

    def predict(
        self, observation: Array, state: Any = None, episode_start: Array | None = None, deterministic: bool = True
    ) -> tuple[Array, Any]:
        """See ``envs.search.windows.Policy``."""
        seen = turns.seen(observation)
        draw = seen.ahead + seen.learned * self.rng.standard_normal(seen.learned.shape) / self.calm
        worth = np.where(seen.open & ((seen.worth > self.least) | (seen.ahead >= 0)), draw, -np.inf)
        chosen = worth.argmax(axis=1)
        return actions_of(chosen if np.ndim(observation) == 2 else chosen[0]), state

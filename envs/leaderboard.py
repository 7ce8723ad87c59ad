"""The judge: what policies made of a suite, in figures, ranks and a page. It never imports ``agent``."""

from __future__ import annotations

from typing import Any

import numpy as np

from .arena import Played

Array = np.ndarray[Any, Any]

#: "Near the oracle": the slot costs at most this much more than under its best config.
NEAR = 0.02


def shares_of_gain(played: Played) -> dict[str, float]:
    """Part of the oracle's gain that the best config measured so far brings, over all tasks, after so many trials."""
    gain = played.oracle.mean(axis=1)
    got = played.best.mean(axis=1)
    return {str(k): round(float(got[k - 1] / gain[k - 1]), 4) for k in (1, 2, 4, 8, 16, 32, 64) if k <= len(gain)}


def trials_until_near(played: Played) -> Array:
    """(n,) windows until the best measured config is within NEAR of the oracle; 0: AUTO is; windows + 1: never."""
    near = played.gap <= NEAR
    first = np.where(near.any(axis=0), near.argmax(axis=0) + 1, len(near) + 1)
    # Before any trial AUTO is what a stop would commit; its saving is 0.
    auto = played.oracle[0] / np.maximum(1 - played.oracle[0], 0.05) <= NEAR
    return np.where(auto, 0, first)


def summary(played: Played) -> dict[str, Any]:
    """Figures of one entrant over all rows of an arena."""
    near = trials_until_near(played)
    regret = played.regret.sum(axis=0)
    return {
        "share_of_gain": shares_of_gain(played),
        "near_median": float(np.median(near)),
        "near_p90": float(np.percentile(near, 90)),
        "never_near": round(float((near > len(played.best)).mean()), 4),
        "regret": round(float(regret.mean()), 3),
        "regret_median": round(float(np.median(regret)), 3),
        "regret_p90": round(float(np.percentile(regret, 90)), 3),
        "worst_window": round(float((1 - played.expected).max()), 3),
        "decision_us": round(played.decision_us, 1),
    }

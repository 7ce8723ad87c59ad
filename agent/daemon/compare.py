"""Is one configuration faster than another? Paired, interleaved windows; ratios; bootstrap intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

RESAMPLES = 10_000


@dataclass(frozen=True)
class Comparison:
    """Speed-up of b over a: time of a / time of b, with a 95 % interval over the pairs."""

    speedup: float
    low: float
    high: float
    n_pairs: int

    def __str__(self) -> str:
        return f"{self.speedup:.3f} [{self.low:.3f}, {self.high:.3f}]"


def compare(a: Array, b: Array, seed: int = 0) -> Comparison:
    """Paired comparison of times ``a`` and ``b``, both (n,), any unit: geometric mean of a / b.

    The interval is the percentile bootstrap (Efron 1979) over pairs. Raises ValueError with fewer than 3 pairs.
    """
    logs = np.log(np.asarray(a, np.float64)) - np.log(np.asarray(b, np.float64))
    if len(logs) < 3:
        raise ValueError(f"a comparison needs at least 3 pairs, not {len(logs)}")
    draws = np.random.default_rng(seed).integers(0, len(logs), (RESAMPLES, len(logs)))
    means = logs[draws].mean(axis=1)
    low, high = np.exp(np.percentile(means, [2.5, 97.5]))
    return Comparison(float(np.exp(logs.mean())), float(low), float(high), len(logs))


@dataclass(frozen=True)
class Verdict:
    """What a run came to: intervals that hold however often the search looked (``envs.search.sequential``)."""

    tuned: Comparison  # default / table
    same: Comparison  # default / default, one window after the other
    default_ms: float
    tuned_ms: float

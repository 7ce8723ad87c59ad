"""The Gaussian of the belief, ``mean`` (m,) and ``cov`` (m, m): how it begins, and how a measurement changes it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ....traces.spaces import N_CONFIGS
from .prior import Prior

Array = np.ndarray[Any, Any]

#: Part of the prior's variances that is taken: they are those of a mixture of worlds, and few are as wild as the whole.
DOUBT = 0.7
#: Variance of the default's log step time at first: the few default steps give it within 1 %.
DEFAULT_VARIANCE = 1e-4
#: A step time further off than this many standard deviations counts for less: step times have heavy tails.
OUTLIER = 4.0
#: Rows of the covariance that are updated together, so that what is subtracted stays in the processor's cache.
ROWS = 64


def parts_of(arms: list[Array]) -> list[slice]:
    """Where the figures of each slot lie: its exposure, then the log times and the remaining effects of its configs
    (a,)."""
    parts = []
    start = 1  # after the default's step time
    for configs in arms:
        end = start + 1 + 2 * len(configs)
        parts.append(slice(start, end))
        start = end
    return parts


def begun(
    prior: Prior, features: Array, mask: Array, arms: list[Array], parts: list[slice]
) -> tuple[Array, Array]:
    """Mean and covariance before anything was measured; features and mask as of :class:`Prior`."""
    means, own, loadings = prior(features, mask)
    n_shared = prior.n_shared
    size = parts[-1].stop if parts else 1
    mean = np.zeros(size)
    cov = np.zeros((size, size))
    shared = np.zeros((size, n_shared))
    for slot, part in enumerate(parts):
        configs = arms[slot]
        exposure = [2 * N_CONFIGS]
        pick = np.concatenate([exposure, configs, N_CONFIGS + configs])
        mean[part] = means[slot, pick]
        shared[part] = loadings[slot, pick, :n_shared]
        alone = loadings[slot, pick, n_shared:]
        together = alone @ alone.T
        variances = np.diag(own[slot, pick])
        cov[part, part] = together + variances
    cov += shared @ shared.T
    cov *= DOUBT
    cov[0, 0] = DEFAULT_VARIANCE
    return mean, cov


def see_sum(
    mean: Array, cov: Array, at: Array, slopes: Array, miss: float, variance: float
) -> tuple[Array, float]:
    """A quantity with these slopes by the figures ``at`` (k,) was off by ``miss``. Returns the new mean, and by how
    many standard deviations it was off; ``cov`` is changed. An outlier counts for less."""
    cross = slopes @ cov[at]
    expected = max(float(cross[at] @ slopes), 0.0)
    off = miss / math.sqrt(expected + variance)
    outlier = off**2 / OUTLIER**2
    spread = expected + max(outlier, 1.0) * variance
    gain = cross / spread
    for first in range(0, len(gain), ROWS):
        rows = slice(first, first + ROWS)
        cov[rows] -= gain[rows, None] * cross
    return mean + gain * miss, off


def see_figures(mean: Array, cov: Array, at: Array, misses: Array, variances: Array) -> Array:
    """The figures ``at`` (k,) themselves were off by ``misses``. Returns the new mean; ``cov`` is changed."""
    cross = cov[at].T
    noise = np.diag(variances)
    spread = cross[at] + noise
    gain = np.linalg.solve(spread, cross.T).T
    cov -= gain @ cross.T
    found: Array = mean + gain @ misses
    return found

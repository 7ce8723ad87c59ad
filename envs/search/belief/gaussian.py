"""The Gaussian of the belief, ``mean`` (m,) and its covariance: how it begins, and how a measurement changes it."""

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
#: Changes of the covariance that are kept before they are subtracted, all in one product of matrices.
LATE = 32


class Covariance:
    """A matrix (m, m) from which each measurement subtracts a product of two vectors.

    To change all of it by each measurement took most of a search's time. So the vectors are kept, and what is read
    takes them into account.
    """

    def __init__(self, matrix: Array) -> None:
        self._matrix = matrix
        self._gain = np.empty((LATE, len(matrix)))
        self._cross = np.empty((LATE, len(matrix)))
        self._n = 0

    def whole(self) -> Array:
        """The matrix itself, (m, m). It may be changed until the next measurement."""
        if self._n:
            self._matrix -= self._gain[: self._n].T @ self._cross[: self._n]
            self._n = 0
        return self._matrix

    def between(self, first: Array, second: Array) -> Array:
        """(k,) of the figures ``first`` (k,) and ``second`` (k,), one by one."""
        gain, cross = self._gain[: self._n, first], self._cross[: self._n, second]
        found: Array = self._matrix[first, second] - (gain * cross).sum(axis=0)
        return found

    def block(self, at: slice | Array) -> Array:
        """(k, k) of the figures ``at``."""
        matrix = self._matrix[at, at] if isinstance(at, slice) else self._matrix[np.ix_(at, at)]
        found: Array = matrix - self._gain[: self._n, at].T @ self._cross[: self._n, at]
        return found

    def rows(self, at: Array) -> Array:
        """(k, m) of the figures ``at`` (k,) with all."""
        found: Array = self._matrix[at] - self._gain[: self._n, at].T @ self._cross[: self._n]
        return found

    def with_sum(self, at: Array, slopes: Array) -> Array:
        """(m,) of the sum of the figures ``at`` (k,), each times its slope, with all figures."""
        late = (slopes @ self._gain[: self._n, at].T) @ self._cross[: self._n]
        found: Array = slopes @ self._matrix[at] - late
        return found

    def add(self, figure: int, variance: float) -> None:
        """To a figure's variance."""
        self._matrix[figure, figure] += variance

    def subtract(self, gain: Array, cross: Array) -> None:
        """Subtract ``gain.T @ cross``; both (k, m)."""
        if self._n + len(gain) > LATE:
            self.whole()
        if len(gain) > LATE:
            self._matrix -= gain.T @ cross
            return
        new = slice(self._n, self._n + len(gain))
        self._gain[new], self._cross[new] = gain, cross
        self._n = new.stop


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
) -> tuple[Array, Covariance]:
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
    return mean, Covariance(cov)


def see_sum(
    mean: Array, cov: Covariance, at: Array, slopes: Array, miss: float, variance: float
) -> tuple[Array, float]:
    """A quantity with these slopes by the figures ``at`` (k,) was off by ``miss``. Returns the new mean, and by how
    many standard deviations it was off; ``cov`` is changed. An outlier counts for less."""
    cross = cov.with_sum(at, slopes)
    expected = max(float(cross[at] @ slopes), 0.0)
    off = miss / math.sqrt(expected + variance)
    outlier = off**2 / OUTLIER**2
    spread = expected + max(outlier, 1.0) * variance
    gain = cross / spread
    cov.subtract(gain[None], cross[None])
    return mean + gain * miss, off


def see_figures(mean: Array, cov: Covariance, at: Array, misses: Array, variances: Array) -> Array:
    """The figures ``at`` (k,) themselves were off by ``misses``. Returns the new mean; ``cov`` is changed."""
    cross = cov.rows(at)
    noise = np.diag(variances)
    spread = cross[:, at] + noise
    gain = np.linalg.solve(spread, cross)
    cov.subtract(gain, cross)
    found: Array = mean + misses @ gain
    return found

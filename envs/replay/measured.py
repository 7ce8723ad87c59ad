"""Measured collectives: between the points that were measured, interpolate; beyond them, follow the formula.

A Gaussian process in log time around a formula, over sizes and channels. (A plain latency-bandwidth fit misses public
curves by 15-33 % in the median.) Time and memory grow with cube and square of the points: more than MOST_POINTS
neighbours count as one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy import array, asarray, exp, exp2, isfinite, log, log2, maximum, median

Array = np.ndarray[Any, Any]
#: log us of (n_bytes (n,), n_channels (n,)).
Formula = Callable[[Array, Array], Array]
#: Bytes and channels of a measured point.
Key = tuple[int, int]

#: So many points are taken as they are: some 60 MB.
MOST_POINTS = 1000
#: Sizes an octave that are told apart where there are more points; the first that leaves few enough counts.
_PLACES = (16.0, 8.0, 4.0, 2.0, 1.0, 0.5, 0.25)

# Standard deviations (log us) and lengths (doublings) of the kernel; chosen by leave-one-out on public measurements.
_OFFSET = 1.0  # of all points
_SIZE = 0.8  # along message sizes
_SIZE_LENGTH = 4.0
_SLOPE = 1.0  # of a line along channel counts
_COUNT = 0.3  # along channel counts, beside that line
_COUNT_LENGTH = 3.0
_BOTH = 0.1  # along both together
_NOISE = 0.01  # of one point


def _kernel(a: Array, b: Array) -> Array:
    """Covariance of log residuals between points ``a`` (n, 2) and ``b`` (m, 2): log2 bytes, log2 channels."""
    size_distance = np.abs(a[:, 0, None] - b[:, 0])
    size = exp(-size_distance / _SIZE_LENGTH)
    counts = a[:, 1, None]
    other_counts = b[:, 1]
    count_distance = np.abs(counts - other_counts)
    count = exp(-count_distance / _COUNT_LENGTH)

    total = _OFFSET**2 + _SIZE**2 * size
    total = total + _SLOPE**2 * counts * other_counts
    total = total + _COUNT**2 * count
    total = total + _BOTH**2 * size * count
    return asarray(total)


def _points(keys: Array) -> Array:
    """Bytes and channels (n, 2) as the kernel reads them, in doublings."""
    return log2(maximum(keys, 1.0))


def _grouped(n_bytes: Array, n_channels: Array, us: Array) -> dict[Key, list[float]]:
    """Times by size and channel count."""
    found: dict[Key, list[float]] = defaultdict(list)
    points = zip(n_bytes, n_channels, us, strict=True)
    for size, count, time in points:
        key = int(size), int(count)
        found[key].append(float(time))
    return found


def _few(n_bytes: Array, n_channels: Array, us: Array) -> dict[Key, list[float]]:
    """The same; of too many points neighbouring sizes become one, so that at most about MOST_POINTS are left."""
    found = _grouped(n_bytes, n_channels, us)
    octaves = log2(maximum(asarray(n_bytes, float), 1.0))
    for places in _PLACES:
        if len(found) <= MOST_POINTS:
            break
        rounded = np.round(octaves * places)
        sizes = exp2(rounded / places)
        found = _grouped(np.round(sizes), n_channels, us)
    return found


class Measured:
    """Points of one collective under one algorithm and protocol; of equal points the median counts.

    ``n_bytes``, ``n_channels`` (1 throughout where unknown) and ``us`` are (n,). Raises ValueError for times that are
    not finite or not above 0.
    """

    def __init__(self, n_bytes: Array, n_channels: Array, us: Array, formula: Formula) -> None:
        us = asarray(us)
        is_time = (us > 0) & isfinite(us)
        if not len(us) or not is_time.all():
            raise ValueError("measured times must be finite and above 0, and at least one")
        found = _few(n_bytes, n_channels, us)
        self.known: dict[Key, float] = {}
        for key, values in sorted(found.items()):
            self.known[key] = float(median(values))
        self._formula = formula

        known = list(self.known)
        keys = array(known, float)
        times = [self.known[key] for key in known]
        self._at = _points(keys)
        expected = formula(keys[:, 0], keys[:, 1])
        self.misses = log(times) - expected  # by size
        noise = np.eye(len(keys))
        covariance = _kernel(self._at, self._at)
        covariance = covariance + _NOISE**2 * noise
        self._weights = np.linalg.solve(covariance, self.misses)

    def predict_us(self, n_bytes: int, n_channels: int) -> float:
        """Microseconds: the measured median at a measured point, else interpolated or extrapolated."""
        known = self.known.get((int(n_bytes), int(n_channels)))
        if known is not None:
            return known
        keys = array([[n_bytes, n_channels]], float)
        covariance = _kernel(_points(keys), self._at)
        residual = covariance @ self._weights
        expected = self._formula(keys[:, 0], keys[:, 1])
        us = exp(expected + residual)
        return float(us[0])

"""Measured collectives: between the points that were measured, interpolate; beyond them, follow the formula.

A set of points of one collective under one algorithm and protocol, over message sizes and channel counts, is a
Gaussian process in log time around a formula. With the exponential kernel below that is log-log interpolation between
neighbouring sizes, borrowing the shape along channels from sizes where more counts were measured. (A plain
latency-bandwidth fit misses public curves by 15-33 % in the median.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
#: log us of (n_bytes (n,), n_channels (n,)).
Formula = Callable[[Array, Array], Array]

# Standard deviations (log us) and lengths (doublings) of the kernel; chosen by leave-one-out on public measurements.
_OFFSET, _SIZE, _SIZE_LENGTH = 1.0, 0.8, 4.0
_SLOPE, _COUNT, _COUNT_LENGTH, _BOTH = 1.0, 0.3, 3.0, 0.1
_NOISE = 0.01


def _kernel(a: Array, b: Array) -> Array:
    """Covariance of log residuals between points ``a`` (n, 2) and ``b`` (m, 2): log2 bytes, log2 channels."""
    size = np.exp(-np.abs(a[:, None, 0] - b[None, :, 0]) / _SIZE_LENGTH)
    count = np.exp(-np.abs(a[:, None, 1] - b[None, :, 1]) / _COUNT_LENGTH)
    slope = _SLOPE**2 * a[:, None, 1] * b[None, :, 1]
    return np.asarray(_OFFSET**2 + _SIZE**2 * size + slope + _COUNT**2 * count + _BOTH**2 * size * count)


class Measured:
    """Points of one collective under one algorithm and protocol; of equal points the median counts.

    ``n_bytes``, ``n_channels`` (1 throughout where unknown) and ``us`` are (n,). Raises ValueError for times that are
    not finite or not above 0.
    """

    def __init__(self, n_bytes: Array, n_channels: Array, us: Array, formula: Formula) -> None:
        if not len(us) or (np.asarray(us) <= 0).any() or not np.isfinite(us).all():
            raise ValueError("measured times must be finite and above 0, and at least one")
        found: dict[tuple[int, int], list[float]] = defaultdict(list)
        for size, count, time in zip(n_bytes, n_channels, us, strict=True):
            found[int(size), int(count)].append(float(time))
        self.known = {key: float(np.median(values)) for key, values in sorted(found.items())}
        self._formula = formula
        keys, times = np.array(list(self.known), float), np.array(list(self.known.values()))
        self._at = np.log2(np.maximum(keys, 1.0))
        self.misses = np.log(times) - formula(keys[:, 0], keys[:, 1])  # by size
        covariance = _kernel(self._at, self._at) + _NOISE**2 * np.eye(len(keys))
        self._weights = np.linalg.solve(covariance, self.misses)

    def predict_us(self, n_bytes: int, n_channels: int) -> float:
        """Microseconds: the measured median at a measured point, else interpolated or extrapolated."""
        if (known := self.known.get((int(n_bytes), int(n_channels)))) is not None:
            return known
        keys = np.array([[n_bytes, n_channels]], float)
        residual = _kernel(np.log2(np.maximum(keys, 1.0)), self._at) @ self._weights
        return float(np.exp(self._formula(keys[:, 0], keys[:, 1]) + residual)[0])

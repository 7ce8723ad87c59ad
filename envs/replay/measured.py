"""Measured collectives: between the points that were measured, interpolate; beyond them, follow the formula.

A set of points of one collective under one algorithm and protocol, over message sizes and channel counts, is a
Gaussian process in log time around a formula: the fabric's where the cluster is known, else latency plus bytes over
bandwidth. With the exponential kernel below that is log-log interpolation between neighbouring sizes, borrowing the
shape along channels from sizes where more counts were measured. (A plain latency-bandwidth fit misses public curves
by 15-33 % in the median.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
#: log us of (n_bytes (n,), n_channels (n,)).
Formula = Callable[[Array, Array], Array]

# Standard deviations (log us) and lengths (doublings) of the kernel; chosen by leave-one-out on public measurements.
_OFFSET, _SIZE, _SIZE_LENGTH = 1.0, 0.8, 4.0
_SLOPE, _COUNT, _COUNT_LENGTH, _BOTH = 1.0, 0.3, 3.0, 0.1
_NOISE = 0.01


def line(n_bytes: Array, us: Array) -> Formula:
    """Latency + bytes / bandwidth through points, by least squares of relative errors; both terms at least 0."""
    columns = np.stack([1.0 / us, n_bytes / us], axis=1)
    best: tuple[float, Array] = (np.inf, np.array([float(np.median(us)), 0.0]))
    for used in ([0, 1], [0], [1]):
        found = np.linalg.lstsq(columns[:, used], np.ones(len(us)), rcond=None)[0]
        if (found < 0).any():
            continue
        both = np.zeros(2)
        both[used] = found
        error = float(((columns @ both - 1.0) ** 2).sum())
        if error < best[0]:
            best = error, both
    latency, per_byte = best[1]
    return lambda b, _: np.log(np.maximum(latency + per_byte * b, 1e-9))


def _kernel(a: Array, b: Array) -> Array:
    """Covariance of log residuals between points ``a`` (n, 2) and ``b`` (m, 2): log2 bytes, log2 channels."""
    size = np.exp(-np.abs(a[:, None, 0] - b[None, :, 0]) / _SIZE_LENGTH)
    count = np.exp(-np.abs(a[:, None, 1] - b[None, :, 1]) / _COUNT_LENGTH)
    slope = _SLOPE**2 * a[:, None, 1] * b[None, :, 1]
    return np.asarray(_OFFSET**2 + _SIZE**2 * size + slope + _COUNT**2 * count + _BOTH**2 * size * count)


@dataclass
class Measured:
    """Points of one collective under one algorithm and protocol; equal points are averaged (median)."""

    n_bytes: Array  # (n,)
    n_channels: Array  # (n,); 1 throughout where unknown
    us: Array  # (n,)
    formula: Formula | None = None  # None: latency and bandwidth fitted to the points
    known: dict[tuple[int, int], float] = field(init=False)

    def __post_init__(self) -> None:
        if not len(self.us) or (np.asarray(self.us) <= 0).any() or not np.isfinite(self.us).all():
            raise ValueError("measured times must be finite and above 0, and at least one")
        found: dict[tuple[int, int], list[float]] = defaultdict(list)
        for b, c, us in zip(self.n_bytes, self.n_channels, self.us, strict=True):
            found[int(b), int(c)].append(float(us))
        self.known = {key: float(np.median(values)) for key, values in sorted(found.items())}
        keys = np.array(list(self.known), float)
        self._at = np.log2(np.maximum(keys, 1.0))
        times = np.array(list(self.known.values()))
        self._mean = self.formula or line(keys[:, 0], times)
        miss = np.log(times) - self._mean(keys[:, 0], keys[:, 1])
        self._weights = np.linalg.solve(_kernel(self._at, self._at) + _NOISE**2 * np.eye(len(keys)), miss)

    def predict_us(self, n_bytes: int, n_channels: int) -> float:
        """Microseconds: the measured median at a measured point, else interpolated or extrapolated."""
        known = self.known.get((int(n_bytes), int(n_channels)))
        return known if known is not None else float(self._predict(np.array([[n_bytes, n_channels]], float))[0])

    def _predict(self, keys: Array) -> Array:
        at = np.log2(np.maximum(keys, 1.0))
        return np.asarray(np.exp(self._mean(keys[:, 0], keys[:, 1]) + _kernel(at, self._at) @ self._weights))

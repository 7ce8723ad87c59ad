"""Of the normal distribution what a search asks, without overhead, which counts here."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def within(x: Array, low: float, high: float) -> Array:
    """np.clip without its overhead."""
    return np.minimum(np.maximum(x, low), high)


def above(u: Array) -> Array:
    """Probability of more than ``u`` standard deviations: Bowling et al. 2009 (a logistic of a cubic), within 2e-4."""
    return np.asarray(1 / (1 + np.exp(within(u * (1.5976 + 0.07056 * u * u), -40.0, 40.0))))


def expected_improvement(ahead: Array, deviation: Array) -> Array:
    """E[max(x, 0)] for x normal with mean ``ahead`` and standard deviation ``deviation``."""
    deviation = np.maximum(deviation, 1e-9)
    u = ahead / deviation
    density = np.exp(-0.5 * u * u) / math.sqrt(2 * math.pi)
    return np.asarray(np.maximum(ahead * above(-u) + deviation * density, 0.0))

"""Step times of a window: their trimmed mean, and how noisy it is."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np

from .config import CLIP, NOISE_LEAST, NOISE_STEPS, SearchConfig

Array = np.ndarray[Any, Any]

#: Part of a window's steps that is cut off at each end: one of five steps, two of ten.
TRIMMED = 5
#: A normal distribution's standard deviation over its median absolute deviation.
ROBUST = 1.4826
#: Noise of a window (log) if fewer steps than this were seen; a typical training job has less.
UNKNOWN_NOISE, FEWEST_STEPS = 0.02, 4
#: No window is steadier than this (log): the clock and the scheduler are not.
LEAST_NOISE = 5e-4
#: The robust deviation is at least this part of the plain one: half of the steps may be equal by rounding.
PLAIN_PART = 0.5
#: Smallest deviation of single steps (log), and smallest variance: both keep divisions finite.
TINY_DEVIATION, TINY_VARIANCE = 1e-4, 1e-12
#: Largest autocorrelation that is believed: estimates above come from few steps.
MOST_CORRELATION = 0.95


def trimmed_mean(durations: Array) -> float:
    """Step time of a window: the mean without its extremes (one at each end of five steps, two of ten, ...).

    A median would jump between the modes of a job whose steps have two; a plain mean follows one straggler.
    """
    ordered = sorted(durations.tolist())  # faster than an array for a handful of steps
    cut = len(ordered) // TRIMMED
    kept = ordered[cut : len(ordered) - cut]
    return sum(kept) / len(kept)


def shortest_counted(durations: Array) -> float:
    """The shortest step that :func:`trimmed_mean` counts: nearly all steps took at least this."""
    cut = len(durations) // TRIMMED
    return float(np.partition(durations, cut)[cut])


def median(x: Array) -> float:
    """np.median of a vector without its overhead, which counts here."""
    ordered = np.sort(x)
    low = ordered[(len(x) - 1) // 2]
    high = ordered[len(x) // 2]
    return float((low + high) / 2)


def window_noise(logs: Array, n_steps: int) -> float:
    """Standard deviation of a window's log step time, from the logs of single steps in their order.

    Neighbouring steps are correlated: the variance of a mean of n is that of one times (1 + 2 sum r_k (1 - k / n)) / n,
    with the autocorrelation of a first-order process. Robust against stragglers; never below 0.05 %.
    """
    x = np.asarray(logs, np.float64)
    if len(x) < FEWEST_STEPS:
        return UNKNOWN_NOISE
    x = x - median(x)
    scale = ROBUST * median(np.abs(x))
    scale = max(scale, PLAIN_PART * float(np.std(x)), TINY_DEVIATION)
    x = np.clip(x, -CLIP * scale, CLIP * scale)
    squares = float((x**2).mean())
    variance = squares * len(x) / (len(x) - 1)
    neighbours = (x[1:] * x[:-1]).mean()
    r = float(np.clip(neighbours / max(squares, TINY_VARIANCE), 0.0, MOST_CORRELATION))
    lags = np.arange(1, n_steps)
    together = 1 + 2 * float((r**lags * (1 - lags / n_steps)).sum())
    return max(math.sqrt(variance * together / n_steps), LEAST_NOISE)


class NoiseEstimate:
    """The noise of this job's windows, from its last single steps. It stays when the job changes."""

    def __init__(self) -> None:
        self._logs: deque[float] = deque(maxlen=NOISE_STEPS)  # of single steps against their window's
        self.window_steps = 0
        self.of_window = 0.0  # standard deviation of a window's log step time

    def begin(self, step_ms: Array, config: SearchConfig) -> None:
        """Take in default steps and choose the length of windows: the shortest that is steady enough."""
        self._logs.extend(np.log(step_ms / trimmed_mean(step_ms)))
        fewest, most = config.window_steps
        fits = (n for n in range(fewest, most) if self.of(n) <= config.good_noise)
        self.window_steps = next(fits, most)
        self.of_window = self.of(self.window_steps)

    def add(self, logs: Array) -> None:
        """Take in the logs of a window's steps."""
        if len(logs) < NOISE_LEAST:
            return
        self._logs.extend(logs - median(logs))
        self.of_window = self.of(self.window_steps)

    def of(self, n_steps: int) -> float:
        """Standard deviation of the log step time of a window of this many steps."""
        return window_noise(np.array(self._logs), n_steps)

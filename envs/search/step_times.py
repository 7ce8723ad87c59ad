"""Step times: their trimmed mean, and how noisy it is; what turns of two tables show; the default's calls.

In *turns* two tables alternate, so that noise that lasts longer than a turn cancels in their difference. A *turn* is a
step, or a few, under one table. A *quad* is four turns: A B B A, or B A A B. A is the current table, B
the one that is tried. The mean log step time of A's turns less that of B's is one observation: a linear drift cancels
in it, and so does a rhythm of two steps. On 536 public series of real nodes the error of such a difference is 2.5 to
4.6 times smaller than between two stretches of five to ten steps.

A part of a table's effect may carry over into the next step, such as a prefetched gather. Then B after A differs from B
after B. Turns of two steps, the first of which does not count, are free of it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from .config import ABORT, CLIP, KNOWN_QUADS, NOISE_LEAST, NOISE_STEPS, SearchConfig
from .interfaces import PATTERN, QUAD

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
    plain = float(np.std(x))
    x = _clipped(x, plain)
    squares = float((x**2).mean())
    variance = squares * len(x) / (len(x) - 1)
    neighbours = (x[1:] * x[:-1]).mean()
    correlation = neighbours / max(squares, TINY_VARIANCE)
    r = float(np.clip(correlation, 0.0, MOST_CORRELATION))
    lags = np.arange(1, n_steps)
    weights = 1 - lags / n_steps
    together = 1 + 2 * float((r**lags * weights).sum())
    of_mean = variance * together / n_steps
    return max(math.sqrt(of_mean), LEAST_NOISE)


def _clipped(values: Array, plain: float) -> Array:
    """Values around 0 without what lies beyond CLIP robust standard deviations; ``plain``: the plain one."""
    robust = ROBUST * median(np.abs(values))
    scale = max(robust, PLAIN_PART * plain, TINY_DEVIATION)
    most = CLIP * scale
    return np.clip(values, -most, most)


@dataclass(frozen=True)
class Quads:
    """What ``q`` whole quads show; logs of ratios of step times."""

    ratios: Array  # (q,) the current table's step over the tried one's: above 0 the tried one is faster; one more of a
    # quad that a step of the tried table has ended
    apart: Array  # (2 q,) two turns of one table within a quad, scaled to the standard deviation of a ratio
    carried: Array  # (q,) part of a ratio that carries over into the next step
    same: Array  # (q,) of `apart` the current table's: a ratio of that table to itself

    @classmethod
    def single(cls, ratio: float) -> Quads:
        """Of turns that ended before a whole quad."""
        none = np.zeros(0)
        return cls(np.array([ratio]), none, none, none)

    @classmethod
    def of(cls, step_ms: Array, arms: Array, turn_steps: int, has_ended: bool = False) -> Quads:
        """From the steps (k,) of a plan with turns, see :class:`interfaces.Measured`. A quad that is not whole is left
        out, unless its last step has ended it (``has_ended``): a long step of the tried table counts as one of the
        current table does. Else a job with a heavy tail would seem to gain by any table."""
        size = QUAD * turn_steps
        n_quads = len(step_ms) // size
        whole = n_quads * size
        shape = n_quads, QUAD, turn_steps
        logs = np.log(step_ms[:whole])
        logs = logs.reshape(shape)
        ran = np.reshape(arms[:whole], shape)
        if turn_steps > 1:  # the first step holds some of the turn before
            logs = logs[:, :, 1:]
        begins = ran[:, :1, :1]
        is_first = PATTERN[None, :, None] == 0
        expected = np.where(is_first, begins, 1 - begins)
        as_expected = (ran == expected) & (ran >= 0)
        is_whole = as_expected.all(axis=(1, 2))
        sign = 1.0 - 2.0 * begins[is_whole, 0, 0]
        turns = logs[is_whole].mean(axis=2)
        first, second, third, fourth = turns.T
        outer = first + fourth
        inner = second + third
        ratios = sign * (outer - inner) / 2
        earlier = first + second
        later = third + fourth
        carried = sign * (earlier - later) / 2
        apart = np.concatenate([first - fourth, second - third]) / math.sqrt(2)
        same = np.where(sign > 0, *np.split(apart, 2))
        if has_ended:
            ratios = np.append(ratios, cls._ended(step_ms, arms, whole))
        return cls(ratios, apart, carried, same)

    @staticmethod
    def _ended(step_ms: Array, arms: Array, whole: int) -> Array:
        """(1,) the ratio of a quad of which the last step is the tried table's, its other turns taken to be alike; (0,)
        if that step is in a whole quad, or no step of the current table is there to compare it with."""
        is_current = arms == 0
        in_quad = is_current.copy()
        in_quad[:whole] = False
        which = in_quad if in_quad.any() else is_current
        if len(step_ms) == whole or not which.any():
            return np.zeros(0)
        beside = step_ms[which]
        ratio = math.log(median(beside) / step_ms[-1])
        return np.array([ratio / 2])

    @property
    def ratio(self) -> float:
        """The median, which a long step does not move."""
        return float(np.median(self.ratios))


def deviation_of(values: Array) -> float:
    """Standard deviation of values around 0, robust against stragglers; never below 0.05 %."""
    plain = _root_mean_square(values)
    near = _clipped(values, plain)
    return max(_root_mean_square(near), LEAST_NOISE)


def _root_mean_square(values: Array) -> float:
    squares = values**2
    return math.sqrt(float(squares.mean()))


class NoiseEstimate:
    """The noise of this job's windows and quads, from its last steps. It stays when the job changes."""

    def __init__(self) -> None:
        self._logs: deque[float] = deque(maxlen=NOISE_STEPS)  # of single steps against their window's
        self._apart: deque[float] = deque(maxlen=NOISE_STEPS)  # see Quads
        self._is_long = False  # they are of long turns
        self._quad = UNKNOWN_NOISE  # standard deviation of a quad's log ratio
        self.quads = 1  # of a table that is tried
        self.window_steps = 0
        self.of_window = 0.0  # standard deviation of a window's log step time

    def begin(self, step_ms: Array, config: SearchConfig) -> None:
        """Take in default steps and choose the length of windows: the shortest that is steady enough."""
        usual_ms = trimmed_mean(step_ms)
        self._logs.extend(np.log(step_ms / usual_ms))
        fewest, most = config.window_steps
        fits = (n for n in range(fewest, most) if self.of(n) <= config.good_noise)
        steps = next(fits, most)
        self.window_steps = steps
        self.of_window = self.of(steps)
        self._begin_quads(step_ms, config)

    def _begin_quads(self, step_ms: Array, config: SearchConfig) -> None:
        """Every four default steps in a row are a quad of the default with itself."""
        if self._is_long:
            self._apart.clear()
            self._is_long = False
        n_quads = len(step_ms) - QUAD + 1
        for first in range(n_quads):
            four_ms = step_ms[first : first + QUAD]
            quads = Quads.of(four_ms, PATTERN, 1)
            self.add_quads(quads)
        self._choose_quads(config)

    def lengthen(self, turn_steps: int, config: SearchConfig) -> None:
        """Turns are longer from now on. Before a quad of them was seen, a turn is taken to be as noisy as so many steps
        together."""
        self._is_long = True
        self._apart.clear()
        self._apart.extend([self.of(turn_steps)] * int(KNOWN_QUADS))
        self._quad = self.of(turn_steps)
        self._choose_quads(config)

    def _choose_quads(self, config: SearchConfig) -> None:
        fewest, most = config.try_quads
        good = config.good_noise * math.sqrt(2)
        self.quads = fewest
        while self.quads < most and self.of_quads(self.quads) > good:
            self.quads += 1

    def add_quads(self, quads: Quads) -> None:
        """Take in the scatter of quads."""
        self._apart.extend(quads.apart)
        if self._apart:
            self._quad = deviation_of(np.array(self._apart))

    def of_quads(self, n: int) -> float:
        """Standard deviation of the mean log ratio of so many quads."""
        return self._quad / math.sqrt(n)

    def add(self, logs: Array) -> None:
        """Take in the logs of a window's steps."""
        if len(logs) < NOISE_LEAST:
            return
        self._logs.extend(logs - median(logs))
        self.of_window = self.of(self.window_steps)

    def usual_ms(self, step_ms: Array) -> float:
        """Step time of a window, which a long step does not move. Of a few steps :func:`trimmed_mean` cuts none off, so
        those that are clearly longer than the shortest are left out: for the noise of a step, or as too slow."""
        if len(step_ms) < TRIMMED:
            apart = math.sqrt(2) * self.of(1)
            by_noise = math.exp(CLIP * apart)
            longest_ms = step_ms.min() * min(by_noise, ABORT)
            step_ms = step_ms[step_ms <= longest_ms]
        return trimmed_mean(step_ms)

    def of(self, n_steps: int) -> float:
        """Standard deviation of the log step time of a window of this many steps."""
        return window_noise(np.array(self._logs), n_steps)


class DefaultCalls:
    """Mean log times (s,) of the slots' calls under the default."""

    def __init__(self, call_us: Array) -> None:
        self.logs = np.log(call_us)
        self._windows = np.ones(len(call_us))

    def changed(self, call_us: Array) -> None:
        """The job has changed: what was measured before counts no more."""
        self.logs = np.log(call_us)
        self._windows = np.ones(len(call_us))

    def add(self, logs: Array, is_default: Array) -> None:
        """Log times (s,) of a window, in the slots that ran the default (s,)."""
        known = is_default & np.isfinite(logs)
        is_first = known & np.isnan(self.logs)
        self._windows += known & ~is_first
        before = np.where(is_first, logs, self.logs)
        self.logs = before + np.where(known, (logs - before) / self._windows, 0.0)

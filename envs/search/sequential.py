"""One test for every comparison of two tables: confirm, roll back, close, watch. It may be looked at after every pair.

Pairs of neighbouring windows, one under each table, give log ratios of step times. Their running mean gets a
confidence sequence: an interval that holds the true mean at *all* times at once with probability 1 - alpha, however
often one looks and whatever makes one stop (the normal mixture of Robbins 1970, as in Howard et al. 2021,
"Time-uniform, nonparametric, nonasymptotic confidence sequences", section 3.2). Step times are not normal: ratios far
from the middle are pulled in (a straggler is no evidence), and the noise is that of this very job, with room for what
is not known of it. ``tests/envs/search/test_sequential.py`` measures how often it is wrong on noise that lasts, has
heavy tails or two paces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

#: The chance that a comparison is ever wrong about its sign.
ALPHA = 0.05
#: Each new search of a job that changes is one more chance for luck: after one that found nothing the next has so much
#: of its level, so that all together have 4/3 of the first's.
AGAIN = 0.25
#: Pairs at which the interval is narrowest for its level.
TUNED_FOR = 4.0
#: Ratios further from the middle than so many standard deviations are pulled in to there.
CLIP = 3.0
#: What is assumed beyond the measured noise, because it is measured from few windows and windows are not independent.
ROOM = 1.25
#: Noise of a pair that is large. Such noise tends to last, and within windows it seems half of what it is: no table is
#: taken before SOONEST pairs (no trial ever: a slow spell may last for two), and MORE_ROOM / pairs is assumed beyond.
LOUD, SOONEST, MORE_ROOM = 0.02, 4, 2.0
#: A table is promising when its mean is so many standard errors above 0, and then gets MORE times as many pairs.
LIKELY, MORE = 1.0, 2.5
#: A step that takes so many times what others do counts for no more: what is longer is the job's own, a checkpoint.
LONGEST_STEP = 3.0
#: What a long step that has not been seen yet may cost, in steps.
LONG_STEP = 2.0
#: So many pairs' worth of evidence is what the noise measured before the comparison counts for.
KNOWN_PAIRS = 6.0


def half_width(n: float, alpha: float = ALPHA) -> float:
    """Of the confidence sequence of a mean of ``n`` observations with standard deviation 1; infinite for none."""
    if n <= 0:
        return math.inf
    level = 2 * math.log(1 / alpha) + math.log(1 + 2 * math.log(1 / alpha))
    rho = TUNED_FOR / level
    return math.sqrt((n + rho) * math.log((n + rho) / (rho * alpha**2))) / n


@dataclass
class Race:
    """The comparison of a table with a reference. ``noise``: standard deviation of the log ratio of one pair, from
    what was measured before."""

    noise: float
    alpha: float = ALPHA
    logs: list[float] = field(default_factory=list)  # log(reference / table): above 0 the table is faster
    kept: tuple[int, float, float] = field(default=(0, 0.0, 0.0), init=False)  # pairs, their mean and sigma

    def add(self, reference_ms: float, table_ms: float) -> None:
        """One pair of windows."""
        self.logs.append(math.log(reference_ms / table_ms))

    @property
    def n(self) -> int:
        """Pairs so far."""
        return len(self.logs)

    @property
    def sigma(self) -> float:
        """Standard deviation of one pair: what was known before and what the pairs show."""
        return self._worked_out()[1]

    @property
    def mean(self) -> float:
        """Mean log ratio, far ones pulled in."""
        return self._worked_out()[0]

    def _worked_out(self) -> tuple[float, float]:
        """:attr:`mean` and :attr:`sigma`, once for all that ask between two pairs."""
        if not self.n:
            return 0.0, self.noise
        if self.kept[0] != self.n:
            x = np.array(self.logs)
            away = np.abs(x - (middle := median(x)))
            # Squares of a heavy tail mislead as its values do: nothing counts for more than CLIP robust deviations.
            scatter = float((np.minimum(away, CLIP * max(1.4826 * median(away), self.noise)) ** 2).sum())
            sigma = math.sqrt((KNOWN_PAIRS * self.noise**2 + scatter) / (KNOWN_PAIRS + self.n - 1))
            self.kept = self.n, float(np.clip(x, middle - CLIP * sigma, middle + CLIP * sigma).mean()), sigma
        return self.kept[1:]

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of the true mean log ratio that hold at all times."""
        room = ROOM + (MORE_ROOM / max(self.n, 1) if self.noise >= LOUD else 0.0)
        mean, width = self.mean, room * self.sigma * half_width(self.n, self.alpha)
        return mean - width, mean + width

    def verdict(
        self, pairs: float, least: float, known: float | None = None, soonest: int = 2
    ) -> bool | None:
        """Whether the table is to be taken, None: not known yet. ``pairs``: after which it is not worth many more;
        ``least``: gain that is worth a table; ``known``: lower bound of what the reference itself gains over the
        default, None where it is the default; ``soonest``: pairs before it is taken, where noise is not LOUD."""
        low, high = self.interval
        if low > 0:
            return True if self.n >= (soonest if self.noise < LOUD else SOONEST) else None
        if high < least:
            return False
        if self.n < pairs:
            return None
        # Not sure yet. What is but an improvement of a table that is confirmed may be taken on less, as long as the two
        # comparisons together are sure of a gain over the default; else a promising table gets more pairs.
        promising = self.mean > LIKELY * self.sigma / math.sqrt(self.n)
        if promising and known is not None and known + low > 0:
            return True
        return None if promising and self.n < MORE * pairs else False


class LongSteps:
    """What long steps cost under each table that ran: :func:`middle` leaves them out, and a config that makes one step
    in 200 twice as long would seem as fast as it is in all others.

    They are too rare to be tested for in a comparison of a hundred steps. So a table has to be so much faster that one
    long step more would not make it slower than the default: the less it gains, the longer it runs before it is
    confirmed, and what is lost by that is the gain of those steps, LONG_STEP in all at most. A table whose long steps
    cost twice what it gains comes through in one case of 5 where they take three times as long, in one of 25 where
    twice (a random walk that falls, and a level that it must reach: Wald 1945). In force it runs for thousands of
    steps, and goes where it is slower for sure. Long steps that are the job's own strike the default as well.
    """

    def __init__(self) -> None:
        self.seen: dict[
            bytes, Array
        ] = {}  # of a table: steps, their excess over the middle in steps, its squares

    def add(self, configs: Array, step_ms: Array, usual_ms: float) -> None:
        """A window under configs (s,); ``usual_ms``: what most of its steps took."""
        excess = np.minimum(step_ms / usual_ms, LONGEST_STEP) - 1
        self.seen[configs.tobytes()] = self._of(configs) + np.array(
            [len(excess), excess.sum(), (excess**2).sum()]
        )

    def _of(self, configs: Array) -> Array:
        return self.seen.get(configs.tobytes(), np.zeros(3))

    def gain(self, table: Array, reference: Array, gain: float, more: float = 0.0) -> float:
        """What a table (s,) gains over the reference (s,) with long steps, and ``more`` steps of them in the table,
        that gains ``gain`` without."""
        n, excess, _ = self._of(table)
        m, usual, _ = self._of(reference)
        cost = (excess + more) / max(n, 1)
        return float(gain - cost + usual / max(m, 1))

    def allows(self, table: Array, reference: Array, gain: float) -> bool:
        """Whether the table may take the reference's place. What replaces a table that was confirmed has only to be no
        slower than that: it is a little faster at most, and few steps are left to tell."""
        return self.gain(table, reference, gain, 0.0 if reference.any() else LONG_STEP) > 0

    def forbids(self, table: Array, reference: Array, gain: float) -> bool:
        """Whether the table is slower for sure: by three standard errors, one long step more of the reference's in
        them. Looked at after every window: 150 clean default steps are needed to blame 4 % on a table."""
        (n, _, squares), (m, _, others) = self._of(table), self._of(reference)
        error = math.sqrt(squares / max(n, 1) ** 2 + (others + LONG_STEP**2) / max(m, 1) ** 2)
        return self.gain(table, reference, gain) < -3 * error


def middle(durations: Array) -> float:
    """Step time of a window: the mean without its extremes (one at each end of five steps, two of ten, ...).

    A median would jump between the modes of a job whose steps have two; a mean follows one straggler.
    """
    x = sorted(durations.tolist())  # of a handful, quicker than an array is
    cut = len(x) // 5
    return sum(x[cut : len(x) - cut]) / (len(x) - 2 * cut)


def least(durations: Array) -> float:
    """What nearly all steps of a window took at least: the shortest that :func:`middle` counts."""
    return float(np.partition(durations, len(durations) // 5)[len(durations) // 5])


def median(x: Array) -> float:
    """np.median of a vector without its overhead, which counts here."""
    ordered = np.sort(x)
    return float((ordered[(len(x) - 1) // 2] + ordered[len(x) // 2]) / 2)


def window_noise(logs: Array, n_steps: int) -> float:
    """Standard deviation of a window's log step time, from the logs of single steps in their order.

    Neighbouring steps go together: the variance of a mean of n is that of one times (1 + 2 sum r_k (1 - k / n)) / n,
    with the autocorrelation taken as that of a first-order process. Robust against stragglers; never below 0.05 %.
    """
    x = np.asarray(logs, np.float64)
    if len(x) < 4:
        return 0.02
    x = x - median(x)
    scale = 1.4826 * median(np.abs(x))
    scale = max(scale, 0.5 * float(np.std(x)), 1e-4)
    x = np.clip(x, -CLIP * scale, CLIP * scale)
    variance = float((x**2).mean()) * len(x) / (len(x) - 1)
    r = float(np.clip((x[1:] * x[:-1]).mean() / max(float((x**2).mean()), 1e-12), 0.0, 0.95))
    k = np.arange(1, n_steps)
    together = 1 + 2 * float((r**k * (1 - k / n_steps)).sum())
    return max(math.sqrt(variance * together / n_steps), 5e-4)

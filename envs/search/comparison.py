"""The only place that decides whether one table is faster than another.

A :class:`Comparison` collects quads: four turns of the two tables, see step_times.py. Their log ratios get a confidence
sequence: an interval that holds the true mean at *all* times at once with probability 1 - level, no matter how often it
is checked and why it stops (the normal mixture of Robbins 1970). The noise is that of this job, and known as well as
so many quads tell: so the mixture is Student's (Lai 1976; Wang and Ramdas 2023, "Anytime-valid t-tests"), wide at first
and the normal one in the end. Step times are not normal: outliers are pulled in. Quads follow each other at once, so
what is left of the noise may be common to neighbours: the deviation grows by their correlation. :class:`LongSteps` adds
what outliers leave out. A job has many comparisons, and one promise: :func:`level_of` shares it among them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .config import (
    ALPHA,
    AT_ONCE,
    CARRIED_ERRORS,
    CHECK_QUADS,
    CLIP,
    HOPE,
    KNOWN_QUADS,
    LONG_STEP,
    LONG_STEP_ERRORS,
    LONGEST_STEP,
    PLAIN,
    PROOF,
    SEEN_QUADS,
    TUNED_FOR,
    WATCH_KNOWN,
    WATCH_TUNED_FOR,
)
from .interfaces import Measured, Plan
from .step_times import ROBUST, Quads, median

Array = np.ndarray[Any, Any]

#: What has become of a comparison.
OPEN, ADOPTED, REJECTED = "open", "kept", "lost"


def level_of(number: int) -> float:
    """Level of the interval of a job's first, second, ... comparison since it last adopted a table, ``number`` from 1.

    The chances that the intervals ever miss, ALPHA / (k (k + 1)) for k = 1, 2, ..., sum to ALPHA: at most as often a
    job in which nothing can gain ever adopts a table, however long it is searched (Bonferroni). The first comparison,
    of what the policy thinks best, has half of it.
    """
    return ALPHA / (number * (number + 1))


def half_width(n: float, level: float, tuned_for: float = TUNED_FOR, known: float = KNOWN_QUADS) -> float:
    """Of the confidence sequence of a mean of ``n`` observations, in their standard deviations as estimated from them
    and from ``known`` ones before. It is narrowest, for its level, at about ``tuned_for`` observations; infinite as
    long as there are too few for the level."""
    if n <= 0:
        return math.inf
    tail = 2 * math.log(1 / level)
    rho = tuned_for / (tail + math.log(1 + tail))
    part = n / (n + rho)
    log_odds = math.log((n + rho) / (rho * level**2))
    needed = -math.expm1(-log_odds / (known + n))
    if part <= needed:
        return math.inf
    return math.sqrt((known + n - 1) * needed / ((part - needed) * n))


@dataclass
class SequentialTest:
    """Log ratios of quads, log(reference / table), and the interval of their true mean."""

    noise: float  # standard deviation of the log ratio of one quad, from what was measured before
    level: float  # the chance that the interval ever misses the true mean
    logs: list[float] = field(default_factory=list)  # above 0 the table is faster
    tuned_for: float = TUNED_FOR
    known: float = KNOWN_QUADS  # quads that the noise was measured from
    _known: tuple[int, float, float] = field(
        default=(0, 0.0, 0.0), init=False
    )  # quads, their mean and deviation

    @property
    def n(self) -> int:
        """Quads so far."""
        return len(self.logs)

    @property
    def mean(self) -> float:
        """Mean log ratio, outliers pulled in."""
        return self._estimate()[0]

    @property
    def deviation(self) -> float:
        """Standard deviation of one quad: what was known before and what the quads show."""
        return self._estimate()[1]

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of the true mean log ratio that hold at all times."""
        width = self.provable(self.n)
        return self.mean - width, self.mean + width

    @property
    def has_interval(self) -> bool:
        """There are quads enough for one that ends."""
        return math.isfinite(half_width(self.n, self.level, self.tuned_for, self.known))

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return self.deviation / math.sqrt(self.n) if self.n else math.inf

    @property
    def is_promising(self) -> bool:
        """The mean is above 0 by more than its standard error."""
        return self.mean > self.error

    def provable(self, n: float, level: float | None = None) -> float:
        """The least gain that so many quads would prove at this ``level``; None: at its own."""
        return self.deviation * half_width(n, level or self.level, self.tuned_for, self.known)

    def _estimate(self) -> tuple[float, float]:
        """Mean and deviation, computed once between two quads."""
        if not self.n:
            return 0.0, self.noise
        if self._known[0] != self.n:
            x = np.array(self.logs)
            middle = median(x)
            away = np.abs(x - middle)
            # Squares of a heavy tail mislead as its values do: nothing counts for more than CLIP robust deviations.
            most = CLIP * max(ROBUST * median(away), self.noise)
            scatter = float((np.minimum(away, most) ** 2).sum())
            quads = KNOWN_QUADS + self.n - 1
            deviation = math.sqrt((KNOWN_QUADS * self.noise**2 + scatter) / quads)
            near = np.clip(x, middle - CLIP * deviation, middle + CLIP * deviation)
            deviation *= self._together(near - near.mean())
            self._known = self.n, float(near.mean()), deviation
        return self._known[1:]

    @staticmethod
    def _together(off: Array) -> float:
        """Factor of the deviation of a mean of quads whose neighbours are alike: that of blocks of two quads over that
        of single ones, pulled to 1 as long as there are few."""
        squares = float((off**2).sum())
        neighbours = float((off[1:] * off[:-1]).sum())
        if squares <= 0 or neighbours <= 0:
            return 1.0
        correlation = neighbours / squares * len(off) / (len(off) + KNOWN_QUADS)
        return math.sqrt(1 + 2 * correlation)


@dataclass(frozen=True)
class Terms:
    """When a comparison is decided."""

    quads_left: float  # that the job has steps for
    quads_long_steps: float  # after this many the table is rejected if only its long steps stand against it
    least_gain: float  # (log) below which a table is not worth adopting


@dataclass(frozen=True)
class TimedWindow:
    """Step time under one table in a measurement, and the job's own numbers of its first and last step."""

    ms: float
    first_step: int
    last_step: int


@dataclass(frozen=True)
class Window:
    """What was measured, as the loop takes it in."""

    plan: Plan
    seen: Measured
    steps: Array  # (k,) ms, the steps that measure the table
    ms: float  # their trimmed mean
    is_aborted: bool
    quads: Quads | None = None  # None: a look at what holds now, or a few calls
    current: TimedWindow | None = None  # the turns of the current table

    @property
    def is_refused(self) -> bool:
        """NCCL did not obey one of the configs."""
        return bool((~self.seen.obeyed & (self.plan.configs > 0)).any())

    @property
    def timed(self) -> TimedWindow:
        """For a comparison."""
        return TimedWindow(self.ms, self.seen.first_step, self.seen.last_step)


@dataclass(eq=False)  # arrays have no truth value: one comparison equals only itself
class Comparison:
    """Is ``table`` faster than ``reference``, each configs (s,)?"""

    table: Array
    reference: Array
    test: SequentialTest
    is_trial: bool = False  # of the time after the verdict
    outcome: str = OPEN
    table_windows: list[TimedWindow] = field(default_factory=list)
    reference_windows: list[TimedWindow] = field(default_factory=list)
    carried: list[float] = field(default_factory=list)  # of its quads, see Quads

    @property
    def quads_until_check(self) -> int:
        """Quads of its next measurement: half as many as it has."""
        fewest, most = CHECK_QUADS
        half = self.test.n // 2
        return min(max(half, fewest), most)

    def add_quads(self, quads: Quads, reference: TimedWindow, table: TimedWindow) -> None:
        """Take in a measurement; the times of its steps under the two."""
        self.reference_windows.append(reference)
        self.table_windows.append(table)
        self.test.logs.extend(quads.ratios.tolist())
        self.carried.extend(quads.carried.tolist())

    def restart(self, noise: float) -> None:
        """Begin anew, as turns have another length: who follows this comparison goes on with it. ``noise``: of a
        quad."""
        self.test = replace(self.test, noise=noise, logs=[])
        for seen in (self.reference_windows, self.table_windows, self.carried):
            seen.clear()

    def drop_carried(self) -> bool:
        """Whether a part of the effect carries over into the next step. The quads so far, which show too little of the
        effect, are dropped then."""
        n = len(self.carried)
        if n < KNOWN_QUADS:
            return False
        part = float(np.mean(self.carried)) * math.copysign(1.0, self.test.mean)
        error = float(np.std(self.carried)) / math.sqrt(n - 1)
        if part <= CARRIED_ERRORS * error:
            return False
        self.test.logs.clear()
        self.carried.clear()
        return True

    def add_log(self, log_ratio: float) -> None:
        """Take in a look at the default: log(reference / table)."""
        self.test.logs.append(log_ratio)

    @property
    def steps(self) -> list[int]:
        """The job's own numbers of its first and its last step; [] if it has none."""
        windows = [*self.reference_windows, *self.table_windows]
        return [min(w.first_step for w in windows), max(w.last_step for w in windows)] if windows else []

    def decide(self, terms: Terms, long_steps: LongSteps) -> bool | None:
        """True: adopt the table. False: reject it. None: continue."""
        found = self._by_quads(terms)
        if not found:
            return found
        gain = self.test.mean
        if long_steps.allows(self.table, self.reference, gain):
            return True
        # The table gains by its usual steps, so it costs little to go on until the long ones are known.
        is_over = self.test.n >= terms.quads_long_steps
        return False if is_over or long_steps.forbids(self.table, self.reference, gain) else None

    def _by_quads(self, terms: Terms) -> bool | None:
        """A table is adopted if its interval lies above 0. It is rejected if what it may gain does not pay: it is below
        the least gain that is worth a table, or that the steps left could prove. To go on costs next to nothing, as
        half of the steps run a table that is about as fast. To give up claims no gain, so what a table may gain is of
        ALPHA in each of a job's comparisons."""
        test = self.test
        is_early = test.n < CHECK_QUADS[0]
        if test.interval[0] > 0:
            return None if is_early else True
        pays = max(terms.least_gain, test.provable(terms.quads_left))
        more = test.provable(test.n, ALPHA)
        may_gain = test.mean + (more if is_early else min(more, HOPE * test.error))
        return False if may_gain < pays else None

    def refutes(self, log_ratio: float) -> bool:
        """Whether the adopted table has to go if this look at the default is added. Either it proves by itself that
        the table is slower, or PROOF looks show no gain."""
        with_it = replace(self.test, logs=[*self.test.logs, log_ratio])
        is_worthless = with_it.n >= PROOF and with_it.mean <= 0
        return is_worthless or proves_slower(log_ratio, self.test.noise)


def detectable_gain(deviation: float) -> float:
    """Part of the step that a first comparison of SEEN_QUADS would be sure of; ``deviation`` of one quad."""
    width = half_width(SEEN_QUADS, level_of(1))
    return 1 - math.exp(-deviation * width)


def proves_slower(log_ratio: float, noise: float) -> bool:
    """One look at the default with log(reference / table) proves by itself that the table is slower."""
    alone = SequentialTest(noise, AT_ONCE, [log_ratio], WATCH_TUNED_FOR, WATCH_KNOWN)
    return alone.interval[1] < 0 and log_ratio < -PLAIN


class LongSteps:
    """The cost of long steps under each table that ran: a trimmed mean leaves them out, and a setting that makes one
    step in 200 twice as long would seem as fast as it is in all others.

    They are too rare to be tested for in a comparison of a hundred steps. Both tables have as many steps in the same
    time, and the long ones of each count: a long step that was not seen in either is assumed of both. Later the table
    runs for thousands of steps, and is dropped when it is clearly slower. Long steps that are the job's own strike the
    default as well.
    """

    def __init__(self) -> None:
        self._seen: dict[
            bytes, Array
        ] = {}  # by table: steps, their excess over the usual in steps, its squares

    def add(self, configs: Array, step_ms: Array, usual_ms: float) -> None:
        """Steps under configs (s,); ``usual_ms``: what most of them took."""
        excess = np.minimum(step_ms / usual_ms, LONGEST_STEP) - 1
        sums = np.array([len(excess), excess.sum(), (excess**2).sum()])
        self._seen[configs.tobytes()] = self._of(configs) + sums

    def _of(self, configs: Array) -> Array:
        return self._seen.get(configs.tobytes(), np.zeros(3))

    def gain(self, table: Array, reference: Array, gain: float) -> float:
        """Gain of a table (s,) over the reference (s,) with long steps, if ``gain`` is the gain without them."""
        steps, excess, _ = self._of(table)
        reference_steps, usual, _ = self._of(reference)
        return float(gain - excess / max(steps, 1) + usual / max(reference_steps, 1))

    def allows(self, table: Array, reference: Array, gain: float) -> bool:
        """Whether long steps leave it likely that the table is faster: they do not make it slower by their standard
        error. The long steps of both are so rare that chance alone makes the one or the other look slower."""
        return self.gain(table, reference, gain) > -self._error(table, reference)

    def forbids(self, table: Array, reference: Array, gain: float) -> bool:
        """Whether long steps make the table clearly slower than the reference, one more long step of which is
        assumed."""
        error = self._error(table, reference, LONG_STEP)
        return self.gain(table, reference, gain) < -LONG_STEP_ERRORS * error

    def _error(self, table: Array, reference: Array, more: float = 0.0) -> float:
        """Standard error of what long steps cost the table against the reference, if that had one ``more``, in
        steps."""
        steps, _, squares = self._of(table)
        reference_steps, _, reference_squares = self._of(reference)
        variance = squares / max(steps, 1) ** 2
        reference_variance = (reference_squares + more**2) / max(reference_steps, 1) ** 2
        return math.sqrt(variance + reference_variance)

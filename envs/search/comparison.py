"""The only place that decides whether one table is faster than another.

A :class:`Comparison` collects pairs of windows, one under each table. Their log ratios get a confidence sequence: an
interval that holds the true mean at *all* times at once with probability 1 - level, no matter how often it is checked
and why it stops (the normal mixture of Robbins 1970, as in Howard et al. 2021, "Time-uniform, nonparametric,
nonasymptotic confidence sequences", section 3.2). Step times are not normal: outliers are pulled in, and the noise is
that of this job, with room for what is not known of it. :class:`LongSteps` adds what the trimmed windows leave out.

If the two tables take turns at every step, a quad of turns is a pair. Quads follow each other at once, so what is left
of the noise may be common to neighbours: the deviation grows by their correlation. If the job takes no turns, the pairs
come from windows. Nothing but this file knows the difference between the two.
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
    KNOWN_PAIRS,
    LIKELY,
    LONG_STEP,
    LONG_STEP_ERRORS,
    LONGEST_STEP,
    LOUD,
    MORE,
    MORE_ROOM,
    PLAIN,
    PROOF,
    ROOM,
    SAFE_PAIRS,
    TUNED_FOR,
)
from .interfaces import Measured, Plan
from .step_times import ROBUST, Quads, median

Array = np.ndarray[Any, Any]

#: What has become of a comparison.
OPEN, ADOPTED, REJECTED = "open", "kept", "lost"


def half_width(n: float, level: float, tuned_for: float = TUNED_FOR) -> float:
    """Of the confidence sequence of a mean of ``n`` observations with standard deviation 1; infinite for none. It is
    narrowest, for its level, at ``tuned_for`` observations."""
    if n <= 0:
        return math.inf
    tail = 2 * math.log(1 / level)
    rho = tuned_for / (tail + math.log(1 + tail))
    return math.sqrt((n + rho) * math.log((n + rho) / (rho * level**2))) / n


@dataclass
class SequentialTest:
    """Log ratios of pairs, log(reference / table), and the interval of their true mean."""

    noise: float  # standard deviation of the log ratio of one pair, from what was measured before
    level: float  # the chance that the interval ever misses the true mean
    logs: list[float] = field(default_factory=list)  # above 0 the table is faster
    quads_a_pair: float = (
        0.0  # quads that take as many steps as a pair of windows; 0: the logs are of windows
    )
    _known: tuple[int, float, float] = field(
        default=(0, 0.0, 0.0), init=False
    )  # pairs, their mean and deviation

    @property
    def n(self) -> int:
        """Pairs so far."""
        return len(self.logs)

    @property
    def mean(self) -> float:
        """Mean log ratio, outliers pulled in."""
        return self._estimate()[0]

    @property
    def deviation(self) -> float:
        """Standard deviation of one pair: what was known before and what the pairs show."""
        return self._estimate()[1]

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of the true mean log ratio that hold at all times."""
        is_loud = self.noise >= LOUD and not self.quads_a_pair
        extra = MORE_ROOM / max(self.n, 1) if is_loud else 0.0
        room = ROOM + extra
        tuned_for = TUNED_FOR * (self.quads_a_pair or 1.0)
        width = room * self.deviation * half_width(self.n, self.level, tuned_for)
        return self.mean - width, self.mean + width

    @property
    def is_promising(self) -> bool:
        """The mean is above 0 by more than its standard error."""
        return self.mean > LIKELY * self.deviation / math.sqrt(self.n)

    def _estimate(self) -> tuple[float, float]:
        """Mean and deviation, computed once between two pairs."""
        if not self.n:
            return 0.0, self.noise
        if self._known[0] != self.n:
            x = np.array(self.logs)
            middle = median(x)
            away = np.abs(x - middle)
            # Squares of a heavy tail mislead as its values do: nothing counts for more than CLIP robust deviations.
            most = CLIP * max(ROBUST * median(away), self.noise)
            scatter = float((np.minimum(away, most) ** 2).sum())
            pairs = KNOWN_PAIRS + self.n - 1
            deviation = math.sqrt((KNOWN_PAIRS * self.noise**2 + scatter) / pairs)
            near = np.clip(x, middle - CLIP * deviation, middle + CLIP * deviation)
            if self.quads_a_pair:
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
        correlation = neighbours / squares * len(off) / (len(off) + KNOWN_PAIRS)
        return math.sqrt(1 + 2 * correlation)


@dataclass(frozen=True)
class Terms:
    """When a comparison is decided."""

    max_pairs: float  # after this many the table is not worth many more
    max_pairs_long_steps: float  # ... if only its long steps stand against it
    min_pairs: int  # before the table is adopted, if the noise is not LOUD
    least_gain: float  # (log) below which a table is not worth adopting
    known_gain: (
        float | None
    )  # lower bound of the reference's own gain over the default; None: it is the default


@dataclass(frozen=True)
class TimedWindow:
    """Step time of one window of a comparison, and the job's own numbers of its first and last step."""

    ms: float
    first_step: int
    last_step: int


@dataclass(frozen=True)
class Window:
    """One window as the phases take it in."""

    plan: Plan
    seen: Measured
    steps: Array  # (k,) ms, the steps that measure the table
    ms: float  # their trimmed mean
    is_aborted: bool
    is_guilty: bool  # aborted, and its likeliest cause had aborted a window before
    quads: Quads | None = None  # of a plan with turns
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
    table_windows: list[TimedWindow] = field(default_factory=list)  # of whole pairs
    reference_windows: list[TimedWindow] = field(default_factory=list)
    carried: list[float] = field(default_factory=list)  # of its quads, see Quads
    _waiting: dict[bool, TimedWindow] = field(
        default_factory=dict
    )  # by whether it is the table's: half a pair

    @property
    def takes_turns(self) -> bool:
        """Its pairs are quads."""
        return self.test.quads_a_pair > 0

    @property
    def quads_until_check(self) -> int:
        """Quads of its next measurement: half as many as it has."""
        fewest, most = CHECK_QUADS
        half = self.test.n // 2
        return min(max(half, fewest), most)

    def add_quads(self, quads: Quads, reference: TimedWindow, table: TimedWindow) -> None:
        """Take in a measurement by turns; the times of its steps under the two."""
        self.reference_windows.append(reference)
        self.table_windows.append(table)
        self.test.logs.extend(quads.ratios.tolist())
        self.carried.extend(quads.carried.tolist())

    def restart(self, test: SequentialTest) -> None:
        """Begin anew, with this test: who follows this comparison goes on with it."""
        self.test = test
        self.drop_half()
        for seen in (self.reference_windows, self.table_windows, self.carried):
            seen.clear()

    def drop_carried(self) -> bool:
        """Whether a part of the effect carries over into the next step. The quads so far, which show too little of the
        effect, are dropped then."""
        n = len(self.carried)
        if n < KNOWN_PAIRS:
            return False
        part = float(np.mean(self.carried)) * math.copysign(1.0, self.test.mean)
        error = float(np.std(self.carried)) / math.sqrt(n - 1)
        if part <= CARRIED_ERRORS * error:
            return False
        self.test.logs.clear()
        self.carried.clear()
        return True

    @property
    def next_side(self) -> bool:
        """Whether the table runs next, or the reference: R T, T R, R T ..., which is one switch a pair."""
        windows = len(self._waiting) + self.test.n
        return windows % 2 == 1

    def add_window(self, is_table: bool, window: TimedWindow) -> bool:
        """Take in a window of one side. Returns whether it completes a pair."""
        self._waiting[is_table] = window
        if len(self._waiting) < 2:
            return False
        self.add_pair(self._waiting[False], self._waiting[True])
        self._waiting = {}
        return True

    def add_pair(self, reference: TimedWindow, table: TimedWindow) -> None:
        """Take in a whole pair."""
        self.reference_windows.append(reference)
        self.table_windows.append(table)
        self.add_log(math.log(reference.ms / table.ms))

    def add_log(self, log_ratio: float) -> None:
        """Take in a pair whose windows are not kept: log(reference / table)."""
        self.test.logs.append(log_ratio)

    def drop_half(self) -> None:
        """A window was aborted: its pair is measured once more."""
        self._waiting = {}

    @property
    def steps(self) -> list[int]:
        """The job's own numbers of the first and the last step of its windows; [] if it has none."""
        windows = [*self.reference_windows, *self.table_windows, *self._waiting.values()]
        return [min(w.first_step for w in windows), max(w.last_step for w in windows)] if windows else []

    def decide(self, terms: Terms, long_steps: LongSteps) -> bool | None:
        """True: adopt the table. False: reject it. None: continue."""
        found = self._by_pairs(terms)
        if not found:
            return found
        gain = self.test.mean
        if long_steps.allows(self.table, self.reference, gain, self.takes_turns):
            return True
        # The table gains by its usual steps, so it costs little to go on until the long ones are known.
        is_over = self.test.n >= terms.max_pairs_long_steps
        return False if is_over or long_steps.forbids(self.table, self.reference, gain) else None

    def _by_pairs(self, terms: Terms) -> bool | None:
        low, high = self.test.interval
        if low > 0:
            is_loud = self.test.noise >= LOUD and not self.takes_turns
            least = SAFE_PAIRS if is_loud else terms.min_pairs
            return True if self.test.n >= least else None
        if high < terms.least_gain:
            return False
        if self.test.n < terms.max_pairs:
            return None
        # Undecided. A table that improves on an adopted one may be adopted on less evidence, as long as the two
        # comparisons together prove a gain over the default; else a promising table gets more pairs.
        if not self.test.is_promising:
            return False
        if terms.known_gain is not None and terms.known_gain + low > 0:
            return True
        return None if self.test.n < MORE * terms.max_pairs else False

    def refutes(self, log_ratio: float) -> bool:
        """Whether the adopted table has to go if this scheduled pair with the default is added. Either it proves by
        itself that the table is slower, or PROOF pairs show no gain."""
        with_it = replace(self.test, logs=[*self.test.logs, log_ratio])
        is_worthless = with_it.n >= PROOF and with_it.mean <= 0
        return is_worthless or proves_slower(log_ratio, self.test.noise)


def detectable_gain(deviation: float, pairs: int, quads_a_pair: float = 0.0) -> float:
    """Part of the step that a comparison of so many pairs would be sure of; ``deviation`` of one pair, or of one quad
    where ``quads_a_pair`` is above 0."""
    times = quads_a_pair or 1.0
    width = half_width(pairs * times, ALPHA, TUNED_FOR * times)
    return 1 - math.exp(-ROOM * deviation * width)


def proves_slower(log_ratio: float, noise: float) -> bool:
    """One pair with log(reference / table) proves by itself that the table is slower."""
    alone = SequentialTest(noise, AT_ONCE, [log_ratio])
    return alone.interval[1] < 0 and log_ratio < -PLAIN


class LongSteps:
    """The cost of long steps under each table that ran: a trimmed mean leaves them out, and a setting that makes one
    step in 200 twice as long would seem as fast as it is in all others.

    They are too rare to be tested for in a comparison of a hundred steps. By turns, both tables have as many steps in
    the same time, and the long ones of each count. In windows a table has to be so much faster that one more long step
    would not make it slower than the reference: the less it gains, the longer it runs before it is adopted, and the
    gain of those steps, LONG_STEP in all at most, is lost. A table whose long steps cost twice what it gains is adopted
    in one case of 5 if they take three times as long, in one of 25 if twice (a random walk that falls, and a level that
    it must reach: Wald 1945). Later it runs for thousands of steps, and is dropped when it is clearly slower. Long
    steps that are the job's own strike the default as well.
    """

    def __init__(self) -> None:
        self._seen: dict[
            bytes, Array
        ] = {}  # by table: steps, their excess over the usual in steps, its squares

    def add(self, configs: Array, step_ms: Array, usual_ms: float) -> None:
        """A window under configs (s,); ``usual_ms``: what most of its steps took."""
        excess = np.minimum(step_ms / usual_ms, LONGEST_STEP) - 1
        sums = np.array([len(excess), excess.sum(), (excess**2).sum()])
        self._seen[configs.tobytes()] = self._of(configs) + sums

    def _of(self, configs: Array) -> Array:
        return self._seen.get(configs.tobytes(), np.zeros(3))

    def gain(self, table: Array, reference: Array, gain: float, more: float = 0.0) -> float:
        """Gain of a table (s,) over the reference (s,) with long steps, and ``more`` steps of them in the table, if
        ``gain`` is the gain without them."""
        steps, excess, _ = self._of(table)
        reference_steps, usual, _ = self._of(reference)
        cost = (excess + more) / max(steps, 1)
        return float(gain - cost + usual / max(reference_steps, 1))

    def allows(self, table: Array, reference: Array, gain: float, by_turns: bool = False) -> bool:
        """Whether the table may replace the reference. If that was adopted before, the table has only to be no slower:
        it is a little faster at most, and few steps are left to show it. The same holds if the two took turns: a long
        step that was not seen in either is assumed of both."""
        more = 0.0 if by_turns or reference.any() else LONG_STEP
        return self.gain(table, reference, gain, more) > 0

    def forbids(self, table: Array, reference: Array, gain: float) -> bool:
        """Whether long steps make the table clearly slower than the reference, one more long step of which is
        assumed."""
        steps, _, squares = self._of(table)
        reference_steps, _, reference_squares = self._of(reference)
        variance = squares / max(steps, 1) ** 2
        reference_variance = (reference_squares + LONG_STEP**2) / max(reference_steps, 1) ** 2
        error = math.sqrt(variance + reference_variance)
        return self.gain(table, reference, gain) < -LONG_STEP_ERRORS * error

"""Has the job changed? The usual step time under one table, and the regimes that a job alternates between.

A regime (another batch size, an evaluation) is known by the default in it: the step's time, and the slots' calls if
kernels are sampled. When a job has changed, some default steps tell whether it is a regime that was tuned before. Then
the table adopted in it is the current one again at once, and monitoring begins with these default steps. A table whose
regime does not come back as it was is never used again.

This file also knows when the default is looked at meanwhile.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .comparison import Comparison
from .config import (
    EARLY,
    FAR,
    FRESH,
    LEAST_USUAL,
    LONG_WINDOW,
    LONGEST,
    MOST_REGIMES,
    ODD,
    ODD_LONG,
    PACE,
    PACE_DEVIATIONS,
    SAME_CALLS,
    SAME_LEVEL,
    SAME_STEP,
    SAME_STEP_DEVIATIONS,
    USUAL,
)
from .step_times import ROBUST

Array = np.ndarray[Any, Any]


#: What a window is to :class:`StepLevel`: as usual; off the usual; back at a level that was seen before; a change.
AS_USUAL, OFF, RETURNED, MOVED = "usual", "off", "returned", "moved"


class StepLevel:
    """The usual log step time under one table. Several windows in a row that are off it are a change, unless the job
    was seen at their level before, as a job with two paces is."""

    def __init__(self, noise: float, window_steps: int, least_change: float, levels: Sequence[float]) -> None:
        """``noise``: standard deviation of a window's log step time; ``least_change``: smaller ones are none (log)."""
        self.noise, self.least_change = noise, least_change
        self.odd_windows = ODD if window_steps < LONG_WINDOW else ODD_LONG
        self.levels = list(levels)
        self.moved: float | None = None  # by how much (log) at the last change
        self.odd: list[float] = []  # the last windows in a row that are off the usual
        self._usual: deque[float] = deque(maxlen=USUAL)
        self._figures: tuple[float, float] | None = None  # what :meth:`usual` returns
        self._calm = 0  # windows as usual since :meth:`restart_calm`

    @property
    def is_known(self) -> bool:
        """A window was seen."""
        return bool(self._usual)

    @property
    def usual(self) -> tuple[float, float]:
        """Median and standard deviation of the usual windows; the latter no less than the noise that was measured."""
        if self._figures is None:
            ordered = sorted(self._usual)
            half = len(ordered) // 2
            middle = ordered[half]
            away = sorted([abs(value - middle) for value in ordered])
            self._figures = middle, max(self.noise, ROBUST * away[half])
        return self._figures

    def restart_calm(self) -> None:
        """Count the windows as usual anew."""
        self._calm = 0

    def take_calm(self) -> bool:
        """Whether a long time was as usual; it is counted once."""
        is_long = self._calm >= USUAL
        if is_long:
            self._calm = 0
        return is_long

    def add(self, log: float) -> str:
        """Take in a window."""
        if len(self._usual) < LEAST_USUAL:
            return self._note(log)
        middle, deviation = self.usual
        off = log - middle
        if abs(off) < max(FAR * deviation, self.least_change):
            self.odd.clear()
            return self._note(log)
        if self.odd and (off > 0) != (self.odd[-1] > middle):
            self.odd.clear()
        self.odd.append(log)
        return OFF if len(self.odd) < self.odd_windows else self._moved(middle, deviation)

    def _note(self, log: float) -> str:
        self._usual.append(log)
        self._calm += 1
        if self._calm % FRESH == 0 or len(self._usual) < USUAL // 4:
            self._figures = None
        return AS_USUAL

    def accept(self) -> None:
        """The level that the last windows had is as usual, too."""
        if self.odd:
            self.levels.append(sum(self.odd) / len(self.odd))
            self._usual = deque(self.odd, USUAL)
            self._figures = None
            self.odd.clear()

    def _moved(self, middle: float, deviation: float) -> str:
        after = self.odd[1:]  # the first window may be of both levels
        level = sum(after) / len(after)
        if not any(abs(middle - known) < SAME_LEVEL for known in self.levels):
            self.levels.append(middle)
        if any(abs(level - known) < max(SAME_LEVEL, deviation) for known in self.levels):
            self._usual = deque(self.odd, USUAL)
            self._figures = None
            self.odd.clear()
            return RETURNED
        self.moved = level - middle
        return MOVED


class VisitSchedule:
    """When the default is looked at: often until that shows a gain, then less and less while nothing speaks against the
    table. Times are steps of the job."""

    def __init__(self, visit_steps: int, watch_share: float, now: int) -> None:
        self.visit_steps = visit_steps
        self.usual = visit_steps / watch_share  # between two visits
        self.early = self.usual / EARLY
        self.gap = self.early
        self.last = now
        self.is_due = False  # at once

    def wants(self, now: int) -> bool:
        """Whether the default is due."""
        return self.is_due or now - self.last >= self.gap

    def visited(self, now: int) -> bool:
        """The default was measured. Returns whether that was out of turn."""
        was_due, self.is_due = self.is_due, False
        self.last = now
        return was_due

    def gains(self, is_calm: bool) -> None:
        """The visits show that the table gains; ``is_calm``: so does the last one."""
        longest = LONGEST * self.usual
        longer = min(2 * self.gap, longest)
        may_grow = is_calm and self.gap >= self.usual
        self.gap = longer if may_grow else self.usual

    def lengthen(self, visit_steps: int) -> None:
        """A visit takes so many steps from now on."""
        times = visit_steps / self.visit_steps
        self.visit_steps = visit_steps
        self.usual *= times
        self.early *= times
        self.gap *= times

    def be_next(self, now: int) -> None:
        """The default is looked at now, as if its time had come."""
        self.last = now - math.ceil(self.gap)

    def be_early(self) -> None:
        """The table may not gain: visit as often as at first."""
        self.gap = self.early


@dataclass(frozen=True)
class Regime:
    """A job under the default, and what was adopted in it."""

    step_ms: float
    call_logs: Array  # (s,) of the default's call times; NaN: not sampled
    configs: Array  # (s,) of the table; zeros: the default, after a whole search
    comparisons: tuple[Comparison, ...]  # that adopted it

    def distance(self, step_ms: float, call_logs: Array) -> tuple[float, float]:
        """Absolute log ratios to a default step and to its calls (the median slot)."""
        logs = np.abs(np.asarray(call_logs) - self.call_logs)
        logs = logs[np.isfinite(logs)]
        calls = float(np.median(logs)) if len(logs) else 0.0
        return abs(float(np.log(step_ms / self.step_ms))), calls


@dataclass(frozen=True)
class Change:
    """The job has changed, so the default is measured anew."""

    regime: Regime  # that was left
    is_harmful: bool = False  # its table is slower than the default
    is_other: bool = False  # it came back, and its table does not do there what it did
    default_ms: float | None = None  # of the look at the default that showed that; None: something else did
    moved: float | None = None  # by how much a step of the default is longer (log); None: unknown
    levels: Sequence[float] = ()  # logs of step times that it was seen at before

    @property
    def before(self) -> Array:
        """(s,) configs to try first in a new search."""
        configs = self.regime.configs
        return np.zeros_like(configs) if self.is_harmful else configs


@dataclass
class Regimes:
    """Those that a job was tuned in, the latest ones."""

    known: list[Regime] = field(default_factory=list)

    def leave(
        self, regime: Regime, noise: float, is_harmful: bool = False, default_ms: float | None = None
    ) -> None:
        """The job has left it. A regime whose table is slower than the default (``is_harmful``) is forgotten, unless
        this default is another one than the regime's: ``default_ms``, if a look at it showed that."""
        before = self.find(regime.step_ms, regime.call_logs, noise)
        is_elsewhere = default_ms is not None and abs(math.log(default_ms / regime.step_ms)) > _reach(noise)
        holds = is_elsewhere or not is_harmful
        others = [one for one in self.known if one is not before]
        self.known = [*others, *([regime] if holds else [])][-MOST_REGIMES:]

    def find(self, step_ms: float, call_logs: Array, noise: float) -> Regime | None:
        """The regime with this default; ``noise``: standard deviation of its log step time."""
        near = list[tuple[float, Regime]]()
        for regime in self.known:
            step, calls = regime.distance(step_ms, call_logs)
            if step < _reach(noise) and calls < SAME_CALLS:
                near.append((step, regime))
        return min(near, key=lambda pair: pair[0])[1] if near else None

    def same(self, change: Change, default_ms: float, call_logs: Array, noise: float) -> Regime | None:
        """After a change: the regime that the default is as in now, if any: one that was tuned, or the one left at
        another pace: all steps are slower or faster by the same, and the network is as it was."""
        if change.is_other:
            return None
        left = change.regime
        found = self.find(default_ms, call_logs, noise)
        if found is not None or change.moved is None or abs(change.moved) >= PACE:
            return found
        apart = abs(math.log(default_ms / left.step_ms) - change.moved)
        is_same_network = left.distance(default_ms, call_logs)[1] < SAME_CALLS
        is_same_pace = apart < max(SAME_STEP, PACE_DEVIATIONS * noise)
        return left if is_same_pace and is_same_network else None


def _reach(noise: float) -> float:
    return max(SAME_STEP, SAME_STEP_DEVIATIONS * noise)

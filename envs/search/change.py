"""Has the job changed? The usual step time under one table, and when the default is looked at meanwhile."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from .config import EARLY, FAR, FRESH, LEAST_USUAL, LONG_WINDOW, LONGEST, ODD, ODD_LONG, SAME_LEVEL, USUAL
from .step_times import ROBUST

Array = np.ndarray[Any, Any]


#: What a window is to :class:`StepLevel`: as usual; off the usual; back at a level that was seen before; a change.
AS_USUAL, OFF, RETURNED, MOVED = "usual", "off", "returned", "moved"


class StepLevel:
    """The usual log step time under one table. Several windows in a row that are off it are a change, unless the job
    was seen at their level before, as a job with two paces is."""

    def __init__(self, noise: float, window_steps: int, least_change: float, levels: list[float]) -> None:
        """``noise``: standard deviation of a window's log step time; ``least_change``: smaller ones are none (log);
        ``levels``: logs of step times that the job was seen at under this table, to which new ones are added."""
        self.noise, self.least_change = noise, least_change
        self.odd_windows = ODD if window_steps < LONG_WINDOW else ODD_LONG
        self.levels = levels
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
class Change:
    """The job has changed, so the default is measured anew."""

    configs: Array  # (s,) of the table that was left; zeros: the default
    is_harmful: bool = False  # that table is slower than the default

    @property
    def before(self) -> Array:
        """(s,) configs to try first in a new search."""
        return np.zeros_like(self.configs) if self.is_harmful else self.configs

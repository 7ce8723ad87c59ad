"""Regimes of a job that come and go: an evaluation, another batch or sequence length. Each has a table of its own.

A regime is known by what NCCL's own choice does in it: the step's time, and the durations of the slots' calls where
kernels are sampled. When a job has changed, some default steps tell whether it is one that was tuned before; then the
table that was *confirmed in it* is in force again at once, and the watch sees to it as to any other, beginning with the
default steps that have just been measured. A table whose regime does not come back as it was is never put in force.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .sequential import Race
from .watch import Change

Array = np.ndarray[Any, Any]

#: Log ratios within which two regimes are the same: of the default's step (or four standard deviations of a window,
#: where that is more), of the middle call.
SAME_STEP, SAME_CALLS, DEVIATIONS = 0.02, 0.10, 4.0
#: By more than this (log) no job changes its pace.
PACE = 0.08
#: Regimes of a job that are remembered, those seen last.
MOST = 8


@dataclass(frozen=True)
class Regime:
    """How a job was under the default, and what was confirmed in it."""

    step_ms: float
    call_logs: Array  # (s,) of the default's call times; NaN: not sampled
    confirmed: Array  # (s,) configs; zeros: the default, after a whole search
    races: tuple[Race, ...]  # what confirmed it

    def apart(self, step_ms: float, call_logs: Array) -> tuple[float, float]:
        """Log ratios to a default step and to its calls (the median slot), both without a sign."""
        logs = np.abs(np.asarray(call_logs) - self.call_logs)
        logs = logs[np.isfinite(logs)]
        return abs(float(np.log(step_ms / self.step_ms))), float(np.median(logs)) if len(logs) else 0.0


@dataclass
class Regimes:
    """Those that a job was tuned in."""

    known: list[Regime] = field(default_factory=list)

    def leave(self, regime: Regime, default_ms: float | None, noise: float) -> None:
        """The job is in it no more. ``default_ms``: of the default that its table was slower than: if that is still the
        regime's, it is the table that does not hold any more, and it goes."""
        before = self.find(regime.step_ms, regime.call_logs, noise)
        holds = default_ms is None or abs(math.log(default_ms / regime.step_ms)) > _reach(noise)
        self.known = [*(r for r in self.known if r is not before), *([regime] if holds else [])][-MOST:]

    def find(self, step_ms: float, call_logs: Array, noise: float) -> Regime | None:
        """The regime that the default is as in; ``noise``: standard deviation of its log step time."""
        reach = _reach(noise)
        apart = [(r.apart(step_ms, call_logs), r) for r in self.known]
        near = [(step, r) for (step, calls), r in apart if step < reach and calls < SAME_CALLS]
        return min(near, key=lambda pair: pair[0])[1] if near else None

    def same(
        self, left: Regime, change: Change, default_ms: float, call_logs: Array, noise: float
    ) -> Regime | None:
        """After a ``change`` out of ``left``: the regime that the default is as in now, if any: one that was tuned, or
        the one left, at another pace: all goes slower or quicker by the same, and the network is as it was."""
        if change.is_other:
            return None
        found = self.find(default_ms, call_logs, noise)
        if found is None and change.moved is not None and abs(change.moved) < PACE:
            apart = abs(math.log(default_ms / left.step_ms) - change.moved)
            same_calls = left.apart(default_ms, call_logs)[1] < SAME_CALLS
            return left if apart < max(SAME_STEP, 3 * noise) and same_calls else None
        return found


def _reach(noise: float) -> float:
    return max(SAME_STEP, DEVIATIONS * noise)

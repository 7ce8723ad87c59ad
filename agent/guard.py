"""The guard makes a bad policy harmless: it commits only what it could confirm, and ends a search that costs too much.

It never makes up numbers; all it does is measure again, refuse, or stop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..envs.live import Window
from ..envs.live_env import DEFAULT, TRIAL, LiveEnv
from ..traces.records import AUTO, Decision, Slot

#: Confirmation: accept once the gain is this many standard errors above zero over at least so many pairs, and give up
#: after so many.
ACCEPT_Z, MIN_PAIRS, MAX_PAIRS = 2.0, 3, 6


@dataclass
class Confirmation:
    """Outcome of the paired test of one slot's best config against leaving the slot to NCCL."""

    kept: bool
    gain: float  # relative step time saved by this slot's decision
    error: float  # its standard error
    n_pairs: int


@dataclass
class Guard:
    """Watches one tuning run."""

    budget: float  # share of the job's time that the search may lose against the default before it ends
    lost_ms: float = 0.0
    spent_ms: float = 0.0
    noise: list[float] = field(default_factory=list)  # log ratios of default windows that follow each other
    _last_default_ms: float = math.nan

    def note(self, kind: str, window: Window, default_ms: float) -> None:
        """Account for one window that was run."""
        steps = len(window.durations_ms)
        self.spent_ms += steps * window.step_ms
        if kind != DEFAULT and math.isfinite(default_ms):
            self.lost_ms += steps * (window.step_ms - default_ms)
        if kind == DEFAULT:
            if math.isfinite(self._last_default_ms):
                self.noise.append(math.log(window.step_ms / self._last_default_ms))
            self._last_default_ms = window.step_ms

    @property
    def is_spent(self) -> bool:
        """The search has cost more than the budget allows: what it lost outweighs what it won by that much."""
        return self.spent_ms > 0 and self.lost_ms > self.budget * max(self.spent_ms, 20 * 1e3)

    @property
    def sigma(self) -> float:
        """Spread of one window's log step time, from the default against itself; 2 % until there is evidence."""
        n = len(self.noise)
        if n < 4:
            return 0.02
        return max(0.002, math.sqrt(sum(x * x for x in self.noise) / n / 2))

    def confirm(self, env: LiveEnv, slot: Slot, decision: Decision) -> Iterator[tuple[Window, Window] | Confirmation]:
        """Sequential paired test of ``decision`` on ``slot``; yields each pair as it is measured, then the outcome.

        Pairs are (slot left to NCCL, slot with the decision), both with the other slots as committed. The standard
        error uses the noise of this job's own default windows, so that two lucky pairs do not pass.
        """
        without = {**env.committed, slot: AUTO}
        logs: list[float] = []
        while True:
            a = env.measure(TRIAL, without)
            b = env.measure(TRIAL, {**env.committed, slot: decision})
            for window in (a, b):
                self.note(TRIAL, window, env.default_ms)
            yield a, b
            logs.append(math.log(a.step_ms / b.step_ms))
            n, mean = len(logs), sum(logs) / len(logs)
            spread = math.sqrt(sum((x - mean) ** 2 for x in logs) / max(1, n - 1))
            error = max(self.sigma * math.sqrt(2), spread) / math.sqrt(n)
            accepted = n >= MIN_PAIRS and mean > ACCEPT_Z * error
            if accepted or n >= MAX_PAIRS or (n >= MIN_PAIRS and mean < -error):
                yield Confirmation(accepted, 1 - math.exp(-mean), error, n)
                return

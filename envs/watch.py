"""After the verdict: is the table still worth having, and is the job still the one that was tuned?"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .sequential import Race

#: What a window after the verdict may say: the table is slower than the default; the job has changed for good.
HARMFUL, CHANGED = "harmful", "changed"
#: Windows by which the usual step time goes, and so many odd ones running are a change.
USUAL, ODD = 64, 6
#: Level of a single pair that is taken as proof by itself.
AT_ONCE = 1e-3
#: Level of all scheduled pairs of a watch together: it goes on for as long as the job does.
ALL = 0.01
#: Fewer pairs show too little of a job that has two paces.
LEAST = 4
#: Steps that a visit to the default costs beside its window: there and back.
SWITCHES = 8
#: A window so much longer than usual (log) is worth a look at the default by itself, whatever that costs; and one pair
#: is proof by itself where the default is so much faster. A job with two paces makes less of one pair.
ALARM, PLAIN = 0.1, 0.08


@dataclass
class Marks:
    """When what happened, in optimizer steps since the job's first; -1: it has not."""

    first_table: int = -1  # a table came into force that stayed
    first_gain: int = -1  # a gain was confirmed
    verdict: int = -1
    canaries: int = 0  # windows given up
    reopened: int = 0
    returned: int = 0  # of them, into regimes that were tuned before
    dropped: int = 0  # tables taken back after the verdict


@dataclass(frozen=True)
class Rules:
    """How a search is run; steps are optimizer steps."""

    profile_steps: int = 8
    window_steps: tuple[int, int] = (5, 10)  # least and most counted steps of a window
    good_noise: float = 0.004  # standard deviation of a window's log step time that is good enough
    rounds: int = 30  # windows that the policy may ask for, at most ...
    rounds_a_slot: int = 5  # ... or so many a slot, where that is more
    pairs: int = 12  # of one comparison, at most
    comparisons: int = 4  # of one search, at most
    early: int = 3  # windows after which a table that promises enough is confirmed before the search goes on
    least_gain: float = 0.001  # part of the step below which a table is not worth a comparison
    by_belief: bool = True  # a policy that chooses the table of best means has nothing left to try
    patience: int = 3  # windows running under one table that say: that is the policy's result
    reveal: float = 0.5  # noise that a trial is judged by beforehand, in windows: it will not be the last
    budget: float = 0.05  # part of the job's time that the search may lose against the default
    watch_share: float = 0.008  # of the later steps that may run the default
    change: float = 0.03  # lasting change of the step time that begins a new search

    def of(self, policy: Any) -> Rules:
        """The same, but that a policy says by attributes of its own when it has nothing left to try: by default when
        it chooses the table of best means; with ``by_belief = False`` when it keeps to one table for ``patience``
        windows more."""
        by_belief, patience = getattr(policy, "by_belief", self.by_belief), getattr(policy, "patience", self.patience)
        return replace(self, by_belief=bool(by_belief), patience=int(patience))


class Watch:
    """Sees a window after the other. ``noise``: standard deviation of a window's log step time."""

    def __init__(self, noise: float, window_steps: int, rules: Rules, has_table: bool, now: int) -> None:
        self.noise, self.rules, self.has_table = noise, rules, has_table
        self.visit = window_steps + SWITCHES
        self.since, self.check = now, False
        self.begin, self.visits = now, 0
        self.race = Race(noise * math.sqrt(2), ALL)
        self._default_ms: float | None = None  # waits for the window under the table that follows
        self._usual: deque[float] = deque(maxlen=USUAL)
        self._odd: list[float] = []

    def begin_with(self, default_ms: float) -> None:
        """A window of the default has just been measured: the table's first one is set against it."""
        self._default_ms = default_ms

    def wants_default(self, now: int) -> bool:
        """Whether the next window is the default's, given the steps so far."""
        return self.has_table and (self.check or now - self.since >= self.visit / self.rules.watch_share)

    def _affords(self, now: int) -> bool:
        """Whether one more visit to the default stays within its share of the steps since the verdict."""
        return (self.visits + 1) * self.visit <= self.rules.watch_share * (now - self.begin)

    def saw(self, ms: float, is_default: bool, now: int) -> str:
        """One window; HARMFUL, CHANGED or nothing."""
        if not is_default:
            default_ms, self._default_ms = self._default_ms, None
            found = self._against(default_ms, ms, False) if default_ms is not None and self.has_table else ""
            return found or self._level(ms, now)
        asked, self.since, self.check = self.check, now, False
        self.visits += 1
        table_ms = self._odd[-1] if self._odd else self._usual[-1] if self._usual else None
        if table_ms is None:
            return ""
        return self._against(ms, table_ms, asked)

    def _against(self, default_ms: float, table_ms: float, asked: bool) -> str:
        at_once = Race(self.race.noise, AT_ONCE)
        at_once.add(default_ms, table_ms)
        if not asked:  # a window that was looked into because it was slow says nothing fair of the table
            self.race.add(default_ms, table_ms)
        plain = at_once.is_slower and at_once.mean < -PLAIN
        return HARMFUL if (self.race.n >= LEAST and self.race.is_slower) or plain else ""

    def _level(self, ms: float, now: int) -> str:
        """Does the step time stay where it was? One odd window asks for the default if it is far off or a visit is to
        be had, else two do; several in a row are a change."""
        if len(self._usual) < 4:
            self._usual.append(ms)
            return ""
        x = np.log(np.array(self._usual))
        middle = float(np.median(x))
        noise = max(self.noise, 1.4826 * float(np.median(np.abs(x - middle))))
        off = math.log(ms) - middle
        if abs(off) < max(4 * noise, self.rules.change):
            self._odd.clear()
            self._usual.append(ms)
            return ""
        if self._odd and (off > 0) != (math.log(self._odd[-1]) > middle):
            self._odd.clear()
        self._odd.append(ms)
        enough = 1 if off > ALARM or self._affords(now) else 2
        self.check = self.has_table and off > 0 and len(self._odd) == enough
        return CHANGED if len(self._odd) >= ODD else ""

"""A recorded job that can be tuned again: :class:`envs.live.job.Job`'s part that a tuner uses, over a trace.

Its steps are the recorded default steps in order, from a random one on, less what the decisions save: as measured, else
as predicted (``replay.load``); slots add up. A look takes the median; in turns each step its own time.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from ...traces import spaces
from ...traces.files import Trace
from ...traces.queries.costs import default_generations
from ...traces.queries.lives import lives
from ...traces.records import Decision, Decisions, Slot
from ..live.confirmed import decided
from ..live.job import DISCARD, SWITCH_STEPS, Window
from ..live.turns import Turns
from ..search.interfaces import arms_of
from .decisions import Recorded, default_steps, offers_of

Array = np.ndarray[Any, Any]

#: A step never gets shorter than this part of the default's.
LEAST = 0.05


class RecordedJob:
    """``seed``: where in the record it begins. It never ends: the record is gone through again and again."""

    def __init__(self, trace: Trace, recorded: Recorded, seed: int = 0) -> None:
        self.recorded = recorded
        self.assembler = SimpleNamespace(offers=offers_of(trace))
        self.waits = trace.waits
        self.all_reduce = trace.all_reduce
        self.memory_pressure = float(recorded.fingerprint.memory_pressure[0])
        self.memory_free = 0  # a recording runs out of no memory
        self.generation = self.last_step = 0
        self.default_ms = default_steps(trace)
        rng = np.random.default_rng(seed)
        self._at = int(rng.integers(len(self.default_ms)))
        events = trace.events
        is_quiet = events["table_generation"].isin(default_generations(trace))
        self._quiet = _steps_of(events[is_quiet], lives(trace))
        self._last: Array = np.zeros(0, np.int64)
        self._is_default = True
        self._running: dict[Slot, Decision] = {}
        self.confirmed: dict[Slot, Decision] = {}

    def confirm(self, decisions: Decisions) -> int:
        """As ``Job.confirm``; nobody has to be told."""
        self.confirmed = decided(decisions)
        self.generation += 1
        return self.generation

    def saving(self, decisions: Decisions) -> float:
        """Part of the default's step time that ``decisions`` save, measured or predicted."""
        r = self.recorded
        total = 0.0
        for slot, decision in decisions.items():
            if decision.is_auto or slot not in r.slots:
                continue
            row = r.slots.index(slot)
            config = spaces.config_of(decision, slot.func)
            saving = r.truth[row, config]  # of the slot's share of the step
            if np.isfinite(saving):
                total += float(saving * r.share[row])
        return min(total, 1 - LEAST)

    def window(
        self,
        decisions: Decisions,
        n_steps: int,
        discard: int = DISCARD,
        give_up_ms: float = math.inf,
        one_of: int = 0,
    ) -> Window:
        """As ``Job.window``, at all calls: all steps take the same time; one that takes too long is the last."""
        self.generation += 1
        chosen = decided(decisions)
        switch = SWITCH_STEPS if chosen != self._running else 0
        self._running = chosen
        self._is_default = not chosen
        places = np.arange(self._at, self._at + n_steps) % len(self.default_ms)
        ms = float(np.median(self.default_ms[places]) * (1 - self.saving(decisions)))
        self._at = (self._at + n_steps) % len(self.default_ms)
        n = 1 if ms > give_up_ms else n_steps
        first = self.last_step + switch + discard + 1
        self.last_step = first + n - 1
        self._last = np.arange(first, first + n)
        return Window(self.generation, self._last, np.full(n, ms))

    def alternate(
        self,
        decisions: Decisions,
        n_steps: int,
        turn_steps: int = 1,
        discard: int = 0,
        give_up_ms: float = math.inf,
    ) -> Turns:
        """As ``Job.alternate``: its steps are always alike."""
        self.generation += 1
        total = discard + n_steps
        arms = arms_of(total, turn_steps)
        saving = np.where(arms == 1, self.saving(decided(decisions)), self.saving(self.confirmed))
        places = np.arange(self._at, self._at + total) % len(self.default_ms)
        ms = self.default_ms[places] * (1 - saving)
        is_counted = np.arange(total) >= discard
        too_slow = np.flatnonzero((ms > give_up_ms) & (arms == 1) & is_counted)
        end = int(too_slow[0]) + 1 if too_slow.size else total
        self._at = (self._at + end) % len(self.default_ms)
        first = self.last_step + SWITCH_STEPS + 1
        steps = np.arange(first, first + end)
        self.last_step = first + end - 1
        self._running = self.confirmed
        self._is_default = False
        self._last = steps[discard:]
        counted = slice(discard, end)
        others_ms = float(ms[:discard].sum())
        return Turns(
            (self.generation,), steps[counted], ms[counted], arms[counted], turn_steps, discard, others_ms
        )

    def poll(self) -> None:
        """Nothing goes by between two windows."""

    def take_events(self) -> pd.DataFrame:
        """Events of recorded default steps, under the last window's numbers where that was the default's."""
        parts = []
        if self._is_default:
            pairs = zip(self._quiet, self._last, strict=False)  # the shorter one counts
            parts = [events.assign(step=step) for events, step in pairs]
        if not parts:
            return pd.DataFrame()
        return pd.concat(parts, ignore_index=True)


def _steps_of(events: pd.DataFrame, life: pd.Series[int]) -> list[pd.DataFrame]:
    """The events of each step. ``life``: of each process; each life counts its steps from 0.

    The first step of a life warms up, and is left out; some recordings have no other.
    """
    of_process = events["pid"].map(life)
    keys = [of_process.fillna(0), events["step"]]
    every, later = list[pd.DataFrame](), list[pd.DataFrame]()
    before = None
    for (number, _), group in events.groupby(keys):  # in order of lives and steps
        every.append(group)
        if number == before:
            later.append(group)
        before = number
    return later or every

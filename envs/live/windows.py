"""Windows of a running job, for the search: decisions by slot on one side, configs by number on the other.

Works on :class:`live.Job` and on whatever stands in for it (a recorded job).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import pandas as pd

from ...traces import spaces
from ...traces.assemble import COMPUTE_COLUMNS, empty
from ...traces.queries.exposed import exposed_parts
from ...traces.queries.slots import SlotProfile, find_slots, outside_the_offer, with_sizes
from ...traces.reasons import NotTuning, names
from ...traces.records import TUNED_FUNCS, Decision, Slot
from ..nccl_model.arms import distinct
from ..search.interfaces import PROFILE, UNTIMED, Measured, Plan, warm_up_families
from ..search.interfaces import Job as TunedJob
from .job import Window
from .obedience import Disobeyed
from .turns import Turns

Array = np.ndarray[Any, Any]
#: What tells slots apart, in the order of a Slot's fields.
SLOT_COLUMNS = ["n_ranks", "n_nodes", "func", "size_class"]


class LiveWindows:
    """``job``: a :class:`live.Job`; ``profile_steps``: default steps that find the slots; ``min_share``: slots with a
    smaller share of the step are left to NCCL. ``on_window`` hears of every window with what it was for."""

    def __init__(
        self,
        job: Any,
        profile_steps: int = 8,
        min_share: float = 0.01,
        funcs: Sequence[str] = TUNED_FUNCS,
        on_window: Callable[[Plan, Window | Turns], None] = lambda plan, window: None,
    ) -> None:
        self.job, self.profile_steps, self.min_share = job, profile_steps, min_share
        self.funcs, self.on_window = tuple(funcs), on_window
        self.on_disobeyed: Callable[[Disobeyed], object] = lambda row: None
        self.left_alone: list[str] = []  # why no table may touch a slot
        self._refused: set[tuple[Slot, Decision]] = set()
        self.profiles: list[SlotProfile] = []
        self.profile_events = pd.DataFrame()
        self.exposed: dict[Slot, float] = {}  # part of each slot's time; empty: the job does not tell
        self.windows = 0
        self._before_ms = 0.0  # a step under the table before

    def begin(self, skip: int = 3) -> tuple[TunedJob, Measured]:
        """Run default steps (the first ``skip`` of the job do not count) and find the slots.

        Raises ValueError when there is none to tune.
        """
        before = self.job.last_step
        plan = Plan(PROFILE, np.zeros(0, np.int64), self.profile_steps, skip)
        window = self.job.window({}, plan.n_steps, skip)
        found = self._find(window)
        self.profiles = [p for p in found if p.share >= self.min_share]
        self.on_window(plan, window)
        if not self.profiles:
            raise ValueError(self.nothing([p.share for p in found]))
        told = self._told()
        all_obeyed = np.ones(len(self.profiles), bool)
        return told, self._measured(plan, window, before, told.call_us, all_obeyed)

    def _find(self, window: Window) -> list[SlotProfile]:
        """The slots that a table may touch, however small; why it may not touch others."""
        events = self.profile_events = self._events(window)
        offers = self.job.assembler.offers
        found = find_slots(events, offers, window.step_ms * 1e3, self.job.memory_pressure)
        self.exposed = exposed_parts(events, empty(COMPUTE_COLUMNS), self.job.waits)
        outside = outside_the_offer(events, offers)
        self.left_alone = [NotTuning.OUTSIDE(slot=slot, ran=ran) for slot, ran in outside.items()]
        return [p for p in found if p.slot.func in self.funcs and p.slot not in outside]

    def _told(self) -> TunedJob:
        """What a search is told of the slots."""
        found = self.profiles
        own = np.array([int(p.fingerprint.own_pair[0]) for p in found])
        tries_few = getattr(self.job, "tries_few", False)
        timed = [p.timed_by != "NCCL's price" for p in found]
        call_us = np.array([p.call_us for p in found])
        return TunedJob(
            features=np.concatenate([p.fingerprint.vector() for p in found]),
            mask=np.concatenate([distinct(p.fingerprint) for p in found]),
            share=np.array([p.share for p in found]),
            call_us=np.where(timed, call_us, np.nan),
            calls=np.array([p.calls * tries_few for p in found]),
            takes_turns=getattr(self.job, "takes_turns", False),
            families=warm_up_families(own),
        )

    def decisions(self, configs: Array) -> dict[Slot, Decision]:
        """What slots are told under configs (s,); those left to NCCL are left out."""
        return {p.slot: spaces.decision_of(c) for p, c in zip(self.profiles, configs, strict=True) if c}

    def measure(self, plan: Plan) -> Measured:
        """See ``windows.Windows``."""
        is_timed = plan.kind not in UNTIMED or plan.one_of > 0
        if is_timed:
            self.job.take_events()
        before = self.job.last_step
        decisions = self.decisions(plan.configs)
        measured = self._in_turns(plan, decisions) if plan.turns else None
        if measured is None:
            measured = self.job.window(decisions, plan.n_steps, plan.discard, plan.limit_ms, plan.one_of)
        self.windows += 1
        call_us = self._calls(self._events(measured, plan.one_of > 0) if is_timed else pd.DataFrame())
        obeyed = self._obeyed(measured)
        self.on_window(plan, measured)
        return self._measured(plan, measured, before, call_us, obeyed)

    def _in_turns(self, plan: Plan, decisions: dict[Slot, Decision]) -> Turns | None:
        """The plan's configs and the current table in turns; None where the job cannot take turns now."""
        found: Turns | None = self.job.alternate(
            decisions, plan.n_steps, plan.turns, plan.discard, plan.limit_ms
        )
        return found

    def confirm(self, configs: Array) -> None:
        """See ``windows.Windows``."""
        self.job.confirm(self.decisions(configs))

    def _measured(
        self, plan: Plan, window: Window | Turns, before: int, call_us: Array, obeyed: Array
    ) -> Measured:
        counted = len(window.durations_ms)
        billed = max(self.job.last_step - before, counted)
        waited = (
            max(billed - counted - plan.discard, 0) if self._before_ms else 0
        )  # until the table was in force
        billed_ms = float(window.durations_ms.sum()) + (billed - counted - waited) * window.step_ms
        billed_ms += waited * self._before_ms
        self._before_ms = window.step_ms
        durations = np.asarray(window.durations_ms, np.float64)
        first, last = int(window.steps[0]), int(window.steps[-1])
        arms = window.arms if isinstance(window, Turns) else np.zeros(0, np.int64)
        return Measured(durations, call_us, obeyed, billed, billed_ms, first, last, arms)

    def _events(self, window: Window | Turns, is_few: bool = False) -> pd.DataFrame:
        """Of the window's steps; where its table holds at few calls or in turns, of these."""
        events = self.job.take_events()
        if not len(events):
            return events
        mine = events[events["step"].isin(window.steps)]
        if isinstance(window, Turns):
            return mine[mine["table_generation"].isin(window.generations)]
        return mine[mine["table_generation"] == window.generation] if is_few else mine

    def _calls(self, events: pd.DataFrame) -> Array:
        """Median time of each slot's calls, us; NaN where no kernel was sampled."""
        if events.empty:
            return np.full(len(self.profiles), np.nan)
        sized = with_sizes(events)
        timed = sized[sized["us"].notna()]
        firsts = timed[timed["rank"] == timed.groupby(SLOT_COLUMNS)["rank"].transform("min")]
        us = firsts.groupby(SLOT_COLUMNS)["us"].median()
        return np.array([float(us.get(astuple(p.slot), np.nan)) for p in self.profiles])

    def _obeyed(self, window: Window | Turns) -> Array:
        """(s,) bool; what NCCL did not follow is told once."""
        rows = {row.slot: row for row in getattr(window, "disobeyed", ())}
        for row in rows.values():
            if (row.slot, row.decision) not in self._refused:
                self._refused.add((row.slot, row.decision))
                self.on_disobeyed(row)
        return np.array([p.slot not in rows for p in self.profiles])

    def nothing(self, shares: Sequence[float] = ()) -> str:
        """Why there is no slot, and the cure. ``shares``: parts of the step of those that are too small."""
        if shares:
            return NotTuning.TOO_SMALL(share=sum(shares))
        seen = self.profile_events
        tuned = seen[seen["func"].isin(self.funcs)] if len(seen) else seen
        if seen.empty and not self.job.assembler.comms:
            return self._not_loaded()
        if self.left_alone:
            return self.left_alone[0]
        if len(tuned) and not self.job.assembler.offers:
            return NotTuning.NOT_ASKED()
        if seen.empty and any(func in self.funcs for _, func, _ in self.job.assembler.offers):
            return NotTuning.NOT_TOLD()
        return NotTuning.NOTHING()

    def _not_loaded(self) -> str:
        """Why no communicator is known."""
        if not self.job.state:  # no rank has begun to agree: there is no default group
            return NotTuning.NO_JOB_GROUP()
        text = self.job.state[1]
        told = NotTuning.NOT_LOADED_AS_TOLD(why=text) if text else NotTuning.NOT_LOADED()
        return text if "other-backend" in names(text) else told

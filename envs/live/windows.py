"""Windows of a running job, for the search: decisions by slot on one side, configs by number on the other.

Works on :class:`live.Job` and on whatever stands in for it (a recorded job).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from typing import Any, cast

import numpy as np
import pandas as pd

from ...traces import spaces
from ...traces.assemble import COMPUTE_COLUMNS, empty
from ...traces.names import ALL_REDUCE, tuned_funcs
from ...traces.queries.exposed import exposed_parts
from ...traces.queries.slots import SLOT_KEYS, SlotProfile, find_slots, outside_the_offer, with_sizes
from ...traces.reasons import NotTuning, Why
from ...traces.records import Decision, Slot
from ..nccl.untouched import Untouched
from ..nccl_model.arms import distinct
from ..search.interfaces import PROFILE, QUAD, UNTIMED, Measured, Plan, warm_up_families
from ..search.interfaces import Job as TunedJob
from .gpu_memory import take_out
from .job import Window
from .job_ends import NothingToTune, OtherJob
from .obedience import Disobeyed
from .registered import Guard
from .turns import TRIAL, Turns
from .untouched import fault

Array = np.ndarray[Any, Any]


class LiveWindows:
    """``job``: a :class:`live.Job`; ``profile_steps``: default steps that find the slots; ``min_share``: slots with a
    smaller share of the step are left to NCCL. ``funcs``: tune these alone, of those that the job's option names.
    ``on_window`` hears of every window with what it was for."""

    def __init__(
        self,
        job: Any,
        profile_steps: int = 8,
        min_share: float = 0.01,
        funcs: Sequence[str] = (),
        on_window: Callable[[Plan, Window | Turns], None] = lambda plan, window: None,
    ) -> None:
        self.job = job
        self.profile_steps = profile_steps
        self.min_share = min_share
        self.all_reduce = job.all_reduce
        self.funcs = tuple(funcs) or tuned_funcs(self.all_reduce)
        self.on_window = on_window
        self.on_disobeyed: Callable[[Disobeyed], object] = lambda row: None
        self.left_alone: list[Why] = []  # why no table may touch a slot
        self._refused: set[tuple[Slot, Decision]] = set()
        self.profiles: list[SlotProfile] = []
        self.profile_events = pd.DataFrame()
        self._guard = Guard([], self.profile_events)
        self._untouched: Untouched | None = getattr(job, "untouched", None)
        self.withheld: list[Why] = []  # which settings of the slots are not tried, and why
        self.exposed: dict[Slot, float] = {}  # part of each slot's time; empty: the job does not tell
        self._before_ms = 0.0  # a step under the table before
        self._last_step = 0  # of the last window, and what was billed with it

    def begin(self, skip: int = 3) -> tuple[TunedJob, Measured]:
        """Run default steps (the first ``skip`` of the job do not count) and find the slots.

        Raises NothingToTune when there is none.
        """
        job = self.job
        before = job.last_step
        none = np.zeros(0, np.int64)  # no slot is known
        plan = Plan(PROFILE, none, self.profile_steps, skip)
        window = self._default_steps(plan)
        found = self._find(window)
        self.profiles = []
        confirmed = getattr(job, "confirmed", {})
        for profile in found:
            is_large = profile.share >= self.min_share
            if is_large or profile.slot in confirmed:  # a slot of its table stays, however small it is now
                self.profiles.append(profile)
        self.on_window(plan, window)
        if self._untouched and (why := fault(self._untouched, self.profile_events)):
            raise NothingToTune(NotTuning.NOT_UNTOUCHED(why=why))
        if not self.profiles:
            shares = [p.share for p in found]
            raise NothingToTune(self.nothing(shares))
        told = self._told()
        n_slots = len(self.profiles)
        all_obeyed = np.ones(n_slots, bool)
        measured = self._measured(plan, window, before, told.call_us, all_obeyed)
        return told, measured

    def _default_steps(self, plan: Plan) -> Window:
        """Steps under NCCL's default: where a table holds, the default takes turns with it."""
        job = self.job
        if not getattr(job, "confirmed", {}):
            return cast(Window, job.window({}, plan.n_steps, plan.discard))
        quads = math.ceil(2 * plan.n_steps / QUAD)  # half of their steps are the default's
        turns = job.alternate({}, QUAD * quads, 1, QUAD)
        is_default = turns.arms == TRIAL
        return Window(turns.generation, turns.steps[is_default], turns.durations_ms[is_default])

    def _find(self, window: Window) -> list[SlotProfile]:
        """The slots that a table may touch, however small; why it may not touch others."""
        job = self.job
        events = self._events(window)
        self.profile_events = events
        offers = job.assembler.offers
        step_us = window.step_ms * 1e3
        headroom = self._untouched.headroom if self._untouched else 0
        way = self.all_reduce
        found = find_slots(events, offers, step_us, job.memory_pressure, headroom=headroom, all_reduce=way)
        no_compute = empty(COMPUTE_COLUMNS)
        self.exposed = exposed_parts(events, no_compute, job.waits, way)
        outside = outside_the_offer(events, offers, way)
        self.left_alone = []
        for slot, ran in outside.items():
            reason = NotTuning.NOT_REACHED if slot.func == ALL_REDUCE else NotTuning.OUTSIDE
            why = reason(slot=slot, ran=ran)
            self.left_alone.append(why)
        reached = [p for p in found if p.slot.func in self.funcs]
        return [p for p in reached if p.slot not in outside]

    def _told(self) -> TunedJob:
        """What a search is told of the slots."""
        found = self.profiles
        prints = [p.fingerprint for p in found]
        own_pairs = np.array([int(one.own_pair[0]) for one in prints])
        tries_few = getattr(self.job, "tries_few", False)
        is_timed = [p.timed_by != "NCCL's price" for p in found]
        call_us = [p.call_us for p in found]
        calls = np.array([p.calls * tries_few for p in found])
        features = [one.vector() for one in prints]
        mask = [distinct(one) for one in prints]
        self.withheld = self._withhold(mask)
        return TunedJob(
            features=np.concatenate(features),
            mask=np.concatenate(mask),
            share=np.array([p.share for p in found]),
            call_us=np.where(is_timed, call_us, np.nan),
            calls=calls,
            families=warm_up_families(own_pairs, np.array([int(one.func[0]) for one in prints])),
        )

    def _withhold(self, masks: list[Array]) -> list[Why]:
        """Takes out of the slots' masks, (1, N_CONFIGS) each, what could harm this job; says what."""
        found = self.profiles
        events = self.profile_events
        job = self.job
        self._guard = Guard(found, events)
        whys = self._guard.look(job.assembler)
        self._guard.close(masks)
        return whys + take_out(found, masks, events, job.memory_free)

    def may_run(self, slot: Slot, decision: Decision) -> bool:
        """Whether a row of a table from before is one of a slot of this job, and not dangerous here."""
        slots = [profile.slot for profile in self.profiles]
        if slot not in slots:
            return False
        return self._guard.may_run(slot, decision)

    def decisions(self, configs: Array) -> dict[Slot, Decision]:
        """What slots are told under configs (s,); those left to NCCL are left out."""
        found = dict[Slot, Decision]()
        for profile, config in zip(self.profiles, configs, strict=True):
            if config:
                found[profile.slot] = spaces.decision_of(config, profile.slot.func)
        return found

    def measure(self, plan: Plan) -> Measured:
        """See ``windows.Windows``. Raises :class:`OtherJob` before anything runs, if a setting has become dangerous."""
        job = self.job
        if whys := self._guard.look(job.assembler):
            raise OtherJob(whys[0])
        is_few = plan.one_of > 0
        is_timed = plan.kind not in UNTIMED or is_few
        if is_timed:
            job.take_events()
        else:
            job.poll()
        before = job.last_step
        between = max(before - self._last_step, 0)
        decisions = self.decisions(plan.configs)
        more = plan.discard, plan.limit_ms
        measured: Window | Turns
        if plan.turns:
            measured = job.alternate(decisions, plan.n_steps, plan.turns, *more)
        else:
            measured = job.window(decisions, plan.n_steps, *more, plan.one_of)
        events = pd.DataFrame()
        if is_timed:
            events = self._events(measured, is_few)
            why = fault(self._untouched, events, is_default=False) if self._untouched else ""
            if why:
                raise OtherJob(NotTuning.NOT_UNTOUCHED(why=why))
        call_us = self._calls(events)
        obeyed = self._obeyed(measured)
        self.on_window(plan, measured)
        found = self._measured(plan, measured, before, call_us, obeyed)
        turns = measured.turn_steps if isinstance(measured, Turns) else 0
        return replace(found, between=between, turns=turns)

    def confirm(self, configs: Array) -> None:
        """See ``windows.Windows``."""
        self.job.confirm(self.decisions(configs))

    def _measured(
        self, plan: Plan, window: Window | Turns, before: int, call_us: Array, obeyed: Array
    ) -> Measured:
        durations_ms = window.durations_ms
        step_ms = window.step_ms
        counted = len(durations_ms)
        passed = self.job.last_step - before
        billed = max(passed, counted)
        known_ms = float(durations_ms.sum())
        discarded = min(plan.discard, billed - counted)
        discarded_ms = discarded * step_ms
        if isinstance(window, Turns):  # what its leases have seen beside the steps that it tells
            discarded, discarded_ms = window.others, window.others_ms
        waited = max(billed - counted - discarded, 0)  # until the table was in force
        billed_ms = known_ms + discarded_ms + waited * (self._before_ms or step_ms)
        # Steps that wait for the next table run what ran last: after turns that is the current table.
        self._before_ms = step_ms
        if isinstance(window, Turns):
            self._before_ms = window.current_ms
        steps_ms = np.asarray(durations_ms, np.float64)
        first = int(window.steps[0])
        last = int(window.steps[-1])
        arms = np.zeros(0, np.int64)
        if isinstance(window, Turns):
            arms = window.arms
        self._last_step = self.job.last_step
        return Measured(steps_ms, call_us, obeyed, billed, billed_ms, first, last, arms)

    def _events(self, window: Window | Turns, is_few: bool = False) -> pd.DataFrame:
        """Of the window's steps; where its table holds at few calls or in turns, of these."""
        events = self.job.take_events()
        if not len(events):
            return events
        is_within = events["step"].isin(window.steps)
        mine = events[is_within]
        table = mine["table_generation"]
        if isinstance(window, Turns):
            return mine[table.isin(window.generations)]
        return mine[table == window.generation] if is_few else mine

    def _calls(self, events: pd.DataFrame) -> Array:
        """Median time of each slot's calls, us; NaN where no kernel was sampled."""
        if events.empty:
            n_slots = len(self.profiles)
            return np.full(n_slots, np.nan)
        sized = with_sizes(events)
        # Of calls in a group a slot's profile has the time of the whole group, which NCCL asks about. So it is here.
        part = sized["n_bytes"] / sized["asked"]
        whole_us = sized["us"] / part
        sized = sized.assign(us=whole_us)
        is_asked = sized["asked"] > 0
        is_timed = sized["us"].notna()
        timed = sized[is_asked & is_timed]
        ranks = timed.groupby(SLOT_KEYS)["rank"]
        is_first = timed["rank"] == ranks.transform("min")
        firsts = timed[is_first]
        us = firsts.groupby(SLOT_KEYS)["us"].median()
        keys = [astuple(p.slot) for p in self.profiles]
        medians_us = [float(us.get(key, np.nan)) for key in keys]
        return np.array(medians_us)

    def _obeyed(self, window: Window | Turns) -> Array:
        """(s,) bool; what NCCL did not follow is told once."""
        disobeyed = getattr(window, "disobeyed", ())
        rows = {row.slot: row for row in disobeyed}
        for row in rows.values():
            refused = row.slot, row.decision
            if refused not in self._refused:
                self._refused.add(refused)
                self.on_disobeyed(row)
        obeyed = [p.slot not in rows for p in self.profiles]
        return np.array(obeyed)

    def nothing(self, shares: Sequence[float] = ()) -> Why:
        """Why there is no slot, and the cure. ``shares``: parts of the step of those that are too small."""
        if shares:
            return NotTuning.TOO_SMALL(share=sum(shares))
        seen = self.profile_events
        assembler = self.job.assembler
        offers = assembler.offers
        if seen.empty and not assembler.comms:
            return self._not_loaded()
        if self.left_alone:
            return self.left_alone[0]
        has_tuned = False
        if len(seen):
            is_tuned = seen["func"].isin(self.funcs)
            has_tuned = bool(is_tuned.any())
        if has_tuned and not offers:
            return NotTuning.NOT_ASKED()
        offered = {func for _, func, _ in offers}
        if seen.empty and not offered.isdisjoint(self.funcs):
            return NotTuning.NOT_TOLD()
        return NotTuning.NOTHING()

    def _not_loaded(self) -> Why:
        """Why no communicator is known."""
        if not self.job.state:  # no rank has begun to agree: there is no default group
            return NotTuning.NO_JOB_GROUP()
        why: Why | None = self.job.state[1]
        if why is None:
            return NotTuning.NOT_LOADED()
        if why.reason is NotTuning.OTHER_BACKEND:
            return why
        return NotTuning.NOT_LOADED_AS_TOLD(why=why)

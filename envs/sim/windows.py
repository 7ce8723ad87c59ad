"""Windows of simulated jobs: many searches side by side, one on each job of ``sim.jobs.Jobs``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..search.belief.prior import Prior
from ..search.config import SearchConfig
from ..search.interfaces import PROFILE, UNTIMED, Job, Measured, Plan, warm_up_families
from ..search.search import Search
from .jobs import Jobs
from .mixes import Few, Turns, default_tables
from .noise import RandomNumbers, longest

Array = np.ndarray[Any, Any]

#: Steps from publishing a table to the first one under it: the poll, the round under way, the round that carries it.
SWITCH_STEPS = 3


class SimWindows:
    """Windows of all jobs of a batch. ``rng`` draws the noise: for all jobs together, or for each by itself."""

    def __init__(self, jobs: Jobs, rng: RandomNumbers) -> None:
        self.jobs = jobs
        self.rng = rng
        n = len(jobs)
        self.running = default_tables(jobs)
        always = np.ones(n)
        self.few = Few(always, self.running)
        self.waited = np.zeros(n, int)  # steps of the last window until its table held
        self.tried = self.running  # configs of the last window
        self.tried_steps = np.zeros(n, int)  # steps under them

    def begin(self, n_steps: int) -> tuple[list[Job], list[Measured]]:
        """Default steps of every job, and what its search is told. Kernels of the default are waited for."""
        jobs = self.jobs
        n = len(jobs)
        default = default_tables(jobs)
        rows = list(range(n))
        plans = []
        for row in rows:
            n_slots = jobs.n_slots[row]
            configs = default[row, :n_slots]
            plan = Plan(PROFILE, configs, n_steps, 3)
            plans.append(plan)
        seen = self.measure(rows, plans)
        _, default_us = jobs.step_us(default)
        steps = np.full(n, 8)
        noise = jobs.noise
        all_late_us = noise.calls(default_us, steps, self.rng)
        features = jobs.fingerprint.vector()
        told = []
        for row, measured in enumerate(seen):
            # Calls of which no kernel was sampled in the window are heard of later.
            sampled_us = measured.call_us
            is_sampled = np.isfinite(sampled_us)
            n_slots = len(sampled_us)
            late_us = all_late_us[row, :n_slots]
            call_us = np.where(is_sampled, sampled_us, late_us)
            job = self._told(row, features, call_us)
            told.append(job)
        return told, seen

    def _told(self, row: int, features: Array, call_us: Array) -> Job:
        """What the search of the job at ``row`` is told: ``features`` (places of all jobs, ...) as the fingerprint has
        them, ``call_us`` (its slots,) us of its calls under the default."""
        jobs = self.jobs
        fingerprint = jobs.fingerprint
        n_slots = int(jobs.n_slots[row])
        first = row * jobs.width
        stop = first + n_slots
        places = slice(first, stop)
        share = fingerprint.share[places]
        own_pair = fingerprint.own_pair[places]
        func = fingerprint.func[places]
        calls = jobs.calls[row, :n_slots]
        mask = jobs.mask[row, :n_slots]
        return Job(
            features=features[places],
            mask=mask,
            share=np.asarray(share, np.float64),
            call_us=call_us,
            families=warm_up_families(own_pair, func),
            calls=np.asarray(calls, np.float64),
        )

    def measure(self, rows: Sequence[int], plans: Sequence[Plan]) -> list[Measured]:
        """One window for each of the jobs at ``rows``, as ``windows.Windows.measure`` does for one."""
        n = len(self.jobs)
        configs = self.running.copy()
        counted = np.zeros(n, int)  # steps of each job's window
        every = np.arange(n)
        before = self.few
        few = before.take(every)
        no_turns = np.zeros(n, int)
        no_others = np.zeros_like(configs)
        turns = Turns(no_turns, no_others)
        for row, plan in zip(rows, plans, strict=True):
            n_slots = len(plan.configs)
            place = row, slice(n_slots)
            configs[place] = plan.configs
            counted[row] = plan.n_steps + plan.discard
            one_of = max(plan.one_of, 1)
            few.part[row] = 1 / one_of
            few.others[place] = plan.others
            turns.steps[row] = plan.turns
            turns.others[place] = plan.others
        in_turns = turns.steps > 0
        after = np.where(in_turns[:, None], turns.others, configs)  # the current table runs between turns
        is_other = after != self.running
        is_other_part = few.part != before.part
        is_new = is_other.any(axis=1) | is_other_part | in_turns
        self.waited, waited_us = self._wait(is_new)
        most = longest(counted)
        arms = turns.arms(most)
        shape = n, most
        limit_us = np.full(shape, np.inf)
        for row, plan in zip(rows, plans, strict=True):
            is_own = arms[row] == 1
            is_own[: plan.discard] = False
            own_us = 1e3 * plan.limit_ms
            limit_us[row, is_own] = own_us
        steps_us, calls_us = self.jobs.window(configs, counted, self.rng, few, turns, limit_us)
        self.running = after
        self.few = few
        self.tried = configs
        # A round after turns says whether they count, where rank 0 is not in all communicators: they are sharded in
        # the node and replicated over nodes.
        jobs = self.jobs
        works = jobs.works
        is_replicated = works.replicated[jobs.which]
        has_round = in_turns & is_replicated
        ended, ended_us = self._wait(has_round)
        rounds = self.waited + ended
        rounds_us = waited_us + ended_us
        self.tried_steps = np.zeros(n, int)
        found = []
        for row, plan in zip(rows, plans, strict=True):
            step_us = steps_us[row]
            is_taken = np.isfinite(step_us)
            step_ms = step_us[is_taken] / 1e3
            ran = arms[row, is_taken]
            taken = len(step_ms)
            last = taken - 1
            last_us = step_us[last]
            most_us = limit_us[row, last]
            is_cut = bool(last_us > most_us)
            n_slots = len(plan.configs)
            call_us = calls_us[row, :n_slots].copy()
            seen = self._told_of(plan, step_ms, ran, call_us, is_cut)
            tried = int(ran.sum())
            self.tried_steps[row] = tried
            billed = int(rounds[row]) + taken
            rounds_ms = rounds_us[row] / 1e3
            taken_ms = step_ms.sum()
            both_ms = rounds_ms + taken_ms
            billed_ms = float(both_ms)
            seen = replace(seen, billed=billed, billed_ms=billed_ms)
            found.append(seen)
        return found

    def _wait(self, is_new: Array) -> tuple[Array, Array]:
        """Let a round pass on the jobs (n,) bool that have one; its steps, and their time, us, (n,) each."""
        n = len(self.jobs)
        waited = np.where(is_new, SWITCH_STEPS, 0)
        waited_us = np.zeros(n)
        changed = np.flatnonzero(is_new)
        if len(changed):
            running = self.running[changed]
            few = self.few.take(changed)
            step_us, _ = self.jobs.step_us(running, changed, few)
            waited_us[changed] = SWITCH_STEPS * step_us
        self.jobs.advance(waited, self.rng)
        return waited, waited_us

    @staticmethod
    def _told_of(plan: Plan, ms: Array, arms: Array, call_us: Array, is_cut: bool) -> Measured:
        """What is told of a window's steps (k,). ``is_cut``: it ended with a step of the plan's configs that was too
        slow."""
        first = plan.discard
        is_untimed = is_cut or plan.kind in UNTIMED
        if is_untimed and not plan.one_of:
            call_us[:] = np.nan
        told_ms = ms[first:]
        told_arms = arms[first:] if plan.turns else arms[:0]
        n_slots = len(call_us)
        obeyed = np.ones(n_slots, bool)
        return Measured(told_ms, call_us, obeyed, 0, 0.0, arms=told_arms, turns=plan.turns)


class OneJob:
    """The windows of a batch of one as ``windows.Windows``."""

    def __init__(self, batch: SimWindows, profile_steps: int) -> None:
        self.batch = batch
        self.profile_steps = profile_steps

    def begin(self) -> tuple[Job, Measured]:
        """See ``windows.Windows``."""
        jobs, windows = self.batch.begin(self.profile_steps)
        return jobs[0], windows[0]

    def measure(self, plan: Plan) -> Measured:
        """See ``windows.Windows``."""
        windows = self.batch.measure([0], [plan])
        return windows[0]

    def confirm(self, configs: Array) -> None:
        """See ``windows.Windows``: nothing takes a table back here."""


class SimSearch:
    """Searches on all jobs of a batch, side by side: every one goes on until the policy has a turn or it is done."""

    def __init__(self, windows: SimWindows, prior: Prior, config: SearchConfig) -> None:
        self.windows = windows
        jobs, defaults = windows.begin(config.profile_steps)
        self.searches = []
        for job, default in zip(jobs, defaults, strict=True):
            search = Search(job, default, prior, config)
            self.searches.append(search)

    def measure(self, rows: Sequence[int]) -> list[int]:
        """One window of each of the jobs at ``rows`` where it is not the policy's turn; which these are."""
        measured = []
        plans = []
        for row in rows:
            search = self.searches[row]
            plan = search.plan()
            if plan is not None:
                measured.append(row)
                plans.append(plan)
        if not plans:
            return []
        windows = self.windows.measure(measured, plans)
        for row, plan, seen in zip(measured, plans, windows, strict=True):
            search = self.searches[row]
            search.record(plan, seen)
        return measured

    @property
    def tables(self) -> Array:
        """What is confirmed in every job, (n, width)."""
        tables = default_tables(self.windows.jobs)
        for table, search in zip(tables, self.searches, strict=True):
            table[: search.n_slots] = search.confirmed
        return tables

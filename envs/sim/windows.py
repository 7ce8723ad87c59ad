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
from .mixes import Few, Turns
from .noise import RandomNumbers

Array = np.ndarray[Any, Any]

#: Steps from publishing a table to the first one under it: the poll, the round under way, the round that carries it.
SWITCH_STEPS = 3


class SimWindows:
    """Windows of all jobs of a batch. ``rng`` draws the noise: for all jobs together, or for each by itself."""

    #: Whether the searches are told that two tables can take turns at every step.
    takes_turns = True

    def __init__(self, jobs: Jobs, rng: RandomNumbers) -> None:
        self.jobs, self.rng = jobs, rng
        n = len(jobs)
        self.running = np.zeros((n, jobs.width), np.int64)
        self.few = Few(np.ones(n), self.running)
        self.waited = np.zeros(n, int)  # steps of the last window until its table held
        self.tried = self.running  # configs of the last window
        self.tried_steps = np.zeros(n, int)  # steps under them

    def begin(self, n_steps: int) -> tuple[list[Job], list[Measured]]:
        """Default steps of every job, and what its search is told. Kernels of the default are waited for."""
        jobs, f = self.jobs, self.jobs.fingerprint
        none = np.zeros((len(jobs), jobs.width), np.int64)
        rows = range(len(jobs))
        seen = self.measure(list(rows), [Plan(PROFILE, none[i, : jobs.n_slots[i]], n_steps, 3) for i in rows])
        late = jobs.noise.calls(jobs.step_us(none)[1], np.full(len(jobs), 8), self.rng)
        features, told = f.vector(), []
        for i, m in enumerate(seen):
            s = int(jobs.n_slots[i])
            part = slice(i * jobs.width, i * jobs.width + s)
            told.append(
                Job(
                    features=features[part],
                    mask=jobs.mask[i, :s],
                    share=np.asarray(f.share[part], np.float64),
                    call_us=np.where(np.isfinite(m.call_us), m.call_us, late[i, :s]),
                    families=warm_up_families(f.own_pair[part]),
                    calls=np.asarray(jobs.calls[i, :s], np.float64),
                    takes_turns=self.takes_turns,
                )
            )
        return told, seen

    def measure(self, rows: Sequence[int], plans: Sequence[Plan]) -> list[Measured]:
        """One window for each of the jobs at ``rows``, as ``windows.Windows.measure`` does for one."""
        rows, n = list(rows), len(self.jobs)
        configs, counted = self.running.copy(), np.zeros(n, int)
        few = self.few.take(np.arange(n))
        turns = Turns(np.zeros(n, int), np.zeros_like(configs))
        for row, plan in zip(rows, plans, strict=True):
            slots = slice(len(plan.configs))
            configs[row, slots] = plan.configs
            counted[row] = plan.n_steps + plan.discard
            few.part[row], few.others[row, slots] = 1 / max(plan.one_of, 1), plan.others
            turns.steps[row], turns.others[row, slots] = plan.turns, plan.others
        in_turns = turns.steps > 0
        after = np.where(in_turns[:, None], turns.others, configs)  # the current table runs between turns
        is_new = (after != self.running).any(axis=1) | (few.part != self.few.part) | in_turns
        self.waited, waited_us = self._wait(is_new)
        steps, calls = self.jobs.window(configs, counted, self.rng, few, turns)
        self.running, self.few, self.tried, found = after, few, configs, []
        # A round after turns says whether they count, where rank 0 is not in all communicators: they are sharded in
        # the node and replicated over nodes.
        works = self.jobs.works
        is_replicated = works.replicated[self.jobs.which]
        ended, ended_us = self._wait(in_turns & is_replicated)
        self.tried_steps = np.zeros(n, int)
        arms = turns.arms(steps.shape[1])
        for row, plan in zip(rows, plans, strict=True):
            ms, ran = steps[row, : counted[row]] / 1e3, arms[row, : counted[row]]
            seen = self._cut(plan, ms, ran, calls[row, : len(plan.configs)].copy())
            taken = plan.discard + len(seen.step_ms)
            self.tried_steps[row] = int(ran[:taken].sum())
            around_ms = (waited_us[row] + ended_us[row]) / 1e3
            billed = int(self.waited[row] + ended[row]) + taken
            billed_ms = float(around_ms + ms[:taken].sum())
            found.append(replace(seen, billed=billed, billed_ms=billed_ms))
        return found

    def _wait(self, is_new: Array) -> tuple[Array, Array]:
        """Let a round pass on the jobs (n,) bool that have one; its steps, and their time, us, (n,) each."""
        waited_us = np.zeros(len(self.jobs))
        waited = np.where(is_new, SWITCH_STEPS, 0)
        changed = np.flatnonzero(is_new)
        if len(changed):
            before = self.running[changed], changed, self.few.take(changed)
            waited_us[changed] = SWITCH_STEPS * self.jobs.step_us(*before)[0]
        self.jobs.advance(waited)
        return waited, waited_us

    @staticmethod
    def _cut(plan: Plan, ms: Array, arms: Array, call_us: Array) -> Measured:
        """What is told of a window: it ends with its first step of the plan's configs that is too slow."""
        too_slow = (ms[plan.discard :] > plan.limit_ms) & (arms[plan.discard :] == 1)
        over = np.flatnonzero(too_slow)
        end = plan.discard + int(over[0]) + 1 if len(over) else len(ms)
        if not plan.one_of and (len(over) or plan.kind in UNTIMED):
            call_us[:] = np.nan
        told = arms[plan.discard : end] if plan.turns else arms[:0]
        obeyed = np.ones(len(call_us), bool)
        return Measured(ms[plan.discard : end], call_us, obeyed, 0, 0.0, arms=told)


class OneJob:
    """The windows of a batch of one as ``windows.Windows``."""

    def __init__(self, batch: SimWindows, profile_steps: int) -> None:
        self.batch, self.profile_steps = batch, profile_steps

    def begin(self) -> tuple[Job, Measured]:
        """See ``windows.Windows``."""
        (job,), (seen,) = self.batch.begin(self.profile_steps)
        return job, seen

    def measure(self, plan: Plan) -> Measured:
        """See ``windows.Windows``."""
        return self.batch.measure([0], [plan])[0]

    def confirm(self, configs: Array) -> None:
        """See ``windows.Windows``: nothing takes a table back here."""


class SimSearch:
    """Searches on all jobs of a batch, side by side: every one goes on until the policy has a turn or it is done."""

    def __init__(self, windows: SimWindows, prior: Prior, config: SearchConfig) -> None:
        self.windows = windows
        begun = zip(*self.windows.begin(config.profile_steps), strict=True)
        self.searches = [Search(job, default, prior, config) for job, default in begun]

    def measure(self, rows: Sequence[int]) -> list[int]:
        """One window of each of the jobs at ``rows`` where it is not the policy's turn; which these are."""
        plans = {i: plan for i in rows if (plan := self.searches[i].plan()) is not None}
        if not plans:
            return []
        for i, seen in zip(plans, self.windows.measure(list(plans), list(plans.values())), strict=True):
            self.searches[i].record(plans[i], seen)
        return list(plans)

    @property
    def tables(self) -> Array:
        """What is confirmed in every job, (n, width)."""
        out = np.zeros((len(self.searches), self.windows.jobs.width), np.int64)
        for row, search in zip(out, self.searches, strict=True):
            row[: search.n_slots] = search.confirmed
        return out

"""Windows of simulated jobs: many searches side by side, one on each job of ``sim.jobs.Jobs``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..search.belief.prior import Prior
from ..search.config import SearchConfig
from ..search.interfaces import PROFILE, UNTIMED, Job, Measured, Plan, warm_up_families
from ..search.search import Search
from .jobs import Jobs
from .noise import NoiseStream
from .truth import Few

Array = np.ndarray[Any, Any]

#: Steps from publishing a table to the first one under it: the poll, the round under way, the round that carries it.
SWITCH_STEPS = 3


class SimWindows:
    """Windows of all jobs of a batch. ``rng`` draws the noise: for all jobs together, or for each by itself."""

    def __init__(self, jobs: Jobs, rng: np.random.Generator | NoiseStream) -> None:
        self.jobs, self.rng = jobs, rng
        self.running, self.waited = np.zeros((len(jobs), jobs.width), np.int64), np.zeros(len(jobs), int)
        self.few = Few(np.ones(len(jobs)), self.running)

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
                )
            )
        return told, seen

    def measure(self, rows: Sequence[int], plans: Sequence[Plan]) -> list[Measured]:
        """One window for each of the jobs at ``rows``, as ``windows.Windows.measure`` does for one."""
        rows, configs, counted = list(rows), self.running.copy(), np.zeros(len(self.jobs), int)
        few = self.few.take(np.arange(len(self.jobs)))
        for row, plan in zip(rows, plans, strict=True):
            configs[row, : len(plan.configs)] = plan.configs
            counted[row] = plan.n_steps + plan.discard
            few.part[row], few.others[row, : len(plan.configs)] = 1 / max(plan.one_of, 1), plan.others
        changed = np.flatnonzero((configs != self.running).any(axis=1) | (few.part != self.few.part))
        waited, waited_us = np.zeros(len(self.jobs), int), np.zeros(len(self.jobs))
        if len(changed):
            waited[changed] = SWITCH_STEPS
            before = self.running[changed], changed, self.few.take(changed)
            waited_us[changed] = SWITCH_STEPS * self.jobs.step_us(*before)[0]
        self.jobs.advance(waited)
        steps, calls = self.jobs.window(configs, counted, self.rng, few)
        self.running, self.few, self.waited, found = configs, few, waited, []
        for row, plan in zip(rows, plans, strict=True):
            s, ms = len(plan.configs), steps[row, : counted[row]] / 1e3
            call_us, over = calls[row, :s].copy(), np.flatnonzero(ms[plan.discard :] > plan.limit_ms)
            if len(over):  # the next window bills the steps until all ranks are back
                ms = ms[: plan.discard + int(over[0]) + 1]
            if not plan.one_of and (len(over) or plan.kind in UNTIMED):
                call_us[:] = np.nan
            billed, billed_ms = int(waited[row]) + len(ms), float(waited_us[row] / 1e3 + ms.sum())
            found.append(Measured(ms[plan.discard :], call_us, np.ones(s, bool), billed, billed_ms))
        return found


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

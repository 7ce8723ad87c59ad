"""Windows of simulated jobs: many searches side by side, one on each job of ``sim.jobs.Jobs``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..traces.spaces import config_index
from . import turns
from .belief import Prior
from .search import Search
from .sim.jobs import SLOTS, Jobs
from .sim.noise import Luck
from .watch import Rules
from .windows import PROFILE, UNTIMED, Job, Measured, Plan, warm_up_families

Array = np.ndarray[Any, Any]

#: Steps from publishing a table to the first one under it: the poll, the round under way, the round that carries it.
SWITCH_STEPS = 3


class SimWindows:
    """Windows of all jobs of a batch. ``rng`` draws the noise: for all jobs together, or for each by itself."""

    def __init__(self, jobs: Jobs, rng: np.random.Generator | Luck) -> None:
        self.jobs, self.rng = jobs, rng
        self.running = np.zeros((len(jobs), SLOTS), np.int64)

    def begin(self, n_steps: int) -> tuple[list[Job], list[Measured]]:
        """Default steps of every job, and what its search is told. Kernels of the default are waited for."""
        jobs, f = self.jobs, self.jobs.fingerprint
        none = np.zeros((len(jobs), SLOTS), np.int64)
        rows = range(len(jobs))
        seen = self.measure(list(rows), [Plan(PROFILE, none[i, : jobs.n_slots[i]], n_steps, 3) for i in rows])
        late = jobs.noise.calls(jobs.step_us(none)[1], np.full(len(jobs), 8), self.rng)
        features, told = f.vector(), []
        for i, m in enumerate(seen):
            s = int(jobs.n_slots[i])
            part = slice(i * SLOTS, i * SLOTS + s)
            told.append(
                Job(
                    features=features[part],
                    mask=jobs.mask[i, :s],
                    share=np.asarray(f.share[part], np.float64),
                    call_us=np.where(np.isfinite(m.call_us), m.call_us, late[i, :s]),
                    families=warm_up_families(f.own_pair[part]),
                )
            )
        return told, seen

    def measure(self, rows: Sequence[int], plans: Sequence[Plan]) -> list[Measured]:
        """One window for each of the jobs at ``rows``, as ``windows.Windows.measure`` does for one."""
        jobs, n = self.jobs, len(self.jobs)
        configs, counted = self.running.copy(), np.zeros(n, int)
        changed, discard = np.zeros(n, bool), np.zeros(n, int)
        for row, plan in zip(rows, plans, strict=True):
            s = len(plan.configs)
            changed[row] = not np.array_equal(plan.configs, configs[row, :s])
            configs[row, :s] = plan.configs
            discard[row] = plan.discard
            counted[row] = plan.n_steps + plan.discard
        before = np.zeros(n)
        rows = list(rows)
        before[rows] = jobs.step_us(self.running[rows], np.array(rows))[0]
        jobs.advance(np.where(changed, SWITCH_STEPS, 0))
        steps, calls = jobs.window(configs, counted, self.rng)
        found = []
        for row, plan in zip(rows, plans, strict=True):
            s, ms = len(plan.configs), steps[row, : counted[row]] / 1e3
            extra, kept = SWITCH_STEPS * bool(changed[row]), ms[discard[row] :]
            billed = extra * float(before[row]) / 1e3
            over = np.flatnonzero(kept > plan.limit_ms)
            call_us = calls[row, :s].copy()
            if len(over):  # the next window bills the steps until all ranks are back
                kept = kept[: int(over[0]) + 1]
                ms = ms[: discard[row] + len(kept)]
            if len(over) or plan.kind in UNTIMED:
                call_us[:] = np.nan
            found.append(Measured(kept, call_us, np.ones(s, bool), extra + len(ms), billed + float(ms.sum())))
            self.running[row] = configs[row]
        return found

    def saving(self, tables: Array) -> Array:
        """What tables (n, SLOTS) truly save now, as a part of the default's step time, (n,)."""
        none = np.zeros((len(self.jobs), SLOTS), np.int64)
        return np.asarray(1 - self.jobs.step_us(tables)[0] / self.jobs.step_us(none)[0])


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

    def __init__(
        self, jobs: Any, prior: Prior, rng: np.random.Generator | Luck, rules: Rules | None = None, windows: Any = None
    ) -> None:
        """``windows``: those of ``jobs``, where they are more than simulated."""
        self.windows, self.rules = windows or SimWindows(jobs, rng), rules or Rules()
        told, seen = self.windows.begin(self.rules.profile_steps)
        self.searches = [Search(t, m, prior, self.rules) for t, m in zip(told, seen, strict=True)]
        self.n_windows = np.zeros(len(jobs), np.int64)

    @property
    def waiting(self) -> list[int]:
        """Jobs whose search is not done: it is the policy's turn."""
        return [i for i, search in enumerate(self.searches) if not search.is_done]

    def observe(self, rows: Sequence[int]) -> Array:
        """Observations of the jobs at ``rows``, (len(rows), N_OBSERVATION)."""
        return np.stack([self.searches[i].observe() for i in rows])

    def step(self, rows: Sequence[int], configs: Array) -> Array:
        """A turn of each of the jobs at ``rows``, and the windows that come of it; rewards."""
        rewards = np.zeros(len(rows))
        for i, config in zip(rows, configs, strict=True):
            self.searches[i].decide(int(config))
        going = list(range(len(rows)))
        while going := [k for k in going if not self.searches[rows[k]].is_done]:
            plans = {k: plan for k in going if (plan := self.searches[rows[k]].plan()) is not None}
            if not plans:
                break
            seen = self.windows.measure([rows[k] for k in plans], list(plans.values()))
            for (k, plan), measured in zip(plans.items(), seen, strict=True):
                rewards[k] += self.searches[rows[k]].record(plan, measured)
                self.n_windows[rows[k]] += 1
            going = list(plans)
        return rewards

    def watch(self, rows: Sequence[int]) -> None:
        """One window of each of the jobs at ``rows`` whose search is over (or has begun anew by itself)."""
        plans = [self.searches[i].plan() for i in rows]
        due = [(i, plan) for i, plan in zip(rows, plans, strict=True) if plan is not None]
        if not due:
            return
        seen = self.windows.measure([i for i, _ in due], [plan for _, plan in due])
        for (i, plan), measured in zip(due, seen, strict=True):
            self.searches[i].record(plan, measured)

    @property
    def tables(self) -> Array:
        """What is confirmed in every job, (n, SLOTS)."""
        out = np.zeros((len(self.searches), SLOTS), np.int64)
        for row, search in zip(out, self.searches, strict=True):
            row[: search.n_slots] = search.confirmed
        return out


def play(search: SimSearch, policy: Any) -> SimSearch:
    """Let a policy (SB3's ``predict``) decide until every search is over. Its state is kept for every job apart."""
    state, start = None, np.ones(len(search.searches), bool)
    everyone = np.zeros((len(start), turns.N_OBSERVATION), np.float32)
    while rows := search.waiting:
        everyone[rows] = search.observe(rows)
        # All rows are asked, so that a recurrent policy's state keeps its shape; what is over is not listened to.
        actions, state = policy.predict(everyone, state=state, episode_start=start, deterministic=True)
        start = np.zeros(len(start), bool)
        search.step(rows, config_index(actions)[rows])
    return search

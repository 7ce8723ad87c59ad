"""What a search promises its user, put to the test in simulation: before its verdict, after it, and when a job changes.

A job in which nothing can be gained ends under no table that harms it; a small gain stays in force; a table that has
turned bad is gone; a job that does not change is not searched anew; one that does is tuned again. ``dynamiccl lab
promises`` prints all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from ..traces.fingerprint import N_FEATURES
from ..traces.spaces import N_CONFIGS, config_index
from .belief import Prior
from .job_arena import play as play_billed
from .job_arena import played
from .scores import HARM, Ledger
from .search import Search
from .sim.jobs import SLOTS, STANDARD, JobFamily, Jobs, draw_jobs, oracle
from .sim.noise import Noise
from .sim_windows import SWITCH_STEPS, SimSearch, play
from .windows import Job, Measured, Plan

Array = np.ndarray[Any, Any]

#: Default steps from which the noise of a job is known before its watch begins.
KNOWN_STEPS = 96
#: The one config beside AUTO of a job that is only watched.
CONFIG = 20


@dataclass(frozen=True)
class Ended:
    """Searches as they ended, arrays (n,)."""

    has_table: Array  # bool
    saving: Array  # what the table truly saves, as a part of the default's step

    @property
    def is_harmed(self) -> Array:
        """Under a table that is slower than the default by more than HARM, (n,) bool."""
        return self.saving < -HARM


def ended(jobs: Jobs, policy: Any, seed: int = 0) -> Ended:
    """Search all ``jobs`` to their verdicts."""
    done = play(SimSearch(jobs, Prior.load(), np.random.default_rng([seed, 13])), policy)
    return Ended(np.asarray(done.tables.any(axis=1)), done.windows.saving(done.tables))


def nothing_to_gain(n: int, seed: int = 0, family: JobFamily = STANDARD, worse: float = 0.0) -> Jobs:
    """``n`` jobs whose configs all do what the default does, or, with ``worse``, cost up to that part of the step."""
    rng = np.random.default_rng([seed, 11])
    jobs = draw_jobs(family, rng, n).without_gain()
    if worse:
        share = jobs.fingerprint.share.reshape(n, SLOTS, 1)
        more = rng.uniform(0.0, worse, (n, SLOTS, N_CONFIGS)) / np.maximum(share, 1e-3)
        more[:, :, 0] = 0.0
        us = np.array(jobs.tables.us)
        us[:n] *= 1 + more
        jobs.tables = replace(jobs.tables, us=us.astype(np.float32))
    return jobs


class _Plain:
    """Windows of ``n`` jobs of one slot and one config beside AUTO, under which a step takes ``before`` default steps
    until step ``change_at`` of the watch, then ``after``."""

    def __init__(self, n: int, before: float, after: float, change_at: int, noise: Noise, rng: Any) -> None:
        self.before, self.after, self.change_at, self.noise, self.rng = before, after, change_at, noise, rng
        self.now, self.is_default = np.zeros(n, np.int64), np.ones(n, bool)

    def begin(self) -> tuple[Job, list[Measured]]:
        """What the searches are told, and default steps enough to know the noise."""
        mask = np.zeros((1, N_CONFIGS), bool)
        mask[0, [0, CONFIG]] = True
        features, us = np.zeros((1, N_FEATURES), np.float32), np.array([100.0])
        n = len(self.now)
        steps = self.noise.steps(np.ones(n), np.full(n, KNOWN_STEPS), self.rng)
        families = np.full((1, N_CONFIGS), -1)
        seen = [Measured(row, us, np.ones(1, bool), KNOWN_STEPS, float(row.sum())) for row in steps]
        return Job(features, mask, np.array([0.3]), us, families), seen

    def measure(self, plans: Sequence[Plan | None]) -> list[Measured]:
        """A window of each job that has a plan."""
        n = len(plans)
        counted, extra, discard = (np.zeros(n, np.int64) for _ in range(3))
        for i, plan in enumerate(plans):
            if plan is not None:
                is_default = not plan.configs.any()
                extra[i] = SWITCH_STEPS * (is_default != self.is_default[i])
                self.is_default[i] = is_default
                discard[i], counted[i] = plan.discard, plan.discard + plan.n_steps
        pace = np.where(self.is_default, 1.0, np.where(self.now >= self.change_at, self.after, self.before))
        self.noise.at = self.noise.at + extra
        ms = self.noise.steps(pace, counted, self.rng)
        calls = self.noise.calls(np.full((n, 1), 100.0), counted, self.rng)
        self.now += counted + extra
        found = []
        for i in range(n):
            row = ms[i, : counted[i]]
            billed = int(counted[i] + extra[i])
            found.append(Measured(row[discard[i] :], calls[i], np.ones(1, bool), billed, float(row.sum()) + extra[i]))
        return found


@dataclass
class Watched:
    """What became of ``n`` tables, arrays (n,). ``windows``: those under the table from the change until it was gone,
    NaN where it never was; ``anew``: searches begun anew; ``default_share``: of all steps."""

    in_force: Array
    windows: Array
    anew: Array
    default_share: Array


def watch(
    n: int,
    steps: int,
    before: float,
    after: float,
    policy: Any,
    change_at: int = 0,
    seed: int = 0,
    family: JobFamily = STANDARD,
) -> Watched:
    """Watch ``n`` confirmed tables for ``steps`` steps each, with the noise of the family's jobs.

    A step under the table takes ``before`` default steps until ``change_at``, then ``after``.
    """
    rng = np.random.default_rng([seed, 12])
    jobs = _Plain(n, before, after, change_at, Noise.draw(family.noise, rng, n), rng)
    told, seen = jobs.begin()
    prior = Prior.load()
    searches = [Search(told, one, prior) for one in seen]
    for search in searches:
        search.resume(np.array([CONFIG]))
    on_default, windows, gone = np.zeros(n, np.int64), np.zeros(n, np.int64), np.full(n, np.nan)
    while (going := jobs.now < steps).any():
        plans = [_next(search, policy) if on else None for search, on in zip(searches, going, strict=True)]
        measured = jobs.measure(plans)
        for i, plan in enumerate(plans):
            if plan is None:
                continue
            on_default[i] += measured[i].billed * (not plan.configs.any())
            windows[i] += plan.configs.any() and jobs.now[i] > change_at and np.isnan(gone[i])
            searches[i].record(plan, measured[i])
            if np.isnan(gone[i]) and not searches[i].confirmed.any():
                gone[i] = windows[i]
    anew = np.array([s.marks.reopened - s.marks.returned for s in searches])
    in_force = np.array([s.confirmed.any() for s in searches])
    return Watched(in_force, gone, anew, on_default / np.maximum(jobs.now, 1))


def _next(search: Search, policy: Any) -> Plan:
    while (plan := search.plan()) is None:
        search.decide(int(config_index(policy.predict(search.observe()[None])[0])[0]))
    return plan


@dataclass
class Lived:
    """Jobs that were searched and then watched, arrays (n,), ``default_share`` (k, n): after k numbers of steps."""

    default_share: Array
    anew: Array
    dropped: Array
    saving: Array
    oracle: Array


def lived(jobs: Jobs, policy: Any, milestones: Sequence[int], seed: int = 0) -> Lived:
    """Search ``jobs``, and watch each for the last of ``milestones`` steps after its verdict; all by the truth."""
    calm = jobs.take(slice(None))
    calm.swing[:, 0] = 0
    best_us = oracle(calm)[1]
    ledger, search = played(policy, jobs, best_us, Prior.load(), seed, after=milestones[0])
    shares = [_share(ledger)]
    for before, more in pairwise(milestones):
        play_billed(policy, search, ledger, more - before)
        shares.append(_share(ledger))
    scores, marks = ledger.scores(), [s.marks for s in search.searches]
    return Lived(
        np.array(shares),
        np.array([m.reopened - m.returned for m in marks]),
        np.array([m.dropped for m in marks]),
        scores.gain,
        scores.oracle_gain,
    )


@dataclass
class Recovered:
    """Jobs that change for good, (k, n) at k numbers of steps after that: what the table in force saves, and what runs;
    (n,) what there is to gain then, and what the table of before still saves."""

    in_force: Array
    running: Array
    possible: Array
    before: Array
    anew: Array


def recovery(
    n: int, policy: Any, at: Sequence[int] = (300,), change_at: int = 2500, seed: int = 0, family: JobFamily = STANDARD
) -> Recovered:
    """``n`` jobs whose network or compute changes for good at step ``change_at``, long after most verdicts; weather
    swings the network's pace as in all jobs of the family."""
    rng = np.random.default_rng([seed, 14])
    kind = replace(family, change=1.0, passing=0.0, change_at=(change_at, change_at + 0.5))
    jobs = draw_jobs(kind, rng, n)
    calm = jobs.take(slice(None))
    calm.swing[:, 0] = 0
    calm.noise.at = calm.change_at.copy()
    default_us = calm.step_us(np.zeros((n, SLOTS), np.int64))[0]
    possible = 1 - oracle(calm)[1] / default_us
    search = play(SimSearch(jobs, Prior.load(), rng), policy)

    def saves(tables: Array) -> Array:
        return np.asarray(1 - calm.step_us(tables)[0] / default_us)

    def until(steps: Array) -> None:
        while len(rows := np.flatnonzero(jobs.at < steps)):
            for i in rows:
                _settle(search.searches[i], policy)
            search.watch(rows.tolist())

    until(jobs.change_at)
    before, in_force, running = saves(search.tables), [], []
    for steps in at:
        until(jobs.change_at + steps)
        in_force.append(saves(search.tables))
        running.append(saves(search.windows.running))
    anew = np.array([s.marks.reopened - s.marks.returned for s in search.searches])
    return Recovered(np.array(in_force), np.array(running), possible, before, anew)


def _share(ledger: Ledger) -> Array:
    """Of the steps after a verdict those at the default; NaN where no table is in force."""
    return np.where(ledger.final.any(axis=1), ledger.default_after / ledger.after, np.nan)


def _settle(search: Search, policy: Any) -> None:
    """The policy's turns, where it has any."""
    while search.plan() is None:
        search.decide(int(config_index(policy.predict(search.observe()[None])[0])[0]))

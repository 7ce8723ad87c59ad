"""Plays a policy's searches on whole jobs, with every step on the bill: what the board shows and training is judged by.

The search is the one that runs live (``search.Search``); only the windows are simulated, and each goes into a
:class:`scores.Ledger`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import turns
from .belief import Prior
from .memory import Memory
from .scores import Ledger, Scores
from .sim.jobs import Jobs
from .sim_windows import SWITCH_STEPS, SimSearch, SimWindows
from .spaces import config_index
from .watch import Rules
from .windows import Measured, Plan

Array = np.ndarray[Any, Any]

#: Steps of the watch that are played after a verdict; the rest of a job goes on like them.
AFTER = 1000


class BilledWindows(SimWindows):
    """Simulated windows of which each step goes into a ledger, those around a switch and those thrown away too."""

    def __init__(self, jobs: Jobs, rng: np.random.Generator, ledger: Ledger) -> None:
        super().__init__(jobs, rng)
        self.ledger = ledger

    def measure(self, rows: Sequence[int], plans: Sequence[Plan]) -> list[Measured]:
        """See :class:`SimWindows`."""
        before = self.running[rows].copy()
        found = super().measure(rows, plans)
        now = self.running[rows]
        waited = np.where((before != now).any(axis=1), SWITCH_STEPS, 0)  # until the table is in force
        self.ledger.bill(np.asarray(rows), before, waited)
        self.ledger.bill(np.asarray(rows), now, np.array([m.billed for m in found]) - waited)
        return found


def judged(
    policy: Any, jobs: Jobs, best_us: Array, prior: Prior, seed: int = 0, after: int = AFTER, rules: Rules | None = None
) -> Scores:
    """Scores of a policy (SB3's ``predict`` on ``turns``' observations) on jobs whose best step is ``best_us`` (n,).

    ``jobs`` are left as they are. What the policy raises passes through.
    """
    return played(policy, jobs, best_us, prior, seed, after, rules)[0].scores()


def played(
    policy: Any,
    jobs: Jobs,
    best_us: Array,
    prior: Prior,
    seed: int = 0,
    after: int = AFTER,
    rules: Rules | None = None,
    memories: Sequence[Memory | None] | None = None,
) -> tuple[Ledger, SimSearch]:
    """As :func:`judged`: the bills, and the searches as they ended. ``memories``: of each job's cluster."""
    jobs, rng, n = jobs.take(slice(None)), np.random.default_rng([seed, len(jobs)]), len(jobs)
    ledger = Ledger(jobs, best_us)
    search = SimSearch(jobs, prior, rng, rules, BilledWindows(jobs, rng, ledger), memories)
    state, start = None, np.ones(n, bool)
    seen = np.zeros((n, turns.N_OBSERVATION), np.float32)
    until = np.full(n, np.inf)  # steps at which a job's watch has been played
    while True:
        over = np.array([s.is_over for s in search.searches])
        fresh = np.flatnonzero(over & np.isinf(until))
        ledger.end(fresh, search.tables[fresh])
        until[fresh] = ledger.steps[fresh] + after
        open_ = np.flatnonzero(ledger.steps < until).tolist()
        if not open_:
            break
        # Where the watch has begun a new search, its first windows come before the policy's turn.
        asked = [i for i in open_ if not over[i] and search.searches[i].plan() is None]
        watched = [i for i in open_ if i not in asked]
        if watched:
            search.watch(watched)
        if asked:
            seen[asked] = search.observe(asked)
            # All rows are asked, so that a recurrent policy's state keeps its shape; only those whose turn it is count.
            actions, state = policy.predict(seen, state=state, episode_start=start, deterministic=True)
            start = np.zeros(n, bool)
            search.step(asked, config_index(actions)[asked])
        again = np.flatnonzero(np.isfinite(until))
        ledger.final[again] = search.tables[again]
    marks = [s.marks.first_gain for s in search.searches]
    ledger.first_gain = np.where(np.array(marks) >= 0, marks, np.nan)
    return ledger, search

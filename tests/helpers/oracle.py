"""The best there is in whole jobs, by trying: nothing that searches may know it. Suites of jobs keep what it finds."""

from __future__ import annotations

from typing import Any

import numpy as np
from dynamiccl.envs.sim.regimes import MOST_REGIMES
from dynamiccl.envs.sim.truth import Jobs
from dynamiccl.traces.spaces import N_CONFIGS

Array = np.ndarray[Any, Any]
#: Further starts where slots act together, from random tables.
STARTS = 8
#: Of all starts so many are climbed in pairs of slots, the best of each job.
BEST = 3


def oracle(jobs: Jobs, passes: int = 4) -> tuple[Array, Array]:
    """The best joint configs that stay as they are: (n, S), and :meth:`Jobs.usual_us` (n,) under them.

    Every config of a slot in turn, until no slot helps; begun from the default and from each slot's quickest call,
    whatever that does to the rest of the step. Where slots act together, every pair of configs of every two slots as
    well. Where congestion moves, that is the best for a long job as a whole: who follows it can be better.
    """
    alone = np.where(jobs.mask, jobs.tables.us, np.inf).argmin(axis=2)
    (a, a_us), (b, b_us) = (_climb(jobs, start, passes) for start in (np.zeros_like(alone), alone))
    law, extras = jobs.sites.law, jobs.sites.extras
    strong = (law.crowd > 0.5) | (law.steep > 0)  # more than any job that trains
    rows = np.flatnonzero(strong | (extras.joint > 0) | (law.budget > 0) | (law.serial > 0) | (law.port > 0))
    if len(rows):
        some, rng = jobs.take(rows), np.random.default_rng(0)
        found = [(a[rows], a_us[rows]), (b[rows], b_us[rows])]
        for _ in range(STARTS):
            table = np.where(some.mask, rng.random(some.mask.shape), -1.0).argmax(axis=2)
            found.append(_climb(some, table, passes))
        tables, times = (np.stack(part) for part in zip(*found, strict=True))
        order = np.argsort(times, axis=0, kind="stable")
        for place in order[:BEST]:
            every = np.arange(len(rows))
            chosen, us = _climb_in_pairs(some, tables[place, every], times[place, every], passes)
            better = us < b_us[rows]
            b[rows[better]], b_us[rows[better]] = chosen[better], us[better]
    return np.where((b_us < a_us)[:, None], b, a), np.minimum(a_us, b_us)


def by_regime(jobs: Jobs) -> tuple[Array, Array]:
    """The best tables of each regime, (n, MOST_REGIMES, S), and :meth:`Jobs.followed_us` (n,) under them."""
    first, us = oracle(jobs.settled(np.zeros(len(jobs), int)))
    tables = np.repeat(first[:, None], MOST_REGIMES, axis=1)
    for k in range(1, MOST_REGIMES):
        there = np.flatnonzero(jobs.regimes.count > k)
        if len(there):
            tables[there, k] = oracle(jobs.take(there).settled(np.full(len(there), k)))[0]
    changing = jobs.regimes.count > 1
    return tables, np.where(changing, jobs.followed_us(tables), us)


def _climb_in_pairs(jobs: Jobs, chosen: Array, best: Array, passes: int) -> tuple[Array, Array]:
    rows = np.arange(len(jobs))
    for _ in range(passes):
        before = best[rows]
        for s in range(jobs.width):
            for t in range(s):
                _best_pair(jobs, rows, s, t, chosen, best)
        rows = rows[best[rows] < before * (1 - 1e-4)]
        if len(rows):
            chosen[rows], best[rows] = _climb(jobs.take(rows), chosen[rows], passes)
    return chosen, best


def _climb(jobs: Jobs, start: Array, passes: int) -> tuple[Array, Array]:
    """Better tables than ``start``, one slot at a time, and their usual us."""
    best, chosen = jobs.usual_us(start), start.copy()
    active = np.ones(len(jobs), bool)
    for _ in range(passes):
        before = best.copy()
        for s in range(jobs.width):
            for config in range(N_CONFIGS):
                rows = np.flatnonzero(active & jobs.mask[:, s, config] & (s < jobs.n_slots))
                rows = rows[chosen[rows, s] != config]
                if not len(rows):
                    continue
                trial = chosen[rows].copy()
                trial[:, s] = config
                us = jobs.usual_us(trial, rows)
                better = us < best[rows] * (1 - 1e-6)
                best[rows[better]], chosen[rows[better], s] = us[better], config
        active = best < before * (1 - 1e-4)
    return chosen, best


def _best_pair(jobs: Jobs, rows: Array, s: int, t: int, chosen: Array, best: Array) -> None:
    """Take the best pair of configs of two slots of the jobs at ``rows``, where it is better than what is chosen."""
    rows = rows[jobs.n_slots[rows] > max(s, t)]
    place, config, other = np.nonzero(jobs.mask[rows, s][:, :, None] & jobs.mask[rows, t][:, None, :])
    if not len(rows):
        return
    trial = chosen[rows[place]]
    trial[:, s], trial[:, t] = config, other
    us = jobs.usual_us(trial, rows[place])
    order = np.lexsort((us, place))
    quickest = order[np.unique(place[order], return_index=True)[1]]
    better = us[quickest] < best[rows] * (1 - 1e-6)
    best[rows[better]], chosen[rows[better]] = us[quickest[better]], trial[quickest[better]]

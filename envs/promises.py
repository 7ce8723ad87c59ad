"""What a search promises of the time after its verdict, put to the test in simulation.

Jobs in which there is nothing to gain end without a table; a gain of 1 % stays in force; a table that has turned bad is
gone within two windows; a job that does not change is not searched anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .belief import Prior
from .sequential import middle, window_noise
from .sim.jobs import STANDARD, JobFamily, draw_jobs
from .sim.noise import Noise
from .sim_windows import SWITCH_STEPS, SimSearch, play
from .watch import CHANGED, HARMFUL, Rules, Watch
from .windows import DISCARD

Array = np.ndarray[Any, Any]

#: Default steps from which the noise of a job is known before its watch begins.
KNOWN_STEPS = 96


def tables_of_nothing(n: int, policy: Any, seed: int = 0, family: JobFamily = STANDARD) -> Array:
    """Whether a search ended with a table, (n,) bool, on jobs whose configs all do what the default does."""
    rng = np.random.default_rng([seed, 11])
    jobs = draw_jobs(family, rng, n).without_gain()
    return np.asarray(play(SimSearch(jobs, Prior.load(), rng), policy).tables.any(axis=1))


@dataclass
class Watched:
    """What became of ``n`` tables, arrays (n,): steps and windows from the change until a table was dropped or the job
    held to have changed, NaN where that never was; and the part of all steps that ran the default."""

    dropped: Array
    dropped_windows: Array
    reopened: Array
    default_share: Array

    @property
    def in_force(self) -> Array:
        """Tables that nothing happened to, (n,) bool."""
        return np.isnan(self.dropped) & np.isnan(self.reopened)


def watch(
    n: int, steps: int, before: float, after: float, change_at: int = 0, seed: int = 0, family: JobFamily = STANDARD
) -> Watched:
    """Watch ``n`` tables for ``steps`` steps each, with the noise of the family's jobs.

    A step under the table takes ``before`` default steps until ``change_at``, then ``after``; what is told counts from
    there. A table that is dropped or a job that is searched anew is watched no further.
    """
    rng, rules = np.random.default_rng([seed, 12]), Rules()
    noise = Noise.draw(family.noise, rng, n)
    known = np.log(noise.steps(np.ones(n), np.full(n, KNOWN_STEPS), rng))
    lowest, most = rules.window_steps
    fits = [[k for k in range(lowest, most) if window_noise(logs, k) <= rules.good_noise] for logs in known]
    length = np.array([min(some, default=most) for some in fits])
    watches = [Watch(window_noise(logs, int(k)), int(k), rules, True, 0) for logs, k in zip(known, length, strict=True)]
    now, on_default, windows = (np.zeros(n, np.int64) for _ in range(3))
    dropped, dropped_windows, reopened = (np.full(n, np.nan) for _ in range(3))
    was_default, going = np.zeros(n, bool), np.ones(n, bool)
    while going.any():
        is_default = np.array([w.wants_default(int(t)) for w, t in zip(watches, now, strict=True)])
        extra = np.where(is_default != was_default, SWITCH_STEPS + DISCARD, 0)
        noise.at = noise.at + np.where(going, extra, 0)
        pace = np.where(is_default, 1.0, np.where(now >= change_at, after, before))
        ms = noise.steps(pace, np.where(going, length, 0), rng)
        was_default = is_default
        for i in np.flatnonzero(going):
            now[i] += length[i] + extra[i]
            on_default[i] += (length[i] + extra[i]) * is_default[i]
            windows[i] += now[i] > change_at
            found = watches[i].saw(middle(ms[i, : length[i]]), bool(is_default[i]), int(now[i]))
            if found == HARMFUL:
                dropped[i], dropped_windows[i] = now[i] - change_at, windows[i]
            elif found == CHANGED:
                reopened[i] = now[i] - change_at
            going[i] = not found and now[i] < steps
    return Watched(dropped, dropped_windows, reopened, on_default / np.maximum(now, 1))

"""What a search over a job costs and brings its user: every step billed, by the truth, in default steps.

A :class:`LossAccount` is told each step that ran and under which configs; it knows the truth of the simulated jobs.
Whatever searches can be scored by it: rules, networks, other people's tuners. Nothing that a search measures enters its
score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ..search.config import HORIZON
from ..sim.jobs import Jobs
from ..sim.mixes import Few

Array = np.ndarray[Any, Any]

#: A step this many times the default's is one that people notice.
HARSH = 1.5
#: A table that makes the true step this much longer than the default is harmful; what is less, nobody can tell.
HARM = 0.002


def bootstrap(values: Array, seed: int = 0, rounds: int = 2000, over: Array | None = None) -> list[float]:
    """95 % percentile-bootstrap interval (Efron 1979) of the mean of ``values`` (n,), or of their sum over the sum of
    ``over`` (n,)."""
    n = len(values)
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, n, (rounds, n))
    means = values[draws].mean(axis=1)
    if over is not None:
        divisors = over[draws].mean(axis=1)
        means = means / np.maximum(divisors, 1e-9)
    bounds = np.percentile(means, [2.5, 97.5])
    return _rounded(bounds, 4)


def _rounded(values: Array, digits: int) -> list[float]:
    return [round(float(v), digits) for v in values]


@dataclass(frozen=True)
class Scores:
    """One entrant on ``n`` jobs, arrays (n,). Steps count from the job's first; NaN where there was none.

    ``lost`` is in default steps against the oracle's table from the first step on; ``gain`` is what the table in force
    at the end truly saves, as a part of the default step.
    """

    first_gain: Array  # steps to the first confirmed gain
    verdict: Array  # steps to the verdict
    quiet: Array  # steps until nothing is tried any more
    gain: Array
    oracle_gain: Array
    lost: Array  # in HORIZON steps
    is_harsh: Array  # a step took more than HARSH times the default's
    is_harmed: Array  # ends under a table that is slower than the default by more than HARM

    def take(self, rows: Array) -> Scores:
        """The jobs at ``rows``."""
        found = {name: value[rows] for name, value in vars(self).items()}
        return Scores(**found)

    def record(self) -> dict[str, Any]:
        """What a file holds, rounded to what can be told apart; NaN becomes None."""

        def plain(values: Array) -> list[Any]:
            if values.dtype == bool:
                return [int(v) for v in values]
            rounded = _rounded(values, 5)
            return [v if math.isfinite(v) else None for v in rounded]

        return {name: plain(value) for name, value in vars(self).items()}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Scores:
        """Inverse of :meth:`record`; ``quiet`` may be missing. Raises ValueError when it is none."""
        names = [field.name for field in fields(cls)]
        found = dict[str, Array]()
        try:
            n_jobs = len(record["gain"])
            record = {"quiet": [None] * n_jobs, **record}
            for name in names:
                found[name] = np.array(record[name], float)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no scores: {type(error).__name__} {error}") from error
        shapes = {value.shape for value in found.values()}
        if shapes != {(found["gain"].size,)}:
            raise ValueError("no scores: they are not all of as many jobs")
        for name in names:
            if name.startswith("is_"):
                found[name] = found[name] > 0.5
        return cls(**found)


class LossAccount:
    """The bill of one search on each of ``n`` jobs, beside which it runs."""

    def __init__(self, jobs: Jobs, oracle_us: Array) -> None:
        """``oracle_us`` (n,): the usual step under the best configs."""
        n = len(jobs)
        self.jobs = jobs
        self.oracle = oracle_us / jobs.default_us
        self.steps = np.zeros(n)  # all billed
        self.lost = np.zeros(n)  # against the default
        # Of both, since the verdict.
        self.after = np.zeros(n)
        self.lost_after = np.zeros(n)
        self.worst = np.ones(n)
        never = np.full(n, np.nan)
        self.first_gain = never.copy()
        self.verdict = never.copy()
        self.quiet = never.copy()
        shape = n, jobs.width
        self.final = np.zeros(shape, int)

    def bill(
        self,
        rows: Array,  # (m,)
        configs: Array,  # (m, width)
        n_steps: Array,  # (m,)
        few: Few | None = None,
        at: Array | None = None,  # (m,)
    ) -> Array:
        """``n_steps`` ran of the jobs at ``rows`` under ``configs``, of some at ``few`` calls, all at what a step took
        when the jobs were ``at`` these steps; None: now.

        Returns a step's true time (m,) in default steps of that moment.
        """
        rows = np.asarray(rows)
        n_steps = np.asarray(n_steps, float)
        n = len(rows)
        # Both at once: what a call costs does not grow with the jobs.
        default = np.zeros_like(configs)
        if few:
            all_calls = Few(np.ones(n), default)
            few = Few.join([few, all_calls])
        tables = np.concatenate([configs, default])
        twice = np.concatenate([rows, rows])
        moments = None if at is None else np.concatenate([at, at])
        step_us, *_ = self.jobs.step_us(tables, twice, few, moments)
        under_table = step_us[:n]
        under_default = step_us[n:]
        pace = under_table / under_default
        lost = n_steps * (pace - 1)
        is_over = np.isfinite(self.verdict[rows])
        np.add.at(self.steps, rows, n_steps)
        np.add.at(self.lost, rows, lost)
        n_after = n_steps * is_over
        lost_after = lost * is_over
        np.add.at(self.after, rows, n_after)
        np.add.at(self.lost_after, rows, lost_after)
        seen = np.where(n_steps > 0, pace, 1.0)
        self.see(rows, seen)
        return np.asarray(pace)

    def see(self, rows: Array, pace: Array) -> None:
        """One step of each of the jobs at ``rows`` (m,) truly took ``pace`` (m,) default steps."""
        np.maximum.at(self.worst, rows, pace)

    def end(self, rows: Array, configs: Array) -> None:
        """They have given a verdict: ``configs`` (m, width) stay in force. Called again when that is changed."""
        before = self.verdict[rows]
        now = self.steps[rows]
        self.verdict[rows] = np.fmin(before, now)
        self.final[rows] = configs

    def go_on(self, rows: Array) -> None:
        """They are still at work: how a job goes on once nothing is tried any more does not yet show."""
        self.after[rows] = 0.0
        self.lost_after[rows] = 0.0

    def scores(self) -> Scores:
        """What it came to. After what was billed a job goes on as it did in the end, or under its table."""
        jobs = self.jobs
        default = np.zeros_like(self.final)
        final_us = jobs.usual_us(self.final)
        default_us = jobs.usual_us(default)
        pace = final_us / default_us
        first_use = jobs.first_use.spent_us / jobs.default_us
        billed = self.lost + first_use
        has_gone_on = self.after > 0
        with np.errstate(invalid="ignore"):
            seen = self.lost_after / self.after
            goes_on = np.where(has_gone_on, seen, pace - 1)
        longest = np.maximum(self.steps, 1)
        part = np.minimum(HORIZON / longest, 1.0)  # of the bill, where it is longer than that
        rest = np.maximum(HORIZON - self.steps, 0)
        oracle_gain = 1 - self.oracle
        until_now = part * billed
        from_now_on = rest * goes_on
        to_gain = HORIZON * oracle_gain
        return Scores(
            first_gain=self.first_gain.copy(),
            verdict=self.verdict.copy(),
            quiet=self.quiet.copy(),
            gain=1 - pace,
            oracle_gain=oracle_gain,
            lost=until_now + from_now_on + to_gain,
            is_harsh=self.worst > HARSH,
            is_harmed=pace > 1 + HARM,
        )


def _spread(values: Array) -> list[float] | None:
    """p10, median, p90; None where there is nothing."""
    known = values[np.isfinite(values)]
    if not len(known):
        return None
    spread = np.percentile(known, [10, 50, 90])
    return _rounded(spread, 1)


def _spread_of_firsts(values: Array) -> list[float | None] | None:
    """p10, median, p90 of steps to an event that some jobs never saw: these count as infinite, and None in the list is
    "never". None where there are no jobs."""
    if not len(values):
        return None
    is_known = np.isfinite(values)
    steps = np.where(is_known, values, np.inf)
    spread = np.percentile(steps, [10, 50, 90], method="inverted_cdf")
    return [round(float(value), 1) if np.isfinite(value) else None for value in spread]


def summary(s: Scores) -> dict[str, Any]:
    """Figures of one entrant for people and programs; intervals are over jobs, spreads are p10, median and p90."""
    found = s.oracle_gain >= 0.01  # steps to a first gain mean little where there is none
    possible = max(s.oracle_gain.sum(), 1e-9)
    delivered = float(s.gain.sum() / possible)
    return {
        "jobs": len(s.gain),
        "steps_to_first_gain": _spread_of_firsts(s.first_gain[found]),
        "steps_to_verdict": _spread(s.verdict),
        "steps_to_quiet": _spread(s.quiet),
        "gain_delivered": round(delivered, 4),
        "gain_delivered_ci95": bootstrap(s.gain, over=s.oracle_gain),
        "lost": round(float(s.lost.mean()), 1),
        "lost_ci95": bootstrap(s.lost),
        "harsh": round(float(s.is_harsh.mean()), 4),
        "slower": round(float(s.is_harmed.mean()), 4),
    }


def by_stratum(scores: Scores, strata: Array) -> dict[str, dict[str, Any]]:
    """:func:`summary` of the jobs of each stratum; ``strata`` (n,) names each job's."""
    names = dict.fromkeys(strata.tolist())  # each once, in their order
    found = dict[str, dict[str, Any]]()
    for name in names:
        own = scores.take(strata == name)
        found[str(name)] = summary(own)
    return found


def ranks(entrants: Mapping[str, Scores]) -> dict[str, int]:
    """Rank of each by mean time lost, 1 = best; entrants whose paired difference cannot be told from 0 share one."""

    def mean_lost(name: str) -> float:
        return float(entrants[name].lost.mean())

    order = sorted(entrants, key=mean_lost)
    place: dict[str, int] = {}
    head = ""
    for i, name in enumerate(order):
        scores = entrants[name]
        if not head or _loses_more(scores, entrants[head]):
            head, rank = name, i + 1
        place[name] = rank
    return place


def _loses_more(scores: Scores, other: Scores) -> bool:
    """Whether the paired difference of the time lost is above 0 for certain."""
    low, _ = bootstrap(scores.lost - other.lost)
    return low > 0

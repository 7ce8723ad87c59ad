"""What a search over a job costs and brings its user: every step billed, by the truth, in default steps.

A :class:`LossAccount` is told each step that ran and under which configs; it knows the truth of the simulated jobs.
Whatever searches can be scored by it: rules, networks, other people's tuners. Nothing that a search measures enters its
score.
"""

from __future__ import annotations

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
    draws = np.random.default_rng(seed).integers(0, len(values), (rounds, len(values)))
    means = values[draws].mean(axis=1)
    if over is not None:
        means = means / np.maximum(over[draws].mean(axis=1), 1e-9)
    return [round(float(q), 4) for q in np.percentile(means, [2.5, 97.5])]


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
        return Scores(**{name: value[rows] for name, value in vars(self).items()})

    def record(self) -> dict[str, Any]:
        """What a file holds, rounded to what can be told apart; NaN becomes None."""

        def plain(values: Array) -> list[Any]:
            if values.dtype == bool:
                return [int(v) for v in values]
            return [round(float(v), 5) if np.isfinite(v) else None for v in values]

        return {name: plain(value) for name, value in vars(self).items()}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Scores:
        """Inverse of :meth:`record`; ``quiet`` may be missing. Raises ValueError when it is none."""
        try:
            record = {"quiet": [None] * len(record["gain"]), **record}
            found = {f.name: np.array(record[f.name], float) for f in fields(cls)}
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no scores: {type(error).__name__} {error}") from error
        if {value.shape for value in found.values()} != {(found["gain"].size,)}:
            raise ValueError("no scores: they are not all of as many jobs")
        return cls(
            **{name: value > 0.5 if name.startswith("is_") else value for name, value in found.items()}
        )


class LossAccount:
    """The bill of one search on each of ``n`` jobs, beside which it runs.

    Tell it of windows before the jobs' time goes on: :meth:`bill` reads the truth of the present.
    """

    def __init__(self, jobs: Jobs, oracle_us: Array) -> None:
        """``oracle_us`` (n,): the usual step under the best configs."""
        n = len(jobs)
        self.jobs, self.oracle = jobs, oracle_us / jobs.default_us
        self.steps, self.lost = np.zeros(n), np.zeros(n)  # all billed; lost against the default
        self.after, self.lost_after = np.zeros(n), np.zeros(n)  # since the verdict
        self.worst = np.ones(n)
        self.first_gain, self.verdict = np.full(n, np.nan), np.full(n, np.nan)
        self.quiet = np.full(n, np.nan)
        self.final = np.zeros((n, jobs.width), int)

    def bill(self, rows: Array, configs: Array, n_steps: Array, few: Few | None = None) -> Array:
        """``n_steps`` (m,) ran of the jobs at ``rows`` (m,) under ``configs`` (m, width), of some at ``few`` calls.

        Returns a step's true time (m,) in default steps of that moment.
        """
        rows, n_steps = np.asarray(rows), np.asarray(n_steps, float)
        # Both at once: what a call costs does not grow with the jobs.
        default = np.zeros_like(configs)
        few = few and Few.join([few, Few(np.ones(len(rows)), default)])
        both = self.jobs.step_us(np.concatenate([configs, default]), np.concatenate([rows, rows]), few)[0]
        pace = both[: len(rows)] / both[len(rows) :]
        over = np.isfinite(self.verdict[rows])
        np.add.at(self.steps, rows, n_steps)
        np.add.at(self.lost, rows, n_steps * (pace - 1))
        np.add.at(self.after, rows, n_steps * over)
        np.add.at(self.lost_after, rows, n_steps * (pace - 1) * over)
        np.maximum.at(self.worst, rows, np.where(n_steps > 0, pace, 1.0))
        return np.asarray(pace)

    def end(self, rows: Array, configs: Array) -> None:
        """They have given a verdict: ``configs`` (m, width) stay in force. Called again when that is changed."""
        self.verdict[rows] = np.fmin(self.verdict[rows], self.steps[rows])
        self.final[rows] = configs

    def go_on(self, rows: Array) -> None:
        """They are still at work: how a job goes on once nothing is tried any more does not yet show."""
        self.after[rows] = self.lost_after[rows] = 0.0

    def scores(self) -> Scores:
        """What it came to. After what was billed a job goes on as it did in the end, or under its table."""
        pace = self.jobs.usual_us(self.final) / self.jobs.usual_us(np.zeros_like(self.final))
        billed = self.lost + self.jobs.first_use.spent_us / self.jobs.default_us
        with np.errstate(invalid="ignore"):
            goes_on = np.where(self.after > 0, self.lost_after / self.after, pace - 1)
        part = np.minimum(
            HORIZON / np.maximum(self.steps, 1), 1.0
        )  # of the bill, where it is longer than that
        rest = np.maximum(HORIZON - self.steps, 0)
        return Scores(
            first_gain=self.first_gain.copy(),
            verdict=self.verdict.copy(),
            quiet=self.quiet.copy(),
            gain=1 - pace,
            oracle_gain=1 - self.oracle,
            lost=part * billed + rest * goes_on + HORIZON * (1 - self.oracle),
            is_harsh=self.worst > HARSH,
            is_harmed=pace > 1 + HARM,
        )


def _spread(values: Array) -> list[float] | None:
    """p10, median, p90; None where there is nothing."""
    known = values[np.isfinite(values)]
    return [round(float(q), 1) for q in np.percentile(known, [10, 50, 90])] if len(known) else None


def summary(s: Scores) -> dict[str, Any]:
    """Figures of one entrant for people and programs; intervals are over jobs, spreads are p10, median and p90."""
    found = s.oracle_gain >= 0.01  # steps to a first gain mean little where there is none
    return {
        "jobs": len(s.gain),
        "steps_to_first_gain": _spread(s.first_gain[found]),
        "steps_to_verdict": _spread(s.verdict),
        "steps_to_quiet": _spread(s.quiet),
        "gain_delivered": round(float(s.gain.sum() / max(s.oracle_gain.sum(), 1e-9)), 4),
        "gain_delivered_ci95": bootstrap(s.gain, over=s.oracle_gain),
        "lost": round(float(s.lost.mean()), 1),
        "lost_ci95": bootstrap(s.lost),
        "harsh": round(float(s.is_harsh.mean()), 4),
        "slower": round(float(s.is_harmed.mean()), 4),
    }


def by_stratum(scores: Scores, strata: Array) -> dict[str, dict[str, Any]]:
    """:func:`summary` of the jobs of each stratum; ``strata`` (n,) names each job's."""
    return {str(name): summary(scores.take(strata == name)) for name in dict.fromkeys(strata.tolist())}


def ranks(entrants: Mapping[str, Scores]) -> dict[str, int]:
    """Rank of each by mean time lost, 1 = best; entrants whose paired difference cannot be told from 0 share one."""
    order = sorted(entrants, key=lambda name: float(entrants[name].lost.mean()))
    place: dict[str, int] = {}
    head = ""
    for i, name in enumerate(order):
        if not head or bootstrap(entrants[name].lost - entrants[head].lost)[0] > 0:
            head, rank = name, i + 1
        place[name] = rank
    return place

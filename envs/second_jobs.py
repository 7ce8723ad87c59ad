"""Second jobs on a cluster, with and without what the first one left: what memory between jobs is worth.

Each pair is two jobs with every step on the bill (:mod:`.job_arena`): the first is searched from nothing and leaves its
evidence, the second is searched with it and, on the same draws, without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import job_arena
from .belief import Prior
from .memory import Evidence, Memory, aged
from .scores import Scores, difference, summary
from .sim.fabric import Fabric, unmodelled
from .sim.job_family import JobFamily
from .sim.jobs import Jobs, Sites, assemble, computing, draw_jobs, oracle
from .sim.noise import even

Array = np.ndarray[Any, Any]

#: What the second job is: the same again; another job on the same cluster; the same job on a cluster that bears the
#: same name and is another; the same job after the cluster's network has changed.
SAME, OTHER, STRANGE, CHANGED = "same job", "other job", "another fabric", "changed network"
KINDS = (SAME, OTHER, STRANGE, CHANGED)


@dataclass(frozen=True)
class Pairs:
    """``first`` and ``second`` jobs, (n,) each, by kind of the second."""

    first: Jobs
    second: Jobs


def draw_pairs(kind: str, family: JobFamily, n: int, seed: int = 0) -> Pairs:
    """``n`` pairs of a family whose second jobs are of ``kind``, one of KINDS. Raises ValueError for another."""
    rng = np.random.default_rng([seed, 7])
    first = draw_jobs(family, rng, n)
    if kind == SAME:
        return Pairs(first, _again(first, rng))
    if kind == OTHER:
        return Pairs(first, draw_jobs(family, rng, n, first.sites))
    if kind not in KINDS:
        raise ValueError(f"second jobs are {', '.join(KINDS)}, not {kind!r}")
    sites = first.sites.worsened(rng) if kind == CHANGED else _elsewhere(first.sites, family, rng)
    second = assemble(first.works, first.which, sites, even(rng, family.exposed, n), family, rng)
    computing(second, first.scale)
    return Pairs(first, second)


def _again(jobs: Jobs, rng: np.random.Generator) -> Jobs:
    """The same jobs at another time."""
    again = jobs.take(slice(None))
    again.swing[:, 2] = rng.random(len(jobs))
    return again


def _elsewhere(sites: Sites, family: JobFamily, rng: np.random.Generator) -> Sites:
    """Clusters of the same make of which all else is drawn anew."""
    n = len(sites.turn)
    sigma = even(rng, family.effects, n)
    truth = Fabric.random(sites.fleet, rng, family.clusters.width, sigma).truth
    return replace(sites, truth=truth, other=sigma[:, None, None, None] * unmodelled(rng, n))


def left_by(policy: Any, jobs: Jobs, prior: Prior, seed: int = 0) -> list[Evidence]:
    """What a search on each of these jobs leaves."""
    _, done = job_arena.played(policy, jobs, jobs.default_us, prior, seed, after=0)
    return [search.evidence for search in done.searches]


@dataclass(frozen=True)
class Second:
    """Second jobs as they were played: scores, and of the first window under any table what it truly saved (n,), as a
    part of the default's step, NaN where there was none."""

    scores: Scores
    first_table: Array
    texts: list[str]
    is_used: Array


def play_second(
    policy: Any, jobs: Jobs, best_us: Array, prior: Prior, memories: Sequence[Memory | None] | None, seed: int = 1
) -> Second:
    """Search the second jobs. ``memories``: None for none."""
    ledger, done = job_arena.played(policy, jobs, best_us, prior, seed, memories=memories)
    recalled = [search.memory.recalled for search in done.searches]
    used = np.array([r is not None and r.is_used for r in recalled])
    return Second(ledger.scores(), 1 - ledger.first_table, [r.text if r else "" for r in recalled], used)


def compare(
    policy: Any, kind: str, family: JobFamily, n: int, prior: Prior, seed: int = 0, days: float = 1.0
) -> dict[str, Any]:
    """The second jobs of ``n`` pairs with memory and without: summaries, and the difference in time lost.

    ``first_window``: what the first window under any table saved, all jobs together, as a part of what the best configs
    would save; ``of_delivered``: as a part of what the search came to in the end.
    """
    pairs = draw_pairs(kind, family, n, seed)
    left = left_by(policy, pairs.first, prior, seed)
    calm = pairs.second.take(slice(None))
    calm.swing[:, 0] = 0.0
    _, best_us = oracle(calm)
    known = [Memory([aged(evidence, days)]) for evidence in left]
    with_it = play_second(policy, pairs.second, best_us, prior, known, seed + 1)
    without = play_second(policy, pairs.second, best_us, prior, None, seed + 1)
    both = (("with", with_it), ("without", without))
    return {
        "kind": kind,
        "family": family.name,
        "pairs": n,
        "used_at_the_end": round(float(with_it.is_used.mean()), 3),
        "first_window": {name: _part(second.first_table, second.scores.oracle_gain) for name, second in both},
        "of_delivered": {name: _part(second.first_table, second.scores.gain) for name, second in both},
        "with": summary(with_it.scores),
        "without": summary(without.scores),
        "with_against_without": difference(with_it.scores, without.scores),
    }


def _part(saved: Array, whole: Array) -> float:
    return round(float(np.nansum(saved) / max(float(whole.sum()), 1e-9)), 3)

"""Make suites anew: ``python tests/tools/make_job_suites.py [NAME ...]`` (all: some minutes).

Seeds from 3,000,000,000 on are kept for suites: nothing trains on them.
"""

import json
import sys
from pathlib import Path

import numpy as np
from dynamiccl.envs.bench import job_suites
from dynamiccl.envs.bench.job_suites import FAMILIES, JobSuite, drawn, packed, quickest_alone
from dynamiccl.envs.bench.scores import bootstrap
from dynamiccl.envs.bench.strata import SUITES

sys.path.append(str(Path(__file__).resolve().parents[1] / "helpers"))

from oracle import by_regime

JOBS = 1000
SEEDS = {
    "standard": 3_000_000_013,
    "held-out": 3_000_000_014,
    "unseen": 3_000_000_012,
    "mpi-headroom": 3_000_000_015,
}


def draw_suite(name, family, seed, n):
    """About ``n`` jobs, equally many of each world."""
    each = max(n // len(family.worlds), 1)
    jobs = drawn(family, seed, each)
    tables, best_us = by_regime(jobs)
    return JobSuite(name, family, seed, each, jobs, tables, best_us, np.arange(len(jobs)))


def figures(suite):
    """What needs no entrant, of each world: what there is to gain, and what an offline sweep of single calls makes of
    it.

    Means over jobs with 95 % intervals; a fresh draw's must lie within them, which a test looks after.
    """
    sweep = 1 - suite.jobs.usual_us(quickest_alone(suite.jobs)) / suite.jobs.default_us
    found = {}
    for world in suite.family.worlds:
        rows, row = suite.strata == world, found.setdefault(world, {})
        for name, values in (("oracle_gain", suite.gain[rows]), ("sweep_gain", sweep[rows])):
            if len(values):
                row |= {name: round(float(values.mean()), 5), f"{name}_ci95": bootstrap(values)}
    return found


def save(suite, path):
    """Write the file of a suite, which ``JobSuite.load`` reads."""
    record = {
        "suite": suite.name,
        "family": suite.family.name,
        "version": suite.family.version,
        "seed": suite.seed,
        "each": suite.each,
        "figures": figures(suite),
        "default_us": [round(float(us), 3) for us in suite.jobs.default_us],
        "best": packed(suite.tables, suite.jobs),
        "gain": [round(float(g), 6) for g in suite.gain],
    }
    path.write_text(json.dumps(record, indent=0) + "\n")


def main():
    folder = Path(job_suites.__file__).parent
    for name in sys.argv[1:] or SUITES:
        suite = draw_suite(name, FAMILIES[name], SEEDS[name], JOBS)
        save(suite, folder / SUITES[name])
        print(f"{SUITES[name]}: {len(suite)} jobs")
        for world, row in figures(suite).items():
            print(f"  {world:12} {row}")


if __name__ == "__main__":
    main()

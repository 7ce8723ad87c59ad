"""What could a policy win by a choice? Fixed alternatives of each choice on the same jobs under two noises.

  python tests/tools/headroom.py play ROWS.csv --jobs 40 [--worlds lasting,alternating,many] [--suite standard]
  python tests/tools/headroom.py show ROWS.csv

``play`` appends a row per job, alternative and noise, and goes on where it stopped. ``show`` prints, for each choice
and world: what every alternative loses beside the rule as it is, and the *headroom*: for each job the alternative that
lost least under one noise is judged under the other. What a pick gains on its own noise is luck as well. What perfect
knowledge in one decision would save is in ``perfect.py``.
"""

import argparse
from pathlib import Path

import numpy as np
from dynamiccl.agent.policies.rule import ExpectedImprovement
from dynamiccl.envs.bench.job_arena import AccountedWindows, play
from dynamiccl.envs.bench.job_suites import JobSuite
from dynamiccl.envs.bench.scores import LossAccount, bootstrap
from dynamiccl.envs.search.belief.prior import Prior
from dynamiccl.envs.search.config import SearchConfig
from dynamiccl.envs.sim.noise import NoiseStream
from dynamiccl.envs.sim.windows import SimSearch
from rows import append, read

FIELDS = ("suite", "world", "job", "arm", "noise", "lost", "verdict", "gain", "harsh", "slower")
RULE = "rule"
#: Each choice: its alternatives, as settings of the search. The rule as it is, is an alternative of all.
CHOICES = {
    "quads of a try": {"one quad": {"try_quads": (1, 1)}, "three quads": {"try_quads": (3, 3)}},
    "looks at the default": {"few looks": {"watch_share": 0.002}, "many looks": {"watch_share": 0.03}},
    "searching again": {"eager again": {"change": 0.015}, "seldom again": {"change": 0.06}},
    "trials after the verdict": {"no trials": {"trials": 0}, "60 trials": {"trials": 60}},
}
#: Jobs that are played side by side.
BATCH = 8
#: Steps of the watch after a verdict: regimes come back in them.
AFTER = 4_000


def opened(suite, rows, noise, arm):
    """A search on each of the jobs, by one alternative, and their bill."""
    jobs = suite.jobs.take(rows)
    ledger = LossAccount(jobs, suite.best_us[rows])
    windows = AccountedWindows(jobs, NoiseStream(noise, rows, jobs.width), ledger)
    config = SearchConfig(**arms_of(CHOICES)[arm])
    return SimSearch(windows, Prior.load(), config), ledger


def rows_of(suite, world, first, last):
    return np.flatnonzero(suite.strata == world)[first:last]


def arms_of(choices):
    """The rule and the alternatives of these choices: settings of the search by name."""
    return {RULE: {}} | {name: change for choice in choices for name, change in CHOICES[choice].items()}


def play_all(path, name, worlds, n_jobs, choices):
    """Append the rows that are missing."""
    suite = JobSuite.load(name)
    done = {(r["suite"], int(r["job"]), r["arm"], int(r["noise"])) for r in read(path)}
    for first in range(0, n_jobs, BATCH):
        for world in worlds:
            for noise in (0, 1):
                for arm in arms_of(choices):
                    jobs = rows_of(suite, world, first, min(first + BATCH, n_jobs))
                    jobs = np.array([r for r in jobs if (name, int(r), arm, noise) not in done], int)
                    if len(jobs):
                        scores = play(
                            ExpectedImprovement(), *opened(suite, jobs, noise, arm), after=AFTER
                        ).scores
                        append(path, FIELDS, told_of(name, world, jobs, arm, noise, scores))
                print(f"{name} {world}: jobs {first} to {first + BATCH}, noise {noise}", flush=True)


def told_of(name, world, jobs, arm, noise, scores):
    """One row a job."""
    for k, job in enumerate(jobs):
        figures = scores.lost[k], scores.verdict[k], scores.gain[k]
        told = [f"{value:.5f}" for value in figures]
        yield [name, world, int(job), arm, noise, *told, int(scores.is_harsh[k]), int(scores.is_harmed[k])]


def table(path, world, arms):
    """Lost steps by alternative, (jobs, noises), of the jobs that all of ``arms`` have played under both noises."""
    found = {}
    for r in read(path):
        if world == r["world"] and r["arm"] in arms:
            found.setdefault((r["suite"], r["job"]), {})[r["arm"], int(r["noise"])] = float(r["lost"])
    whole = [one for one in found.values() if len(one) == 2 * len(arms)]
    return {arm: np.array([[one[arm, 0], one[arm, 1]] for one in whole]) for arm in arms}


def told(values):
    low, high = bootstrap(values)
    return f"{values.mean():+.0f} [{low:+.0f}, {high:+.0f}]"


def show(path, worlds, choices):
    for world in worlds:
        lost = table(path, world, arms_of(choices))
        rule = lost[RULE]
        if not len(rule):
            continue
        again = told(rule[:, 1] - rule[:, 0])
        print(f"\n{world}: {len(rule)} jobs, the rule loses {rule.mean():.0f}; under the other noise {again}")
        for choice in choices:
            arms = CHOICES[choice]
            names = [RULE, *arms]
            many = np.stack([lost[name] for name in names])  # (alternatives, jobs, noises)
            means = ", ".join(f"{name} {told((lost[name] - rule).mean(axis=1))}" for name in arms)
            best = many.argmin(axis=0)
            own = np.take_along_axis(many, best[None], 0)[0] - rule
            carried = np.take_along_axis(many, best[None, :, ::-1], 0)[0] - rule
            print(f"  {choice}: {means}")
            if len(arms) > 1:
                print(
                    f"    best for each job, own noise {told(own.mean(axis=1))}; headroom {told(carried.mean(axis=1))}"
                )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["play", "show"])
    parser.add_argument("rows", type=Path, help="the file of rows")
    parser.add_argument("--jobs", type=int, default=40, help="of each world")
    parser.add_argument("--worlds", default="lasting,alternating,many")
    parser.add_argument("--suite", default="standard")
    parser.add_argument(
        "--choice", action="append", choices=CHOICES, help="this one only; repeat it for more"
    )
    args = parser.parse_args()
    worlds, choices = args.worlds.split(","), args.choice or list(CHOICES)
    if args.what == "play":
        play_all(args.rows, args.suite, worlds, args.jobs, choices)
    show(args.rows, worlds, choices)


if __name__ == "__main__":
    main()

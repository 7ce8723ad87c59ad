"""How often does a policy keep a table in jobs that nothing can make faster?

  python tests/tools/false_gains.py [--jobs 1000] [--policy lstm] [--policy expected-improvement]

The jobs are those of the plain world of ``standard`` under the noise of real nodes, but each setting does what the
default does. Counted are jobs that ever kept a table up to 1,000 steps after the last trial, with a 95 % interval
(Wilson). By the levels of its comparisons a job may keep one by chance in ALPHA of cases. All of it is simulated.
"""

import argparse
import math
from dataclasses import replace

import numpy as np
from dynamiccl.agent.policies.choosing import make_chooser
from dynamiccl.envs.bench.job_arena import AFTER, AccountedWindows, play
from dynamiccl.envs.bench.scores import LossAccount
from dynamiccl.envs.search.belief.prior import Prior
from dynamiccl.envs.search.config import SearchConfig
from dynamiccl.envs.sim.jobs import STANDARD, draw_jobs
from dynamiccl.envs.sim.noise import NODE, NoiseStream
from dynamiccl.envs.sim.windows import SimSearch
from joblib import Parallel, delayed
from no_gain import without_gain

PART = 25


def played(name, seed, n):
    """(jobs that ever kept a table, steps that each lost) of ``n`` jobs that are drawn with ``seed``."""
    plain = STANDARD.only("plain")
    world = replace(plain.parts[0], noise=NODE)
    jobs = without_gain(draw_jobs(replace(plain, parts=(world,)), np.random.default_rng([71, seed]), n))
    windows = AccountedWindows(
        jobs, NoiseStream(seed, np.arange(n), jobs.width), LossAccount(jobs, jobs.default_us)
    )
    search = SimSearch(windows, Prior.load(), SearchConfig())
    scores = play(make_chooser(name), search, windows.ledger, AFTER).scores
    kept = sum(one.marks.first_gain >= 0 for one in search.searches)
    return kept, scores.lost


def interval(k, n):
    """95 %, of a share: k of n (Wilson)."""
    z, p = 1.96, k / n
    middle, half = p + z * z / 2 / n, z * math.sqrt(p * (1 - p) / n + z * z / 4 / n / n)
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    for name in args.policy or ["lstm", "expected-improvement"]:
        tasks = [delayed(played)(name, seed, PART) for seed in range(args.jobs // PART)]
        parts = Parallel(args.processes)(tasks)
        n, kept = args.jobs // PART * PART, sum(part[0] for part in parts)
        lost = np.concatenate([part[1] for part in parts])
        low, high = interval(kept, n)
        print(
            f"{name}: {kept} of {n} simulated jobs kept a table, {kept / n:.1%} [{low:.1%}, {high:.1%}]; lost "
            f"{lost.mean():.0f} default steps of 20,000, at most {lost.max():.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()

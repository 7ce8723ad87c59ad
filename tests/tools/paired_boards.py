"""What has a change of the search changed? Two submissions of one policy on the same jobs, by two checkouts.

  dynamiccl bench --policy expected-improvement --suite S --jobs 400 --out runs/before    # in the one checkout
  dynamiccl bench --policy expected-improvement --suite S --jobs 400 --out runs/after     # in the other
  python tests/tools/paired_boards.py runs/before/S/expected-improvement.json runs/after/S/expected-improvement.json

Jobs and noise are the same in both, step by step. Ratios are of sums; intervals are 95 %, bootstrapped over jobs.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from dynamiccl.envs.bench.job_suites import JobSuite
from dynamiccl.envs.bench.scores import Scores, bootstrap
from dynamiccl.envs.bench.submissions import rows_of

ROUNDS = 4000


def read(path):
    """A submission's head, and its scores. Raises ValueError."""
    found = json.loads(Path(path).read_text())
    return found, Scores.of(found["scores"])


def interval(bounds):
    low, high = bounds
    return f"[{low:.2f}, {high:.2f}]"


def ratio(first, second):
    """The sum of ``second`` over that of ``first``. Sums of lost steps may lie on both sides of 0, which a ratio of
    gains does not: so this is not :func:`bootstrap` over ``first``."""
    draws = np.random.default_rng(0).integers(0, len(first), (ROUNDS, len(first)))
    many = second[draws].sum(axis=1) / first[draws].sum(axis=1)
    return f"x {second.sum() / first.sum():.2f} {interval(np.percentile(many, [2.5, 97.5]))}"


def ends(scores):
    """Jobs that end under a table that is faster than the default, and under one that is over HARM slower."""
    return f"{(scores.gain > 0).sum()}/{scores.is_harmed.sum()}"


def line(title, before, after):
    """One row; ``before`` and ``after`` are scores of the same jobs."""
    gap = after.lost - before.lost
    told = [f"{title:12} {len(gap):4} jobs", f"lost {before.lost.mean():6.1f} -> {after.lost.mean():6.1f}"]
    told += [
        ratio(before.lost, after.lost),
        f"difference {gap.mean():+.1f} {interval(bootstrap(gap, rounds=ROUNDS))}",
    ]
    told += [f"verdict {np.median(before.verdict):.0f} -> {np.median(after.verdict):.0f}"]
    told += [ratio(before.verdict, after.verdict)]
    told += [f"harsh {before.is_harsh.sum()} -> {after.is_harsh.sum()}"]
    told += [f"slower {before.is_harmed.sum()} -> {after.is_harmed.sum()}"]
    told += [f"end faster/slower than the default {ends(before)} -> {ends(after)}"]
    return "  ".join(told)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", help="a submission file of `dynamiccl bench`")
    parser.add_argument("after")
    args = parser.parse_args()
    (first, before), (second, after) = read(args.before), read(args.after)
    for name in ("suite", "digest", "jobs", "seed"):
        if first[name] != second[name]:
            parser.error(f"the two have another {name}: {first[name]} and {second[name]}")
    suite = JobSuite.load(first["suite"])
    rows = rows_of(suite, first["jobs"])
    worlds = suite.strata[rows]
    print(f"suite {first['suite']}: {first['entrant']}; lost: default steps in 20,000 against the best table")
    for world in dict.fromkeys(worlds.tolist()):
        is_here = worlds == world
        print(line(world, before.take(is_here), after.take(is_here)))
    print(line("all", before, after))


if __name__ == "__main__":
    main()

"""The rule at its best: CMA-ES over the constants of ``agent/policies/rule.py``, and what its answer is worth.

  python tests/tools/fit_rule.py search FOUND.json --generations 15 --jobs 48
  python tests/tools/fit_rule.py judge FOUND.json --jobs 500

``search`` lets CMA-ES (the package ``cma``) vary the logarithms of 13 constants, from the shipped ones. A generation
plays all its candidates on the same fresh jobs of ``standard``'s worlds under the same noise, the shipped rule
included; a candidate's figure is the mean of lost steps beyond that rule, a job clipped at CLIP. The answer is the mean
of the last generation. It goes on where it stopped. ``judge`` plays answer and shipped rule on other fresh jobs, of
``standard``'s and ``held-out``'s worlds. All of it is simulated.
"""

import argparse
import json
import pickle
from pathlib import Path

import numpy as np
from dynamiccl.agent.policies import rule
from dynamiccl.agent.policies.choosing import make_chooser
from dynamiccl.envs.bench.job_arena import AFTER, AccountedWindows, play
from dynamiccl.envs.bench.scores import LossAccount, bootstrap
from dynamiccl.envs.search.belief.prior import Prior
from dynamiccl.envs.search.config import SearchConfig
from dynamiccl.envs.sim.family import HELD_OUT, STANDARD
from dynamiccl.envs.sim.jobs import draw_jobs
from dynamiccl.envs.sim.noise import NoiseStream
from dynamiccl.envs.sim.windows import SimSearch
from joblib import Parallel, delayed

NAMES = (
    "RISK_PRICE",
    "RISK_PRICE_AFTER",
    "WORTHWHILE",
    "PROVEN_NOISE",
    "PROVEN_BELIEF",
    "ROUNDS",
    "ROUNDS_A_SLOT",
    "FORESIGHT",
    "FORESIGHT_AFTER",
    "LEAST",
    "CAUTION",
)
SHIPPED = {name: float(getattr(rule, name)) for name in NAMES}
FAMILIES = {"standard": STANDARD, "held-out": HELD_OUT}
#: First spread of the logarithms: most candidates lie within a factor of 2.
SPREAD = 0.35
#: Lost default steps of a job beyond the rule's that count, at most: few jobs would decide otherwise.
CLIP = 500.0
#: Seeds of the jobs that are searched on, and of those that judge.
SEARCHED, JUDGED = 77, 78
PART = 24


def constants(x):
    """The rule's constants at a point, logarithms of factors (11,)."""
    return {name: SHIPPED[name] * float(np.exp(v)) for name, v in zip(NAMES, x, strict=True)}


def played(values, family, seed, n):
    """Lost default steps beside the default, and marks of harm, of ``n`` jobs that are drawn with ``seed``."""
    vars(rule).update(values)
    jobs = draw_jobs(FAMILIES[family], np.random.default_rng(seed), n)
    whole, number, part = seed
    of_noise = 1000 * whole + number  # each job meets noise of its own, that no suite's job meets
    noise = NoiseStream(of_noise, part * n + np.arange(n), jobs.width)
    windows = AccountedWindows(jobs, noise, LossAccount(jobs, jobs.default_us))
    search = SimSearch(windows, Prior.load(), SearchConfig())
    scores = play(make_chooser("expected-improvement"), search, windows.ledger, AFTER).scores
    vars(rule).update(SHIPPED)
    return scores.lost, scores.is_harsh, scores.is_harmed, scores.verdict


def all_played(points, family, seed, n, parallel):
    """Of each point a tuple of arrays as :func:`played` gives, over all ``n`` jobs."""
    parts = [(seed[0], seed[1], k) for k in range(n // PART)]
    tasks = [(constants(x), part) for x in points for part in parts]
    found = parallel(delayed(played)(values, family, part, PART) for values, part in tasks)
    each = [found[i : i + len(parts)] for i in range(0, len(found), len(parts))]
    return [tuple(np.concatenate(column) for column in zip(*rows, strict=True)) for rows in each]


def search(path, generations, n, parallel):
    """Write the state of CMA-ES and its answer after each generation."""
    import cma  # here: it imports matplotlib, and the other commands need neither

    state = path.with_suffix(".pickle")
    if state.exists():
        strategy = pickle.loads(state.read_bytes())
    else:
        options = {"seed": 1, "verbose": -9, "popsize": 10}
        strategy = cma.CMAEvolutionStrategy(np.zeros(len(NAMES)), SPREAD, options)
    while strategy.countiter < generations:
        points = strategy.ask()
        origin = np.zeros(len(NAMES))
        tried = [origin, strategy.mean.copy(), *points]
        seed = (SEARCHED, strategy.countiter)
        shipped, middle, *others = (one[0] for one in all_played(tried, "standard", seed, n, parallel))
        beyond = [float(np.clip(lost - shipped, -CLIP, CLIP).mean()) for lost in others]
        strategy.tell(points, beyond)
        state.write_bytes(pickle.dumps(strategy))
        gap = middle - shipped
        record = {
            "generation": strategy.countiter,
            "jobs": n,
            "mean before it, beyond the shipped rule": [gap.mean(), gap.std() / np.sqrt(n)],
            "candidates": beyond,
            "spread": float(strategy.sigma),
            "factors": dict(zip(NAMES, np.exp(strategy.mean).tolist(), strict=True)),
        }
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(
            f"generation {record['generation']}: mean {gap.mean():+.1f} ({gap.std() / np.sqrt(n):.1f}), "
            f"candidates {min(beyond):+.0f} to {max(beyond):+.0f}",
            flush=True,
        )


def judge(path, n, parallel):
    """Print the answer beside the shipped rule on fresh jobs of both families."""
    last = json.loads(path.read_text().splitlines()[-1])
    x = np.log([last["factors"][name] for name in NAMES])
    print("factors: " + ", ".join(f"{name} {factor:.2f}" for name, factor in last["factors"].items()))
    for family in FAMILIES:
        seed = (JUDGED, 0)
        before, after = all_played([np.zeros(len(NAMES)), x], family, seed, n, parallel)
        gap = after[0] - before[0]
        low, high = bootstrap(gap)
        print(
            f"{family}, {len(gap)} fresh jobs, beyond the shipped rule: lost {gap.mean():+.1f} "
            f"[{low:+.1f}, {high:+.1f}]; "
            f"long step {before[1].sum()} -> {after[1].sum()}, slower {before[2].sum()} -> {after[2].sum()}, "
            f"verdict {np.median(before[3]):.0f} -> {np.median(after[3]):.0f}"
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["search", "judge"])
    parser.add_argument("found", type=Path, help="one JSON line a generation")
    parser.add_argument("--generations", type=int, default=15)
    parser.add_argument("--jobs", type=int, default=48, help="a multiple of 24")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    parallel = Parallel(args.processes)
    if args.what == "search":
        search(args.found, args.generations, args.jobs, parallel)
    else:
        judge(args.found, args.jobs, parallel)


if __name__ == "__main__":
    main()

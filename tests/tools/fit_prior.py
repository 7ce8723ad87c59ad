"""Fits what the belief expects of a job before anything is tried: ``python tests/tools/fit_prior.py [OUT.npz] [SEED]``.

On fresh simulated jobs; judged beside the shipped prior by how likely the true times of other fresh jobs are under each
(negative log likelihood a figure; less is better). To use it, put it in place of envs/search/prior.npz and train the
policy anew: it reads the belief. The same seed on the same machine gives the same weights.
"""

import sys
import time
from pathlib import Path

import numpy as np
import torch
from dynamiccl.agent.train.job_prior import JobPrior, fit, judge
from dynamiccl.envs.search.belief import N_FIGURES, Prior
from dynamiccl.envs.sim.family import HELD_OUT, STANDARD
from dynamiccl.envs.sim.jobs import draw_jobs

#: Fresh jobs that judge, of each family; the seed is no one else's.
JUDGES, JUDGE_SEED = 256, 2_800_000_000


def trained(weights):
    """The network in training that has these weights: the inverse of ``JobPrior.export``."""
    n_shared, factors = int(weights["n_shared"]), len(weights["b2"]) // N_FIGURES - 2
    prior = JobPrior(len(weights["b0"]), n_shared, factors - n_shared)
    with torch.no_grad():
        for i, layer in enumerate([*prior.layers, prior.out]):
            layer.weight.copy_(torch.as_tensor(weights[f"w{i}"].T))
            layer.bias.copy_(torch.as_tensor(weights[f"b{i}"]))
    return prior


def main(out="runs/train/prior.npz", seed=0, rounds=4000, batch=64):
    """``batch`` jobs in each of ``rounds`` steps of gradient descent; {family: both losses}."""
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    fresh, begin, rng = JobPrior(), time.perf_counter(), np.random.default_rng([seed, 23])

    def progress(done, loss):
        if done % 100 == 0:
            print(f"{done} of {rounds}: loss {loss:.2f}", file=sys.stderr)

    fit(fresh, lambda n: draw_jobs(STANDARD, rng, n), rounds, batch, progress=progress)
    print(f"{out}: {rounds} rounds of {batch} jobs in {time.perf_counter() - begin:.0f} s")
    with open(out, "wb") as file:
        np.savez_compressed(file, **fresh.export())
    now = Prior.load()
    shipped, losses = trained(now.weights | {"n_shared": now.n_shared}), {}
    for family in (STANDARD, HELD_OUT):
        jobs = draw_jobs(family, np.random.default_rng(JUDGE_SEED), JUDGES)
        losses[family.name] = {"fitted": judge(fresh, jobs), "shipped": judge(shipped, jobs)}
        print(
            f"{family.name:9} "
            + "   ".join(f"{which} {loss:.3f}" for which, loss in losses[family.name].items())
        )
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))

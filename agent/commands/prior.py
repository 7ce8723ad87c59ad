"""``dynamiccl lab prior``: fit the prior of the belief anew."""

from pathlib import Path
from typing import Annotated

from . import Json, Option, fail, one_thread, refusing

#: Fresh jobs that judge, of each family; the seed is no one else's.
JUDGES, JUDGE_SEED = 256, 2_800_000_000


def prior(
    rounds: Annotated[int, Option(min=1, help="Steps of gradient descent.")] = 4000,
    batch: Annotated[int, Option(min=2, help="Fresh simulated jobs in each.")] = 64,
    seed: Annotated[int, Option(min=0, help="The same seed on the same machine gives the same weights.")] = 0,
    out: Annotated[Path, Option(help="Weights file to write.")] = Path("runs/train/prior.npz"),
    as_json: Json = False,
) -> None:
    """Fit what the belief expects of a job before anything is tried, on simulated jobs; set it beside the shipped one.

    Both are judged by how likely the true times of fresh jobs are under them (negative log likelihood a figure; less is
    better). To use the new one, put it in place of envs/search/prior.npz and train the policy anew: it reads the
    belief.
    """
    one_thread()
    import json
    import time

    import numpy as np
    import torch
    from rich.progress import Progress

    from ...envs.search.belief import Prior
    from ...envs.sim.family import HELD_OUT, STANDARD
    from ...envs.sim.jobs import draw_jobs
    from ..report.terminal import terminal
    from ..train.job_prior import JobPrior, fit, judge

    if out.suffix != ".npz":
        fail(f"--out is a .npz file, not {out}")
    with refusing(OSError):
        out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    fresh, begin, rng = JobPrior(), time.perf_counter(), np.random.default_rng([seed, 23])
    with Progress(console=terminal(stderr=True), disable=as_json) as bar:
        task = bar.add_task("fitting", total=rounds)
        fit(
            fresh,
            lambda n: draw_jobs(STANDARD, rng, n),
            rounds,
            batch,
            progress=lambda done, loss: bar.update(task, completed=done, description=f"loss {loss:.2f}"),
        )
    took = time.perf_counter() - begin
    with out.open("wb") as file:
        np.savez_compressed(file, **fresh.export())  # type: ignore[arg-type]
    now = Prior.load()
    shipped = JobPrior.of(now.weights, now.n_shared)
    figures = {"seconds": round(took, 1), "rounds": rounds, "batch": batch, "seed": seed, "out": str(out)}
    losses = {}
    for family in (STANDARD, HELD_OUT):
        jobs = draw_jobs(family, np.random.default_rng(JUDGE_SEED), JUDGES)
        losses[family.name] = {"fitted": round(judge(fresh, jobs), 4), "shipped": round(judge(shipped, jobs), 4)}
    if as_json:
        print(json.dumps(figures | {"loss": losses}))
        return
    for name, told in losses.items():
        print(f"{name:9} fitted {told['fitted']:.3f}   shipped {told['shipped']:.3f}")
    print(f"{out}: {rounds} rounds of {batch} jobs in {took:.0f} s")

"""What a job of light ranks comes to, with a daemon beside it that tries one table after the other."""

from __future__ import annotations

from typing import Any

from dynamiccl.envs.nccl.shm import RunFolder
from light_ranks import Program, Publisher, run, splits
from light_store import StoreServer

Found = dict[str, Any]


def found(ranks: list[dict[str, Any]], server: StoreServer, **more: Any) -> Found:
    split, compared = splits(ranks)
    return {"ranks": ranks, "requests": server.requests, "split": split, "compared": compared, **more}


def tries(
    folder: RunFolder,
    n_ranks: int,
    program: Program,
    trial_steps: int = 30,
    every_s: float = 0.05,
    **more: Any,
) -> Found:
    """A daemon tries one table after the other while the job runs."""
    daemons: list[Publisher] = []

    def beside(server: StoreServer, pids: list[int]) -> None:
        daemons.append(Publisher(folder, server, every_s, trial_steps))
        if "beside" in more:
            more["beside"](server, pids)

    ranks, server = run(n_ranks, program, folder, beside, **{k: v for k, v in more.items() if k != "beside"})
    daemon = daemons[0]
    daemon.alive = False
    took = [daemon.in_force[g] - daemon.published[g] for g in list(daemon.in_force)[:-1] if g > 1]
    return found(ranks, server, took_s=took, published=daemon.generation)

"""Is there any gain over NCCL untouched? Each candidate alternates with it at every step."""

from __future__ import annotations

import time
from typing import Any

from ...results.files import read_table
from ...results.judge import best_table
from .model import SHAPES, Arm, Model, run
from .rank import Rank

UNTOUCHED = Arm("untouched", "nccl")


def truth(rank: Rank, share: float, steps: int) -> dict[str, Any]:
    """One race after the other, each with its part of the time.

    truth.csv says what the arms are, steps.csv how long each step took.
    """
    rank.open_ring()
    model = Model(rank, share)
    races = _races(rank)
    told = {}
    for at, (race, candidate) in enumerate(races):
        arms = [UNTOUCHED, candidate]
        began = time.monotonic()
        until = began + (rank.ends - began) / (len(races) - at)
        default_us = min(model.step_us(UNTOUCHED) for _ in range(3))
        measured = min(model.collectives_us / default_us, 1.0)
        for arm in arms:
            row = {"race": race, "arm": arm.name, "comm": arm.comm, "table": arm.table}
            row["share"] = f"{measured:.3f}"
            rank.write("truth", [row])
        told[race] = run(model, race, arms, steps, until)
    return {"ok": bool(told), "pieces": model.load.pieces, "races": told}


def _races(rank: Rank) -> list[tuple[str, Arm]]:
    """What meets NCCL untouched: the best table of the sweep, raised channels, and their best table.

    Rank 0 has the sweep, and says it to all.
    """
    n_bytes = SHAPES[rank.backend][0]
    tables = {"nccl": "", "raised": ""}
    if rank.number == 0:
        sweep = read_table(rank.folder, "sweep")
        tables = {comm: best_table(sweep, comm, n_bytes) for comm in tables}
    tables = rank.gather(tables)[0]
    races = [("raised channels", Arm("raised", "raised"))]
    if tables["nccl"]:
        races.insert(0, ("best table", Arm("table", "nccl", tables["nccl"])))
    if tables["raised"]:
        races.append(("raised channels and best table", Arm("raised table", "raised", tables["raised"])))
    return races

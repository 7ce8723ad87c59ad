"""A/A: steps under the default alone. They show the noise of steps, and how often luck looks like a gain."""

from __future__ import annotations

from typing import Any

from .model import Arm, Model, run
from .rank import Rank


def noise(
    rank: Rank, race: str, arm: str, share: float, steps: int, pieces: int = 0, begin: int = 0
) -> dict[str, Any]:
    """Up to ``steps`` default steps into steps.csv.

    ``pieces``: compute of a step as an earlier call found it, 0 to find it. The answer has it again.
    """
    rank.open_ring()
    model = Model(rank, share, pieces)
    arms = [Arm(arm, "nccl")]
    told = run(model, race, arms, steps, rank.ends, begin)
    told["ok"] = told["steps"] > 0
    told["pieces"] = model.load.pieces
    told["collectives_us"] = round(model.collectives_us, 1)
    return told

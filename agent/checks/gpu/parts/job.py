"""The model of the truth part as a job of its own, for ``dynamiccl tune``: its optimizer's steps are what is timed."""

from __future__ import annotations

import json
import os
import sys

import torch

from .model import Model
from .rank import Rank


def main() -> None:
    """One rank: the JSON has ``backend``, ``share``, ``pieces`` and ``steps``."""
    told = json.loads(sys.argv[1])
    rank = Rank(told["backend"], ".", os.devnull, 0, "none")
    model = Model(rank, told["share"], told["pieces"])
    weight = torch.nn.Parameter(torch.zeros(8, device=rank.device))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    group = rank.comms["nccl"]
    for _ in range(told["steps"]):
        model.step(group)
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        rank.finish()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads can abort a process that tears down


if __name__ == "__main__":
    main()

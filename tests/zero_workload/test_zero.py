"""The ZeRO engine: every stage computes what one process computes, to the digit, byte and message."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dynamiccl.zero_workload import Engine, zero
from dynamiccl.zero_workload.job.data import Corpus
from dynamiccl.zero_workload.job.model import ModelConfig, Transformer
from peers import Peer
from torch.utils.checkpoint import checkpoint
from world import World

# Agreement ------------------------------------------------------------------------------------------------------------

TINY = ModelConfig(layers=3, width=32, heads=2, seq=16)
BATCH = 16  # rows of the global batch, whatever the number of ranks


def adamw(lr: float) -> Callable[..., torch.optim.Optimizer]:
    return partial(torch.optim.AdamW, lr=lr)


class Recomputed(Transformer):
    """Backward recomputes so many blocks at a time, of which only the first one's input is kept."""

    at_a_time = 1

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert self.position is not None
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for at in range(0, len(self.blocks), self.at_a_time):
            x = checkpoint(self.blocks[at : at + self.at_a_time], x, use_reentrant=False)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


Batches = Callable[
    [int, int, int], tuple[Any, ...]
]  # step, first and last row -> what the model is called with


def texts(step: int, first: int, last: int, seed: int = 0) -> tuple[Any, ...]:
    return Corpus(TINY.seq).batch(first, last, step=step, seed=seed)


def run(
    job: Any, steps: Iterable[int], *, rows: int = BATCH, batches: Batches = texts, accumulation: int = 1
) -> list[float]:
    """Train an engine or a peer, ``rows`` cut over micro-batches and ranks; the mean loss of each step."""
    group = job.comm.group if isinstance(job, Engine) and not job.comm.replicas else None
    rank, size, losses = dist.get_rank(group), dist.get_world_size(group), []
    share = rows // size // accumulation
    for step in steps:
        total = torch.zeros(())
        for micro in range(accumulation):
            first = (micro * size + rank) * share
            loss = job.model(*batches(step, first, first + share))
            job.backward(loss)
            total += loss.detach() / accumulation
        job.step()
        dist.all_reduce(total, op=dist.ReduceOp.AVG, group=group)
        losses.append(total.item())
    return losses


def saved_and_resumed(engine: Engine, other: Engine, folder: str) -> tuple[list[float], list[float]]:
    """Losses of three steps after saving, and of the same steps by ``other``, of other weights, that has loaded."""
    run(engine, range(3))
    engine.save(folder)
    through = run(engine, range(3, 6))
    other.load(folder)
    return through, run(other, range(3, 6))


def train(steps: int, settings: dict[str, Any], seed: int = 0) -> list[float]:
    """Losses of ``TINY`` under ``zero`` (or a peer: ``name``) in fp32 with AdamW, if ``settings`` say nothing else."""
    torch.manual_seed(seed)
    settings = {"param_dtype": torch.float32, "bucket_bytes": 2**16, "optimizer": adamw(1e-2), **settings}
    at_a_time, make = settings.pop("recompute", 0), zero
    model = Recomputed(TINY) if at_a_time else Transformer(TINY)
    if isinstance(model, Recomputed):
        model.at_a_time = at_a_time
    if "name" in settings:
        make = partial(Peer, settings.pop("name"))
    job, accumulation = (
        make(model, settings.pop("optimizer"), **settings),
        settings.get("gradient_accumulation", 1),
    )
    return run(job, range(steps), batches=partial(texts, seed=seed), accumulation=accumulation)


def train_alone(steps: int, max_norm: float | None, seed: int = 0) -> list[float]:
    """The same training by PyTorch alone, in this process, on the whole batch."""
    torch.manual_seed(seed)
    model = Transformer(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = model(*texts(step, 0, BATCH, seed))
        optimizer.zero_grad()
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


VARIANTS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "3 by layer": {"stage": 3, "unit": "layer", "prefetch": 2},
    "3 without prefetch": {"stage": 3, "prefetch": 0, "keep_last": False},
    "3 hybrid": {"stage": 3, "hybrid": 10_000},
    "1 blocks recomputed": {"stage": 1, "recompute": 1},
    "3 blocks recomputed": {"stage": 3, "recompute": 2},
    "3 layers recomputed": {"stage": 3, "unit": "layer", "recompute": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("size", ["two", "four"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_stages_agree_with_one_process(size: str, accumulation: int, request: pytest.FixtureRequest) -> None:
    world: World = request.getfixturevalue(size)
    alone = train_alone(20, max_norm=0.5)
    assert alone[-1] < alone[0] - 1
    runs = {}
    for name in (
        VARIANTS
        if (size, accumulation) == ("two", 1)
        else ("0", "1", "2", "3", "3 hybrid", "3 blocks recomputed")
    ):
        settings = VARIANTS[name]
        ranks = world.run(train, 20, {**settings, "max_norm": 0.5, "gradient_accumulation": accumulation})
        assert all(r == ranks[0] for r in ranks)
        runs[name] = ranks[0]
        assert runs[name] == pytest.approx(alone, rel=1e-5), name
    for name, losses in runs.items():
        assert losses == pytest.approx(runs["0"], rel=1e-6), name
    theirs = world.run(train, 20, {"name": "fsdp2", "max_norm": 0.5, "gradient_accumulation": accumulation})[
        0
    ]
    assert theirs == pytest.approx(runs["3"], rel=1e-5)

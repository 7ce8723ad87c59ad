"""One odd model, which has everything that real ones have: at each stage it trains as plain PyTorch trains it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dynamiccl.zero_workload import zero
from torch import nn
from world import World

ROWS, STEPS = 12, 4  # rows of the global batch, on any number of ranks


class Odd(nn.Module):
    """Tied, frozen and unused parameters, odd sizes, a block used twice, one that some ranks and steps do not use, a
    buffer, a torch layer that uses its child's weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 20)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(20, 5, 33, 0.0, batch_first=True) for _ in range(3)
        )
        self.exact = nn.LayerNorm(20)
        self.frozen, self.unused, self.sometimes = nn.Linear(20, 20), nn.Linear(7, 3), nn.Linear(20, 1)
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("shift", torch.linspace(0, 1, 20))
        self.head = nn.Linear(20, 37)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.blocks[0].linear1.weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, sometimes: bool) -> torch.Tensor:
        x = self.embed(tokens) * self.scalar + self.shift
        for number in (0, 1, 0, 2):
            x = self.blocks[number](x)
        x = self.frozen(self.exact(x))
        loss = F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, 1).flatten())
        return loss + self.sometimes(x).square().mean() if sometimes else loss


def decayed(params: Any, model: nn.Module | None = None) -> torch.optim.Optimizer:
    """AdamW: decay for matrices only, and another rate for one layer, by its name."""
    slow = {id(p) for name, p in model.named_parameters() if name.startswith("blocks.1.")} if model else set()
    params = [p for p in params if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() > 1 and id(p) not in slow], "weight_decay": 0.3},
        {"params": [p for p in params if p.dim() <= 1 and id(p) not in slow], "weight_decay": 0.0},
        {"params": [p for p in params if id(p) in slow], "lr": 2e-3, "weight_decay": 0.1},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)  # a key bias has gradient 0 but for rounding


def batch(step: int, rank: int, size: int) -> tuple[torch.Tensor, bool]:
    tokens = torch.randint(37, (ROWS, 11), generator=torch.Generator().manual_seed(step))
    return tokens.chunk(size)[rank], rank == 1 and step in (0, 2)


def alone(size: int, optimizer: Callable[..., Any], max_norm: float | None) -> dict[str, torch.Tensor]:
    """The same by plain PyTorch, on the whole batch."""
    torch.manual_seed(0)
    model = Odd()
    made = optimizer(model.parameters(), model)
    for step in range(STEPS):
        made.zero_grad()
        sum(model(*batch(step, rank, size)) / size for rank in range(size)).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        made.step()
    return model.state_dict()


def sharded(optimizer: Callable[..., Any], variants: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    found = []
    for settings in variants:
        torch.manual_seed(0)
        model = Odd()
        engine = zero(model, lambda params, model=model: optimizer(params, model), **settings)
        for step in range(STEPS):
            engine.backward(model(*batch(step, dist.get_rank(), dist.get_world_size())))
            engine.step()
        found.append(engine.state_dict())
    return found


VARIANTS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2},
    {"stage": 3, "min_unit": 100},  # what some ranks do not use stays with the root
    {"stage": 3, "min_unit": 100, "unit": "layer", "prefetch": 2},
    {"stage": 3, "hybrid": 1000},
]


@pytest.mark.parametrize(
    "size", ["two", *(pytest.param(n, marks=pytest.mark.slow) for n in ("three", "four"))]
)
def test_the_odd_model_trains_as_plain_pytorch_trains_it(size: str, request: pytest.FixtureRequest) -> None:
    world: World = request.getfixturevalue(size)
    for max_norm in (None, 0.3):
        wanted = alone(len(world.ranks), decayed, max_norm)
        fp32: dict[str, Any] = {"bucket_bytes": 2**12, "param_dtype": torch.float32}
        variants = [{**fp32, "max_norm": max_norm, **v} for v in VARIANTS]
        for ranks in zip(*world.run(sharded, decayed, variants), strict=True):
            for got in ranks:
                assert got.keys() == wanted.keys()
                for name, value in wanted.items():
                    assert got[name].dtype == value.dtype, name
                    assert (got[name] - value).abs().max() <= 1e-5 * value.abs().max(), name

"""Passes that are not the step's backward: those inside of it (of reentrant checkpoints), and torch.autograd.grad."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from dynamiccl.zero_workload import zero
from torch import nn
from torch.utils.checkpoint import checkpoint
from world import World


class Adapted(nn.Module):
    """Three checkpointed blocks, the first called twice, under a head that is frozen as with LoRA. Or ``tied``: a
    layer that is used inside a checkpoint and outside of it.
    """

    def __init__(self, reentrant: bool, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant, self.tied = reentrant, tied
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in (0, 1, 0, 2):
            x = checkpoint(self.blocks[number], x, use_reentrant=self.reentrant)
        return self.head(self.blocks[2](x) if self.tied else x)


def trained(stage: int, reentrant: bool, accumulation: int) -> tuple[int, torch.Tensor]:
    """Updates of six micro-batches, and the weights after them."""
    model = Adapted(reentrant)
    engine = zero(
        model,
        partial(torch.optim.SGD, lr=0.1),
        stage=stage,
        param_dtype=torch.float32,
        gradient_accumulation=accumulation,
        bucket_bytes=64,
    )
    for number in range(6):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number)).requires_grad_()
        engine.backward(model(x).square().mean())
        engine.step()
    return engine.steps, torch.cat([value.flatten() for value in engine.state_dict().values()])


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_passes_inside_a_pass_are_parts_of_it(stage: int, accumulation: int, one: World) -> None:
    """Before: each counted as a micro-batch where nothing outside of the checkpoints trains."""
    wanted, weights = one.run(trained, stage, False, accumulation)[0]
    steps, got = one.run(trained, stage, True, accumulation)[0]
    assert steps == wanted == 6 // accumulation
    assert torch.allclose(got, weights, rtol=1e-5, atol=1e-6)


def refused(stage: int, tied: bool) -> str:
    model = Adapted(True, tied)
    engine = zero(
        model, partial(torch.optim.SGD, lr=0.1), stage=stage, param_dtype=torch.float32, bucket_bytes=64
    )
    loss = model(torch.randn(4, 8).requires_grad_()).square().mean()
    try:
        if tied:
            engine.backward(loss)
        else:
            loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_pass_whose_outer_one_is_not_seen_is_refused(stage: int, one: World) -> None:
    said = one.run(refused, stage, False)[0]
    assert "call engine.backward(loss)" in said and "use_reentrant=False" in said


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_gradient_after_its_reduction_is_refused(stage: int, one: World) -> None:
    """Before: it was lost."""
    assert "use_reentrant=False" in one.run(refused, stage, True)[0]


def penalised(stage: int, create_graph: bool) -> tuple[int, str]:
    """Updates of two micro-batches whose loss has a gradient penalty, or what was said."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    engine = zero(
        model,
        partial(torch.optim.SGD, lr=0.1),
        stage=stage,
        param_dtype=torch.float32,
        gradient_accumulation=2,
    )
    for _ in range(2):
        x = torch.randn(4, 8).requires_grad_()
        y = model(x)
        try:
            (grad,) = torch.autograd.grad(y.sum(), x, create_graph=create_graph, retain_graph=True)
        except RuntimeError as error:
            return engine.steps, str(error)
        engine.backward(y.square().mean() + grad.square().mean())
        engine.step()
    return engine.steps, ""


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_autograd_grad_is_no_micro_batch(stage: int, create_graph: bool, one: World) -> None:
    """Before: at stage 3 it counted as one, and the next backward was blamed."""
    steps, said = one.run(penalised, stage, create_graph)[0]
    assert steps == (stage < 3)
    assert said.startswith("torch.autograd.grad went through the model") == (stage == 3)


def to_some(stage: int) -> int:
    """Updates by a backward that is told whose gradients it computes."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    engine = zero(model, partial(torch.optim.SGD, lr=0.1), stage=stage, param_dtype=torch.float32)
    model(torch.randn(4, 8)).square().mean().backward(inputs=list(model.parameters()))
    engine.step()
    return engine.steps


@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_to_some_parameters_is_one(stage: int, one: World) -> None:
    assert one.run(to_some, stage)[0] == 1

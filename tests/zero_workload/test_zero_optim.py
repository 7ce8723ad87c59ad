"""ZeRO with other optimizers, and what it refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dynamiccl.zero_workload import zero
from test_zero import adamw, train
from test_zero_exact import Hand
from torch import nn
from world import World


@pytest.mark.parametrize(
    ("optimizer", "stages"),
    [
        (partial(torch.optim.NAdam, lr=1e-2), (0, 1, 2, 3)),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), (0, 3)),
        (partial(torch.optim.RMSprop, lr=1e-3), (0, 3)),
        (partial(torch.optim.Adagrad, lr=1e-2), (0, 1, 2, 3)),  # it has a state before the first step
    ],
)
def test_optimizers_agree_across_stages(optimizer: Any, stages: tuple[int, ...], two: World) -> None:
    runs = {stage: two.run(train, 8, {"stage": stage, "optimizer": optimizer})[0] for stage in stages}
    assert runs[0][-1] < runs[0][0] - 0.3
    for losses in runs.values():
        assert losses == pytest.approx(runs[0], rel=1e-5)


# What is not finite ------------------------------------------------------------------------------------------------


def not_finite(stage: int, where: str) -> tuple[int, str]:
    """The step in which, and what, the engine says when something on rank 1 is not finite in step 2."""
    torch.manual_seed(0)
    model = Hand()
    engine = zero(model, adamw(1e-2), stage=stage, param_dtype=torch.float32, min_unit=1)
    spoil = dist.get_rank() == 1
    for step in range(5):
        x = torch.tensor([1.0, -1.0])  # h = 5, relu passes
        loss = model(x, float("nan") if where == "loss" and spoil and step == 2 else 1.0)
        if where == "gradient" and spoil and step == 2:
            loss.register_hook(
                lambda grad: grad * float("inf")
            )  # the loss is fine, a gradient on its way is not
        try:
            engine.backward(loss)
            engine.step()
        except FloatingPointError as error:
            return step, str(error)
    return -1, ""


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_is_told_on_every_rank(where: str, two: World) -> None:
    for stage in range(4):
        for step, said in two.run(not_finite, stage, where):
            assert step == 2 and said.startswith("the gradient is not finite at step 2: lower"), said


# Bad input ---------------------------------------------------------------------------------------------------------


class Mine(torch.optim.SGD):
    """A user's own: a subclass may do anything, so the user's word decides."""


def refusal(case: str) -> str:
    model: nn.Module = Hand()
    settings: dict[str, Any] = {"stage": 1}
    optimizer: Any = adamw(1e-3)
    if case == "ranks":
        model = nn.Linear(4, 4 + dist.get_rank())
    elif case == "frozen":
        model.requires_grad_(False)
    elif case == "muon":
        model, optimizer = nn.Linear(4, 4, bias=False), torch.optim.Muon
    elif case.startswith("a user's own"):
        settings["elementwise"], optimizer = True if "fine" in case else None, partial(Mine, lr=0.1)
    else:
        name, value = case.split("=")
        settings[name] = int(value) if value.lstrip("-").isdigit() else value
    try:
        zero(model, optimizer, **settings)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("stage=4", "stage is 0, 1, 2 or 3"),
        ("prefetch=-1", "prefetch"),
        ("gradient_accumulation=0", "a whole number from 1 up, not 0"),
        ("unit=row", "'block' or 'layer'"),
        ("ranks", "ranks [1] have another model or other settings than rank 0"),
        ("frozen", "no trainable parameter"),
        ("muon", "Muon may need whole matrices: say elementwise=True if"),
        ("a user's own", "Mine may need whole matrices: say elementwise=True if"),
        ("a user's own, and fine", ""),
    ],
)
def test_bad_input_is_refused_on_every_rank(case: str, words: str, two: World) -> None:
    for said in two.run(refusal, case):
        assert words in said if words else said == ""

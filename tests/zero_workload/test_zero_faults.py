"""What goes wrong in a loop: backward fails, is called twice, gradients are not finite, settings make no sense."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dynamiccl.zero_workload import Engine, zero
from dynamiccl.zero_workload.job.model import Transformer
from test_zero import TINY, adamw, texts
from test_zero_exact import Hand
from torch import nn
from world import World


class Bad(Exception):
    """What the loop catches."""


def engine_of(stage: int, **settings: Any) -> Engine:
    torch.manual_seed(0)
    both: dict[str, Any] = {"param_dtype": torch.float32, "bucket_bytes": 2**14, **settings}
    return zero(Transformer(TINY), adamw(1e-2), stage=stage, **both)


def weights_of(engine: Engine) -> torch.Tensor:
    return torch.cat([value.flatten() for value in engine.state_dict().values()])


# Backward fails ------------------------------------------------------------------------------------------------------


def failing(stage: int) -> list[str]:
    """What is said of a step whose backward failed on every rank: by a step, and by the next forward."""
    engine, said = engine_of(stage), []
    blocks: Any = engine.model.blocks

    def fail(grad: torch.Tensor) -> None:
        raise Bad

    hook = blocks[1].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    with pytest.raises(Bad):
        engine.backward(engine.model(*texts(0, 0, 2)))
    hook.remove()
    for go_on in (engine.step, lambda: engine.model(*texts(1, 0, 2))):
        try:
            go_on()
        except RuntimeError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_after_a_backward_that_failed_the_engine_does_not_go_on(stage: int, two: World) -> None:
    """Seen: the next steps trained on half of its gradients, without a word."""
    for said in two.run(failing, stage):
        assert len(said) == 2 and all(one.startswith("backward has failed") for one in said)


def twice(stage: int) -> str:
    engine = engine_of(stage)
    engine.backward(engine.model(*texts(0, 0, 2)))
    try:
        engine.backward(engine.model(*texts(1, 0, 2)))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_second_backward_in_a_step_is_refused(stage: int, two: World) -> None:
    for said in two.run(twice, stage):
        assert "add the losses up" in said and "engine.step()" in said


# What is not finite ------------------------------------------------------------------------------------------------


def spoiled(stage: int, settings: dict[str, Any]) -> tuple[bool, str, bool]:
    """Whether the weights stayed, what was said, whether the next step trains."""
    engine = engine_of(stage, **settings)
    for step in range(2):
        loss = engine.model(*texts(step, 0, 2))
        before = weights_of(engine)
        engine.backward(loss * (float("nan") if step == 1 and dist.get_rank() == 1 else 1.0))
        try:
            engine.step()
        except FloatingPointError as error:
            stayed = torch.equal(weights_of(engine), before)
            engine.backward(engine.model(*texts(2, 0, 2)))
            engine.step()
            after = weights_of(engine)
            return stayed, f"{step}: {error}", bool(after.isfinite().all()) and not torch.equal(after, before)
    return False, "", False


@pytest.mark.parametrize("settings", [{}, {"max_norm": 1.0}], ids=["", "clip"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_not_finite_never_reaches_the_weights(
    stage: int, settings: dict[str, Any], two: World
) -> None:
    for stayed, said, goes_on in two.run(spoiled, stage, settings):
        assert stayed and goes_on and said.startswith("1: the gradient is not finite at step 1: lower"), said


class Complex(nn.Module):
    """One real and one complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.phase = (
            nn.Parameter(torch.ones(3)),
            nn.Parameter(torch.ones(3, dtype=torch.complex64)),
        )


def in_double() -> float:
    """The norm of a gradient of two elements that differ after the 7th digit."""
    model = nn.Linear(2, 1, bias=False).double()
    engine = zero(model, adamw(1e-3), stage=1, param_dtype=torch.float64, max_norm=1e9)
    engine.backward(model(torch.tensor([1.0, 1e-5], dtype=torch.float64)).sum())
    norm = engine.step()
    assert norm is not None
    return norm.item()


def test_the_norm_of_float64_gradients_has_its_digits(two: World) -> None:
    assert two.run(in_double)[0] == pytest.approx((1 + 1e-10) ** 0.5, rel=1e-14)


# Values that make no sense -------------------------------------------------------------------------------------------

FLOATING = "a floating-point dtype of 16 bits or more"


def refusal(settings: dict[str, Any], model: nn.Module) -> str:
    try:
        zero(model, adamw(1e-3), **{"stage": 1, **settings})
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        *(({"max_norm": x}, f"max_norm is above 0, or None, not {x}") for x in (0, -1, float("nan"))),
        ({"gradient_accumulation": 1.5}, "gradient_accumulation is a whole number from 1 up, not 1.5"),
        ({"bucket_bytes": float("nan")}, "bucket_bytes is a whole number from 1 up, not nan"),
        ({"stage": True}, "stage is 0, 1, 2 or 3, not True"),
        ({"stage": 3, "hybrid": -1}, "hybrid is a whole number from 0 up, or None, not -1"),
        ({"min_unit": -1}, "min_unit is a whole number from 0 up, not -1"),
        ({"param_dtype": torch.float8_e4m3fn}, f"param_dtype is {FLOATING}, not torch.float8_e4m3fn"),
        ({"loss_scale": 0.5}, "loss_scale is from 1 up, not 0.5"),
        ({"stage": 2, "classic": True}, "classic is a form of stage 1, not of stage 2"),
        ({"stage": 0, "offload": True}, "offload moves optimizer shards to the host: take stage 1, 2 or 3"),
        ({"reduce_dtype": torch.int8}, f"reduce_dtype is {FLOATING}, or None, not torch.int8"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(settings: dict[str, Any], words: str, two: World) -> None:
    for said in two.run(refusal, settings, Hand()):
        assert said == words


def test_complex_parameters_are_named(two: World) -> None:
    for said in two.run(refusal, {}, Complex()):
        assert said.startswith("phase is complex64") and "torch.view_as_real" in said
    frozen = copy.deepcopy(Complex())
    frozen.phase.requires_grad_(False)
    assert two.run(refusal, {}, frozen) == ["", ""]

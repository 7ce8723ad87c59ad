"""What goes wrong in a loop: backward fails, is called twice, gradients are not finite, settings make no sense."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dynamiccl.zero_workload import Engine, zero
from dynamiccl.zero_workload.job.model import ModelConfig, Transformer
from dynamiccl.zero_workload.job.parallel import groups
from test_zero import TINY, adamw, texts
from test_zero_exact import Hand
from torch import nn
from world import World

STEPS, FAULTY = 4, 1


class Bad(Exception):
    """What the loop catches."""


def engine_of(stage: int, **settings: Any) -> Engine:
    torch.manual_seed(0)
    both: dict[str, Any] = {"param_dtype": torch.float32, "bucket_bytes": 2**14, **settings}
    return zero(Transformer(TINY), adamw(1e-2), stage=stage, **both)


def weights_of(engine: Engine) -> torch.Tensor:
    return torch.cat([value.flatten() for value in engine.state_dict().values()])


# Backward fails ------------------------------------------------------------------------------------------------------


def loop(stage: int, accumulation: int, breaks: dict[int, int] | None, stepping: bool) -> tuple[torch.Tensor, str]:
    """Weights after a loop that catches what its faulty batch does: backward fails at the block that ``breaks`` names
    for a rank, or (``None``) that step is left out; with ``stepping`` the loop calls ``step`` all the same.
    """
    rank, size, said = dist.get_rank(), dist.get_world_size(), ""
    engine = engine_of(stage, gradient_accumulation=accumulation)

    def fail(grad: torch.Tensor) -> None:
        raise Bad

    for step in range(STEPS):
        if breaks is None and step == FAULTY:
            continue
        for micro in range(accumulation):
            first = 2 * (micro * size + rank)
            at = breaks.get(rank) if breaks is not None and (step, micro) == (FAULTY, 0) else None
            blocks: Any = engine.model.blocks
            hooks = [] if at is None else [
                blocks[at].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
            ]  # fmt: skip
            try:
                engine.backward(engine.model(*texts(step, first, first + 2)))
                engine.step()
            except Bad:
                if stepping:
                    engine.step()
            except RuntimeError as error:
                said = str(error)
                if at is None and rank in (breaks or {}):  # it was said in the forward of the next step
                    engine.backward(engine.model(*texts(step, first, first + 2)))
                    engine.step()
            for hook in hooks:
                hook.remove()
    return weights_of(engine), said


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_whose_backward_fails_on_every_rank_is_left_out(stage: int, accumulation: int, two: World) -> None:
    wanted, _ = two.run(loop, stage, accumulation, None, False)[0]
    for stepping in (False, True):
        for got, said in two.run(loop, stage, accumulation, {0: 2, 1: 0}, stepping):
            assert said == "" and torch.equal(got, wanted), stepping


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_backward_that_fails_on_one_rank_is_told_on_all_and_applied_on_none(stage: int, two: World) -> None:
    wanted, _ = two.run(loop, stage, 1, None, False)[0]
    for got, said in two.run(loop, stage, 1, {1: 1}, False, timeout=60):
        assert "backward failed on ranks [1] and not on the others" in said and torch.equal(got, wanted)


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
def test_what_is_not_finite_never_reaches_the_weights(stage: int, settings: dict[str, Any], two: World) -> None:
    for stayed, said, goes_on in two.run(spoiled, stage, settings):
        assert stayed and goes_on and said.startswith("1: the loss is not finite at step 1 on ranks [1]"), said


def spoiled_replica() -> str:
    torch.manual_seed(0)
    engine = zero(Transformer(TINY), adamw(1e-2), stage=3, param_dtype=torch.float32, **groups(2))
    engine.backward(engine.model(*texts(0, 0, 2)) * (float("nan") if dist.get_rank() == 3 else 1.0))
    try:
        engine.step()
    except FloatingPointError as error:
        return str(error)
    return ""


def test_the_global_rank_is_named_in_every_replica(four: World) -> None:
    for said in four.run(spoiled_replica):
        assert said.startswith("the loss is not finite at step 0 on ranks [3]"), said


class Complex(nn.Module):
    """One real and one complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.phase = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.complex64))


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

FLOATING = "a floating-point dtype of more range than float16"


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
        ({"param_dtype": torch.float16}, f"param_dtype is {FLOATING}, not torch.float16"),
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


def test_a_model_recomputes_no_segment_of_negative_length() -> None:
    with pytest.raises(ValueError, match="recompute starts at 0, not -1"):
        ModelConfig(recompute=-1)

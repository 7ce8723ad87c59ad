"""ZeRO in mixed precision and with other optimizers, and what it refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dynamiccl.zero_workload import zero
from dynamiccl.zero_workload.job.data import Corpus
from dynamiccl.zero_workload.job.model import Transformer
from dynamiccl.zero_workload.job.optim import Adan, Lion
from test_zero import TINY, adamw, train
from test_zero_exact import Hand
from torch import nn
from world import World

# The worked example: two ranks, four weights -----------------------------------------------------------------------


def half_precision() -> tuple[list[float | None], int, list[float]]:
    torch.manual_seed(0)
    model = Transformer(TINY)
    engine = zero(model, adamw(1e-2), stage=2, param_dtype=torch.float16, bucket_bytes=2**14, loss_scale=2.0**12)
    scales, before, changes = [], [], []
    corpus = Corpus(None, TINY.seq)
    for step in range(3):
        loss = model(*corpus.batch(0, 2, step=step, seed=0))
        if step == 1 and dist.get_rank() == 1:
            loss = loss * 1e6  # overflows on this rank alone
        before = torch.cat([b.master.detach().clone() for b in engine.buckets])
        engine.backward(loss)
        engine.step()
        changes.append((torch.cat([b.master.detach() for b in engine.buckets]) - before).abs().max().item())
        scales.append(engine.health.loss_scale)
    return scales, engine.health.skipped, changes


def test_overflow_on_one_rank_skips_the_step_on_all(two: World) -> None:
    for scales, skipped, changes in two.run(half_precision):
        assert scales == [2.0**12, 2.0**11, 2.0**11]
        assert skipped == 1
        assert changes[1] == 0.0 and changes[0] > 1e-3 and changes[2] > 1e-3


@pytest.mark.parametrize(
    ("optimizer", "stages"),
    [
        (partial(Adan, lr=1e-2), (0, 1, 2, 3)),
        (partial(Lion, lr=1e-3), (0, 1, 2, 3)),
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


def always_overflowing() -> tuple[list[float | None], str]:
    """Loss scales of a model whose gradients are infinite on rank 1, until the engine has enough."""
    torch.manual_seed(0)
    model, scales = Hand(), list[float | None]()
    engine = zero(model, adamw(1e-2), stage=3, param_dtype=torch.float16, loss_scale=8.0)
    for _ in range(9):
        loss = model(torch.ones(2).half(), 1.0)
        engine.backward(loss * (float("inf") if dist.get_rank() == 1 else 1.0))
        try:
            engine.step()
        except FloatingPointError as error:
            return scales, str(error)
        scales.append(engine.health.loss_scale)
    return scales, ""


def test_the_loss_scale_has_a_floor_and_says_so(two: World) -> None:
    for scales, said in two.run(always_overflowing):
        assert scales == [4.0, 2.0, 1.0]
        assert "beyond float16 at step 3, at the least loss scale on ranks [1]" in said


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
            loss.register_hook(lambda grad: grad * float("inf"))  # the loss is fine, a gradient on its way is not
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
            assert step == 2
            if where == "loss":
                assert said.startswith("the loss is not finite at step 2 on ranks [1]"), said
            else:
                assert said.startswith("the gradient is not finite at step 2, though each loss is"), said
                assert "second.bias" in said or "first.weight" in said


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
        ("ranks", "ranks [1] have a model or settings that differs from rank 0's: weight is ((5, 4),"),
        ("frozen", "no trainable parameter"),
        ("muon", "Muon may need whole matrices: say elementwise=True if"),
        ("a user's own", "Mine may need whole matrices: say elementwise=True if"),
        ("a user's own, and fine", ""),
    ],
)
def test_bad_input_is_refused_on_every_rank(case: str, words: str, two: World) -> None:
    for said in two.run(refusal, case):
        assert words in said if words else said == ""

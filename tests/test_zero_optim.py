"""ZeRO in mixed precision and with other optimizers, and what it refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dynamiccl.zero_workload import zero
from dynamiccl.zero_workload.data import Corpus
from dynamiccl.zero_workload.model import Transformer
from dynamiccl.zero_workload.optim import Adan, Lion, Muon
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
        scales.append(engine.loss_scale)
    return scales, engine.skipped, changes


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
        (partial(Muon, lr=0.02), (0, 1)),
    ],
)
def test_optimizers_agree_across_stages(optimizer: Any, stages: tuple[int, ...], two: World) -> None:
    runs = {stage: two.run(train, 8, {"stage": stage, "optimizer": optimizer})[0] for stage in stages}
    assert runs[0][-1] < runs[0][0] - 0.3
    for losses in runs.values():
        assert losses == pytest.approx(runs[0], rel=1e-5)


# Bad input ---------------------------------------------------------------------------------------------------------


def refusal(case: str) -> str:
    model: nn.Module = Hand()
    settings: dict[str, Any] = {"stage": 1}
    optimizer: Any = adamw(1e-3)
    if case == "ranks":
        model = nn.Linear(4, 4 + dist.get_rank())
    elif case == "frozen":
        model.requires_grad_(False)
    elif case == "muon":
        settings, optimizer = {"stage": 2}, Muon
    elif case == "torch muon":
        settings, optimizer = {"stage": 3}, torch.optim.Muon
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
        ("gradient_accumulation=0", "start at 1"),
        ("reduce_op=max", "'mean' or 'sum'"),
        ("unit=row", "'block' or 'layer'"),
        ("ranks", "ranks [1] have a model or settings that differs"),
        ("frozen", "no trainable parameter"),
        ("muon", "whole matrices: use stage 1"),
        ("torch muon", "whole matrices: use stage 1"),
    ],
)
def test_bad_input_is_refused_on_every_rank(case: str, words: str, two: World) -> None:
    for said in two.run(refusal, case):
        assert words in said

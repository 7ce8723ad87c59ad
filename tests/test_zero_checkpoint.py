"""Checkpoints: resumed to the bit where the job is cut in the same way, refused elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from dynamiccl.zero_workload import zero
from dynamiccl.zero_workload.job.checkpoint import load, save
from dynamiccl.zero_workload.job.model import Transformer
from test_zero import TINY, adamw, run
from torch import nn
from world import World

OPTIMIZERS: dict[str, Any] = {"adamw": adamw(1e-2), "rprop": torch.optim.Rprop}


def part(
    folder: str, stage: int, first: int, last: int, resume: bool, optimizer: str = "adamw", dtype: Any = torch.float32
) -> list[float]:
    """Train steps ``first .. last``, from a checkpoint if ``resume``; leave one at the end."""
    torch.manual_seed(0 if not resume else 99)  # a resumed model starts from other values
    model = Transformer(TINY)
    engine = zero(model, OPTIMIZERS[optimizer], stage=stage, param_dtype=dtype, bucket_bytes=2**15)
    if resume:
        assert load(engine, Path(folder)) == first
    losses = run(engine, range(first, last))
    if not resume and last < 8:
        save(engine, Path(folder), last)
    return losses


@pytest.mark.parametrize(
    ("optimizer", "dtype", "stages"), [("adamw", torch.float32, (0, 1, 2, 3)), ("rprop", torch.bfloat16, (1, 3))]
)
def test_resume_is_exact_at_the_same_stage(
    optimizer: str, dtype: Any, stages: tuple[int, ...], two: World, tmp_path: Path
) -> None:
    for stage in stages:
        folder = str(tmp_path / str(stage))
        through = two.run(part, folder, stage, 0, 8, False, optimizer, dtype)[0]
        first = two.run(part, folder, stage, 0, 4, False, optimizer, dtype)[0]
        assert first + two.run(part, folder, stage, 4, 8, True, optimizer, dtype)[0] == through, stage


def elsewhere(folder: str, stage: int) -> str:
    try:
        load(zero(Transformer(TINY), adamw(1e-2), stage=stage, param_dtype=torch.float32), Path(folder))
    except ValueError as error:
        return str(error)
    return ""


def test_elsewhere_it_is_refused_on_every_rank(two: World, four: World, tmp_path: Path) -> None:
    two.run(part, str(tmp_path), 3, 0, 4, False)
    refusals = {
        "its stage is not": (two, 2),
        "number of ranks that shard is not|cannot be read on rank [23]": (four, 3),
    }
    for what, (world, stage) in refusals.items():
        for said in world.run(elsewhere, str(tmp_path), stage):
            assert re.search(what, said)


def interrupted(folder: str) -> str:
    """A save that breaks half-way, then a load of what is there."""
    torch.manual_seed(0)
    engine = zero(Transformer(TINY), adamw(1e-2), stage=3)
    save(engine, Path(folder), 1)
    import dynamiccl.zero_workload.job.checkpoint as module

    original = module.torch.save

    def broken(state: dict[str, Any], path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    module.torch.save = broken
    try:
        save(engine, Path(folder), 2)
    except KeyboardInterrupt:
        pass
    finally:
        module.torch.save = original
    assert load(engine, Path(folder)) == 1
    save(engine, Path(folder), 2)
    assert load(engine, Path(folder)) == 2
    said = ""
    for other in (zero(nn.Linear(3, 3), adamw(1e-2), stage=3), zero(Transformer(TINY), torch.optim.Rprop, stage=3)):
        try:
            load(other, Path(folder))
        except ValueError as error:
            said += f"{error}; "
    return said


def test_interrupted_save_and_another_model(two: World, tmp_path: Path) -> None:
    for said in two.run(interrupted, str(tmp_path)):
        assert "its model is not this one's" in said and "its optimizer is not this one's" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def in_an_older_runs_folder(folder: str) -> str:
    engine = zero(nn.Linear(3, 3), adamw(1e-2), stage=1)
    try:
        save(engine, Path(folder), 1)
    except ValueError as error:
        return str(error)
    return ""


def test_a_new_run_is_not_saved_behind_an_older_ones_checkpoints(two: World, tmp_path: Path) -> None:
    for step in (2, 4):
        (tmp_path / f"step-{step:08d}").mkdir()
    for said in two.run(in_an_older_runs_folder, str(tmp_path)):
        assert "step-00000004 is of another run, and later than step 1: resume from it, or save elsewhere" in said
    assert len(list(tmp_path.iterdir())) == 2


def rates(folder: str) -> list[float]:
    """What a resumed engine has of another that changed its rates."""

    def groups(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p], "lr": 0.1} for p in params])

    engine, resumed = (zero(nn.Linear(3, 3), groups, stage=1, param_dtype=torch.float32) for _ in range(2))
    for group, rate in zip(engine.optimizer.param_groups, (0.05, 0.02), strict=True):
        group["lr"] = rate
    save(engine, Path(folder), 1)
    load(resumed, Path(folder))
    return [group["lr"] for group in resumed.optimizer.param_groups]


def test_rates_are_kept(two: World, tmp_path: Path) -> None:
    for got in two.run(rates, str(tmp_path)):
        assert got == [0.05, 0.02]

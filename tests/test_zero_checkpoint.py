"""Checkpoints: resumed to the bit where the job is cut in the same way, refused elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dynamiccl.zero_workload import zero
from dynamiccl.zero_workload.job.checkpoint import load, save
from dynamiccl.zero_workload.job.model import Transformer
from dynamiccl.zero_workload.job.parallel import groups
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
    for world, stage, what in ((two, 2, "its stage is not"), (four, 3, "its number of ranks that shard is not")):
        for said in world.run(elsewhere, str(tmp_path), stage):
            assert what in said


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


def rates(folder: str) -> tuple[list[float], int]:
    """What a resumed engine has of another that changed its rates and skipped a step."""

    def groups(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p], "lr": 0.1} for p in params])

    engine, resumed = (zero(nn.Linear(3, 3), groups, stage=1, param_dtype=torch.float32) for _ in range(2))
    for group, rate in zip(engine.optimizer.param_groups, (0.05, 0.02), strict=True):
        group["lr"] = rate
    engine.health.skipped = 3
    save(engine, Path(folder), 1)
    load(resumed, Path(folder))
    return [group["lr"] for group in resumed.optimizer.param_groups], resumed.health.skipped


def test_rates_and_skipped_steps_are_kept(two: World, tmp_path: Path) -> None:
    for got in two.run(rates, str(tmp_path)):
        assert got == ([0.05, 0.02], 3)


def unwritten(folder: str, fails: str, replicas: bool) -> str:
    """What each rank is told, in seconds, when rank 0 cannot write ``fails``; the next save goes well."""
    engine = zero(nn.Linear(8, 8), adamw(1e-2), stage=2, **(groups(2) if replicas else {}))
    before = Path.rename, torch.save

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    if fails == "the folder":
        Path.rename = full
    elif dist.get_rank() < 2:
        torch.save = full
    try:
        save(engine, Path(folder), 1)
        said = ""
    except OSError as error:
        said = str(error)
    finally:
        Path.rename, torch.save = before
    save(engine, Path(folder), 2)
    return said


@pytest.mark.parametrize(("size", "fails"), [("two", "the folder"), ("four", "the elements")])
def test_a_full_disk_is_told_on_every_rank(
    size: str, fails: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    world: World = request.getfixturevalue(size)
    for said in world.run(unwritten, str(tmp_path), fails, size == "four", timeout=60):
        assert "No space left on device" in said
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]

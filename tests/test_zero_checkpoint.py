"""Checkpoints: resumed at the same stage to the bit, at any other stage and number of ranks to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dynamiccl.zero_workload import zero
from dynamiccl.zero_workload.checkpoint import load, save
from dynamiccl.zero_workload.model import Transformer
from dynamiccl.zero_workload.optim import Adan, Lion, Muon
from test_zero import TINY, adamw, run
from torch import nn
from world import World

OPTIMIZERS: dict[str, Any] = {"adamw": adamw(1e-2), "adan": Adan, "muon": Muon}


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
    ("optimizer", "dtype", "stages"), [("adamw", torch.float32, (0, 1, 2, 3)), ("adan", torch.bfloat16, (1, 3))]
)
def test_resume_is_exact_at_the_same_stage(
    optimizer: str, dtype: Any, stages: tuple[int, ...], two: World, tmp_path: Path
) -> None:
    for stage in stages:
        folder = str(tmp_path / str(stage))
        through = two.run(part, folder, stage, 0, 8, False, optimizer, dtype)[0]
        first = two.run(part, folder, stage, 0, 4, False, optimizer, dtype)[0]
        assert first + two.run(part, folder, stage, 4, 8, True, optimizer, dtype)[0] == through, stage


@pytest.mark.slow
def test_resume_elsewhere(two: World, four: World, tmp_path: Path) -> None:
    through = two.run(part, str(tmp_path), 1, 0, 8, False)[0]
    two.run(part, str(tmp_path), 3, 0, 4, False)
    for world, stage in ((two, 0), (two, 2), (four, 3), (four, 1)):
        assert world.run(part, str(tmp_path), stage, 4, 8, True)[0] == pytest.approx(through[4:], rel=1e-5)
    two.run(part, str(tmp_path / "muon"), 1, 0, 4, False, "muon")
    muon = two.run(part, str(tmp_path / "none"), 0, 0, 8, False, "muon")[0]
    assert four.run(part, str(tmp_path / "muon"), 1, 4, 8, True, "muon")[0] == pytest.approx(muon[4:], rel=1e-5)


def interrupted(folder: str) -> str:
    """A save that breaks half-way, then a load of what is there."""
    torch.manual_seed(0)
    engine = zero(Transformer(TINY), adamw(1e-2), stage=3)
    save(engine, Path(folder), 1)
    import dynamiccl.zero_workload.checkpoint as module

    original = module.state_dict_saver.save

    def broken(state: dict[str, Any], checkpoint_id: Path, process_group: Any) -> None:
        Path(checkpoint_id, f"__{dist.get_rank()}_0.distcp").write_bytes(b"half")
        raise KeyboardInterrupt

    module.state_dict_saver.save = broken
    try:
        save(engine, Path(folder), 2)
    except KeyboardInterrupt:
        pass
    finally:
        module.state_dict_saver.save = original
    assert load(engine, Path(folder)) == 1
    save(engine, Path(folder), 2)
    assert load(engine, Path(folder)) == 2
    said = ""
    for other in (zero(nn.Linear(3, 3), adamw(1e-2), stage=3), zero(Transformer(TINY), Lion, stage=3)):
        try:
            load(other, Path(folder))
        except ValueError as error:
            said += f"{error}; "
    return said


def test_interrupted_save_and_another_model(two: World, tmp_path: Path) -> None:
    for said in two.run(interrupted, str(tmp_path)):
        assert "is of another model: " in said and "is of another optimizer: AdamW" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]

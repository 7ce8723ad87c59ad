"""What a save deletes, and what all ranks say where one does not see the folder of the others."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dynamiccl.zero_workload.engine.checkpoint as checkpoint
import pytest
import torch
import torch.distributed as dist
from dynamiccl.zero_workload import Engine, zero
from dynamiccl.zero_workload.job import train
from dynamiccl.zero_workload.job.options import check, parser
from test_zero import adamw
from torch import nn
from world import World

MINE = ("save-best", "save-0123456789ab", "zero-save-best", "zero-save-0123456789ab-mine")


def engine_of() -> Engine:
    return zero(nn.Linear(4, 4), adamw(1e-2), stage=1, param_dtype=torch.float32)


def milestones(folder: str) -> int:
    """Saves beside saves of the user's own names; the steps of one of these afterwards."""
    engine, root = engine_of(), Path(folder)
    for name in MINE:
        engine.save(root / name)
    (root / ".metadata").touch()
    (root / "current").touch()
    for _ in range(2):
        engine.backward(engine.model(torch.ones(2, 4)).square().mean())
        engine.step()
        engine.save(root)
    engine.load(root / MINE[0])
    return engine.steps


def test_a_save_deletes_only_saves_before_it(one: World, tmp_path: Path) -> None:
    """Before: every folder whose name begins with save- was deleted."""
    assert one.run(milestones, str(tmp_path)) == [0]
    left = {path.name for path in tmp_path.iterdir()}
    new = left - {*MINE, ".metadata", "current", "zero-save-current"}
    assert len(new) == 1 and len(left) == len(MINE) + 4


def on_own_disks(folder: str) -> tuple[str, str, list[str]]:
    """Each rank has a folder of its own: what a save says, what a load says where only rank 0 has a save, what is left
    of the first.
    """
    rank, engine = dist.get_rank(), engine_of()
    mine, said = Path(folder, str(rank)), []
    mine.mkdir()
    try:
        engine.save(mine)
    except OSError as error:
        said.append(str(error))
    left = [path.name for path in mine.iterdir()]
    engine.save(Path(folder, "0"))
    try:
        engine.load(mine)
    except ValueError as error:
        said.append(str(error))
    return said[0], said[1], left


def test_folders_that_the_nodes_do_not_share_are_refused_on_all_ranks(two: World, tmp_path: Path) -> None:
    """Before: the save succeeded, and the load failed on one rank while the other waited for it."""
    for written, read, left in two.run(on_own_disks, str(tmp_path), timeout=20):
        assert "could not be written" in written and "all nodes must share the folder" in written
        assert "holds no whole checkpoint" in read and "all nodes must share the folder" in read
        assert left == []


def test_a_folder_that_cannot_be_read_is_no_checkpoint(one: World, tmp_path: Path) -> None:
    (tmp_path / checkpoint._CURRENT).mkdir()
    assert "holds no whole checkpoint" in one.run(said_of_load, str(tmp_path))[0]


def tried(folder: str) -> tuple[str, list[str]]:
    """What is said before the first step of a folder that each rank has for itself; what is left in the first's."""
    mine = Path(folder, str(dist.get_rank()))
    mine.mkdir()
    engine, said = engine_of(), ""
    try:
        checkpoint.require_writable(engine, mine)
    except OSError as error:
        said = str(error)
    checkpoint.require_writable(engine, Path(folder, "0"))
    dist.barrier()
    return said, os.listdir(Path(folder, "0"))


def test_a_save_is_tried_before_the_first_step(two: World, tmp_path: Path) -> None:
    """Before: a folder that cannot be written was found after the training, all of which was lost."""
    for said, left in two.run(tried, str(tmp_path), timeout=20):
        assert "could not be written" in said and "all nodes must share the folder" in said
        assert left == []


def test_a_place_that_is_no_folder_is_refused_before_the_job(tmp_path: Path, monkeypatch: Any) -> None:
    file = tmp_path / "file"
    file.touch()
    for place in (file, file / "below"):
        with pytest.raises(ValueError, match=f"--save {place}: {file} is no folder"):
            check(parser().parse_args(["--save", str(place)]))
    check(parser().parse_args(["--save", str(tmp_path / "new" / "below")]))
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(ValueError, match=f"nothing can be written in {tmp_path}"):
        check(parser().parse_args(["--save", str(tmp_path / "new")]))


def test_a_job_tries_its_folder_before_its_first_step(monkeypatch: Any, tmp_path: Path) -> None:
    def refuse(engine: Any, folder: Path) -> None:
        raise OSError(f"{folder} could not be written")

    monkeypatch.setattr(train, "build", lambda args, device: None)
    monkeypatch.setattr(train, "dist", SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 1))
    monkeypatch.setattr(train, "signal", SimpleNamespace(SIGINT=2, SIGTERM=15, signal=lambda *_: None))
    monkeypatch.setattr(train, "require_writable", refuse)
    args = parser().parse_args(["--save", str(tmp_path)])
    with pytest.raises(OSError, match="could not be written"):
        train.Job(args, torch.device("cpu"))


def said_of_load(folder: str) -> str:
    with pytest.raises(ValueError) as caught:
        engine_of().load(folder)
    return str(caught.value)

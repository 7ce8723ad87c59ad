"""The table of subjects in zero_workload/README.md: the job runs with the options of each row."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from dynamiccl.agent.commands.plan import compare
from dynamiccl.zero_workload.job import train as train_module
from job_log import SMALL_MODEL, read_log
from paths import ROOT
from world import World

PAGE = ROOT / "zero_workload" / "README.md"
SMALL = [*SMALL_MODEL, "--batch", "2", "--steps", "3"]


def options_of_the_table() -> list[str]:
    """The cells of the column "command" that are options of the job; several of one cell run one after the other."""
    table = PAGE.read_text("utf-8").partition("| subject of the documents |")[2].partition("\n\n")[0]
    cells = [line.split("|")[3].strip() for line in table.splitlines() if line.startswith("| ")]
    return [cell for cell in dict.fromkeys(cells) if cell.startswith("`--")]


def ran(options: list[str], folder: str) -> list[float]:
    """The losses of the job's steps, read by each rank when the first one has written them."""
    log = Path(folder, "log")
    args = train_module.parser().parse_args([*SMALL, *options, "--log", str(log)])
    train_module.check(args)
    job: Any = train_module.Job(args, torch.device("cpu"))
    job.run()
    torch.distributed.barrier()
    return [step["loss"] for step in read_log(log)[1]]


def test_the_table_has_options() -> None:
    assert {"`--offload`", "`--dtype fp16`", "`--save DIR`, `--resume DIR`"} <= set(options_of_the_table())


@pytest.mark.slow
@pytest.mark.parametrize("cell", options_of_the_table())
def test_the_job_takes_the_options_of_each_row(cell: str, four: World, tmp_path: Path) -> None:
    """Seen: the table promised Muon, which the command refused."""
    if "pytorch_optimizer" in cell:
        pytest.importorskip("pytorch_optimizer", reason="not installed")
    for options in re.findall(r"`(--.*?)`", cell):
        words = options.replace("DIR", str(tmp_path / "saved")).split()
        resumes = "--resume" in words
        (tmp_path / "log").unlink(missing_ok=True)  # a job that resumes would add to it
        for losses in four.run(ran, [*words, "--steps", "6" if resumes else "3"], str(tmp_path)):
            assert len(losses) == 3
            # A fresh model guesses one of 256 bytes: log(256) is 5.55. A resumed one has learned.
            assert losses[0] < 5.4 if resumes else losses[0] == pytest.approx(5.55, abs=0.15)
            assert all(0 < loss < 6 for loss in losses)


def test_each_start_of_the_job_logs_its_first_step(one: World, tmp_path: Path) -> None:
    """The report puts the losses beside the steps of the trace by it; with --log-every no loss is of the first step."""
    saved = str(tmp_path / "saved")
    one.run(ran, ["--save", saved], str(tmp_path))
    one.run(ran, ["--resume", saved, "--steps", "5", "--log-every", "5"], str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["first_step"] for line in lines if "first_step" in line] == [0, 3]
    assert [line["step"] for line in lines if "loss" in line] == [0, 1, 2, 4]


def described(options: list[str], folder: str) -> dict[str, Any]:
    """What the log of a job says of it, as ``plan RUN`` reads it."""
    log = Path(folder, "log")
    ran(options, folder)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (head,) = (line for line in lines if "n_params" in line)
    (end,) = (line for line in lines if "memory" in line)
    return {**head, **end, "params": head["n_params"], "ranks": head["n_ranks"], "sent": {}}


@pytest.mark.parametrize(
    "options",
    [
        "--stage 3",
        "--stage 3 --hsdp 2",
        "--stage 2 --hsdp 2",
        "--stage 2 --dtype bf16 --reduce-dtype fp32",
        "--stage 3 --dtype bf16 --reduce-dtype fp32 --hsdp 2",
        "--stage 1 --dtype bf16 --reduce-dtype fp32",
        "--stage 3 --hybrid 20000",
        "--stage 2 --tensor-parallel 2",
    ],
)
def test_plan_computes_with_the_options_of_a_run(options: str, four: World, tmp_path: Path) -> None:
    """Seen: HSDP and a dtype of the reduction were 100 % off, --hybrid 15 %: a healthy run looked faulty."""
    told = four.run(described, [*options.split(), "--log-every", "3"], str(tmp_path))[0]
    for row in compare(told)["rows"][:3]:
        assert abs(row["off"]) < 0.03, row


def test_plan_counts_what_replicas_send() -> None:
    """By hand: HSDP over 2 of 4 ranks, stage 2, float32: each sends 1 of 2 parts, then the shards' all-reduce."""
    run: dict[str, Any] = {"dtype": "fp32", "params": 1000, "ranks": 4, "stage": 2, "n_tensors": 3, "hsdp": 2}
    run |= {"memory": {"weights": 4000, "gradients": 2000, "optimizer": 4000}, "kept_params": 0}
    agreement = 2 * (2 * 20 * 4 / 2)  # among the ranks of a shard, and among replicas
    losses = 2 * 3 / 4 * 4 * 5
    run["sent"] = {
        "all_gather": 2000,
        "reduce_scatter": 2000,
        "all_reduce": 2 * 1 / 2 * 2000 + agreement + losses,
    }
    assert [row["off"] for row in compare(run)["rows"]] == pytest.approx([0, 0, 0, 0])

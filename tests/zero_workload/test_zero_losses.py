"""When the job looks at its losses, and what it says of a resumed run's learning rate."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dynamiccl.zero_workload.job import train
from dynamiccl.zero_workload.job.options import parser

WORK = SimpleNamespace(wait=lambda: None)


class Job(train.Job):
    """A job without an engine: each step has a loss of 0."""

    def __init__(self, words: list[str], device: str, rate: float = 2e-3) -> None:
        self.args, self.device, self.size = parser().parse_args(words), torch.device(device), 1
        self.written, self.held_out, self.said = list[int](), list[int](), list[str]()
        optimizer = SimpleNamespace(param_groups=[{"lr": rate}])
        self.engine: Any = SimpleNamespace(optimizer=optimizer, steps=0, scale=SimpleNamespace(skipped=0))

    def about(self) -> dict[str, Any]:
        return {}

    def _headline(self) -> str:
        return ""

    def _scale(self) -> dict[str, float]:
        return {}

    def _say(self, line: str) -> None:
        self.said.append(line)

    def _write(self, record: dict[str, Any]) -> None:
        self.written += [record["step"] + 1] if "step" in record else []

    def _step(self, step: int) -> tuple[torch.Tensor, Any]:
        return torch.zeros(2), WORK

    def _look_at_held_out(self, step: int) -> None:
        self.held_out.append(step + 1)

    def _end(self, done: int, stopped: bool) -> None: ...


@pytest.mark.parametrize(("device", "every"), [("cpu", 1), ("cuda", 10)])
def test_held_out_text_is_looked_at_as_often_as_asked(device: str, every: int) -> None:
    """Before: on a GPU only in steps whose loss was logged too, every lcm(10, N)-th."""
    job = Job(["--steps", "50", "--held-out-every", "12"], device)
    job.run()
    assert job.held_out == [12, 24, 36, 48]
    assert set(job.written) == {*range(every, 51, every), 12, 24, 36, 48}


def test_a_resumed_run_says_that_its_rate_is_another(tmp_path: Path) -> None:
    for rate, words in ((1e-4, ["--resume", str(tmp_path)]), (2e-3, ["--resume", str(tmp_path)]), (1e-4, [])):
        job = Job(["--steps", "1", *words], "cpu", rate)
        job.run()
        said = [line for line in job.said if "learning rate" in line]
        told = bool(words) and rate != 2e-3
        assert said == ([f"learning rate 0.0001, as in {tmp_path}, not 0.002"] if told else [])

"""TensorBoard scalars: what is written is what TensorBoard reads back."""

import sys

import numpy as np
import pytest
from dynamiccl.agent.cli import app
from dynamiccl.agent.scalars import DEFAULT_MS, GENERATION, TABLE_MS, Scalars
from dynamiccl.envs.live import Window
from dynamiccl.envs.windows import REFERENCE, TABLE, Plan
from typer.testing import CliRunner


def window(generation, first, ms):
    steps = np.arange(first, first + 4)
    return Window(generation, steps, np.array([ms, ms, ms + 1, ms]))


def test_step_times_by_default_and_by_table_and_the_generation(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'dynamiccl[tensorboard]'")
    pytest.importorskip("torch")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scalars = Scalars(tmp_path / "tb")
    none, some = np.zeros(2, np.int64), np.array([0, 5])
    scalars.window(Plan(REFERENCE, none, 4), window(0, 1, 100.0))
    scalars.window(Plan(TABLE, some, 4), window(1, 6, 80.0))
    scalars.window(Plan(REFERENCE, none, 4), window(2, 11, 101.0))
    scalars.close()
    scalars.close()  # nothing is left to write
    read = EventAccumulator(str(tmp_path / "tb"))
    read.Reload()
    assert set(read.Tags()["scalars"]) == {DEFAULT_MS, TABLE_MS, GENERATION}
    told = {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in (DEFAULT_MS, TABLE_MS, GENERATION)}
    assert told[DEFAULT_MS] == [(4, 100.0), (14, 101.0)] and told[TABLE_MS] == [(9, 80.0)]
    assert told[GENERATION] == [(4, 0.0), (9, 1.0), (14, 2.0)]


def test_a_writer_that_fails_ends_the_scalars_alone():
    class Fails:
        def add_scalar(self, *_):
            raise OSError("no space left")

    scalars = object.__new__(Scalars)
    scalars._writer = Fails()
    scalars.window(Plan(TABLE, np.array([1]), 4), window(1, 1, 80.0))
    assert scalars._writer is None
    scalars.window(Plan(TABLE, np.array([1]), 4), window(1, 6, 80.0))


def test_a_package_that_is_missing_is_said_before_the_job_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    ran = tmp_path / "ran"
    words = ["tune", "--tensorboard", str(tmp_path / "tb"), "--cluster", "dgx-h100-2x8", "--", "touch", str(ran)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and "dynamiccl[tensorboard]" in result.stderr and not ran.exists()

"""The job under the tuner: its losses are those of the same job without one, and where its time goes is measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from command import invoke
from dynamiccl.agent.daemon.request import workload
from dynamiccl.agent.report.losses import difference, read_losses
from dynamiccl.agent.report.outputs import logged
from dynamiccl.agent.report.summary import RunSummary
from dynamiccl.envs.sim.emulated.settings import Emulated
from dynamiccl.traces.files import Trace
from dynamiccl.traces.queries.costs import default_generations

STEPS = 240


class Both(NamedTuple):
    """The folder of a tuned run, and the job's own log of the same job without a tuner."""

    tuned: Path
    untuned: Path


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp("both")
    out, log = folder / "out", folder / "untuned.jsonl"
    tune(out)
    finish(workload(3, STEPS, 2, log, backend="emulated"), **Emulated().env())
    return Both(out, log)


def tune(out: Path, *options: str) -> None:
    """Tune the job of :func:`both` on the emulated cluster; the run's folder is ``out``.

    Every step takes kernel times. Else a block of turns is sampled whole or not at all. On a busy machine, where few
    tables are tried, none may be.
    """
    command = [sys.executable, "-m", "dynamiccl.agent.cli", "tune", "--cluster", Emulated().cluster]
    command += ["--steps", str(STEPS), "--no-memory", "--quiet", "--out", str(out), *options]
    finish(command, DYNAMICCL_SAMPLE_EVERY="1")


def finish(command: list[str], **env: str) -> None:
    """Run ``command`` to its end, with ``env`` beside the environment."""
    env = {**os.environ, **env}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_tuning_does_not_change_what_is_learned(both: Both) -> None:
    """On the emulated cluster a table changes times alone, so the losses are equal to the last bit."""
    for name, least in (("loss", STEPS), ("held_out", 4)):
        tuned, untuned = (logged(log, name) for log in (both.tuned / "job.jsonl", both.untuned))
        assert tuned == untuned and len(tuned) >= least
    losses = read_losses(Trace.read(both.tuned))
    assert losses is not None
    assert 0 < losses.tuned.sum() < STEPS
    mean, error = difference(losses)  # type: ignore[misc]
    assert abs(mean) < 4 * error
    page = (both.tuned / "report.html").read_text(encoding="utf-8")
    assert "Step time and loss over the run" in page and f"held-out loss {losses.held_out[-1][1]:.3f}" in page


@pytest.mark.slow
def test_what_a_run_used_equals_the_formulas(both: Both) -> None:
    """Memory and traffic as measured in the run, within 1 % of what `plan` computes."""
    told = json.loads(invoke(["plan", str(both.tuned), "--json"]).output)
    rows = told["measured"]["rows"]
    assert [row["what"] for row in rows] == ["weights", "gradients", "optimizer", "sent in a step"]
    assert all(row["measured"] > 0 and abs(row["off"]) < 0.01 for row in rows), rows


@pytest.mark.slow
def test_bitwise_decides_all_gathers_alone_and_changes_no_bit(both: Both, tmp_path: Path) -> None:
    """What OPERATING.md promises. The run without --bitwise decides reduce-scatters too."""
    out = tmp_path / "out"
    tune(out, "--bitwise")
    assert decided(both.tuned) == {"all_gather", "reduce_scatter"}
    assert decided(out) == {"all_gather"}
    for name in ("loss", "held_out"):
        assert logged(out / "job.jsonl", name) == logged(both.untuned, name), name


def decided(run: Path) -> set[str]:
    """The collectives that any table of a run had a setting for, in trials too."""
    tables = [line["table"] for line in Trace.read(run).log if line["kind"] == "table"]
    return {rule["func"] for table in tables for rule in table["rules"]}


@pytest.mark.slow
def test_what_is_not_waited_for_is_compute_whatever_the_table(both: Both) -> None:
    """Step times come from one record and waits from another: their difference is the compute, which no table changes.

    Collectives that share the GPU slow compute a little. The tables are those that were tried: what is kept, if
    anything, is the search's to say.
    """
    trace = Trace.read(both.tuned)
    default = default_generations(trace)
    tried = set(trace.tables) - default
    assert tried
    of_table = compute_ns(trace, tried)
    assert np.median(of_table) == pytest.approx(np.median(compute_ns(trace, default)), rel=0.05)
    steps = trace.steps[trace.steps["table_generation"].isin(tried)]
    assert np.median(of_table) < 0.9 * steps["duration_ns"].median()


def compute_ns(trace: Trace, those: set[int]) -> list[int]:
    """Of each sampled step under these tables its time without the waits in it."""
    found = []
    for pid, steps in trace.steps.groupby("pid"):
        mine = trace.waits[trace.waits["pid"] == pid]
        sampled = steps[steps["sampled"] & steps["table_generation"].isin(those)]
        for end, duration in zip(sampled["end_ns"], sampled["duration_ns"], strict=True):
            inside = mine[(mine["start_ns"] >= end - duration) & (mine["end_ns"] <= end)]
            waited = int((inside["end_ns"] - inside["start_ns"]).sum())
            found.append(int(duration) - waited)
    return found


@pytest.mark.slow
def test_the_critical_path_is_named(both: Both) -> None:
    exposed = RunSummary.read(both.tuned).exposed
    assert exposed and all(0 <= row["exposed"] <= 1 for row in exposed)
    line = "on the critical path: all_gather "
    show = [sys.executable, "-m", "dynamiccl.agent.cli", "show", str(both.tuned)]
    shown = subprocess.run(show, capture_output=True, text=True, timeout=60, check=True).stdout
    assert line in shown and "% of the step; exposed: " in shown
    told = [event for window in Trace.read(both.tuned).log for event in window.get("events", ())]
    codes = {event["code"] for event in told}
    assert "critical" in codes  # as the run told them when it had seen the first steps

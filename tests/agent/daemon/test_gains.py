"""The claim itself: a whole ``dynamiccl tune`` beside a real, emulated job makes its step shorter."""

import json
import os
import subprocess
import sys

import pytest
from dynamiccl.traces.files import Trace
from dynamiccl.traces.queries.costs import generations
from paths import HELPERS

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
FSDP2 = [*TORCHRUN, str(HELPERS / "fsdp2_rank.py")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [["--steps", "280"], ["--cluster", "dgx-h100-2x8", "--", *FSDP2, "240"]],
    ids=["the demo", "a job of FSDP2"],
)
def test_the_lstm_by_default_beside_an_emulated_job_gains(job, tmp_path):
    """By the steps that the job itself had, not by what the summary says of them."""
    command = [sys.executable, "-m", "dynamiccl.agent.cli", "tune", "--no-memory"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path), *job],
        env=env,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["kept"] and summary["policy"] == "lstm" and summary["consistency"]["mismatches"] == 0
    same = summary["aa_speedup_ci95"]
    assert summary["speedup_ci95"][0] > same[1] > 1 > same[0]
    trace = Trace.read(tmp_path / "trace")
    steps = trace.steps[trace.steps["rank"] == 0]
    default = steps[steps["table_generation"] == steps["table_generation"].min()]
    kept = generations(
        trace, summary["decisions"]
    ).tuned  # on a busy machine few steps are left after the verdict
    under = steps[steps["table_generation"].isin(kept)]
    assert len(under) > 20 and under["duration_ns"].median() < 0.95 * default["duration_ns"].median()
    # What it says, as `make demo` does where there is no terminal: paths alone may be longer than a line.
    said = [
        line for line in done.stderr.splitlines() if "socket.cpp" not in line
    ]  # PyTorch's, on a busy machine
    assert done.stdout == "" and len(said) < 60
    assert [line for line in said if len(line) > 80 and str(tmp_path) not in line] == []
    assert [line for line in said if line.startswith("KEPT ")] and said.index("") < len(said) - 5

"""``dynamiccl apply`` on jobs of two ranks: the table is in force on all of them or on none, and the last line says so.

The job is ``probe_ranks.py``, whose collectives the stand-in for NCCL asks about and tells of.
"""

import json
import re
import subprocess
import sys

import pytest
from dynamiccl.envs.nccl.tables import to_json
from dynamiccl.traces.reasons import RunEnds
from dynamiccl.traces.records import Table
from paths import HELPERS
from test_plugin_static import run, small_gathers

JOB = HELPERS / "probe_ranks.py"
TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    str(JOB),
    "plain",
)
SOON = {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def table(tmp_path):
    return str(small_gathers(tmp_path))


def last_line(done: subprocess.CompletedProcess) -> str:
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("func", ["all_gather", "all_reduce"])
def test_the_ranks_take_the_table_together_and_the_last_line_says_how_often_it_was_used(tmp_path, func):
    """Before: rows of all_reduce never came in force in a job that runs nothing else: it counted nothing."""
    table = str(small_gathers(tmp_path, func))
    done = run("apply", table, "--", *TORCHRUN, WARM="1", STEPS="20", FUNC=func, **SOON)
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [rank["generations"]["plain"] for rank in said] == [[4] * 20] * 2  # channels
    calls = 2 * 8 * (said[0]["warm"] + 20)
    found = re.fullmatch("dynamiccl: the table was used in ([0-9,]+) of ([0-9,]+) calls", last_line(done))
    used, asked = (int(number.replace(",", "")) for number in found.groups())
    assert asked == calls and 2 * 8 * 20 <= used < calls


@pytest.mark.slow
def test_a_longer_job_is_told_its_step_time_beside_some_default_steps(table):
    done = run("apply", table, "--", *TORCHRUN, WARM="1", STEPS="1500", **SOON)
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    one, other = (rank["generations"]["plain"] for rank in said)
    assert one == other, "the ranks change tables together"
    assert one[0] == one[-1] == 4 and sum(channels != 4 for channels in one) >= 40, one
    assert re.search(
        r"of [\d,]+ calls; a step takes .* under the table, .* default \(40 steps", last_line(done)
    )


@pytest.mark.slow
def test_a_table_that_one_rank_would_not_have_is_in_force_on_none(table):
    """Before: each process that loaded the plugin had it at once, and its peers ran another way, which hangs."""
    done = run(
        "apply", table, "--", *TORCHRUN, NO_TUNER="1", JITTER_S="0.6", **{**SOON, "DYNAMICCL_ATTACH_S": "1.5"}
    )
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [set(rank["generations"]["plain"]) for rank in said] == [{0}, {0}]
    assert "used in 0 of 112 calls: 1 of 2 ranks of a communicator" in last_line(done)


def test_what_is_no_training_loop_of_pytorch_is_told_of_the_other_way(table):
    from test_plugin_static import JOB as ONE
    from test_plugin_static import REACH

    done = run("apply", table, "--", sys.executable, "-c", REACH + ONE, RELEASE="2.29.7")
    assert done.returncode == 0 and done.stdout.split() == ["0", "1", "0"] * 4, done.stderr
    assert "used in 0 of 4 calls" in last_line(done) and "--no-gate" in last_line(done)


def test_a_job_in_which_nothing_loads_the_plugin_is_told_so_and_keeps_its_status(table):
    done = run("apply", table, "--", sys.executable, "-c", "raise SystemExit(7)")
    assert done.returncode == 7
    assert "used in 0 of 0 calls: NCCL has not loaded the plugin" in last_line(done)


def test_a_run_folder_that_is_removed_costs_no_status(table):
    """A clean-up of /dev/shm. Before: a traceback, and status 1 for the job's 7."""
    done = run("apply", table, "--force", "--", "sh", "-c", 'rm -rf "$DYNAMICCL_RUN"; exit 7')
    assert done.returncode == 7 and "cannot be counted" in last_line(done), done.stderr


def test_a_table_without_rules_is_said_to_be_one(tmp_path):
    """Before: `hi`, and not one word."""
    (tmp_path / "t.json").write_text('{"dynamiccl_table": 1, "rules": []}')
    done = run("apply", str(tmp_path / "t.json"), "--", "echo", "hi")
    assert (
        done.stdout == "hi\n"
        and last_line(done) == "dynamiccl: the table has no rules: NCCL decided every call"
    )


def test_a_table_that_was_dropped_is_said_to_be_one(tmp_path):
    (tmp_path / "t.json").write_text(to_json(Table(1), RunEnds.STOPPED()))
    done = run("apply", str(tmp_path / "t.json"), "--", "echo", "hi")
    assert done.stdout == "hi\n" and f"the run of this table dropped it: {RunEnds.STOPPED()}" in done.stderr


def test_the_cluster_that_a_table_was_found_on_can_be_said(table):
    words = ("--no-gate", "--cluster", "dgx-h100-2x8", "--bytes-scale", "7", "--", "env")
    told = run("apply", table, *words).stdout.splitlines()
    assert "DYNAMICCL_CLUSTER=dgx-h100-2x8" in told and "DYNAMICCL_BYTES_SCALE=7.0" in told


def test_without_the_gate_it_is_said_that_nobody_counts(table):
    done = run("apply", table, "--no-gate", "--", "echo", "hi")
    assert done.stdout == "hi\n" and "with --no-gate no calls are counted" in last_line(done)


def test_a_script_without_its_first_line_is_named_with_a_shells_status(table, tmp_path):
    """Before: our traceback."""
    script = tmp_path / "script"
    script.write_text("true\n")
    script.chmod(0o700)
    done = run("apply", table, "--no-gate", "--force", "--", str(script))
    assert done.returncode == 126 and last_line(done).startswith("error: cannot start"), done.stderr

"""What ``dynamiccl tune`` and ``env`` refuse or take over from their surroundings before a job starts."""

import os
import signal
import sys

import pytest
from cli_process import run
from dynamiccl.agent import cli
from dynamiccl.agent.commands import emulation_here, tune
from dynamiccl.agent.daemon import daemon
from dynamiccl.agent.daemon.request import Request
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.envs.nccl.steps import nvml
from dynamiccl.envs.sim.emulated.settings import Emulated


def test_files_that_no_run_has_left_are_not_replaced(tmp_path):
    """Before: those with our names were deleted."""
    (tmp_path / "summary.json").write_text("of somebody")
    done = run("tune", "--out", str(tmp_path), "--", "true")
    assert done.returncode == 2 and "has files of its own (summary.json)" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_tuner_that_joins_replaces_nobodys_files_either(tmp_path):
    (tmp_path / "table.json").write_text("of somebody")
    folder = RunFolder.create()
    with pytest.raises(ValueError, match="has files of its own"):
        daemon.Daemon(Request(out=tmp_path), folder)
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


def test_an_inherited_cluster_is_refused_where_gpus_are(monkeypatch, capsys):
    """NCCL runs such a job, and nothing of it is emulated."""
    monkeypatch.setenv("DYNAMICCL_CLUSTER", "dgx-h100-2x8")
    monkeypatch.setattr(nvml, "gpus", lambda: ["NVIDIA H100"] * 2)
    with pytest.raises(SystemExit):
        emulation_here(None, None, None)
    assert "DYNAMICCL_CLUSTER is set, and this machine has GPUs" in capsys.readouterr().err


def test_options_of_a_site_that_mean_nothing_keep_no_job_from_starting(monkeypatch):
    monkeypatch.setenv("DYNAMICCL_TUNE_OPTIONS", "--again --bytes-scale 2")
    monkeypatch.setattr(tune, "_start", lambda asked: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.run(["tune", "--", "true"])


@pytest.mark.parametrize(("policy", "is_told"), [("{}", True), ("sweep", False)])
def test_a_policy_that_runs_its_authors_code_is_told(monkeypatch, tmp_path, capsys, policy, is_told):
    (tmp_path / "policy.py").write_text("class Policy:\n    def predict(self, *asked): ...\n")
    monkeypatch.setattr(tune, "_launch", lambda *_: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    cli.run(
        ["tune", "--force", "--cluster", "dgx-h100-2x8", "--policy", policy.format(tmp_path), "--", "true"]
    )
    sys.modules.pop("policy", None)
    told = f"policy {tmp_path} runs its author's code" in capsys.readouterr().err
    assert told == is_told


def test_a_job_that_inherits_an_emulated_cluster_is_known_for_one(monkeypatch):
    """Before: its times were told and stored as those of the machine."""
    asked = {"command": ["true"], "cluster": None, "bytes_scale": None, "compute_scale": None, "seed": 0}
    asked |= {
        "force": True,
        "policy": "lstm",
        "log_to": None,
        "ranks": None,
        "stage": 3,
        "search_slots": None,
        "all_reduce": None,
    }
    for name, value in Emulated("dgx-a100-2x8", 2.0, 3.0, 4).env().items():
        monkeypatch.setenv(name, value)
    seen = []
    monkeypatch.setattr(tune, "_launch", lambda *found: seen.append(found[1:]))
    tune._start(asked)
    ((emulated, facts),) = seen
    assert emulated == Emulated("dgx-a100-2x8", 2.0, 3.0, 4) and facts["nccl"]


@pytest.mark.parametrize("is_launched", [False, True])
def test_a_sites_options_count_for_a_tuner_that_joins_where_no_launcher_has_left_any(
    is_launched, monkeypatch, tmp_path
):
    """Before: of a run of `dynamiccl env` the site's budget and --bitwise did not hold."""
    monkeypatch.setenv("DYNAMICCL_TUNE_OPTIONS", "--budget 0 --bitwise --no-memory")
    folder, seen = RunFolder.create(), []
    out = tmp_path / "out" if is_launched else None
    Request(emulated=Emulated(), out=out, budget=0.02).write(folder.path)
    monkeypatch.setattr(daemon, "Daemon", lambda request, *rest: seen.append(request) or 1 / 0)
    # What a tuner makes of its own process: the tests' process stays as it is.
    monkeypatch.setattr(os, "nice", lambda by: None)
    monkeypatch.setattr(signal, "signal", lambda *_: signal.SIG_DFL)
    with pytest.raises(ZeroDivisionError):
        cli.run(["tune", "--attach", str(folder.path), "--seed", "5"])
    (request,) = seen
    found = request.budget, request.bitwise, request.seed
    assert found == ((0.02, False, 5) if is_launched else (0, True, 5)) and request.memory is None


def test_a_name_that_is_taken_is_said_with_the_cure():
    name = f"taken-{os.getpid()}"
    folder = RunFolder.create(name)
    done = run("env", "--name", name)
    assert (
        done.returncode == 2 and f"a run {name} is there" in done.stderr and "another --name" in done.stderr
    )
    folder.close()

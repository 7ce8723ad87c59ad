"""dynamiccl from Python, on a real emulated job."""

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import dynamiccl
import dynamiccl.agent.api
import pytest
from dynamiccl.agent import commands
from dynamiccl.agent.commands import demo
from dynamiccl.agent.daemon.request import Request
from dynamiccl.agent.report import outputs
from dynamiccl.envs.live.locks import lock
from dynamiccl.envs.nccl.run_folder import TUNER, make_folder
from dynamiccl.traces.here import program

TRAIN = [
    sys.executable,
    "-m",
    "dynamiccl.zero_workload",
    "--stage",
    "3",
    "--ranks",
    "2",
    "--backend",
    "emulated",
]
TRAIN += ["--layers", "2", "--width", "96", "--heads", "3", "--seq", "32", "--batch", "1"]
CLUSTER = "dgx-h100-2x8"


def test_importing_it_is_quick_and_brings_nothing_large():
    code = "import sys, time; begun = time.perf_counter(); import dynamiccl; took = time.perf_counter() - begun; "
    code += (
        "print(took, *(name for name in ('torch', 'pandas', 'numpy', 'gymnasium') if name in sys.modules))"
    )
    took, *large = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    print(f"import dynamiccl takes {float(took):.3f} s")
    assert large == []


def test_an_option_that_there_is_none_of_is_refused_by_name():
    with pytest.raises(TypeError, match=r"no option 'clutser': dynamiccl tune --help"):
        dynamiccl.tune(["true"], clutser=CLUSTER)


def test_a_run_that_is_not_there_is_told(tmp_path):
    run = dynamiccl.Run(tmp_path / "none")
    assert not run.summary() and run.table is None
    with pytest.raises(ValueError, match="there is no run here"):
        run.stop()
    with pytest.raises(ValueError, match="was not started here"):
        run.wait()


def test_a_recording_that_cannot_be_read_says_why(tmp_path):
    (tmp_path / "a.json").write_text("no profile")
    with pytest.raises(ValueError, match=r"a\.json"):
        dynamiccl.advise(tmp_path / "a.json", cluster=CLUSTER)


def test_a_tuner_that_joins_is_known_by_its_results(tmp_path, monkeypatch):
    """Before: without ``out`` the run's folder was the run folder in shared memory, which holds no results."""
    monkeypatch.chdir(tmp_path)
    printed = subprocess.run(
        [sys.executable, "-m", "dynamiccl.agent.cli", "env", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    folder = json.loads(printed.stdout)["DYNAMICCL_RUN"]
    run = dynamiccl.attach(folder, quiet=True, no_memory=True)
    try:
        assert run.out.parent == outputs.ROOT.absolute()
        end = time.monotonic() + 120
        while run.status()["state"] != "waiting" and time.monotonic() < end:
            assert run.process.poll() is None
            time.sleep(0.1)
        assert run.status()["state"] == "waiting"
        assert dynamiccl.agent.api._results_of(run.out) == run.out
    finally:
        run.process.terminate()
    assert run.wait(120) == 128 + signal.SIGTERM and run.summary()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def started(tmp_path, monkeypatch):
    """The command lines of the children, which are not started; the current folder is a new one, without Slurm."""
    commands = []
    monkeypatch.setattr(subprocess, "Popen", commands.append)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    return commands


def test_children_find_python_s_modules_before_the_job_s(tmp_path, monkeypatch):
    """Before: a job's queue.py ended the launcher, and the job was not started."""
    (tmp_path / "queue.py").write_text("raise RuntimeError('the job\\'s own')")
    monkeypatch.chdir(tmp_path)
    code = "import queue; print(queue.__file__)"
    (tmp_path / "ours.py").write_text(code)
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "child_of_ours.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    command = program("child_of_ours")
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told.strip() == queue.__file__


def test_all_children_are_started_so(started, monkeypatch):
    dynamiccl.tune(["true"])
    monkeypatch.setattr(dynamiccl.agent.api, "_results_of", Path)
    dynamiccl.attach("run")
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda words, **_: started.append(words) or SimpleNamespace(returncode=1, stdout="", stderr=""),
    )
    dynamiccl.apply("table.json", ["true"])
    with pytest.raises(ValueError):
        dynamiccl.advise("recording")
    monkeypatch.setattr(os, "execv", lambda _, words: started.append(words))
    demo.demo.callback(steps=100, out=Path("out"), quiet=False, json=False)
    assert [words[:4] for words in started] == 5 * [program()] and program()[1] == "-P"


def test_a_flag_that_is_on_by_default_can_be_denied():
    """Before: ``gate=False`` said nothing, and the gate stayed."""
    words = dynamiccl.agent.api._words
    assert words("apply", {"gate": False, "force": False, "headroom": None}) == ["--no-gate"]
    assert words("tune", {"memory": False}) == []  # another option denies it


def test_an_answer_counts_also_where_no_table_was_written(monkeypatch):
    done = SimpleNamespace(returncode=1, stdout='{"slots": []}', stderr="no table written")
    monkeypatch.setattr(subprocess, "run", lambda words, **_: done)
    assert dynamiccl.advise("recording", out="table.json") == {"slots": []}
    done.returncode = 2
    with pytest.raises(ValueError, match="no table written"):
        dynamiccl.advise("recording", out="/nowhere/table.json")


def test_a_child_runs_this_package_where_the_current_folder_holds_it(monkeypatch):
    monkeypatch.chdir(Path(commands.__file__).parents[3])
    assert "-P" not in program()


def test_no_child_but_the_job_imports_from_the_current_folder():
    """Before: a ``queue.py`` in the job's folder was the tuner's, the page's and the logger's."""
    found = set()
    for path in Path(commands.__file__).parents[1].rglob("*.py"):
        found |= {line.strip() for line in path.read_text().splitlines() if 'sys.executable, "-m"' in line}
    (job,) = found
    assert "dynamiccl.zero_workload" in job


def test_a_command_that_is_one_text_is_refused(started):
    """Before: each of its letters was a word."""
    for start in (dynamiccl.tune, partial(dynamiccl.apply, "table.json")):
        with pytest.raises(TypeError, match=r"give shlex\.split\('python train\.py'\)"):
            start("python train.py")
    assert not started and not Path("runs").exists()


def test_a_run_folder_leads_to_its_results(tmp_path):
    """Before: status() of a run folder said that there was no tuner while one tuned."""
    folder = make_folder()
    out = tmp_path / "out"
    (out / "trace").mkdir(parents=True)
    (out / "trace" / "header.json").write_text(json.dumps({"run": str(folder)}))
    window = {"kind": "window", "index": 3, "last_step": 77, "step_ms": 10.0, "phase": "search"}
    (out / "trace" / "windows.jsonl").write_text(json.dumps(window) + "\n")
    (out / "summary.json").write_text(json.dumps({"kept": True}))
    run = dynamiccl.Run(folder)
    held = lock(folder / TUNER, "")
    try:
        with pytest.raises(ValueError, match="names no results: give the folder of the results"):
            run.status()
        Request(out=out).write(folder)
        assert run.status()["state"] == "tuning" and run.status()["step"] == 77
        assert run.summary().kept and run.table is None
    finally:
        os.close(held)
        shutil.rmtree(folder)
    assert run.status()["state"] == "ended", "the run folder is gone"


def out_of(command):
    return Path(command[command.index("--out") + 1])


def test_runs_of_one_moment_have_folders_of_their_own(started, tmp_path, monkeypatch):
    """Before: the second got the name of the first, which its child had not made yet, and ended with status 2."""
    monkeypatch.setattr(outputs, "_job_id", lambda: "now")
    runs = [dynamiccl.tune(["true"]) for _ in range(3)]
    names = ["now", "now-2", "now-3"]
    assert [run.out for run in runs] == [tmp_path / outputs.ROOT / name for name in names]
    assert [out_of(command) for command in started] == [run.out for run in runs]
    assert outputs.followed(outputs.ROOT / "latest").name == "now-3"
    folder, fd = outputs.begin(runs[0].out, print)  # as the child does
    os.close(fd)
    assert folder == runs[0].out


def test_a_folder_that_cannot_be_made_is_left_to_the_child(started, tmp_path):
    """It says why, or with or_untuned starts the job untuned."""
    (tmp_path / "runs").write_text("a file")
    run = dynamiccl.tune(["true"], or_untuned=True)
    assert "--or-untuned" in started[0] and out_of(started[0]) == run.out


def test_a_run_is_where_its_child_leaves_the_results(started, tmp_path, monkeypatch):
    """Before: ``status`` said "no tuner" of a Slurm step of several tasks, or after another step with this ``out``."""
    for name, value in {"JOB_ID": "7", "STEP_ID": "0", "NTASKS": "2", "PROCID": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for step, expected in (
        ("0", "out/task-1"),
        ("1", "out-2/task-1"),
        ("1", "out-2/task-1"),
        ("2", "out-3/task-1"),
    ):
        monkeypatch.setenv("SLURM_STEP_ID", step)
        run = dynamiccl.tune(["true"], out="out")
        assert run.out == tmp_path / expected
        for given in (Path("out"), out_of(started[-1])):
            folder, fd = outputs.begin(given, lambda line: None)  # as the child does
            assert folder.absolute() == run.out
            os.close(fd)
        (run.out / "summary.json").write_text("{}")
    assert dynamiccl.tune(["true"]).out == tmp_path / outputs.ROOT / "7.2/task-1"
    assert dynamiccl.attach(_run_folder(tmp_path), out="beside").out == tmp_path / "beside/task-1"
    monkeypatch.chdir("/")
    assert (run.out / "summary.json").exists()


def _run_folder(path):
    folder = path / "run"
    folder.mkdir()
    return folder


@pytest.mark.slow
def test_a_job_is_tuned_queried_and_its_table_applied(tmp_path):
    """tune, status, summary, table, apply and advise, and the figures that --log-to writes meanwhile."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    out = tmp_path / "out"
    options = {"cluster": CLUSTER, "no_memory": True, "quiet": True, "seed": 1, "log_to": "tensorboard"}
    run = dynamiccl.tune([*TRAIN, "--steps", "500"], out=out, **options)
    assert run.wait(300) == 0
    assert run.status()["state"] == "ended"
    summary = run.summary()
    assert summary.steps >= 400 and summary.emulated
    kept = json.loads((out / "table.json").read_text())
    assert kept and (len(run.table.rules) > 0) == bool(summary.kept)
    assert list((out / "tensorboard").glob("events*"))
    assert dynamiccl.apply(out, [*TRAIN, "--steps", "20"], cluster=CLUSTER) == 0
    assert dynamiccl.advise(out)["speedup"] == summary.speedup


@pytest.mark.slow
def test_a_running_job_is_stopped(tmp_path):
    run = dynamiccl.tune(
        [*TRAIN, "--steps", "2000"], out=tmp_path / "out", cluster=CLUSTER, quiet=True, no_memory=True
    )
    while run.status()["step"] is None:
        assert run.process.poll() is None
    assert run.stop(60)
    assert run.process.poll() is None and not run.summary().kept
    run.process.terminate()
    assert run.wait(60) == 128 + signal.SIGTERM


def test_the_names_of_the_api_are_listed_before_they_are_imported():
    assert set(dynamiccl.__all__) <= set(dir(dynamiccl))

"""Who starts us may ignore the ends of its children, and a process that it starts inherits that."""

import signal
import subprocess
import sys

import pytest
from dynamiccl.agent.daemon import launcher
from dynamiccl.agent.daemon.launcher import STATUS, Plan
from dynamiccl.agent.daemon.stopping import ended_politely
from dynamiccl.envs.nccl.plugin import build
from dynamiccl.zero_workload.job.launch import launch
from handlers import hide_handler_of_c_code

#: Tells what became of SIGCHLD, and fails.
PROGRAM = "import signal, sys; sys.{}.write(signal.getsignal(signal.SIGCHLD).name); sys.exit(3)"


def ignore():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def test_the_jobs_end_and_status_are_seen_and_the_job_ignores_its_children_as_it_would_alone(tmp_path):
    """Before: the kernel told the launcher nothing; an hour later it took the job for one that had ended well."""
    job, tuner = ([sys.executable, "-S", "-c", PROGRAM.format(stream)] for stream in ("stdout", "stderr"))
    Plan(job, tuner, str(tmp_path), "").write()
    words = [sys.executable, "-I", "-S", launcher.__file__, str(tmp_path)]
    found = subprocess.run(words, preexec_fn=ignore, capture_output=True, text=True, timeout=60)
    assert found.returncode == 3 and (tmp_path / STATUS).read_text() == "3\n"
    assert found.stdout == "SIG_IGN" and "SIG_DFL" in found.stderr


@pytest.fixture
def ignored():
    """As a program that a parent without interest in its children has started."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    signal.signal(signal.SIGCHLD, before)


def test_a_library_that_cannot_be_loaded_or_compiled_is_named(ignored, tmp_path, monkeypatch):
    """Before: NCCL's loader would have failed without a word, and a compiler's error was a file that is not there."""
    monkeypatch.setattr(build, "_there", lambda: tmp_path / "damaged.so")
    assert "damaged.so" in build.load_fault()
    with pytest.raises(build.PluginBuildError, match="could not build"):
        build._compile(
            [sys.executable, "-c", "raise SystemExit('error: no such option')"], tmp_path / "x.so", ()
        )


def test_a_rank_of_the_workload_that_fails_fails_the_workload(ignored, capfd):
    """Before: its exit status was 0."""
    assert launch(2, ["--no-such-option"], patience=1) == 2
    assert "--no-such-option" in capfd.readouterr().err


def test_a_handler_that_c_code_had_set_stops_no_tuner(monkeypatch):
    """Before: TypeError as Python's None was to be set again."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        hide_handler_of_c_code(monkeypatch, signal.SIGTERM)
        with ended_politely():
            pass
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGTERM, before)


def test_a_tuner_that_joins_sees_how_its_children_end(ignored):
    """Before: its report counted as drawn, whatever became of it."""
    with ended_politely():
        assert subprocess.run(["false"]).returncode == 1

"""Who starts us may ignore the ends of its children, and a process that it starts inherits that."""

import signal
import subprocess
import sys

from dynamiccl.agent.daemon import launcher
from dynamiccl.agent.daemon.launcher import STATUS, Plan
from dynamiccl.agent.daemon.stopping import ended_politely

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


def test_a_tuner_that_joins_sees_how_its_children_end():
    """Before: its report counted as drawn, whatever became of it."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with ended_politely():
            assert subprocess.run(["false"]).returncode == 1
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)

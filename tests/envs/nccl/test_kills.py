"""What happens to a job when something else dies or fills up, one test each; the outcome is in the test's name.

Elsewhere: a daemon killed in a real tuning run (test_tune.py), damaged and truncated tables and rings (test_probe.py,
test_shm.py, and fuzzed), a job killed by its launcher (test_zero.py).
"""

import errno
import os
import signal
import subprocess
import sys

import pytest
from dynamiccl.envs.live.job import Job
from dynamiccl.envs.nccl.plugin.build import job_env
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.traces.files import Trace
from dynamiccl.traces.writer import TraceWriter
from test_probe import finish, start, steps_of, table, wait_for_steps


@pytest.fixture
def run():
    folder = RunFolder.create()
    yield folder
    folder.close()


DAEMON = """
import sys, time
sys.path[:] = sys.argv[2:]
from dynamiccl.envs.nccl.shm import RunFolder
from test_probe import table
run = RunFolder(sys.argv[1])
generation = 0
while True:
    generation += 1
    run.table.publish(table(generation))
    print(generation, flush=True)
    time.sleep(0.002)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_daemon_dies_or_freezes_the_job_goes_on_with_the_table_it_has(run, how):
    """At any moment, in the middle of a table too: all ranks keep one and the same, until a daemon comes back."""
    daemon = subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(run.path), *sys.path], stdout=subprocess.PIPE, text=True
    )
    for line in daemon.stdout:
        if int(line) > 20:
            break
    processes = start(["plain"], 2, {**job_env(run.path), "JITTER_S": "0.2"})
    wait_for_steps(run, 4)
    daemon.send_signal(how)
    wait_for_steps(run, 2)
    back = Job(RunFolder(run.path))  # while the old one is frozen or gone
    back.publish({})
    said, errors = finish(processes)
    daemon.kill()
    daemon.communicate()
    first, second = (s["generations"]["plain"] for s in said)
    assert first == second and max(first) <= back.generation, errors
    assert not any("Traceback" in error for error in errors)


@pytest.mark.slow
def test_full_shared_memory_the_job_trains_without_a_ring(run, monkeypatch):
    """No ring can be made: not a step is lost, the losses are the same, and nothing is said in a loop."""
    alone, errors = finish(start(["plain"], 2, {}))
    assert len(alone) == 2, errors
    limited = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); "
    limited += "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); sys.argv = sys.argv[1:]; "
    limited += (
        "sys.path.insert(0, sys.argv[0].rpartition('/')[0]); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    real = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **more: real([command[0], "-c", limited, *command[1:]], **more)
    )
    said, errors = finish(start(["plain"], 2, {**job_env(run.path), "JITTER_S": "0.05", "WARM": "1"}), run)
    assert [s["losses"] for s in said] == [s["losses"] for s in alone], errors
    first, second = (s["generations"]["plain"] for s in said)
    assert first == second and len(set(first)) > 1, "tables need no ring"
    assert not steps_of(run) and all(
        error.count("dynamiccl:") <= 1 and "Traceback" not in error for error in errors
    )


@pytest.mark.slow
def test_full_disk_ends_the_record_not_the_job_and_what_was_written_can_be_read(tmp_path, run, monkeypatch):
    """The trace's disk fills up while the job trains: the daemon hears of it, the segments before are whole."""
    processes = start(["plain"], 2, {**job_env(run.path), "JITTER_S": "0.2"})
    job = Job(run, writer=TraceWriter(tmp_path / "trace", {"emulated": True}))
    while job.last_step < 3:
        job.rest()
    job.take(everything=True)
    job.writer.flush()
    before = Trace.read(tmp_path / "trace").steps
    assert len(before)

    def full(path, *_args):
        path.with_suffix(".tmp").write_bytes(b"PAR1 and no more")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dynamiccl.traces.writer.write_parquet", full)
    while job.last_step < 6:
        job.rest()
    with pytest.raises(OSError, match="No space left"):
        job.take(everything=True)
        job.writer.flush()
    monkeypatch.undo()
    said, errors = finish(processes)
    assert len(said) == 2 and not any("Traceback" in error for error in errors)
    assert Trace.read(tmp_path / "trace").steps.equals(before)


def test_full_disk_a_table_that_cannot_be_written_is_refused_and_the_old_one_stays(run, monkeypatch):
    run.table.publish(table(1))

    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        run.table.publish(table(2))
    monkeypatch.undo()
    assert run.table.read()[0] == 1

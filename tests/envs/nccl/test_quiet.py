"""What a job writes is its own: per rank, and to the letter, what it writes without us.

The job is ``probe_ranks.py``; a table is published every 20 ms, so that its ranks agree all the time.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from dynamiccl.envs.nccl.plugin.build import job_env
from dynamiccl.envs.nccl.shm import RunFolder
from test_probe import finish, start

LOAD = 10  # processes that want a core, those of this machine's other users included
#: When PyTorch wrote a line, the thread or process that wrote it, and addresses of a C++ stack.
VARIES = re.compile(r"\d\d:\d\d:\d\d[.\d]*|\b[IWE]\d{4}\b|\bpid[ =:]?\d+|0x[0-9a-f]+|\[\d+\]")


def job(env: dict[str, str], run: RunFolder | None = None) -> tuple[list[int], list[list[float]], list[str]]:
    """Exit status, losses and standard error of each rank."""
    job_is = {"JITTER_S": "0.05", "STEPS": "40", "STAYS_S": "1"}
    processes = start(["plain"], 2, {**job_is, **env})
    said, errors = finish(processes, run)
    assert len(said) == 2, errors
    losses = [one["losses"]["plain"] for one in said]
    return [process.returncode for process in processes], losses, [VARIES.sub("", text) for text in errors]


def compare(n_runs: int) -> None:
    alone = job({})
    for _ in range(n_runs):
        run = RunFolder.create()
        try:
            assert job(job_env(run.path), run) == alone
        finally:
            run.close()


@pytest.fixture
def load() -> Iterator[None]:
    """So many busy processes that this machine's load is at least ``LOAD``."""
    more = max(0, LOAD - round(os.getloadavg()[0]))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(more)]
    yield
    for process in busy:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_job_writes_what_it_writes_without_us():
    """Before: 44 warnings of PyTorch's store in a minute, of waits of ours that ran out."""
    compare(2)


@pytest.mark.slow
def test_a_job_writes_what_it_writes_without_us_at_load_10(load):
    compare(20)

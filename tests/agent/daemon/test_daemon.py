"""The daemon beside a job that really steps: whatever ends it, the job is left under what was confirmed."""

import errno
import os
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from dynamiccl.agent.daemon.daemon import Daemon
from dynamiccl.agent.daemon.events import Events
from dynamiccl.agent.daemon.outcome import Outcome
from dynamiccl.agent.daemon.request import Request
from dynamiccl.agent.report.summary import RunSummary
from dynamiccl.envs.live import reader
from dynamiccl.envs.live.job_ends import Closed
from dynamiccl.envs.live.windows import LiveWindows
from dynamiccl.envs.nccl import site_switch
from dynamiccl.envs.nccl.plugin.build import job_env
from dynamiccl.envs.nccl.shm import TableFile, decode_table
from dynamiccl.traces.reasons import NotTuning, RunEnds
from nccl_releases import REACH

#: A job of one process without PyTorch: NCCL's calls, a step's end, and the part of the probe that takes a new table.
#: It ends when a file named `enough` lies beside it.
JOB = """
import os, struct, sys, time
from pathlib import Path
import numpy as np
from dynamiccl.envs.nccl.plugin.bindings import Plugin
from dynamiccl.envs.nccl.agreement.mailbox import TableMailbox
from nccl_releases import Communicator, choose
from dynamiccl.traces.records import ALGOS, PROTOS, STEP, UNSET
run, enough = Path(os.environ["DYNAMICCL_RUN"]), Path(sys.argv[1])
rank = int(os.environ.get("RANK", "0"))
plugin = Plugin.load()
plugin.open()
published = TableMailbox(run / "table")
comm = Communicator(plugin.path, 77, 8, 1, rank)
last = time.monotonic_ns()
for step in range(60_000):
    if enough.exists():
        raise SystemExit(7)
    for call in range(4):
        cost = np.full((7, 3), -1, np.float32)
        cost[1] = (900, 850, 800)
        channels = comm.get_coll_info("all_gather", 1 << 20, cost) or 16
        algo, proto = choose(cost)
        how = (channels, 16, ALGOS[algo], PROTOS[proto])
        comm.stop(comm.start_coll("all_gather", 4 * step + call, 1 << 15, "float32", *how))
    time.sleep(0.004 if step >= int(os.environ.get("SLOW_STEPS", "0")) else 0.4)
    now = time.monotonic_ns()
    head = (0, STEP, UNSET, UNSET, UNSET, 0, UNSET, 0, 0, 0, step, plugin.ended().generation, rank, 0, now, now - last)
    if rank == 0 and (found := published.take()) is not None:
        plugin.activate(found[1])
    plugin.boundary(struct.pack("<QBBBBBBHQQIIIIqq", *head).ljust(128, bytes(1)), step + 1, False)
    last = now
"""


@pytest.fixture
def job(folder, tmp_path):
    """(its process, the file that ends it)."""
    enough = tmp_path / "enough"
    process = subprocess.Popen(
        [sys.executable, "-c", REACH + JOB, str(enough)], env={**os.environ, **job_env(folder.path)}
    )
    yield process, enough
    enough.touch()
    assert process.wait(60) == 7


@pytest.mark.parametrize(
    "fault",
    ["a full disk", "a deleted run folder", "an agreement that ends", "the site's switch", "a bug of ours"],
)
def test_whatever_ends_it_the_job_is_left_under_what_was_confirmed(job, folder, tmp_path, monkeypatch, fault):
    """Before: exit 2, or a traceback, and the trial that happened to be in force stayed to the job's end.

    Seen at 679c0ae, the disk fills up in a trial window: exit 2: "no space left on device"; trials are in force in 981
    of the 1,133 steps after it, the last one to the end.
    Seen at 679c0ae, the run folder is deleted in a trial window: exit 2: "no such file or directory"; the trial stays
    for the other 1,130 steps.
    """
    process, enough = job
    table = TableFile(folder.path / "table")  # open, as the probe has it
    monkeypatch.setattr(site_switch, "FILE", str(tmp_path / "off"))
    struck = []

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    def closed():
        raise Closed(RunEnds.NO_MORE_SWITCHES(why="rank 3 has taken a step less"))

    def polls():
        poll()
        found = table.read()
        if struck or found is None or not decode_table(found[1]).trial_steps:  # a trial must be published
            return
        struck.append(daemon.job.generation)
        if fault == "a full disk":
            monkeypatch.setattr("dynamiccl.traces.writer.write_parquet", full)
            monkeypatch.setattr(daemon.job, "take", full)
        elif fault == "a deleted run folder":
            shutil.rmtree(folder.path)
        elif fault == "an agreement that ends":
            monkeypatch.setattr(daemon.job, "check", closed)
            enough.touch()  # the daemon stays for as long as the job does
        elif fault == "the site's switch":
            (tmp_path / "off").touch()
        else:
            raise ZeroDivisionError("seeded")

    daemon = Daemon(Request(out=tmp_path / "out", policy="random"), folder)
    poll = daemon.job.poll
    monkeypatch.setattr(daemon.job, "poll", polls)
    monkeypatch.setattr(reader, "RESTART_S", 0.5)
    while not folder.rings():
        assert process.poll() is None
        time.sleep(0.01)
    if fault == "a bug of ours":
        with pytest.raises(ZeroDivisionError):
            daemon.serve()
    else:
        daemon.serve()
    left = decode_table(table.read()[1])
    assert struck and left.generation > struck[0] and not left.trial_steps and left.rules == ()


def test_the_command_of_a_run_is_what_was_typed(folder, tmp_path):
    """Before: the launcher's own words, `.../agent/cli.py tune --attach /dev/shm/...`, which nobody can repeat."""
    typed = "dynamiccl tune --log-to tensorboard -- torchrun train.py --api-key abc"
    header = Daemon(Request(out=tmp_path / "out", typed=typed), folder)._header()
    assert header["command"].startswith("dynamiccl tune --log-to tensorboard -- torchrun train.py")
    assert "abc" not in header["command"]


@pytest.mark.slow
def test_a_slow_start_is_looked_at_again_and_then_tuned(folder, tmp_path, monkeypatch):
    """Before: "nothing to tune" to the end of the job, decided by its first eleven steps."""
    enough = tmp_path / "enough"
    env = {**os.environ, **job_env(folder.path), "SLOW_STEPS": "14"}
    process = subprocess.Popen([sys.executable, "-c", REACH + JOB, str(enough)], env=env)
    said = []
    daemon = Daemon(Request(out=tmp_path / "out", policy="random"), folder, on_phase=said.append)
    publish = daemon.job.publish

    def publishes(decisions, *trial):
        if trial and trial[0]:  # nobody votes in this job, so no trial runs
            enough.touch()
        return publish(decisions, *trial)

    monkeypatch.setattr(daemon.job, "publish", publishes)
    monkeypatch.setattr(reader, "RESTART_S", 0.5)
    try:
        summary = daemon.serve()
        assert enough.exists(), "a table is tried"
    finally:
        enough.touch()
        assert process.wait(60) == 7
    assert "looking again for what can be tuned" in said and any(
        "too small a share" in text for text in said
    ), said
    assert summary.ended.reason is not NotTuning.TOO_SMALL


@pytest.mark.slow
def test_the_tuner_of_a_node_without_rank_0_says_so_and_the_status_is_the_jobs(tmp_path):
    """Before: "no step for 120 s" and exit 2, on every node but one.

    Seen at 679c0ae, the second node: "the job has taken no step for 120 s", and exit 2 for a job that ends with 0.
    """
    enough = tmp_path / "enough"
    command = [sys.executable, "-m", "dynamiccl.agent.cli", "tune", "--force", "--out", str(tmp_path / "out")]
    command += ["--", sys.executable, "-c", REACH + JOB, str(enough)]
    env = {**os.environ, "RANK": "1"}
    launcher = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = ""
    for line in launcher.stdout:
        said += line
        if "rank 0 is on another node" in line:
            enough.touch()
    assert launcher.wait(60) == 7 and enough.exists(), said


@pytest.mark.parametrize("once", [True, False])
def test_after_the_verdict_a_job_is_left_alone_where_that_was_asked(once):
    """``tune --once``: no step of the search after its verdict, and the end says why."""
    said, steps = [], []
    daemon = Daemon.__new__(Daemon)
    daemon.request, daemon._events, daemon._closed = Request(once=once), Events(lambda: 0), False
    alive = iter([True, True, False])
    daemon.job = SimpleNamespace(is_alive=lambda: next(alive), thin=False, writer=None)
    daemon._page = SimpleNamespace(keep_up=lambda summary: None)
    daemon._results = SimpleNamespace(are_old=False)
    daemon.on_phase, daemon._step = said.append, lambda: steps.append(1)
    search = SimpleNamespace(is_over=True, is_done=True)
    daemon.tuner = SimpleNamespace(
        search=search, result=Outcome(LiveWindows(SimpleNamespace(all_reduce="")), daemon._events)
    )
    daemon._watch()
    assert (daemon.outcome.ended, len(steps)) == ((RunEnds.ONCE(), 0) if once else (None, 2))
    assert said == [str(RunEnds.ONCE())] * once


@pytest.mark.parametrize("once", [True, False])
def test_trials_after_the_verdict_are_announced_with_what_switches_them_off(once):
    """Before: a window of 35 % more came after the verdict, without a word."""
    daemon, said = Daemon.__new__(Daemon), []
    daemon.request, daemon.on_phase = Request(once=once), said.append
    daemon._events, logged = Events(lambda: 130), []
    daemon._events.open(lambda kind, line: logged.append((kind, line["step"])))
    daemon._summary = lambda: RunSummary(steps_to_verdict=126, detectable=0.02)
    state = SimpleNamespace(noise=SimpleNamespace(window_steps=5))
    search = SimpleNamespace(is_over=True, is_done=False, trials_left=80, state=state)
    daemon.tuner = SimpleNamespace(search=search)
    daemon._say_verdict()
    assert (
        said[0].startswith("verdict after 126 steps: NOTHING FOUND")
        and logged == [("verdict", 126), ("event", 130)][: 2 - once]
    )
    told = "trials: up to 80 times 5 steps under another table"
    assert said[1:] == ([] if once else [told + "; with tune --once there are none"])

"""The event path at full rate: nothing is lost, and a daemon that stands still costs the job nothing."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
from dynamiccl.agent.commands.show import tell
from dynamiccl.traces.files import Trace

TRAINER = """
import sys, time
from dynamiccl.envs.nccl.plugin import Plugin
from dynamiccl.traces.records import COLL, STEP
import struct
plugin = Plugin.load()
plugin.open()
record = struct.pack("<QB7x14Q", 0, COLL, *([1] * 14))
step = struct.pack("<QB7x14Q", 0, STEP, *([0] * 14))
start = time.perf_counter()
steps = []
for burst in range(int(float(sys.argv[1]) * 100)):  # a step of 200 every 10 ms: 20,000 a second
    begin = time.perf_counter()
    for _ in range(199):
        plugin.emit(record)
    plugin.boundary(step, burst)
    steps.append((begin, 1e6 * (time.perf_counter() - begin)))
    time.sleep(max(0.0, start + (burst + 1) * 0.01 - time.perf_counter()))
print(200 * len(steps))
print(*(f"{begin:.3f}:{us:.1f}" for begin, us in steps))
"""

#: A daemon's reading, at its own rate: what `dynamiccl tune` does with every job.
DAEMON = """
import sys
from pathlib import Path
from dynamiccl.envs.live import Job
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.traces.files import TraceWriter
with TraceWriter(Path(sys.argv[2]), {}) as writer:
    job = Job(RunFolder.open(sys.argv[1]), writer=writer)
    print("reading", flush=True)
    while not job.run.rings():
        job.rest()
    job.wait()
    job.take(everything=True)
"""


def watched_job(folder, trace, seconds, during=lambda daemon: None):
    """Run the trainer with a daemon beside it; (records sent, (n, 2) times and microseconds of its steps)."""
    env = {**os.environ, "DYNAMICCL_RUN": str(folder.path)}
    daemon = subprocess.Popen([sys.executable, "-c", DAEMON, folder.path, trace], stdout=subprocess.PIPE, text=True)
    assert daemon.stdout.readline() == "reading\n"
    job = subprocess.Popen([sys.executable, "-c", TRAINER, str(seconds)], env=env, stdout=subprocess.PIPE, text=True)
    while not folder.rings():
        time.sleep(0.01)
    during(daemon)
    sent, steps = job.communicate(timeout=60)[0].splitlines()
    assert daemon.wait(60) == 0
    return int(sent), np.array([list(map(float, step.split(":"))) for step in steps.split()])


def seen_in(trace: Trace) -> int:
    return len(trace.events) + len(trace.steps)


def test_twenty_thousand_collectives_a_second_are_all_seen(folder, tmp_path):
    sent, _ = watched_job(folder, tmp_path / "trace", 3)
    trace = Trace.read(tmp_path / "trace")
    assert sent == 60_000 == seen_in(trace) and "records_lost" not in trace.header


def test_a_stopped_daemon_costs_the_job_nothing_and_says_what_it_lost(folder, tmp_path):
    """SIGSTOP for longer than the ring lasts: the job's steps take what they took before, the loss is told."""
    stopped = []

    def stop(daemon):
        time.sleep(1.5)
        daemon.send_signal(signal.SIGSTOP)
        stopped.append(time.perf_counter())
        time.sleep(4.5)  # 90,000 records, a ring holds 65,536
        stopped.append(time.perf_counter())
        daemon.send_signal(signal.SIGCONT)

    sent, steps = watched_job(folder, tmp_path / "trace", 7, stop)
    at, us = steps.T
    quiet = (at > stopped[0]) & (at < stopped[1])
    print(f"median step {np.median(us[quiet]):.0f} us with the daemon stopped, {np.median(us[~quiet]):.0f} us with it")
    assert np.median(us[quiet]) < 1.2 * np.median(us[~quiet])
    trace = Trace.read(tmp_path / "trace")
    assert trace.header["records_lost"] == sent - seen_in(trace) > 10_000
    said = tell(trace, {})
    assert said["records_lost"] == trace.header["records_lost"]
    show = subprocess.run(
        [sys.executable, "-m", "dynamiccl.agent.cli", "show", tmp_path / "trace"], capture_output=True, text=True
    )
    assert f"{said['records_lost']} records were lost" in show.stdout, show.stderr

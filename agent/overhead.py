"""What probe and plugin cost a job whose tuner is idle: the same job with and without them, in turn."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from ..envs.nccl.shm import RunFolder
from .compare import Comparison, compare
from .outputs import logged

#: Steps at the start of a job that do not count: imports, connections, first touches of memory.
WARM_UP = 5


def measure(
    pairs: int,
    command: Callable[[Path], list[str]],
    env: Mapping[str, str],
    say: Callable[[str], object] = lambda text: None,
    budget_s: float = float("inf"),
) -> Comparison:
    """Step time with / without, over ``pairs`` pairs of jobs: 1.01 is one percent of overhead.

    ``command(log)`` is a job of ours that writes its steps to ``log``, ``env`` what it has in its environment. ``say``
    hears of every pair; after three of them no pair begins that would not be done in ``budget_s``. Raises RuntimeError
    with the job's last words if a job fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "job.jsonl"
        return in_turn(pairs, lambda watched: _step_ms(command(log), log, env, watched), say, budget_s)


def in_turn(
    pairs: int,
    step_ms: Callable[[bool], float],
    say: Callable[[str], object] = lambda text: None,
    budget_s: float = float("inf"),
) -> Comparison:
    """``step_ms(True)`` / ``step_ms(False)``, one job each, over ``pairs`` pairs whose order alternates."""
    times: dict[bool, list[float]] = {True: [], False: []}
    began = time.monotonic()
    for i in range(pairs):
        used = time.monotonic() - began
        if i >= 3 and used * (i + 1) / i > budget_s:
            break
        for added in (True, False) if i % 2 else (False, True):
            times[added].append(step_ms(added))
        say(f"pair {i + 1}/{pairs}  without {times[False][-1]:.2f} ms, with {times[True][-1]:.2f} ms")
    return compare(np.array(times[True]), np.array(times[False]))


def _step_ms(command: list[str], log: Path, env: Mapping[str, str], watched: bool) -> float:
    """Median step time of one job, by its own clock."""
    log.unlink(missing_ok=True)
    run = RunFolder.create() if watched else None
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **env, **(run.env() if run else {})},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        if run:
            run.close()
    if done.returncode:
        raise RuntimeError(f"the job failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    steps = logged(log, "step_ms")[WARM_UP:]
    if not steps:
        raise RuntimeError(f"the job logged no step time after its first {WARM_UP}: more steps, or --log-every 1")
    return float(np.median(steps))


def measure_scrapes(
    pairs: int, steps: int, cluster: str, say: Callable[[str], object] = lambda text: None
) -> tuple[Comparison, int]:
    """Step time of a tuned job whose endpoint is scraped every second / of one without an endpoint, over ``pairs``
    pairs of jobs; and how many scrapes were answered. Raises RuntimeError if a job fails or no scrape is answered,
    ImportError without prometheus-client."""
    import prometheus_client  # noqa: F401 - says what is missing before a job is started

    answered = 0

    def step_ms(scraped: bool) -> float:
        nonlocal answered
        with tempfile.TemporaryDirectory() as folder:
            ms, n = _tuned_step_ms(Path(folder) / "run", steps, cluster, scraped)
        answered += n
        return ms

    result = in_turn(pairs, step_ms, say)
    if not answered:
        raise RuntimeError("no scrape was answered: the endpoint did not come up")
    return result, answered


def _tuned_step_ms(out: Path, steps: int, cluster: str, scraped: bool) -> tuple[float, int]:
    """Median step time of one job under a tuner that tries nothing, and the scrapes that its endpoint answered."""
    command = [sys.executable, "-m", "dynamiccl.agent.cli", "tune", "--policy", "default", "--cluster", cluster]
    command += ["--steps", str(steps), "--out", str(out)]
    answered, over, url = [0], threading.Event(), ""
    if scraped:
        with socket.socket() as probe:  # a port that is free now
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command += ["--metrics-port", str(port)]
        url = f"http://127.0.0.1:{port}/metrics"

    def scrape() -> None:
        while not over.wait(1.0):
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
                answered[0] += bool(answer.read())

    scraper = threading.Thread(target=scrape, daemon=True)
    if scraped:
        scraper.start()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    over.set()
    if done.returncode:
        raise RuntimeError(f"the job failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    return float(np.median(logged(out / "job.jsonl", "step_ms")[WARM_UP:])), answered[0]

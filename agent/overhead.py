"""What probe and plugin cost a job whose tuner is idle: the same job with and without them, in turn."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
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
    times: dict[bool, list[float]] = {True: [], False: []}
    began = time.monotonic()
    for i in range(pairs):
        used = time.monotonic() - began
        if i >= 3 and used * (i + 1) / i > budget_s:
            break
        for watched in (True, False) if i % 2 else (False, True):
            times[watched].append(_step_ms(command, env, watched))
        say(f"pair {i + 1}/{pairs}  without {times[False][-1]:.2f} ms, with {times[True][-1]:.2f} ms")
    return compare(np.array(times[True]), np.array(times[False]))


def _step_ms(command: Callable[[Path], list[str]], env: Mapping[str, str], watched: bool) -> float:
    """Median step time of one job, by its own clock."""
    with contextlib.ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "job.jsonl"
        run = RunFolder.create() if watched else None
        if run:
            stack.callback(run.close)
        added = {**env, **(run.env() if run else {})}
        done = subprocess.run(command(log), env={**os.environ, **added}, capture_output=True, text=True, check=False)
        steps = logged(log, "step_ms")[WARM_UP:]
    if done.returncode:
        raise RuntimeError(f"the job failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    if not steps:
        raise RuntimeError(f"the job logged no step time after its first {WARM_UP}: more steps, or --log-every 1")
    return float(np.median(steps))

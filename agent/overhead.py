"""What probe and plugin cost a job whose tuner is idle: the same job with and without them, in turn."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..envs.nccl.shm import RunFolder
from .compare import Comparison, compare
from .daemon import Emulated, workload

#: Steps at the start of a job that do not count: imports, connections, first touches of memory.
WARM_UP = 5


def measure(
    pairs: int, steps: int, cluster: str, say: Callable[[str], object] = lambda text: None, seed: int = 0
) -> Comparison:
    """Step time with / without, over ``pairs`` pairs of jobs of ``steps`` steps: 1.01 is one percent of overhead.

    ``say`` hears of every pair. Raises RuntimeError with the job's last words if a job fails.
    """
    emulated = Emulated(cluster, bytes_scale=90.0, time_scale=15.0, seed=seed)
    times: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(pairs):
            for watched in (True, False) if i % 2 else (False, True):
                times[watched].append(_step_ms(Path(folder), steps, emulated, watched))
            say(f"pair {i + 1}/{pairs}  without {times[False][-1]:.2f} ms, with {times[True][-1]:.2f} ms")
    return compare(np.array(times[True]), np.array(times[False]), seed)


def _step_ms(folder: Path, steps: int, emulated: Emulated, watched: bool) -> float:
    """Median step time of one job, by its own clock."""
    log = folder / "job.jsonl"
    log.unlink(missing_ok=True)
    run = RunFolder.create() if watched else None
    env = {**os.environ, **emulated.env(), **(run.env() if run else {})}
    try:
        done = subprocess.run(
            workload(3, steps, 2, log, backend="emulated", extra=["--quiet"]),
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        if run:
            run.close()
    if done.returncode:
        raise RuntimeError(f"the job failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return float(np.median([line["step_ms"] for line in lines if "step_ms" in line][WARM_UP:]))

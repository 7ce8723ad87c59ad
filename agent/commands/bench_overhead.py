"""``dynamiccl bench overhead``: what being watched costs a job."""

from __future__ import annotations

import contextlib
import json as json_module
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from . import EmulatedCluster, Json, Option, emulation, refusing

if TYPE_CHECKING:
    from ..daemon.compare import Comparison

#: Steps at the start of a job that do not count: imports, connections, first touches of memory.
WARM_UP = 5
RESAMPLES = 10_000
#: On the emulated cluster: a step of our own job, of which the processor has some 100 ms to do.
_LARGER = ("--layers", "4", "--width", "192", "--heads", "6", "--seq", "128", "--batch", "4")


def bench_overhead(
    pairs: Annotated[int, Option(min=3, help="Pairs of jobs, one with the probe and one without.")] = 10,
    steps: Annotated[int, Option(min=10, help="Steps of each job; the first five do not count.")] = 40,
    cluster: EmulatedCluster = None,
    json: Json = False,
) -> None:
    """Step time with probe and plugin, tuning idle, against the same job without: jobs in turn, medians, interval.

    Both jobs run our ZeRO-3 workload on the GPUs here; without a GPU on an emulated cluster, where only the CPU's cores
    are shared. The order within a pair alternates.
    """
    from ..checks.gpu_check import Machine
    from ..report.terminal import terminal

    console = terminal(stderr=True, quiet=json, highlight=False)
    if cluster:
        emulation(cluster)
    with refusing(OSError, ValueError, RuntimeError):
        machine = Machine.here(cluster)
        result = measure(pairs, lambda log: machine.zero3(steps, log, _LARGER), machine.env(), console.print)
    percent = [100 * (x - 1) for x in (result.speedup, result.low, result.high)]
    if json:
        print(json_module.dumps({"overhead_percent": percent[0], "ci95": percent[1:], "pairs": result.n_pairs}))
    else:
        print(f"overhead {percent[0]:+.2f} % [{percent[1]:+.2f}, {percent[2]:+.2f}] of a step, {result.n_pairs} pairs")


def measure(
    pairs: int, command: Callable[[Path], list[str]], env: Mapping[str, str], say: Callable[[str], object] = print
) -> Comparison:
    """Step time with / without, of jobs ``command(log)`` that write to ``log``: 1.01 is one percent of overhead.

    Raises RuntimeError where a job fails, with its last words.
    """
    times: dict[bool, list[float]] = {True: [], False: []}
    for i in range(pairs):
        for watched in (True, False) if i % 2 else (False, True):
            times[watched].append(_step_ms(command, env, watched))
        say(f"pair {i + 1}/{pairs}  without {times[False][-1]:.2f} ms, with {times[True][-1]:.2f} ms")
    return compare(times[True], times[False])


def compare(a: Sequence[float], b: Sequence[float], seed: int = 0) -> Comparison:
    """Paired comparison of times ``a`` and ``b``, any unit: geometric mean of a / b.

    The interval is the percentile bootstrap (Efron 1979) over pairs. Raises ValueError with fewer than 3 pairs.
    """
    import numpy as np

    from ..daemon.compare import Comparison

    if len(a) < 3:
        raise ValueError(f"a comparison needs at least 3 pairs, not {len(a)}")
    logs = np.log(a) - np.log(b)
    means = logs[np.random.default_rng(seed).integers(0, len(logs), (RESAMPLES, len(logs)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Comparison.of(float(logs.mean()), float(low), float(high), len(logs))


def _step_ms(command: Callable[[Path], list[str]], env: Mapping[str, str], watched: bool) -> float:
    """Median step time of one job, by its own clock."""
    from statistics import median

    from ...envs.nccl.plugin.build import job_env
    from ...envs.nccl.shm import RunFolder
    from ..report.outputs import logged

    with contextlib.ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "job.jsonl"
        run = stack.enter_context(contextlib.closing(RunFolder.create())) if watched else None
        added = {**env, **(job_env(run.path) if run else {})}
        done = subprocess.run(command(log), env={**os.environ, **added}, capture_output=True, text=True, check=False)
        steps = logged(log, "step_ms")[WARM_UP:]
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no output"]
        said = [line for line in said if line.startswith("error")] or said  # what torchrun adds names no cause
        raise RuntimeError(f"the job failed: {said[-1]}")
    if not steps:
        raise RuntimeError(f"the job logged no step time after its first {WARM_UP}: more steps, or --log-every 1")
    return median(steps)

"""``dynamiccl bench overhead``: what being watched costs a job."""

from __future__ import annotations

import contextlib
import json as json_module
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from . import EmulatedCluster, Json, Option, emulation, refusing

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
        found = measure(pairs, lambda log: machine.zero3(steps, log, _LARGER), machine.env(), console.print)
    percent = [100 * (x - 1) for x in found]
    if json:
        print(json_module.dumps({"overhead_percent": percent[0], "ci95": percent[1:], "pairs": pairs}))
    else:
        print(f"overhead {percent[0]:+.2f} % [{percent[1]:+.2f}, {percent[2]:+.2f}] of a step, {pairs} pairs")


def measure(
    pairs: int, command: Callable[[Path], list[str]], env: Mapping[str, str], say: Callable[[str], object] = print
) -> list[float]:
    """Step time with / without and its interval, of jobs ``command(log)`` that write to ``log``: 1.01 is one percent.

    Raises RuntimeError where a job fails, with its last words.
    """
    times: dict[bool, list[float]] = {True: [], False: []}
    for i in range(pairs):
        for watched in (True, False) if i % 2 else (False, True):
            times[watched].append(_step_ms(command, env, watched))
        say(f"pair {i + 1}/{pairs}  without {times[False][-1]:.2f} ms, with {times[True][-1]:.2f} ms")
    return compare(times[True], times[False])


def compare(a: Sequence[float], b: Sequence[float], seed: int = 0) -> list[float]:
    """Geometric mean of a / b, times in pairs and in any unit, and its 95 % interval by the bootstrap over pairs."""
    import numpy as np

    from ...envs.bench.scores import bootstrap

    logs = np.log(a) - np.log(b)
    return [float(np.exp(x)) for x in (logs.mean(), *bootstrap(logs, seed, RESAMPLES))]


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

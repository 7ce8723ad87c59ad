"""What being watched costs a job: ``python tests/tools/overhead.py --pairs 24 [--cluster NAME]``.

Step time with probe and plugin, tuning idle, against the same job without: jobs in turn, the order within a pair
alternates. Both run our ZeRO-3 workload on the GPUs here; without a GPU on an emulated cluster, where only the CPU's
cores are shared.
"""

import argparse
import contextlib
import os
import subprocess
import tempfile
from pathlib import Path
from statistics import median

import numpy as np
from dynamiccl.agent.checks.gpu.machine import Machine
from dynamiccl.agent.daemon.request import workload
from dynamiccl.agent.report.outputs import logged
from dynamiccl.envs.bench.scores import bootstrap
from dynamiccl.envs.nccl.plugin.build import job_env
from dynamiccl.envs.nccl.shm import RunFolder

#: Steps at the start of a job that do not count: imports, connections, first touches of memory.
WARM_UP = 5
RESAMPLES = 10_000
#: Options of the job on GPUs.
GPU_MODEL = ("--layers", "8", "--width", "1024", "--heads", "16", "--seq", "512")
#: On the emulated cluster: a step of our own job, of which the processor has some 100 ms to do.
LARGER = ("--layers", "4", "--width", "192", "--heads", "6", "--seq", "128", "--batch", "4")


def measure(pairs, command, env, say=print):
    """Step time with / without and its interval, of jobs ``command(log)`` that write to ``log``: 1.01 is one percent.

    Raises RuntimeError where a job fails, with its last words.
    """
    times = {True: [], False: []}
    for i in range(pairs):
        for watched in (True, False) if i % 2 else (False, True):
            times[watched].append(step_ms(command, env, watched))
        say(f"pair {i + 1}/{pairs}  without {times[False][-1]:.2f} ms, with {times[True][-1]:.2f} ms")
    return compare(times[True], times[False])


def compare(a, b, seed=0):
    """Geometric mean of a / b, times in pairs and in any unit, and its 95 % interval by the bootstrap over pairs."""
    logs = np.log(a) - np.log(b)
    return [float(np.exp(x)) for x in (logs.mean(), *bootstrap(logs, seed, RESAMPLES))]


def step_ms(command, env, watched):
    """Median step time of one job, by its own clock."""
    with contextlib.ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "job.jsonl"
        run = stack.enter_context(contextlib.closing(RunFolder.create())) if watched else None
        added = {**env, **(job_env(run.path) if run else {})}
        done = subprocess.run(
            command(log), env={**os.environ, **added}, capture_output=True, text=True, check=False
        )
        steps = [step_ms for _, step_ms in logged(log, "step_ms")][WARM_UP:]
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no output"]
        said = [
            line for line in said if line.startswith("error")
        ] or said  # what torchrun adds names no cause
        raise RuntimeError(f"the job failed: {said[-1]}")
    if not steps:
        raise RuntimeError(
            f"the job logged no step time after its first {WARM_UP}: more steps, or --log-every 1"
        )
    return median(steps)


def zero3(machine, steps, log, extra):
    """The command of our ZeRO-3 job, each of whose steps is a line of ``log``."""
    extra = [*(() if machine.emulated else GPU_MODEL), "--log-every", "1", "--quiet", *extra]
    return machine.ranks(workload(3, steps, machine.n_ranks, log, backend=machine.backend, extra=extra))


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cluster")
    asked = parser.parse_args(words)
    if asked.pairs < 3:
        parser.error("--pairs: must be at least 3, fewer give no interval")
    machine = Machine.here(asked.cluster)
    extra = LARGER if machine.emulated else ()
    found = measure(asked.pairs, lambda log: zero3(machine, asked.steps, log, extra), machine.env())
    value, low, high = (100 * (x - 1) for x in found)
    print(f"overhead {value:+.2f} % [{low:+.2f}, {high:+.2f}] of a step, {asked.pairs} pairs")


if __name__ == "__main__":
    main()

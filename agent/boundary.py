"""Times what the probe does between two steps, in real processes on gloo: with a new table, without, and not at all.

``python -m dynamiccl.agent.boundary STEPS`` is one rank of the job that is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from ..envs.nccl.shm import MAX_RULES, RunFolder
from ..traces.records import Decision, Rule, Table

Array = np.ndarray[Any, Any]

#: Steps in a row with the probe, then as many without it: drift of the machine meets both alike.
BLOCK = 50
#: The ranks' first steps connect them; they do not count.
WARM_UP = 20
_HOST_S, _WAIT_S = 0.0005, 0.002  # a step: Python at work, then waiting as for a GPU


@dataclass(frozen=True)
class Boundary:
    """What was measured with ``n_ranks`` processes, all ranks together."""

    n_ranks: int
    clock_us: Array  # two readings of the clock with nothing between them: the hook absent
    same_us: Array  # boundaries at which the table stayed
    swap_us: Array  # boundaries at which a new table came into force
    extra_us: Array  # each of those, less the mean of the boundaries before and after it on the same rank
    with_ms: Array  # whole steps of rank 0 with the probe
    without_ms: Array  # and without it
    steps_to_swap: Array  # from the publication of a table to the first step under it, rank 0
    agreed: bool  # at every step all ranks were under the same table


def time_boundary(n_ranks: int, n_steps: int = 2000, every_s: float = 0.04) -> Boundary:
    """Run ``n_ranks`` processes for ``n_steps`` steps while the largest table changes every ``every_s`` seconds.

    Raises RuntimeError with a rank's last words if the job fails.
    """
    run = RunFolder.create()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, **run.env(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    env |= {"WORLD_SIZE": str(n_ranks)}
    command = [sys.executable, "-m", __spec__.name, str(n_steps)]
    published: dict[int, int] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(run.close)
        # What they say is more than a pipe holds, and nobody reads while they run.
        out, err = ([stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(n_ranks)] for _ in range(2))
        ranks = [
            subprocess.Popen(command, env={**env, "RANK": str(r)}, stdout=out[r], stderr=err[r]) for r in range(n_ranks)
        ]
        generation = 0
        while all(r.poll() is None for r in ranks[:1]):
            generation += 1
            run.table.publish(_table(generation))
            published[generation] = time.monotonic_ns()
            time.sleep(every_s)
        codes = [r.wait(timeout=60) for r in ranks]
        said, errors = ([_text(file) for file in files] for files in (out, err))
    if any(codes):
        words = next(error for error, code in zip(errors, codes, strict=True) if code)
        raise RuntimeError(f"the job failed: {(words.strip().splitlines() or ['no output'])[-1]}")
    return _summary(n_ranks, [json.loads(text.splitlines()[-1]) for text in said], published)


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _table(generation: int) -> Table:
    pairs = [Decision("ring", "ll", 1 + generation % 32), Decision("ring", "simple", 1 + generation % 64)]
    rules = [Rule(8, 1, "all_gather", 100 * i, 100 * i + 99, pairs[i % 2]) for i in range(MAX_RULES)]
    return Table(generation, tuple(rules))


def _summary(n_ranks: int, said: list[dict[str, Any]], published: dict[int, int]) -> Boundary:
    rows = [{name: np.array(values) for name, values in rank.items()} for rank in said]
    same, swap, extra = [], [], []
    for rank in rows:
        us, swapped = rank["hook_ns"] / 1e3, np.diff(rank["generation"], prepend=0) != 0
        stayed = (us >= 0) & ~swapped
        same.append(us[stayed])
        swap.append(us[(us >= 0) & swapped])
        at = 1 + np.flatnonzero(swapped[1:-1] & (us[1:-1] >= 0) & stayed[:-2] & stayed[2:])
        extra.append(us[at] - (us[at - 1] + us[at + 1]) / 2)
    first = rows[0]
    on = first["hook_ns"] >= 0
    steps_to = [
        int(np.argmax(first["generation"] >= g) - np.searchsorted(first["end_ns"], at))
        for g, at in published.items()
        if g in first["generation"]
    ]
    return Boundary(
        n_ranks,
        np.concatenate([rank["clock_ns"] for rank in rows]) / 1e3,
        np.concatenate(same),
        np.concatenate(swap),
        np.concatenate(extra),
        first["step_ns"][on] / 1e6,
        first["step_ns"][~on] / 1e6,
        np.array(steps_to),
        all(np.array_equal(first["generation"], rank["generation"]) for rank in rows),
    )


def _rank(n_steps: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.optim.optimizer import _global_optimizer_post_hooks

    from ..envs.nccl.plugin import Plugin
    from ..envs.sim.nccl_caller import Communicator

    dist.init_process_group("gloo")
    (hook,) = _global_optimizer_post_hooks.values()
    _global_optimizer_post_hooks.clear()  # called below, with a clock around it
    plugin = Plugin.load()
    Communicator(plugin.path, 7, dist.get_world_size(), 1, dist.get_rank())  # the ranks agree where NCCL has the plugin
    weights = [torch.zeros(64, 64, requires_grad=True) for _ in range(4)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW(weights, 0.1)
    gradient = torch.zeros(1000)
    said: dict[str, list[int]] = {name: [] for name in ("hook_ns", "clock_ns", "step_ns", "end_ns", "generation")}
    last = time.perf_counter_ns()
    for step in range(-WARM_UP, n_steps):
        while time.perf_counter_ns() - last < _HOST_S * 1e9:  # Python at work: holds the interpreter
            pass
        gradient.mul_(0.5)
        time.sleep(_WAIT_S)
        dist.all_reduce(gradient)  # keeps the ranks in step, as training does
        optimizer.step()  # what runs before the hook in a job: after a wait all caches are cold
        watched = step < 0 or step // BLOCK % 2 == 0
        nothing = time.perf_counter_ns()
        begin = time.perf_counter_ns()
        if watched:
            hook(optimizer, (), {})
        end = time.perf_counter_ns()
        if step >= 0:
            values = (end - begin if watched else -1, begin - nothing, end - last, time.monotonic_ns())
            for name, value in zip(said, (*values, plugin.generation), strict=True):
                said[name].append(value)
        last = end
    print(json.dumps(said), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(int(sys.argv[1]))

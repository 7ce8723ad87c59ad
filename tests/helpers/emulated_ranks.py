"""What the ranks of tests/envs/sim/test_emulated.py run: ``python emulated_ranks.py CASE``, under the
launcher's environment.

Rank 0 prints one JSON object.
"""

import json
import os
import sys
from functools import cache

import torch
import torch.distributed as dist
from dynamiccl.envs.nccl.steps import clock as step_clock

torch.set_num_threads(1)


def timed(run):
    """Emulated microseconds that ``run`` takes."""
    start = step_clock.now_ns()
    run()
    return 1e-3 * (step_clock.now_ns() - start)


@cache
def shard_of(n):
    """Made once: to make it is work, which the clock counts."""
    return torch.arange(n // dist.get_world_size(), dtype=torch.float32) + dist.get_rank()


def gather(n, async_op=False):
    out = torch.empty(n)
    work = dist.all_gather_single(out, shard_of(n), async_op=async_op)
    return (work, out) if async_op else out


def scatter(n):
    out = torch.empty(n // dist.get_world_size())
    dist.reduce_scatter_single(out, torch.arange(n, dtype=torch.float32))
    return out


MATRIX = torch.ones(1024, 1024)


def compute(times=1):
    for _ in range(times):
        MATRIX @ MATRIX


def overlap(n):
    work, _ = gather(n, async_op=True)
    compute()
    work.wait()


def late(n):
    compute(dist.get_rank())
    gather(n)


def case_times():
    n = 1 << 18
    gather(n)  # connects
    scatter(n)
    return {
        "sync": [timed(lambda: gather(n)) for _ in range(5)],
        "two": [timed(lambda: [w.wait() for w, _ in [gather(n, True), gather(n, True)]]) for _ in range(5)],
        "hidden": [timed(lambda: overlap(n)) for _ in range(5)],
        "compute": [timed(compute) for _ in range(5)],
        "late": [timed(lambda: late(n)) for _ in range(5)],
    }


def case_values():
    n = 1 << 12
    world = dist.get_world_size()
    shard = torch.full((n,), float(dist.get_rank()))
    dist.all_reduce(shard)
    groups = [dist.new_group([r]) for r in range(world)]
    alone = torch.ones(2)
    dist.all_reduce(alone, group=groups[dist.get_rank()])
    outs, ins = [torch.empty(2 * world), torch.empty(4 * world)], [torch.ones(2), torch.ones(4)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for out, shard_ in zip(outs, ins, strict=True):
            dist.all_gather_into_tensor(out, shard_)
    manager.wait()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    model(torch.ones(2, 8)).sum().backward()
    return {
        "gather": gather(n).tolist()[:: n // world],
        "scatter": float(scatter(n)[1]),
        "reduce": float(shard[0]),
        "alone": alone.tolist(),
        "coalesced": [float(o.sum()) for o in outs],
        "ddp": float(model.module.weight.grad.sum()),
    }


dist.init_process_group(os.environ.get("BACKEND", "emulated"))
result = globals()["case_" + sys.argv[1]]()
if dist.get_rank() == 0:
    print(json.dumps(result), flush=True)
dist.destroy_process_group()

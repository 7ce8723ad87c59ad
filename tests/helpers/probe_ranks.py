"""The job of tests/envs/nccl/test_probe.py: ``python probe_ranks.py LOOP...`` runs the named training loops
one after the other and prints one JSON line a rank.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable

STEPS = int(os.environ.get("STEPS", "14"))


# -- the job ----------------------------------------------------------------------------------------------------------


def job(names: list[str]) -> None:
    import torch
    import torch.distributed as dist
    from probe_odd import ODD_LOOPS, PACKAGES

    rank = int(os.environ.get("RANK", "0"))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(os.environ.get("BACKEND", "gloo"))
    torch.manual_seed(0)
    said = {"rank": rank, "losses": {}, "generations": {}}
    jitter = random.Random(rank)
    collective = nccl(rank)
    if "WARM" in os.environ:
        said["warm"] = until_tables_change(torch, dist, collective)
        torch.manual_seed(0)
    for name in names:
        loop = (LOOPS | ODD_LOOPS | PACKAGES)[name]
        losses, generations = [], []
        step = loop(torch, dist)
        for i in range(STEPS):
            time.sleep(jitter.random() * float(os.environ.get("JITTER_S", "0")))
            generations.append(collective())
            losses.append(step(i))
        said["losses"][name], said["generations"][name] = losses, generations
    if "DYNAMICCL_RUN" in os.environ:
        from dynamiccl.envs.nccl.probe import probe

        said["stopped"] = str(getattr(probe._probe._agreement, "stopped", None) or "")
    sys.stdout.write(
        json.dumps(said) + "\n"
    )  # in one piece: print writes the end of the line apart, and ranks share it
    sys.stdout.flush()
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(float(os.environ.get("STAYS_S", "0")) * rank)
        time.sleep(
            0.1
        )  # gloo's threads give up their last tensors; where Python has ended meanwhile they abort


def until_tables_change(torch, dist, collective: Callable[[], int]) -> int:
    """Steps of a loop of its own until the ranks have changed tables once, however slow the machine; how many."""
    step, n_ranks = plain(torch, dist), dist.get_world_size() if dist.is_initialized() else 1
    for n in range(1, 3001):
        changed = torch.tensor(float(collective() > 0))
        step(0)
        time.sleep(0.02)
        if dist.is_initialized():
            dist.all_reduce(changed)
        if changed == n_ranks:
            return n
    raise TimeoutError("no table has changed in a minute")


def nccl(rank: int) -> Callable[[], int]:
    """Eight collectives of an NCCL that has loaded the plugin, without the bytes: asked about, and enqueued.

    Returns the channels that the last was answered with, by which the tables of these tests are known; 0: no table.
    """
    if "DYNAMICCL_RUN" not in os.environ or rank == int(os.environ.get("NO_TUNER", "-1")):
        return lambda: 0
    import numpy as np
    from dynamiccl.envs.nccl.plugin.build import plugin_path
    from nccl_releases import Communicator

    n_ranks = int(os.environ.get("COMM_RANKS") or os.environ.get("WORLD_SIZE", "1"))
    release = os.environ.get("NCCL_RELEASE", "2.29.7")
    func = os.environ.get("FUNC", "all_gather")
    comms, cost = {}, np.full((7, 3), 10, np.float32)

    def collective() -> int:
        comm_id = int(os.environ.get("COMM_ID", "77"))
        if comm_id not in comms:
            for old in comms.values():
                old.finalize()
            comms.clear()
            comms[comm_id] = Communicator(plugin_path(), comm_id, n_ranks, 1, rank, release)
        comm = comms[comm_id]
        for _ in range(8):
            channels = comm.get_coll_info(func, 4096, cost.copy())
            comm.stop(comm.start_coll(func, 1, 4096 // n_ranks, "int8", 1, 16, "ring", "ll"))
        return channels

    return collective


def model(torch):
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))


def batch(torch, dist, i):
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(100 * i + rank))


def plain(torch, dist) -> Callable[[int], float]:
    net = model(torch)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)

    def step(i: int) -> float:
        loss = net(batch(torch, dist, i)).square().mean()
        loss.backward()
        if dist.is_initialized():
            for p in net.parameters():
                dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def wrapped(wrap, make_optimizer):
    def loop(torch, dist) -> Callable[[int], float]:
        net = wrap(torch, model(torch))
        optimizer = make_optimizer(torch, net)

        def step(i: int) -> float:
            loss = net(batch(torch, dist, i)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        return step

    return loop


def ddp(torch, net):
    return torch.nn.parallel.DistributedDataParallel(net)


def fsdp2(torch, net):
    from torch.distributed.fsdp import fully_shard

    for part in net:
        if hasattr(part, "weight"):
            fully_shard(part)
    return fully_shard(net)


def compiled(torch, net):
    return torch.compile(ddp(torch, net), backend="eager")


def adam(torch, net):
    return torch.optim.AdamW(net.parameters(), 1e-2)


def compiled_adam(torch, net):
    optimizer = adam(torch, net)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    return optimizer


def zero(torch, net):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-2)


def accumulation(torch, dist) -> Callable[[int], float]:
    net = ddp(torch, model(torch))
    optimizer = adam(torch, net)

    def step(i: int) -> float:
        with net.no_sync():
            net(batch(torch, dist, 3 * i)).square().mean().backward()
        loss = net(batch(torch, dist, 3 * i + 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def two_optimizers(torch, dist) -> Callable[[int], float]:
    """As a GAN trains: two models, the second's optimizer steps every other time."""
    first, second = ddp(torch, model(torch)), ddp(torch, model(torch))
    one, two = adam(torch, first), adam(torch, second)

    def step(i: int) -> float:
        loss = first(batch(torch, dist, i)).square().mean()
        loss.backward()
        one.step()
        one.zero_grad()
        if i % 2:
            second(batch(torch, dist, i)).abs().mean().backward()
            two.step()
            two.zero_grad()
        return loss.item()

    return step


def exception(torch, dist) -> Callable[[int], float]:
    """Every third step fails between backward and optimizer, on all ranks, and the loop goes on."""
    inner = plain(torch, dist)

    def step(i: int) -> float:
        if i % 3 == 2:
            try:
                raise RuntimeError("out of memory, say")
            except RuntimeError:
                return 0.0
        return inner(i)

    return step


LOOPS = {
    "plain": plain,
    "ddp": wrapped(ddp, adam),
    "fsdp2": wrapped(fsdp2, adam),
    "zero": wrapped(ddp, zero),
    "accumulation": accumulation,
    "two optimizers": two_optimizers,
    "exception": exception,
    "compile": wrapped(compiled, compiled_adam),
}

if __name__ == "__main__":
    job(sys.argv[1:])

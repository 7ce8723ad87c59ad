"""The job of tests/test_probe.py: ``python probe_ranks.py LOOP...`` runs the named training loops one after the other
and prints one JSON line a rank.
"""

import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable

STEPS = 14


# -- the job ----------------------------------------------------------------------------------------------------------


def job(names: list[str]) -> None:
    import torch
    import torch.distributed as dist

    rank = int(os.environ.get("RANK", "0"))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(os.environ.get("BACKEND", "gloo"))
    torch.manual_seed(0)
    said = {"rank": rank, "losses": {}, "generations": {}}
    jitter = random.Random(rank)
    for name in names:
        loop = (LOOPS | ODD_LOOPS | PACKAGES)[name]
        losses, generations = [], []
        step = loop(torch, dist)
        for i in range(STEPS):
            time.sleep(jitter.random() * float(os.environ.get("JITTER_S", "0")))
            generations.append(generation())
            losses.append(step(i))
        said["losses"][name], said["generations"][name] = losses, generations
    print(json.dumps(said), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def generation() -> int:
    """Generation of the active table in this process."""
    if "DYNAMICCL_RUN" not in os.environ:
        return 0
    from dynamiccl.envs.nccl.plugin import Plugin

    return Plugin.load().generation


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


def broken_network(torch, dist) -> Callable[[int], float]:
    """In step 7 the probe of one rank loses its connections; the job's own group is sound."""
    inner = plain(torch, dist)

    def step(i: int) -> float:
        from dynamiccl.envs.nccl import probe

        if i == 7 and dist.get_rank() == int(os.environ["VICTIM"]):
            probe._probe._agreement._drop_group()
        return inner(i)

    return step


def one_rank_steps(torch, dist) -> Callable[[int], float]:
    """Only rank 0 has an optimizer, as a learner among actors."""
    inner = plain(torch, dist) if dist.get_rank() == 0 else None

    def step(i: int) -> float:
        if inner is not None:
            return inner(i)
        for p in model(torch).parameters():
            dist.all_reduce(torch.zeros_like(p))
        return 0.0

    return step


def accelerated(torch, dist) -> Callable[[int], float]:
    """Hugging Face Accelerate, with its own gradient accumulation and optimizer wrapper."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = model(torch)
    net, optimizer = accelerator.prepare(net, adam(torch, net))

    def step(i: int) -> float:
        for micro in range(2):
            with accelerator.accumulate(net):
                loss = net(batch(torch, dist, 2 * i + micro)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        return loss.item()

    return step


def deepspeed(stage: int):
    """DeepSpeed's ZeRO, with gradient accumulation."""

    def loop(torch, dist) -> Callable[[int], float]:
        import deepspeed

        # Its own shared-memory collectives would be compiled first, which takes minutes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        net = model(torch)
        config = {
            "train_micro_batch_size_per_gpu": 16,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        engine, *_ = deepspeed.initialize(
            model=net, optimizer=adam(torch, net), config=config, dist_init_required=False
        )

        def step(i: int) -> float:
            for micro in range(2):
                loss = engine(batch(torch, dist, 2 * i + micro)).square().mean()
                engine.backward(loss)
                engine.step()
            return loss.item()

        return step

    return loop


def dies_once(torch, dist) -> Callable[[int], float]:
    """In step 8 one worker is gone; torchrun starts all of them anew."""
    inner = plain(torch, dist)

    def step(i: int) -> float:
        if i == 8 and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(9)
        return inner(i)

    return step


def forks(torch, dist) -> Callable[[int], float]:
    """Every step reads from a data loader with a worker, and forks a child that collects what it inherits."""
    inner = plain(torch, dist)
    data = torch.utils.data.DataLoader(list(range(4)), num_workers=1, multiprocessing_context="fork")

    def step(i: int) -> float:
        loss = inner(i)
        child = os.fork()
        if not child:
            gc.collect()
            os._exit(0)
        end = time.monotonic() + 5
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            assert time.monotonic() < end, "the child hangs"
            time.sleep(0.001)
        if i % 7 == 3:
            assert len(list(data)) == 4
        return loss

    return step


def group_anew(torch, dist) -> Callable[[int], float]:
    """After step 7 the job destroys its process group and makes another one."""
    inner = plain(torch, dist)

    def step(i: int) -> float:
        if i == 7:
            rank = dist.get_rank()
            dist.destroy_process_group()
            meet = f"file://{os.environ['MEET']}"
            dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
        return inner(i)

    return step


def leaves_early(torch, dist) -> Callable[[int], float]:
    """From step 7 on one rank has no more data: it answers the others' collectives and steps no more."""
    inner = plain(torch, dist)

    def step(i: int) -> float:
        if i < 7 or dist.get_rank() != int(os.environ["VICTIM"]):
            return inner(i)
        for p in model(torch).parameters():
            dist.all_reduce(torch.zeros_like(p))
        return 0.0

    return step


def cannot_speak(torch, dist) -> Callable[[int], float]:
    """Standard error is closed, then the network of the probe breaks, which it would tell."""
    inner = broken_network(torch, dist)

    def step(i: int) -> float:
        if i == 5:
            sys.stderr.close()
        return inner(i)

    return step


def uneven(torch, dist) -> Callable[[int], float]:
    """PyTorch's Join on uneven data: every third time one rank steps twice as often as the other."""
    net = ddp(torch, model(torch))
    optimizer = adam(torch, net)

    def one(i: int) -> float:
        loss = net(batch(torch, dist, i)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def step(i: int) -> float:
        if i % 3:
            return one(i)
        with net.join():
            return [one(i + j) for j in range(2 + 2 * (i % 2 == dist.get_rank()))][-1]

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
ODD_LOOPS = {
    "broken network": broken_network,
    "one rank steps": one_rank_steps,
    "dies once": dies_once,
    "forks": forks,
    "group anew": group_anew,
    "leaves early": leaves_early,
    "cannot speak": cannot_speak,
    "uneven": uneven,
}
PACKAGES = {"accelerate": accelerated, "deepspeed 1": deepspeed(1), "deepspeed 3": deepspeed(3)}


if __name__ == "__main__":
    job(sys.argv[1:])

"""Loops of ``probe_ranks.py`` that do what training loops seldom do, and those of frameworks that are packages."""

import gc
import os
import sys
import time
from collections.abc import Callable

from probe_ranks import adam, batch, ddp, model, plain


def probe_breaks(torch, dist) -> Callable[[int], float]:
    """In step 7 something in the probe of one rank fails."""
    inner = plain(torch, dist)

    def step(i: int) -> float:
        from dynamiccl.envs.nccl.probe import probe

        if i == 7 and dist.get_rank() == int(os.environ["VICTIM"]):
            probe._probe._step_ended = None
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
    """DeepSpeed's ZeRO, with gradient accumulation and, as usual, a group of parameters without weight decay."""

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
        by_decay = [[p for p in net.parameters() if (p.ndim > 1) is large] for large in (True, False)]
        groups = [{"params": by_decay[0], "weight_decay": 0.1}, {"params": by_decay[1], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, 1e-2)
        engine, *_ = deepspeed.initialize(
            model=net, optimizer=optimizer, config=config, dist_init_required=False
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
    """In step 7 the job destroys its process group, as after an error, and makes another one; a rank was ahead."""
    inner = plain(torch, dist)
    ahead = model(torch)
    optimizer = adam(torch, ahead)

    def step(i: int) -> float:
        if i == 7:
            rank = dist.get_rank()
            if rank == 1:
                ahead(torch.ones(1, 32)).sum().backward()
                optimizer.step()
            dist.destroy_process_group()
            meet = f"file://{os.environ['MEET']}"
            dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
            os.environ["COMM_ID"] = "78"
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
    """Standard error is closed, then the probe breaks, which it would tell."""
    inner = probe_breaks(torch, dist)

    def step(i: int) -> float:
        if i == 5:
            sys.stderr.close()
        return inner(i)

    return step


def skips_once(torch, dist) -> Callable[[int], float]:
    """In step 7 one rank leaves out its optimizer step, as a guard against NaN on that rank alone would."""
    inner = plain(torch, dist)
    real = torch.optim.AdamW.step

    def step(i: int) -> float:
        skip = i == 7 and dist.get_rank() == int(os.environ["VICTIM"])
        torch.optim.AdamW.step = (lambda *args: None) if skip else real
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


ODD_LOOPS = {
    "one rank steps": one_rank_steps,
    "probe breaks": probe_breaks,
    "dies once": dies_once,
    "forks": forks,
    "group anew": group_anew,
    "leaves early": leaves_early,
    "cannot speak": cannot_speak,
    "uneven": uneven,
    "skips once": skips_once,
}
PACKAGES = {"accelerate": accelerated, **{f"deepspeed {stage}": deepspeed(stage) for stage in range(4)}}

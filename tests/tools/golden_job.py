"""The job of ``golden_nccl.py``: FSDP2, HSDP, DDP or ``zero()`` on the CPU, the losses of all ranks kept to the bit.

  torchrun ... golden_job.py --kind fsdp2 --steps 300 --losses FOLDER --backend ncclcpu --backend-module nccl_cpu

Each rank writes FOLDER/losses-RANK.json: the losses in hexadecimal, so that nothing is rounded. Data and weights come
from fixed seeds: two runs differ only if a collective gave another result.

A fault may be planted, for the positive controls. ``--fault`` is one of

  protocols   rank 0 runs LL and the others Simple (NCCL_PROTO)
  late        the last rank runs each new setting of its tuner some calls late: its tuner plugin is replaced by
              --late-tuner, which stands between NCCL and the plugin that the job was started with
  bit         the last rank changes one bit of one element of a gradient in the middle of the run
"""

import argparse
import ctypes
import hashlib
import importlib
import json
import os
from pathlib import Path

#: ``classic``: stage 1 of zero() by all-reduce of the gradients.
KINDS = ("fsdp2", "hsdp", "ddp", "zero", "classic")


def parsed():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--stage", type=int, default=3, help="of zero()")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--uneven", action="store_true", help="accumulate 1 to 3 batches: steps are not alike"
    )
    parser.add_argument("--losses", type=Path, required=True)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--backend-module", default="", help="imported first: it registers the backend")
    parser.add_argument("--fault", choices=("", "protocols", "late", "bit"), default="")
    parser.add_argument("--late-tuner", default="")
    return parser.parse_args()


def plant(options, rank, world):
    """What has to be set before NCCL's library is loaded."""
    if options.fault == "protocols":
        os.environ["NCCL_PROTO"] = "LL" if rank == 0 else "Simple"
    if options.fault == "late" and rank == world - 1:
        os.environ["GOLDEN_TUNER"] = os.environ["NCCL_TUNER_PLUGIN"]
        # Behind Python's back: the probe takes its place back where it sees another tuner in os.environ.
        ctypes.CDLL(None).setenv(b"NCCL_TUNER_PLUGIN", options.late_tuner.encode(), 1)


def change_a_bit(parameters):
    """Bit 18 of the 23 of the fraction, of the element that counts most."""
    import torch

    grads = [getattr(p.grad, "_local_tensor", p.grad) for p in parameters if p.grad is not None]
    grad = max((g for g in grads if g.numel()), key=lambda g: float(g.abs().max())).view(-1)
    bits = grad.view(torch.int32)
    bits[grad.abs().argmax()] ^= 1 << 18


def fsdp2(model, world, replicas=1):
    """(backward, step) of a model whose blocks are sharded over ``world`` ranks, in ``replicas`` parts of them."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = (world,) if replicas == 1 else (replicas, world // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step():
        optimizer.step()
        optimizer.zero_grad()

    return lambda loss: loss.backward(), step


def ddp(model):
    """(model, backward, step) of a model whose gradients are all-reduced in buckets."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.0625)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step():
        optimizer.step()
        optimizer.zero_grad()

    return wrapped, lambda loss: loss.backward(), step


def by_zero(model, stage, classic=False):
    """(backward, step) of a model under ``zero()``."""
    import torch
    from dynamiccl.zero_workload import zero

    engine = zero(
        model,
        lambda parameters: torch.optim.AdamW([{"params": list(parameters)}], 1e-3),
        stage=stage,
        classic=classic,
        param_dtype=torch.float32,
    )
    return engine.backward, engine.step


def trained(options, world, stage):
    """(model, backward, step) of the job that was asked for."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    width = options.width
    blocks = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for _ in range(options.layers)
    ]
    model = nn.Sequential(*blocks)
    if options.kind == "ddp":
        return ddp(model)
    if options.kind == "zero":
        return model, *by_zero(model, stage)
    if options.kind == "classic":
        return model, *by_zero(model, 1, classic=True)
    return model, *fsdp2(model, world, 2 if options.kind == "hsdp" else 1)


def main():
    options = parsed()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    plant(options, rank, world)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if options.backend_module:
        importlib.import_module(options.backend_module)
    dist.init_process_group(options.backend)
    model, backward, step = trained(options, world, options.stage)
    draws = torch.Generator().manual_seed(1 + rank)
    losses = []
    options.losses.mkdir(parents=True, exist_ok=True)
    for number in range(options.steps):
        for _ in range(1 + number * number % 3 if options.uneven else 1):
            x = torch.randn(8, options.width, generator=draws)
            loss = (model(x) - x).square().mean()
            backward(loss)
            losses.append(float(loss.detach()).hex())
        if options.fault == "bit" and rank == world - 1 and number == options.steps // 2:
            change_a_bit(model.parameters())
        step()
        if rank == 0 and number % 50 == 0:
            print(f"step {number} loss {float.fromhex(losses[-1]):.9f}", flush=True)
    (options.losses / f"losses-{rank}.json").write_text(json.dumps(losses))
    print(f"rank {rank} digest {hashlib.sha256(json.dumps(losses).encode()).hexdigest()[:16]}", flush=True)
    dist.barrier()
    os._exit(0)  # ends beside threads of the backend


if __name__ == "__main__":
    main()

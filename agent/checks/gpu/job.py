"""The job of the races, FSDP2 on GPUs or on an emulated cluster, for so many seconds:

python -m dynamiccl.agent.checks.gpu.job --layer-mib 64 --layers 8 --tokens 4096 --seconds 60
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

#: Steps between two looks at the clock, which ranks take together.
BATCH = 10


def width_of(layer_mib: float, element: int) -> int:
    """Of a square matrix whose weights have about so many MiB; a multiple of 64."""
    return max(64, round((layer_mib * 2**20 / element) ** 0.5 / 64) * 64)


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layer-mib", type=float, required=True, help="MiB of one all-gather")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="rows that each layer multiplies")
    parser.add_argument("--seconds", type=float, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    has_gpu = torch.cuda.is_available() and not os.environ.get("DYNAMICCL_CLUSTER")
    device, dtype = torch.device("cpu"), torch.float32
    if has_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dtype = torch.bfloat16
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)
    width = width_of(asked.layer_mib, dtype.itemsize)
    model = nn.Sequential(
        *(nn.Linear(width, width, bias=False, device=device, dtype=dtype) for _ in range(asked.layers))
    )
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(asked.tokens, width, device=device, dtype=dtype)
    control = dist.new_group(backend="gloo")
    ends, steps = time.monotonic() + asked.seconds, 0
    while True:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps % BATCH == 0:
            over = torch.tensor([float(time.monotonic() > ends)])
            dist.all_reduce(over, group=control)
            if over.item():
                break
    print(f"rank {dist.get_rank()}: {steps} steps", flush=True)
    dist.barrier(group=control)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads can abort a process that tears down


if __name__ == "__main__":
    main()

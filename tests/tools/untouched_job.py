"""The jobs of ``untouched_nccl.py``: calls of every size, or FSDP2 on the CPU.

  torchrun ... untouched_job.py --kind sizes --steps 30 --backend ncclcpu --backend-module nccl_cpu
  torchrun ... untouched_job.py --kind fsdp2 --steps 60 --times FILE ...

Rank 0 of ``fsdp2`` writes FILE: the duration of each step in ms, and what the process holds at the end.
"""

import argparse
import importlib
import json
import os
import time
from pathlib import Path

KIB = 1024
#: Bytes of the whole buffer: powers of two, and numbers beside the limits at which NCCL takes another channel.
SIZES = sorted(
    {2**k for k in range(10, 27)} | {3 * 2**k for k in range(10, 22)} | {n * KIB for n in (17, 33, 63, 129)}
)


def parsed():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=("sizes", "fsdp2"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--times", type=Path)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--backend-module", default="", help="imported first: it registers the backend")
    return parser.parse_args()


def sizes(options, torch, dist):
    """Each step calls all-gather, reduce-scatter and all-reduce of each size once, one after the other."""
    world = dist.get_world_size()
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    most = max(SIZES) // 4
    whole, part = torch.zeros(most), torch.zeros(most // world)
    for _ in range(options.steps):
        for n_bytes in SIZES:
            n = n_bytes // 4 // world
            dist.all_gather_into_tensor(whole[: n * world], part[:n])
            dist.reduce_scatter_tensor(part[:n], whole[: n * world])
            dist.all_reduce(whole[: n * world])
        weight.grad = torch.zeros(4)
        optimizer.step()


def fsdp2(options, torch, dist):
    """A stack of pairs of linear layers, each its own unit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    width, nn = options.width, torch.nn
    pairs = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for _ in range(options.layers)
    ]
    model = nn.Sequential(*pairs)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for pair in pairs:
        fully_shard(pair, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())
    x, y = torch.randn(16, width), torch.randn(16, width)
    times = []
    for _ in range(options.steps):
        began = time.perf_counter()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(1e3 * (time.perf_counter() - began))
    return times


def holds():
    """Memory, threads and connections of this process."""
    status = Path("/proc/self/status").read_text()
    told = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(fd))
        except OSError:
            continue
    return {
        "rss_kib": int(told["VmRSS"].split()[0]),
        "shared_kib": int(told["RssShmem"].split()[0]),
        "threads": int(told["Threads"]),
        "sockets": sum(link.startswith("socket:") for link in links),
    }


def main():
    options = parsed()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if options.backend_module:
        importlib.import_module(options.backend_module)
    dist.init_process_group(options.backend)
    times = {"sizes": sizes, "fsdp2": fsdp2}[options.kind](options, torch, dist)
    if options.times and dist.get_rank() == 0:
        options.times.write_text(json.dumps({"ms": times, **holds()}))
    dist.barrier()
    os._exit(0)  # a backend that a module registers may not survive the interpreter's end


if __name__ == "__main__":
    main()

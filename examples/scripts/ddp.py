"""PyTorch DDP: `--all-reduce` has its all-reduces tuned; sums of more than two ranks then differ in their last bits.

dynamiccl tune --all-reduce -- torchrun --nproc-per-node 8 ddp.py [STEPS]
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if has_gpu else "gloo")
    torch.manual_seed(0)
    width = 1024 if has_gpu else 64
    layers = [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 2000):
        x = torch.randn(32, width, device=device)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

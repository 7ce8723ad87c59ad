"""Train with this project's own ZeRO-3 in a hand-written loop.

dynamiccl tune -- torchrun --nproc-per-node 8 examples/scripts/plain_loop.py
"""

import os
import sys

import torch
import torch.distributed as dist
from dynamiccl.zero_workload import zero
from torch import nn

steps = int(sys.argv[1]) if sys.argv[1:] else 400
gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")
torch.manual_seed(0)
width = 4096 if gpu else 128
blocks = [
    nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(8)
]
model = nn.Sequential(*blocks).to(device)
engine = zero(model, lambda params: torch.optim.AdamW(params, lr=1e-4), stage=3)
torch.manual_seed(dist.get_rank() + 1)  # each rank draws inputs of its own
for step in range(steps):
    inputs = torch.randn(64, width, device=device, dtype=torch.bfloat16)
    loss = (model(inputs) - inputs.roll(1, 0)).square().mean()
    engine.backward(loss)
    engine.step()
    if step % 100 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}", flush=True)
dist.destroy_process_group()

"""Train a small transformer with PyTorch FSDP2. Nothing here knows of a tuner.

dynamiccl tune -- torchrun --nproc-per-node 8 examples/scripts/fsdp2.py
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

steps = int(sys.argv[1]) if sys.argv[1:] else 400
gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")
torch.manual_seed(0)
width = 4096 if gpu else 128
blocks = [torch.nn.TransformerEncoderLayer(width, 8, batch_first=True) for _ in range(8)]
model = torch.nn.Sequential(*blocks).to(device)
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
torch.manual_seed(dist.get_rank() + 1)  # each rank draws inputs of its own
for step in range(steps):
    inputs = torch.randn(4, 32, width, device=device)
    loss = (model(inputs) - inputs.roll(1, 1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 100 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}", flush=True)
dist.destroy_process_group()

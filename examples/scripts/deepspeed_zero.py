"""Train with DeepSpeed ZeRO-3.

dynamiccl tune -- torchrun --nproc-per-node 8 examples/scripts/deepspeed_zero.py
"""

import sys

import deepspeed
import torch
from torch import nn

steps = int(sys.argv[1]) if sys.argv[1:] else 400
gpu = torch.cuda.is_available()
deepspeed.init_distributed("nccl" if gpu else "gloo")
torch.manual_seed(0)
width = 4096 if gpu else 128
blocks = [
    nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(8)
]
model = nn.Sequential(*blocks)
config = {
    "train_micro_batch_size_per_gpu": 64,
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": True},
    "zero_force_ds_cpu_optimizer": False,
}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
torch.manual_seed(engine.global_rank + 1)  # each rank draws inputs of its own
for step in range(steps):
    inputs = torch.randn(64, width, device=engine.device, dtype=torch.bfloat16)
    loss = (engine(inputs) - inputs.roll(1, 0)).float().square().mean()
    engine.backward(loss)
    engine.step()
    if step % 100 == 0 and engine.global_rank == 0:
        print(f"step {step}: loss {loss.item():.3f}", flush=True)

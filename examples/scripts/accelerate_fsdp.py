"""Train with Hugging Face Accelerate and FSDP2.

dynamiccl tune -- torchrun --nproc-per-node 8 examples/scripts/accelerate_fsdp.py
"""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

steps = int(sys.argv[1]) if sys.argv[1:] else 400
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=10_000
)
accelerator = Accelerator(fsdp_plugin=plugin, cpu=not torch.cuda.is_available())
torch.manual_seed(0)
width = 4096 if torch.cuda.is_available() else 128
blocks = [
    nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(8)
]
model = nn.Sequential(*blocks)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model, optimizer = accelerator.prepare(model, optimizer)
torch.manual_seed(accelerator.process_index + 1)  # each rank draws inputs of its own
for step in range(steps):
    inputs = torch.randn(64, width, device=accelerator.device)
    loss = (model(inputs) - inputs.roll(1, 0)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if step % 100 == 0:
        accelerator.print(f"step {step}: loss {loss.item():.3f}", flush=True)
accelerator.end_training()

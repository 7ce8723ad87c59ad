"""FSDP2 on GPUs, a job that nothing was written for: ``dynamiccl tune -- torchrun ... tests/tools/fsdp2_job.py
STEPS LOG``.

Parameters in bf16, gradients reduced in float32. Ranks may share GPUs, see ``agent/checks/gpu/machine.py``; on one
GPU it was run with ``sh -c 'NCCL_HOSTID=rank-$RANK exec python tests/tools/fsdp2_job.py ...'`` and that file's
variables for hosts.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WORDS, WIDTH, LAYERS, BATCH, SEQUENCE = 4096, 1024, 8, 8, 256


class Model(nn.Module):
    """A small transformer."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        one = {"d_model": WIDTH, "nhead": 16, "dim_feedforward": 4 * WIDTH, "dropout": 0.0}
        layers = [nn.TransformerEncoderLayer(**one, batch_first=True, norm_first=True) for _ in range(LAYERS)]
        self.layers = nn.ModuleList(layers)

    def forward(self, words):
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main():
    steps, log = int(sys.argv[1]), sys.argv[2]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    model, policy = Model().cuda(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for part in (*model.layers, model):
        fully_shard(part, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    draws = torch.Generator().manual_seed(dist.get_rank())
    began = time.perf_counter()
    with open(log if dist.get_rank() == 0 else os.devnull, "w", buffering=1) as file:
        for step in range(steps):
            words = torch.randint(0, WORDS, (BATCH, SEQUENCE), generator=draws).cuda()
            loss = nn.functional.cross_entropy(model(words).float().flatten(0, 1), words.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            said, now = loss.item(), time.perf_counter()
            file.write(json.dumps({"step": step, "loss": said, "step_ms": 1e3 * (now - began)}) + "\n")
            began = now
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

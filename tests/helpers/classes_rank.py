"""One of four ranks of tests/envs/nccl/test_classes.py: 2 x 2 groups whose collectives take as long as what
the tuner chose.

The calls are what NCCL would ask and report, without the bytes; a step ends when its slowest rank has ended.
"""

import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from dynamiccl.envs.nccl.plugin.build import plugin_path
from dynamiccl.traces.records import ALGOS, PROTOS
from nccl_releases import Communicator, choose

KIND, STEPS, LIFE = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
#: Long beside what a busy machine does to a step.
SECONDS = {("ring", "ll"): 0.006, ("ring", "simple"): 0.024}
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
#: (communicator id, collective, bytes of the whole buffer), per rank: ids are new in every life of the job.
GROUPS = {
    "one": [(0, "all_gather", 1 << 20)] * 4,
    "hsdp": [(rank // 2, "all_gather", 1 << 20)] * 4,
    "tp x dp": [(rank // 2, "all_gather", 1 << 16)] * 2 + [(2 + rank % 2, "all_gather", 1 << 20)] * 2,
}[KIND]
size = 4 if KIND == "one" else 2
comms = {i: Communicator(plugin_path(), 100 * LIFE + i + 1, size, 1, rank % size) for i, _, _ in GROUPS}
weight = torch.nn.Parameter(torch.zeros(4))
optimizer = torch.optim.SGD([weight], lr=0.1)
seq = 0

for _ in range(STEPS):
    for i, func, n_bytes in GROUPS:
        comm, cost = comms[i], np.full((len(ALGOS), len(PROTOS)), -1, np.float32)
        cost[1] = (9000, -1, 8000)  # NCCL thinks otherwise
        channels = comm.get_coll_info(func, n_bytes, cost) or 16
        algo, proto = choose(cost)
        chosen = ALGOS[algo], PROTOS[proto]
        seq += 1
        time.sleep(SECONDS[chosen])
        comm.stop(comm.start_coll(func, seq, n_bytes // size // 4, "float32", channels, 16, *chosen))
    ((weight * 0).sum()).backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
os._exit(0)

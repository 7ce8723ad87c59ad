"""One rank of tests/envs/nccl/test_consistency.py: steps full of collectives on two communicators, and random delays.

The collectives are what NCCL would ask and report, without the bytes, so that thousands fit into seconds; the step
boundary, the agreement and the plugin are the real ones.
"""

import os
import random
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from dynamiccl.envs.nccl.plugin.build import plugin_path
from dynamiccl.traces.records import ALGOS, PROTOS
from nccl_releases import Communicator, choose

STEPS, CALLS, SIZES = int(sys.argv[1]), int(sys.argv[2]), (1 << 16, 3 << 20, 100 << 20)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
mine, shared = random.Random(rank), random.Random(7)
size = dist.get_world_size()
comms = [Communicator(plugin_path(), comm, size, nodes, rank) for comm, nodes in ((11, 1), (22, 2))]
seq = {(i, func): 0 for i in range(2) for func in ("all_gather", "reduce_scatter")}
weight = torch.nn.Parameter(torch.zeros(4))
optimizer = torch.optim.SGD([weight], lr=0.1)
offer = np.full((len(ALGOS), len(PROTOS)), -1, np.float32)
offer[1] = (30, 20, 40)

for _ in range(STEPS):
    for _ in range(CALLS):
        i, func, n_bytes = (
            shared.randrange(2),
            shared.choice(("all_gather", "reduce_scatter")),
            shared.choice(SIZES),
        )
        cost = offer.copy()
        channels = comms[i].get_coll_info(func, n_bytes, cost) or 16
        algo, proto = choose(cost)
        seq[i, func] += 1
        count = n_bytes // comms[i].n_ranks // 4
        handle = comms[i].start_coll(
            func, seq[i, func], count, "float32", channels, 16, ALGOS[algo], PROTOS[proto]
        )
        comms[i].stop(handle)
        if mine.random() < 0.02:
            time.sleep(mine.expovariate(1000))
    dist.barrier()  # collectives with bytes would hold the ranks together: without, they drift many steps apart
    weight.grad = torch.ones(4)
    optimizer.step()
    if mine.random() < 0.05:
        time.sleep(mine.expovariate(100))
dist.destroy_process_group()
os._exit(0)

"""One rank of tests/envs/nccl/test_turns_of_jobs.py: a job whose steps are of one kind, and the calls of each step.

``python turns_rank.py KIND FILE``. ``fsdp2``: one communicator. ``hsdp``: shards on a communicator of two ranks each,
and their replicas on one of their own. ``accumulation``: gradients of four micro-batches, and of two once rank 0 finds
the file. ``tenth``: an all-reduce every ten steps. ``uneven``: one to four micro-batches in each step, and a second
communicator with other calls in each; ``uneven hsdp``: the former on shards of two ranks. The collectives are what NCCL
would ask and report, without the bytes; probe, agreement and plugin are the real ones. It goes on until it is killed.
"""

import itertools
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from dynamiccl.envs.nccl.plugin.build import plugin_path
from dynamiccl.traces.records import ALGOS, PROTOS
from nccl_releases import Communicator, choose

KIND, FILE = sys.argv[1], Path(sys.argv[2])
LAYERS, N_BYTES = 3, 3 << 20
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
late = random.Random(rank)
seq: dict[tuple[int, str], int] = {}
offer = np.full((len(ALGOS), len(PROTOS)), -1, np.float32)
offer[1] = (30, 20, 40)
if "hsdp" in KIND:
    shards = Communicator(plugin_path(), 100 + rank // 2, 2, 1, rank % 2)
    replicas = Communicator(plugin_path(), 200 + rank % 2, size // 2, 2, rank // 2)
else:
    shards, replicas = Communicator(plugin_path(), 11, size, 1, rank), None
experts = Communicator(plugin_path(), 12, size, 1, rank) if KIND == "uneven" else None


def call(comm, func):
    cost = offer.copy()
    channels = comm.get_coll_info(func, N_BYTES, cost) or 16
    algo, proto = choose(cost)
    number = seq[comm.comm_id, func] = seq.get((comm.comm_id, func), 0) + 1
    how = (channels, 16, ALGOS[algo], PROTOS[proto])
    comm.stop(comm.start_coll(func, number, N_BYTES // comm.n_ranks // 4, "float32", *how))


weight = torch.nn.Parameter(torch.zeros(4))
optimizer = torch.optim.SGD([weight], lr=0.1)
n_micro_batches, is_found = 4 if KIND == "accumulation" else 1, torch.zeros(1)
draw = random.Random(7)  # the same on all ranks
for step in itertools.count():
    if "uneven" in KIND:
        n_micro_batches = draw.randint(1, 4)
    for _ in range(n_micro_batches):
        for func in ["all_gather"] * 2 * LAYERS + ["reduce_scatter"] * LAYERS:
            call(shards, func)
        weight.sum().backward()
    if replicas is not None:
        call(replicas, "all_reduce")
    if experts is not None:
        for _ in range(draw.randint(1, 5)):
            call(experts, "all_gather")
    if KIND == "tenth" and step % 10 == 9:
        call(shards, "all_reduce")
    is_found[0] = rank == 0 and FILE.exists()
    dist.all_reduce(is_found)  # it also holds the ranks together
    n_micro_batches = 2 if is_found[0] and KIND == "accumulation" else n_micro_batches
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02 + (late.expovariate(100) if late.random() < 0.05 else 0.0))

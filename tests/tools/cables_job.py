"""The jobs of ``cables_nccl.py``, one process a rank: a sweep of single collectives, or training that is timed.

  cables_job.py sweep --plan PLAN.json --out FOLDER --backend NAME --backend-module MODULE
  cables_job.py train --kind fsdp2 --steps 300 --out FOLDER --backend NAME --backend-module MODULE

Each rank writes FOLDER/sweep-RANK.csv or FOLDER/steps-RANK.json. With the tuner of ``cables_tuner.c`` (its path is
NCCL_TUNER_PLUGIN) the job itself selects the table of each call or step; all ranks draw the same order from one seed.
"""

import argparse
import csv
import ctypes
import gc
import hashlib
import importlib
import json
import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
from golden_job import KINDS, trained

FUNCS = {"all_gather": 2, "reduce_scatter": 3}
PROTOCOLS = {"LL": 0, "LL128": 1, "Simple": 2, "": -1}


class Tuner:
    """The tuner plugin in this process; a row is (function, first byte, last byte, protocol, channels)."""

    def __init__(self):
        # Where dynamiccl's plugin stands before the job's own, it keeps the path of the latter.
        path = os.environ.get("DYNAMICCL_NEXT_TUNER") or os.environ["NCCL_TUNER_PLUGIN"]
        self.library = ctypes.CDLL(path)
        self.library.cables_row.argtypes = [ctypes.c_int] * 2 + [ctypes.c_size_t] * 2 + [ctypes.c_int] * 2
        self.use, self.offered = self.library.cables_use, self.library.cables_offered

    def load(self, number, rows):
        self.library.cables_clear(number)
        for func, first, last, protocol, channels in rows:
            values = (number, FUNCS[func], first, last, PROTOCOLS[protocol], channels)
            assert self.library.cables_row(*values) == 0, "the plugin holds no more rows"


def collective(func, n_bytes, rank, world):
    """(call, right): one blocking collective of so many bytes in the whole buffer, and whether its data are right."""
    n = n_bytes // 4
    share = n // world
    if func == "all_gather":
        send, whole = torch.full((share,), float(rank + 1)), torch.zeros(n)

        def gather():
            dist.all_gather_into_tensor(whole, send, async_op=True).wait()

        parts = torch.arange(1.0, world + 1).repeat_interleave(share)
        return gather, lambda: torch.equal(whole, parts)
    given, got = torch.arange(n, dtype=torch.float32) % 1000 + rank, torch.zeros(share)

    def reduce_scatter():
        dist.reduce_scatter_tensor(got, given, async_op=True).wait()

    total = world * (torch.arange(n, dtype=torch.float32) % 1000) + world * (world - 1) / 2
    return reduce_scatter, lambda: torch.equal(got, total[rank * share : (rank + 1) * share])


def sweep(options, rank, world):
    plan = json.loads(options.plan.read_text())
    blocks = [(func, n_bytes) for func in FUNCS for n_bytes in plan["bytes"]]
    cells = [tuple(cell) for cell in plan["cells"]]  # name, protocol, channels; "" and 0 are NCCL's own
    own = {(func, n_bytes): (proto, ch) for func, n_bytes, proto, ch in plan["untouched"]}
    calls = {block: collective(*block, rank, world) for block in blocks}
    tuner = Tuner() if plan["tuner"] else None
    draw = random.Random(plan["seed"])
    written = []
    gc.disable()
    for turn in range(plan["rounds"]):
        draw.shuffle(blocks)
        for func, n_bytes in blocks:
            call, right = calls[func, n_bytes]
            order = [*cells] * plan["repeats"]
            draw.shuffle(order)
            # The first call of a block does not count.
            for place, (name, *setting) in enumerate([order[-1], *order]):
                if tuner:
                    asked = own[func, n_bytes] if name.startswith("untouched") else setting
                    tuner.load(0, [(func, n_bytes, n_bytes, *asked)])
                    tuner.use(0)
                if plan["told"] and rank == 0:
                    print(f"cell {func} {n_bytes} {name}", flush=True)
                start = time.perf_counter_ns()
                call()
                end = time.perf_counter_ns()
                if plan["told"]:
                    assert right(), f"wrong data: {func} of {n_bytes} bytes under {name}"
                    if rank == 0:
                        print(f"offered {tuner.offered() if tuner else 1}", flush=True)
                elif place:
                    load = os.getloadavg()[0]
                    written.append((turn, func, n_bytes, name, start, end, f"{load:.2f}"))
    with (options.out / f"sweep-{rank}.csv").open("w", newline="") as file:
        csv.writer(file).writerows(written)


def turns(n_tables, steps, length, seed):
    """The table of each step: in each round every table has one turn, in an order drawn anew."""
    draw, order = random.Random(seed), []
    while len(order) < steps:
        tables = list(range(n_tables))
        draw.shuffle(tables)
        order += [table for table in tables for _ in range(length)]
    return order[:steps]


def train(options, rank, world):
    model, backward, step = trained(options, world, 3)
    order = [-1] * options.steps
    if options.tables:
        tuner, loaded = Tuner(), json.loads(options.tables.read_text())
        for place, rows in enumerate(loaded):
            tuner.load(place, rows)
        order = turns(len(loaded), options.steps, options.turn, options.seed)
    draws = torch.Generator().manual_seed(1 + rank)
    losses, times, loads = [], [], []
    for number in range(options.steps):
        if options.tables:
            tuner.use(order[number])
        start = time.perf_counter()
        x = torch.randn(16, options.width, generator=draws)
        loss = (model(x) - x).square().mean()
        backward(loss)
        step()
        losses.append(loss.item())
        times.append(round(1e3 * (time.perf_counter() - start), 3))
        loads.append(os.getloadavg()[0])
    digest = hashlib.sha256(repr(losses).encode()).hexdigest()[:16]
    written = {"ms": times, "table": order, "load": loads, "digest": digest}
    (options.out / f"steps-{rank}.json").write_text(json.dumps(written))
    late = sorted(times[len(times) // 4 :])
    print(f"rank {rank} median {late[len(late) // 2]:.2f} ms, digest {digest}", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("sweep", "train"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--backend-module", default="", help="imported first: it registers the backend")
    parser.add_argument("--plan", type=Path, help="of the sweep")
    parser.add_argument("--kind", choices=KINDS, default="fsdp2")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--tables", type=Path, help="JSON: tables that take turns")
    parser.add_argument("--turn", type=int, default=2, help="steps of a turn")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.backend_module:
        importlib.import_module(options.backend_module)
    dist.init_process_group(options.backend)
    options.out.mkdir(parents=True, exist_ok=True)
    {"sweep": sweep, "train": train}[options.what](options, dist.get_rank(), dist.get_world_size())
    dist.barrier()
    os._exit(0)  # ends beside threads of the backend


if __name__ == "__main__":
    main()

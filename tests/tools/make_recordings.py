"""Makes ``tests/data/recordings``: PyTorch's own profile of two ranks over gloo.

``python tests/tools/make_recordings.py`` runs our ZeRO-3 and PyTorch's FSDP2 for some steps each. A GPU's
profile has NCCL kernels, grids and ``record_param_comms`` in addition: the tests' generators add those after
PyTorch's documentation.
"""

import gzip
import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

DATA = Path(__file__).resolve().parents[1] / "data" / "recordings"
RANKS, STEPS, WIDTH = 2, 5, 64
#: What of an event is kept: arguments beyond these only name this machine's memory.
ARGS = ("External id", "Input Dims", "Input type", "Collective name")


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in "ab")
    )


def job(kind):
    """A step of the job, as a function."""
    net = model()
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (RANKS,))
        for block in net:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

        def step():
            net(torch.randn(8, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        from dynamiccl.zero_workload import zero

        engine = zero(
            net,
            lambda parts: torch.optim.AdamW(parts, lr=1e-3),
            stage=3,
            param_dtype=torch.float32,
            min_unit=0,
        )

        def step():
            engine.backward(net(torch.randn(8, WIDTH)).square().mean())
            engine.step()

    return step


def rank(index, kind, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{kind}", rank=index, world_size=RANKS)
    step = job(kind)
    plan = schedule(wait=1, warmup=1, active=STEPS - 2)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=plan) as recorder:
        for _ in range(STEPS):
            step()
            recorder.step()
    recorder.export_chrome_trace(f"{folder}/{kind}-rank{index}.json")
    dist.destroy_process_group()


def slim(event):
    """An event without what names the machine and what nothing reads."""
    args = {key: value for key, value in (event.get("args") or {}).items() if key in ARGS}
    return {
        key: value for key, value in event.items() if key in ("ph", "cat", "name", "pid", "tid", "ts", "dur")
    } | {"args": args}


def main():
    DATA.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("fsdp2", "zero3"):
            mp.spawn(rank, (kind, folder), nprocs=RANKS)
            for index in range(RANKS):
                name = f"{kind}-rank{index}"
                document = json.loads(Path(folder, f"{name}.json").read_text())
                events = [e for e in document["traceEvents"] if e.get("cat") in ("cpu_op", "user_annotation")]
                document |= {
                    "traceEvents": list(map(slim, events)),
                    "traceName": f"{name}.json",
                    "host_name": "host",
                }
                with gzip.GzipFile(DATA / f"{name}.json.gz", "wb", mtime=0) as file:
                    file.write(json.dumps(document, separators=(",", ":")).encode())
    print(*sorted(f"{p.name} {p.stat().st_size}" for p in DATA.iterdir()), sep="\n")


if __name__ == "__main__":
    sys.exit(main())

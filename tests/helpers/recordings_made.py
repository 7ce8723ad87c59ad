"""A small recording of a known job, as PyTorch's profiler writes it on GPUs."""

import json

BASE = 1_763_719_000_000_000_000
#: One step of a ZeRO-3 job: (func, whole bytes, us from the step's begin, us).
STEP = [
    ("all_gather", 64 << 20, 100, 400),
    ("all_gather", 64 << 20, 700, 410),
    ("reduce_scatter", 64 << 20, 1500, 500),
]
STEP_US, N_RANKS, N_STEPS, CHANNELS = 3000, 16, 6, 16


def kineto(folder, compute=True):
    """Two files, those of the first ranks of 16."""
    folder.mkdir()
    for rank in (0, 1):
        info = {"backend": "nccl", "rank": rank, "pid": 500 + rank, "nccl_version": "2.28.9"}
        document = {"baseTimeNanoseconds": BASE, "distributedInfo": info, "traceEvents": _events(compute)}
        (folder / f"rank{rank}.trace.json").write_text(json.dumps(document))
    return folder


def _events(compute):
    group = {"Process Group Name": "0", "Process Group Ranks": str([*range(N_RANKS)]), "Group size": N_RANKS}
    events = []

    def add(kind, name, ts, dur, args=None):
        events.append({"ph": "X", "cat": kind, "name": name, "ts": ts, "dur": dur, "args": args or {}})

    for step in range(N_STEPS):
        began = step * STEP_US
        add("user_annotation", f"ProfilerStep#{step}", began, STEP_US - 0.001)
        for func, n_bytes, at, us in STEP:
            call = {**group, "Collective name": func, "dtype": "BFloat16", "External id": len(events)}
            call |= {"In msg nelems": n_bytes // 2, "Out msg nelems": n_bytes // 2 // N_RANKS}
            add("cpu_op", "record_param_comms", began + at - 60, 20, call)
            add("kernel", "ncclDevKernel_Generic", began + at, us, {**call, "grid": [CHANNELS, 1, 1]})
        for k in range(20 if compute else 0):
            add("kernel", "gemm", began + 100 * k, 90)
    return events

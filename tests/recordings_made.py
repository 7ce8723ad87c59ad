"""Small recordings of a known job in formats whose tools are not here, written after their public descriptions."""

import json
import sqlite3
from types import SimpleNamespace

from dynamiccl.traces.importers_chakra import write
from dynamiccl.traces.importers_common import Imported
from dynamiccl.traces.records import FUNCS

BASE = 1_763_719_000_000_000_000
#: One step of a ZeRO-3 job: (func, whole bytes, us from the step's begin, us).
STEP = [("all_gather", 64 << 20, 100, 400), ("all_gather", 64 << 20, 700, 410), ("reduce_scatter", 64 << 20, 1500, 500)]
STEP_US, N_RANKS, N_STEPS, CHANNELS = 3000, 16, 6, 16
NCCL_NAMES = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter"}


def nccl_log(path, rank=0, timed=True):
    lines = [f"host1:700:700 [{rank}] NCCL INFO NCCL version 2.28.9+cuda13.0"]
    lines.append(
        f"host1:700:712 [{rank}] NCCL INFO ncclCommInitRankConfig comm 0x55aa rank {rank} nranks {N_RANKS} "
        f"cudaDev {rank} nvmlDev 0 busId 18000 commId 0x7f1234 - Init COMPLETE"
    )
    for step in range(N_STEPS):
        for n, (func, n_bytes, at, _) in enumerate(STEP):
            us = step * STEP_US + at
            stamp = f"[2026-11-21 10:00:{us // 1_000_000:02d}.{us % 1_000_000:06d}] " if timed else ""
            head = f"{stamp}host1:700:712 [{rank}] NCCL INFO {NCCL_NAMES[func]}: "
            count = n_bytes // N_RANKS // 2
            lines.append(
                f"{head}opCount {3 * step + n:x} sendbuff 0x7f00 recvbuff 0x7f01 count {count} datatype 9 op 0 root 0 "
                f"comm 0x55aa [nranks={N_RANKS}] stream 0x5500"
            )
            lines.append(f"{head}{n_bytes} Bytes -> Algo RING proto LL128 channel{{Lo..Hi}}={{0..{CHANNELS - 1}}}")
    path.write_text("\n".join(lines) + "\n")
    return path


def nsys(path, sizes=True, compute=True):
    """The tables and columns of NVIDIA's SQLite export that are read, of two GPUs."""
    base = sqlite3.connect(path)
    base.executescript(
        "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);"
        "CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT, globalTid INT, textId INT,"
        " jsonText TEXT);"
        "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT, correlationId INT, nameId INT);"
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, contextId INT, streamId INT,"
        " correlationId INT, globalPid INT, demangledName INT, shortName INT, gridX INT, gridY INT, gridZ INT);"
        "INSERT INTO StringIds VALUES (1, 'ncclDevKernel_AllGather_RING_LL'), (2, 'gemm'), (3, 'ncclReduceScatter');"
    )
    correlation = 0
    for rank in (0, 1):
        pid = 500 + rank
        process, tid = pid << 24, pid << 24 | 77
        for step in range(N_STEPS):
            began = BASE + 1000 * step * STEP_US
            mark = (began, began + 1000 * STEP_US - 1, 59, f"step {step}", tid, None, None)
            base.execute("INSERT INTO NVTX_EVENTS VALUES (?,?,?,?,?,?,?)", mark)
            for func, n_bytes, at, us in STEP:
                correlation += 1
                start = began + 1000 * at
                payload = {"NCCL comm": "0x7f1234", "No. of ranks": N_RANKS, "Message size [bytes]": n_bytes // N_RANKS}
                name = (None, 3) if func == "reduce_scatter" else ("ncclAllGather", None)
                row = (
                    start - 60_000,
                    start - 20_000,
                    59,
                    name[0],
                    tid,
                    name[1],
                    json.dumps(payload) if sizes else None,
                )
                base.execute("INSERT INTO NVTX_EVENTS VALUES (?,?,?,?,?,?,?)", row)
                launch = (start - 40_000, start - 38_000, tid, correlation, 9)
                base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,?)", launch)
                kernel = (start, start + 1000 * us, rank, 1, 20, correlation, process, 1, 1, CHANNELS, 1, 1)
                base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", kernel)
            for k in range(20 if compute else 0):
                start = began + 100_000 * k
                kernel = (start, start + 90_000, rank, 1, 7, 0, process, 2, 2, 132, 1, 1)
                base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", kernel)
    base.commit()
    base.close()
    return path


def chakra(folder, ranks=(0, 1)):
    """What :func:`write` makes of the same job: files ``rank.N.et``."""
    found = Imported()
    for rank in ranks:
        for step in range(N_STEPS):
            for func, n_bytes, at, us in STEP:
                start = BASE + 1000 * (step * STEP_US + at)
                row = {"comm_id": 7, "rank": rank, "pid": rank, "func": func, "n_bytes": n_bytes, "n_ranks": N_RANKS}
                times = {"enqueue_ns": start, "start_ns": start, "end_ns": start + 1000 * us}
                found.events.append({**row, **times, "step": step})
    assert {func for func, *_ in STEP} <= set(FUNCS)
    return write(SimpleNamespace(events=found.frames()[0], folder=folder), folder)

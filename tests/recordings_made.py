"""Small recordings of a known job in formats whose tools are not here, written after their public descriptions."""

import json
import sqlite3

BASE = 1_763_719_000_000_000_000
#: One step of a ZeRO-3 job: (func, whole bytes, us from the step's begin, us).
STEP = [("all_gather", 64 << 20, 100, 400), ("all_gather", 64 << 20, 700, 410), ("reduce_scatter", 64 << 20, 1500, 500)]
STEP_US, N_RANKS, N_STEPS, CHANNELS = 3000, 16, 6, 16
NCCL_NAMES = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter"}


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

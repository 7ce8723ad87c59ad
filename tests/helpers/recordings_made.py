"""A small recording of a known job, as PyTorch's profiler and other tools write it on GPUs."""

import json
import pickle
import sqlite3
from contextlib import closing

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


# The same job as other tools record it, each after its published schema ----------------------------------------------

COMM = 0xE62DEDAA97644A
NCCL_NAMES = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter"}


def calls():
    """(step, func, whole bytes, ns of the host's call, ns of the kernel's begin, its end), in order."""
    for step in range(N_STEPS):
        for func, n_bytes, at, us in STEP:
            start = BASE + 1000 * (step * STEP_US + at)
            yield step, func, n_bytes, start - 60_000, start, start + 1000 * us


def nsys(path, steps=True, payloads=True, ranks=(0, 1), told_ranks=True):
    """One export of the processes of these ranks, with the tables and columns that NVIDIA documents."""
    strings = {}

    def text(value):
        return strings.setdefault(value, len(strings) + 1)

    ranges, kernels, launches = [], [], []
    for rank in ranks:
        pid = (500 + rank) << 24
        tid = pid + 1
        made = {"NCCL communicator ID": COMM, "No. of ranks": N_RANKS, "Rank": rank, "CUDA device": rank}
        if told_ranks:
            ranges.append((BASE - 9000, BASE - 1000, text("ncclCommInitRank"), None, tid, json.dumps(made)))
        for step in range(N_STEPS if steps else 0):
            begin = BASE + 1000 * step * STEP_US
            ranges.append((begin, begin + 1000 * STEP_US, None, f"step {step}", tid, None))
        for number, (_, func, n_bytes, asked, start, end) in enumerate(calls()):
            told = {"NCCL communicator ID": COMM, "Message size [bytes]": n_bytes // N_RANKS}
            payload = json.dumps(told) if payloads else None
            ranges.append((asked, asked + 5000, text(f"nccl{NCCL_NAMES[func]}"), None, tid, payload))
            name = text("ncclDevKernel_Generic")
            kernels.append((start, end, pid, rank, name, CHANNELS, number))
            launches.append((asked + 1000, asked + 3000, tid, number))
            kernels.append((end, end + 20_000, pid, rank, text("gemm"), 132, 100_000 + number))
    with closing(sqlite3.connect(path)) as base:
        base.executescript(
            """CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
            CREATE TABLE NVTX_EVENTS (start INT, end INT, textId INT, text TEXT, globalTid INT, jsonText TEXT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, globalPid INT, deviceId INT, shortName INT,
                gridX INT, gridY INT DEFAULT 1, gridZ INT DEFAULT 1, correlationId INT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT, correlationId INT);"""
        )
        base.executemany("INSERT INTO StringIds VALUES (?, ?)", [(n, value) for value, n in strings.items()])
        base.executemany("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)", ranges)
        columns = "start, end, globalPid, deviceId, shortName, gridX, correlationId"
        kernel_row = f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)"
        base.executemany(kernel_row, kernels)
        base.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?)", launches)
        base.commit()
    return path


def inspector(folder, verbose=True):
    """Two logs of the Inspector, format v4.0, as its README shows them."""
    folder.mkdir()
    for rank in (0, 1):
        lines = []
        for seq, (_, func, n_bytes, asked, start, end) in enumerate(calls()):
            header = {"id": hex(COMM), "rank": rank, "n_ranks": N_RANKS, "nnodes": 2}
            metadata = {"inspector_output_format_version": "v4.0", "dump_timestamp_us": BASE // 1000}
            metadata |= {"hostname": "node7", "pid": 500 + rank}
            perf = {"coll": NCCL_NAMES[func], "coll_sn": seq, "coll_msg_size_bytes": n_bytes // N_RANKS}
            perf |= {"coll_exec_time_us": (end - start) // 1000, "coll_timing_source": "kernel_gpu"}
            if verbose:
                channel = {"kernel_start_ts": start // 1000, "kernel_stop_ts": end // 1000}
                channels = [{"channel_id": n, **channel} for n in range(CHANNELS)]
                perf["event_trace_ts"] = {"coll_start_ts": asked // 1000, "kernel_events": channels}
            lines.append(json.dumps({"header": header, "metadata": metadata, "coll_perf": perf}))
        (folder / f"node7-pid{500 + rank}.log").write_text("\n".join(lines) + "\n")
    return folder


#: How three generations of NCCL log what they chose for a call: function's name, bytes -> lines.
CHOICES = {
    "numbers": lambda name, n_bytes: [f"{n_bytes} Bytes -> Algo 1 proto 1 time 123.4"],
    "names": lambda name, n_bytes: [
        f"{name}: {n_bytes} Bytes -> Algo RING proto LL128 channel{{Lo..Hi}}={{0..{CHANNELS - 1}}}"
    ],
    "cost model": lambda name, n_bytes: [
        f"Input: {{ .comm = 0x55, .tuningMask = 0x1fffff, .func = {name}, .redOp = 0, .devRedop = 0, .dataType = 9, "
        f".nBytes = {n_bytes}, .numPipesOps = 1, .count = 1, .countMax = 1, .nWorks = 1, .winRegType = 0, "
        ".regBuff = 0 }",
        "Best tuning { .id = 4, .valid = 1, timeUs = 123.400000, .algo = RING, .proto = LL128, .symKernelId = Count, "
        f".ceMethodId = 0, nChannels = {CHANNELS}, maxChannels = 24, nWarps = 16, forced = 0 }}",
    ],
}


def nccl_log(path, choices="names", prefix=""):
    """The log of two ranks in one file, between lines of the job itself."""
    lines = ["step 0 loss 11.2", "node7:500:500 [0] NCCL INFO NCCL version 2.28.9+cuda12.9"]
    for rank in (0, 1):
        who = f"{prefix}node7:{500 + rank}:{600 + rank} [{rank}] NCCL INFO "
        init = f"ncclCommInitRankConfig comm 0x55{rank} rank {rank} nranks {N_RANKS} cudaDev {rank} nvmlDev {rank} "
        lines.append(f"{who}{init}busId 1b000 commId {COMM:#x} - Init START")
        lines.append(
            f"{who}comm 0x55{rank} rank {rank} nRanks {N_RANKS} nNodes 2 localRanks 8 localRank {rank}"
        )
    for count, (step, func, n_bytes, *_) in enumerate(calls()):
        for rank in (0, 1):
            who = f"{prefix}node7:{500 + rank}:{600 + rank} [{rank}] NCCL INFO "
            name = NCCL_NAMES[func]
            where = "sendbuff 0x7f00 recvbuff 0x7f01"
            elements = n_bytes // 2 // N_RANKS
            said = f"count {elements} datatype 9 op 0 root 0 comm 0x55{rank} [nranks={N_RANKS}] stream 0x5"
            lines.append(f"{who}{name}: opCount {count:x} {where} {said}")
            lines += [who + line for line in CHOICES[choices](name, n_bytes)]
        lines.append(f"step {step} is done")
    path.write_text("\n".join(lines) + "\n")
    return path


def flight(folder, pickled=True, timing=False):
    """Two dumps of the Flight Recorder, version 2.10 of its format, named as PyTorch names them."""
    folder.mkdir()
    for rank in (0, 1):
        entries = []
        for number, (_, func, n_bytes, asked, start, end) in enumerate(calls()):
            whole, part = [[n_bytes // 2]], [[n_bytes // 2 // N_RANKS]]
            sizes = (part, whole) if func == "all_gather" else (whole, part)
            entry = {"record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"), "is_p2p": False}
            entry |= {"collective_seq_id": number + 1, "p2p_seq_id": 0, "op_id": number + 1}
            entry |= {
                "profiling_name": f"nccl:_{func}_base",
                "time_created_ns": asked + rank,
                "state": "completed",
            }
            entry |= {"input_sizes": sizes[0], "output_sizes": sizes[1], "input_dtypes": ["BFloat16"]}
            entry |= {"output_dtypes": ["BFloat16"], "retired": True, "timeout_ms": 600000}
            if timing:
                entry |= {"duration_ms": (end - start) / 1e6, "time_discovered_completed_ns": end}
            entries.append(entry)
        groups = {"0": {"name": "0", "desc": "default_pg", "ranks": str([*range(N_RANKS)])}}
        dump = {"version": "2.10", "nccl_version": "2.28.9", "pg_config": groups, "entries": entries}
        data = pickle.dumps(dump) if pickled else json.dumps(dump).encode()
        (folder / f"nccl_trace_rank_{rank}").write_bytes(data)
    return folder


#: Name -> (format, made in an empty folder, what it knows: steps, times, choice).
MADE = {
    "kineto": ("kineto", lambda d: kineto(d / "r"), "steps times"),
    "nsys": ("nsys", lambda d: nsys(d / "r.sqlite"), "steps times"),
    "inspector verbose": ("inspector", lambda d: inspector(d / "r"), "times"),
    "inspector": ("inspector", lambda d: inspector(d / "r", verbose=False), "times"),
    "log of numbers": ("nccl-log", lambda d: nccl_log(d / "r", "numbers"), "choice"),
    "log of names": ("nccl-log", lambda d: nccl_log(d / "r", "names"), "choice channels"),
    "log of the cost model": ("nccl-log", lambda d: nccl_log(d / "r", "cost model"), "choice channels"),
    "log with times": (
        "nccl-log",
        lambda d: nccl_log(d / "r", prefix="[2026-11-26 12:00:00] "),
        "choice channels",
    ),
    "pickle": ("flight-recorder", lambda d: flight(d / "r"), ""),
    "pickle with times": ("flight-recorder", lambda d: flight(d / "r", timing=True), "times"),
    "flight json": ("flight-recorder", lambda d: flight(d / "r", pickled=False), ""),
}

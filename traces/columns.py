"""The columns of a trace's tables: what each file of a trace holds."""

from __future__ import annotations

#: Columns of a table and their pandas types.
Columns = dict[str, str]

#: Columns of an events table and their pandas types. Times in ns; `start_ns` / `end_ns` are the GPU's clock
#: and unset (NA) where the kernel was not sampled; `n_ranks` is 0 if the communicator was never announced;
#: `captured`: into a CUDA graph, so this stands for all its replays (known of sampled steps, from NCCL 2.28 on);
#: `asked_bytes`: what NCCL asked the tuner about, the whole group's bytes where it was grouped; 0 = not asked, unknown.
EVENT_COLUMNS: Columns = {
    "seq": "int64",
    "comm_id": "uint64",
    "rank": "int32",
    "n_ranks": "int32",
    "n_nodes": "int32",
    "func": "str",
    "n_bytes": "int64",
    "dtype": "str",
    "algo": "str",
    "proto": "str",
    "n_channels": "int16",
    "table_generation": "int64",
    "enqueue_ns": "int64",
    "start_ns": "Int64",
    "end_ns": "Int64",
    "step": "int64",
    "pid": "int64",
    "captured": "bool",
    "asked_bytes": "int64",
}
#: Columns of a steps table. Memory in bytes, 0 = unknown. ``sampled``: kernel times were taken in this step, one of
#: ``sample_every``.
STEP_COLUMNS: Columns = {
    "index": "int64",
    "rank": "int32",
    "end_ns": "int64",
    "duration_ns": "int64",
    "table_generation": "int64",
    "memory_used": "int64",
    "memory_total": "int64",
    "pid": "int64",
    "sampled": "bool",
    "sample_every": "int64",
}
#: What NCCL offered: one row per (comm_id, func, n_bytes); `cost_us` is the (7, 3) cost table, flat, -1 = not
#: available; `algo`, `proto` are NCCL's own choice.
OFFER_COLUMNS: Columns = {
    "comm_id": "uint64",
    "func": "str",
    "n_bytes": "int64",
    "algo": "str",
    "proto": "str",
    "n_pipe_ops": "int32",
    "cost_us": "object",
}
#: One row per communicator and process.
COMM_COLUMNS: Columns = {
    "comm_id": "uint64",
    "n_ranks": "int32",
    "n_nodes": "int32",
    "name": "str",
    "rank": "int32",
    "pid": "int64",
}
#: What a profile of another tool shows beside the collectives: when kernels computed.
COMPUTE_COLUMNS: Columns = {"rank": "int32", "start_ns": "int64", "end_ns": "int64"}

#: When a process stood still for a sampled collective: it computed nothing. Only emulated jobs tell.
WAIT_COLUMNS: Columns = {"pid": "int64", "start_ns": "int64", "end_ns": "int64"}

"""Names of collectives, algorithms and protocols, as Python says them, and the columns of a trace's tables.

The tuples are ordered so that the index *is* NCCL's number (ncclFunc_t, NCCL_ALGO_*, NCCL_PROTO_*; stable from NCCL
2.24 to 2.32). Standard library only: the launcher reads this before the job starts.
"""

from __future__ import annotations

FUNCS = ("broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce", "send_recv", "send", "recv")
ALGOS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOS = ("ll", "ll128", "simple")

#: The collectives that a Decision may touch.
TUNED_FUNCS = ("all_gather", "reduce_scatter")
ALL_REDUCE = "all_reduce"
#: All that it may touch where the job's option has all_reduce tuned.
TUNABLE_FUNCS = (*TUNED_FUNCS, ALL_REDUCE)
#: What that option may say: settings of the algorithm that NCCL picks, or another algorithm too. "": not tuned.
ALL_REDUCE_WAYS = ("protocol", "algo")

#: Every (algo, proto) that any NCCL release offers for all_gather and reduce_scatter; the cost table says which of
#: them this communicator has (facts: tree, collnet_chain and nvls_tree are never in the table for these two).
PAIRS = (
    ("ring", "ll"),
    ("ring", "ll128"),
    ("ring", "simple"),
    ("nvls", "simple"),
    ("collnet_direct", "simple"),
    ("pat", "simple"),
)

#: The same places of all_reduce. NVLS, NVLS Tree and CollNet are left to NCCL. The fifth takes no channel count.
ALL_REDUCE_PAIRS = (*PAIRS[:3], ("tree", "ll128"), ("tree", "ll"), ("tree", "simple"))
#: By collective.
PAIRS_OF = dict.fromkeys(TUNED_FUNCS, PAIRS) | {ALL_REDUCE: ALL_REDUCE_PAIRS}

#: Channel counts that a Decision may ask for; 0 leaves the count to NCCL.
CHANNELS = (0, 1, 2, 4, 8, 16, 24, 32)

#: Bytes of one element of each type, and the names of ncclDataType_t by number, torch's spelling.
DTYPE_BYTES = {
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float16": 2,
    "float32": 4,
}
DTYPE_BYTES |= {"float64": 8, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
DTYPES = tuple(DTYPE_BYTES)


def tuned_funcs(all_reduce: str) -> tuple[str, ...]:
    """The collectives that are tuned under this value of the job's option."""
    return TUNABLE_FUNCS if all_reduce else TUNED_FUNCS


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

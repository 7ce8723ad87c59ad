"""Names of collectives, algorithms and protocols, as Python says them.

The tuples are ordered so that the index *is* NCCL's number (ncclFunc_t, NCCL_ALGO_*, NCCL_PROTO_*; stable from NCCL
2.24 to 2.32). Standard library only: the launcher reads this before the job starts.
"""

from __future__ import annotations

FUNCS = ("broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce", "send_recv", "send", "recv")
ALGOS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOS = ("ll", "ll128", "simple")

#: The collectives that a Decision may touch.
TUNED_FUNCS = ("all_gather", "reduce_scatter")

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

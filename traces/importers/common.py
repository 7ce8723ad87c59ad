"""What importers share: names of collectives and types as others write them, and rows that become a trace."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from ..assemble import COMPUTE_COLUMNS, DTYPE_BYTES, EVENT_COLUMNS, complete, empty, joined
from .steps import step_rows

#: PyTorch's names of types that are not ours.
_ALIASES = {"char": "int8", "byte": "uint8", "bool": "uint8", "int": "int32", "long": "int64"}
_ALIASES |= {"half": "float16", "float": "float32", "double": "float64"}

#: What a row of events has where its source does not tell.
_UNKNOWN: dict[str, Any] = {"n_ranks": 0, "n_nodes": 0, "dtype": "unknown", "algo": "unknown", "proto": "unknown"}
_UNKNOWN |= {"n_channels": 0, "table_generation": 0, "enqueue_ns": 0, "step": 0, "pid": 0, "seq": None}
_UNKNOWN |= {"start_ns": None, "end_ns": None}


@dataclass
class Imported:
    """What one importer found: rows of EVENT_COLUMNS and STEP_COLUMNS, facts for the header, remarks for people.

    An event row needs ``comm_id, rank, func, n_bytes``; the rest has defaults. Without a ``seq`` it is counted, per
    rank, communicator and func, in the order of ``enqueue_ns``.
    """

    events: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    header: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    groups: dict[int, tuple[int, ...]] = field(default_factory=dict)  # comm_id -> ranks, () where not told
    computes: list[pd.DataFrame] = field(default_factory=list)  # parts of COMPUTE_COLUMNS

    def add_compute(self, rank: int, start_ns: Any, end_ns: Any) -> None:
        """Kernels of one rank that compute: begins and ends, (n,) each."""
        part = pd.DataFrame({"rank": rank, "start_ns": start_ns, "end_ns": end_ns})
        self.computes.append(part.astype(COMPUTE_COLUMNS))

    def frames(self, ranks_per_node: int | None = None) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
        """Events, steps and compute; ``ranks_per_node`` tells the number of nodes, which no source does."""
        steps, compute = step_rows(self.steps), joined(self.computes, COMPUTE_COLUMNS)
        if not self.events:
            return empty(EVENT_COLUMNS), steps, compute
        # As objects: a column with gaps must not become float64, clock values have more digits than that.
        events = pd.DataFrame([{**_UNKNOWN, **row} for row in self.events], dtype=object)
        events = events.sort_values("enqueue_ns", kind="stable").reset_index(drop=True)
        counted = events.groupby(["rank", "pid", "comm_id", "func"], sort=False).cumcount()
        events["seq"] = events["seq"].where(events["seq"].notna(), counted)
        if ranks_per_node:
            sizes = events[["comm_id", "n_ranks"]].drop_duplicates("comm_id").itertuples(index=False)
            nodes = {c: len({r // ranks_per_node for r in self.groups.get(c) or range(n)}) for c, n in sizes}
            events["n_nodes"] = events["comm_id"].map(nodes)
        return complete(events, EVENT_COLUMNS), steps, compute


def func_of(name: str) -> str | None:
    """A collective's name as PyTorch or NCCL writes it -> one of FUNCS; None if it is none of them.

    ``_allgather_base``, ``AllGather`` and ``nccl:_all_gather_base`` are all ``all_gather``.
    """
    text = re.sub(r"[^a-z]", "", name.lower().rpartition(":")[2])
    for func in ("reduce_scatter", "all_gather", "all_reduce", "send_recv", "broadcast", "reduce", "send", "recv"):
        if text.startswith(func.replace("_", "")):
            return func
    return None


def dtype_of(name: str) -> str:
    """A type's name as PyTorch or NCCL writes it -> ours; 'unknown' if NCCL has none such: its counts are bytes."""
    plain = name.lower().removeprefix("torch.").removeprefix("nccl")
    plain = _ALIASES.get(plain, plain)
    return plain if plain in DTYPE_BYTES else "unknown"


def comm_id_of(*parts: Any) -> int:
    """A 64-bit id for a communicator that the source names instead of numbering; the same on every rank."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def ranks_of(value: Any) -> tuple[int, ...]:
    """The ranks of a process group as PyTorch writes them: a list, or its text; () where they end in "..."."""
    if isinstance(value, str):
        value = value.strip("[]() ").split(",") if re.fullmatch(r"[\[(]?[\d, ]*[\])]?", value.strip()) else ()
    return tuple(int(r) for r in value if str(r).strip()) if isinstance(value, list | tuple) else ()


def rank_in_name(path: Path, otherwise: Any = None) -> Any:
    """The rank in a file's name (``trace_rank_3.json``, ``nccl_trace_rank_12``), ``otherwise`` if it tells none."""
    found = re.search(r"rank[-_.]?(\d+)", path.name) or re.search(r"(\d+)(?:\.\w+)*$", path.name)
    return int(found[1]) if found else otherwise

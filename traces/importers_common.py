"""What importers share: names of collectives and types as others write them, and rows that become a trace."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from .assemble import DTYPE_BYTES, EVENT_COLUMNS, complete, empty
from .files import COMPUTE_COLUMNS
from .importers_steps import step_rows
from .records import FUNCS

Array = np.ndarray[Any, Any]

_TYPES = {
    "int8": ("char", "int8", "i8"),
    "uint8": ("byte", "uint8", "u8", "bool"),
    "int32": ("int", "int32", "i32"),
    "uint32": ("uint32", "u32"),
    "int64": ("long", "long int", "int64", "i64"),
    "uint64": ("uint64", "u64"),
    "float16": ("half", "float16", "f16"),
    "float32": ("float", "float32", "f32"),
    "float64": ("double", "float64", "f64"),
    "bfloat16": ("bfloat16", "bf16"),
    "float8_e4m3fn": ("float8_e4m3fn", "float8e4m3", "f8e4m3"),
    "float8_e5m2": ("float8_e5m2", "float8e5m2", "f8e5m2"),
}
_TYPE_OF = {alias: name for name, aliases in _TYPES.items() for alias in aliases}


class Compute:
    """Kernels that compute, column by column: a profile has hundreds of thousands of them."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self._parts: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return sum(len(part["start_ns"]) for part in self._parts)

    def add(self, rank: int, start_ns: Array, end_ns: Array, name: Array, blocks: Array, stream: Array) -> None:
        """Kernels of one rank, arrays (n,); ``name`` is the number of a name in :attr:`names`."""
        part = {"rank": np.full(len(start_ns), rank), "start_ns": start_ns, "end_ns": end_ns, "blocks": blocks}
        self._parts.append({**part, "stream": stream, "name": name})

    def frame(self) -> pd.DataFrame:
        """All of them, as COMPUTE_COLUMNS."""
        if not self._parts:
            return empty(COMPUTE_COLUMNS)
        columns = {key: np.concatenate([part[key] for part in self._parts]) for key in self._parts[0]}
        name = pd.Categorical.from_codes(columns["name"], dtype=pd.CategoricalDtype(list(self.names)))
        return pd.DataFrame({**columns, "name": name})[list(COMPUTE_COLUMNS)]


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
    compute: Compute = field(default_factory=lambda: Compute())

    def frames(self, ranks_per_node: int | None = None) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Events and steps as tables; ``ranks_per_node`` tells the number of nodes where the source does not."""
        blank: dict[str, Any] = {"n_ranks": 0, "n_nodes": 0, "dtype": "unknown", "algo": "unknown", "proto": "unknown"}
        blank |= {"n_channels": 0, "table_generation": 0, "enqueue_ns": 0, "step": 0, "pid": 0, "seq": None}
        blank |= {"start_ns": None, "end_ns": None}
        events = empty(EVENT_COLUMNS)
        if self.events:
            # Through objects: a column with gaps must not become float64, clock values have more digits than that.
            rows = [{**blank, **row} for row in self.events]
            told = [name for name in EVENT_COLUMNS if name in rows[0]]
            events = pd.DataFrame({n: pd.Series([r[n] for r in rows], dtype=object) for n in told})
            events = events.sort_values("enqueue_ns", kind="stable").reset_index(drop=True)
            counted = events.groupby(["rank", "pid", "comm_id", "func"], sort=False).cumcount()
            events["seq"] = events["seq"].where(events["seq"].notna(), counted)
            if ranks_per_node:
                nodes = [
                    len({rank // ranks_per_node for rank in self.groups.get(comm_id) or range(n)})
                    for comm_id, n in zip(events["comm_id"], events["n_ranks"], strict=True)
                ]
                events["n_nodes"] = events["n_nodes"].where(events["n_nodes"] > 0, pd.Series(nodes, dtype=object))
            events = complete(events, EVENT_COLUMNS)
        return events, step_rows(self.steps)


def func_of(name: str) -> str | None:
    """A collective's name as PyTorch or NCCL writes it -> one of FUNCS; None if it is none of them.

    ``_allgather_base``, ``AllGather`` and ``nccl:_all_gather_base`` are all ``all_gather``.
    """
    text = re.sub(r"[^a-z]", "", name.lower().rpartition(":")[2])
    for func in ("reduce_scatter", "all_gather", "all_reduce", "send_recv", "broadcast", "reduce", "send", "recv"):
        if text.startswith(func.replace("_", "")) and func in FUNCS:
            return func
    return None


def dtype_of(name: str) -> str:
    """A type's name as PyTorch or NCCL writes it -> ours; 'unknown' if it is no type of NCCL's."""
    return _TYPE_OF.get(name.lower().removeprefix("torch.").removeprefix("nccl").removeprefix("c10::"), "unknown")


def width_of(dtype: str) -> int:
    """Bytes of one element of one of our types; 1 for 'unknown', whose counts are then taken for bytes."""
    return DTYPE_BYTES.get(dtype, 1)


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

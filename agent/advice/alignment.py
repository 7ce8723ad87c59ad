"""Messages that NCCL moves slowly because a rank's part of them is no multiple of 16 bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from ...traces.files import Trace
from ...traces.names import DTYPE_BYTES
from ...traces.records import TUNED_FUNCS, Slot, size_class

#: NCCL loads and stores so many bytes at once; parts that do not divide by it take a slow path with Simple and LL128
#: (pytorch#195450, nccl#413, DeepSpeed#1564; in horovod#3727 a call of 6,294,530 bytes took over 7 ms, one of 6,292,992
#: under 2 ms).
ALIGNMENT = 16


@dataclass(frozen=True)
class Misaligned:
    """Calls of one size whose bytes per rank are no multiple of ALIGNMENT, and the padding that cures it."""

    slot: str
    func: str
    n_ranks: int
    bytes_per_rank: int
    calls: int
    pad_bytes: int
    pad_elements: int | None  # None where elements of the type cannot fill it, or the type is not known
    dtype: str

    def __str__(self) -> str:
        pad = f"{self.pad_bytes} bytes"
        if self.pad_elements:
            pad += f" ({self.pad_elements} of {self.dtype})"
        return (
            f"{self.slot}: {self.bytes_per_rank:,} bytes a rank are no multiple of {ALIGNMENT}, which Simple and LL128 "
            f"move slowly (pytorch#195450, nccl#413). Pad each rank's part by {pad}"
        )


def misaligned(trace: Trace) -> list[Misaligned]:
    """The sizes of all_gather and reduce_scatter that padding would speed up, those of most bytes first."""
    events = trace.events
    tuned = events[events["func"].isin(TUNED_FUNCS) & (events["n_ranks"] > 1)]
    found = []
    keys = ["func", "n_ranks", "n_nodes", "n_bytes", "dtype"]
    for key, calls in tuned.groupby(keys):
        part = _part(key, calls)
        if part is not None:
            found.append(part)
    return sorted(found, key=lambda one: one.bytes_per_rank * one.calls, reverse=True)


def _part(key: Any, calls: pd.DataFrame) -> Misaligned | None:
    """The calls of one size, None where they need no padding."""
    func, n_ranks, n_nodes, n_bytes, dtype = key
    per_rank = -(-int(n_bytes) // int(n_ranks))
    pad = -per_rank % ALIGNMENT
    if not pad:
        return None
    width = DTYPE_BYTES.get(dtype)
    elements = pad // width if width and pad % width == 0 else None
    slot = Slot(int(n_ranks), int(n_nodes), func, size_class(int(n_bytes)))
    return Misaligned(str(slot), func, int(n_ranks), per_rank, len(calls), pad, elements, dtype)


def as_dicts(found: list[Misaligned]) -> list[dict[str, Any]]:
    """For JSON."""
    return [asdict(one) for one in found]

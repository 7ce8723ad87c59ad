"""Which row of a collective a kernel's record belongs to, and the row's times from it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

#: In place of a time that is not known yet.
NO_TIME = np.iinfo(np.int64).min
_LATEST = np.iinfo(np.int64).max
#: What tells a call from all others of its process.
CALL = ("comm_id", "rank", "func", "seq")
_MIX = np.uint64(0x9E3779B97F4A7C15)
_29, _32 = np.uint64(29), np.uint64(32)


def newest_rows(rows: Array, kernels: Array, pids: Array) -> Array:
    """For each kernel the place of the row that it may belong to, (k,); one that belongs to none gets any place."""
    keys = _keys(rows, rows["pid"])
    wanted = _keys(kernels, pids)
    order = np.argsort(keys, kind="stable")
    in_order = keys[order]
    # 'right' - 1: the newest row, should a communicator have been made anew under its old id.
    place = np.searchsorted(in_order, wanted, side="right") - 1
    place = np.maximum(place, 0)
    return np.asarray(order[place])


def _keys(records: Array, pids: Array) -> Array:
    """A hash of each record's call, of its process, (n,)."""
    columns = [pids]
    for name in CALL:
        columns.append(records[name])
    return hash_of(columns)


def add_times(rows: Array, at: Array, kernels: Array) -> None:
    """Widen the times of the rows at these places, (k,), by the times of the kernels, (k,)."""
    start = rows["start_ns"]
    end = rows["end_ns"]
    is_new = start[at] == NO_TIME
    start[at[is_new]] = _LATEST
    np.minimum.at(start, at, kernels["start_ns"])
    np.maximum.at(end, at, kernels["end_ns"])


def hash_of(columns: Iterable[Array]) -> Array:
    """64-bit hash of each row of whole-number columns (n,), shape (n,): numbers sort far faster than records."""
    key: Any = np.uint64(0)
    for column in columns:
        key = key ^ (key >> _29)
        key = key ^ column.astype(np.uint64)
        key = key * _MIX
        key = key ^ (key >> _32)
    return np.asarray(key)

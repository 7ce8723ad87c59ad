"""The collectives of one step of real training jobs: which slots they have, and how often each is called.

``streams.csv`` counts every call of one step: dry runs of public models under our ZeRO engine and PyTorch's FSDP2, and
public recordings of DeepSpeed (aliyun/aicb). ``tests/make_streams.py`` makes it anew.
"""

from __future__ import annotations

import csv
import functools
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...traces.records import TUNED_FUNCS, size_class

Array = np.ndarray[Any, Any]

#: Slots kept of a stream: the ones that move most.
KEPT = 6
_FILE = Path(__file__).with_name("streams.csv")


@dataclass(frozen=True)
class Streams:
    """All streams as arrays (n_streams, KEPT); unused places have no calls."""

    names: tuple[str, ...]
    is_reduce_scatter: Array  # bool
    n_bytes: Array  # of a typical call, before padding to the ranks
    calls: Array  # per step


def counts(path: Path = _FILE) -> dict[str, dict[tuple[str, int], int]]:
    """Calls of each (func, bytes) in one step, by stream. Raises ValueError when the file is not such a table."""
    found: dict[str, dict[tuple[str, int], int]] = defaultdict(dict)
    lines = (line for line in path.read_text().splitlines() if not line.startswith("#"))
    for row in csv.DictReader(lines):
        try:
            found[row["stream"]][row["func"], int(row["n_bytes"])] = int(row["calls"])
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{path}: rows need stream, func, n_bytes, calls; found {row}") from None
    return dict(found)


@functools.cache
def streams() -> Streams:
    """The shipped streams, read-only."""
    counted = counts()
    shape = len(counted), KEPT
    is_rs, n_bytes, calls = np.zeros(shape, bool), np.full(shape, 1024, np.int64), np.zeros(shape)
    for row, step in enumerate(counted.values()):
        slots: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
        for (func, size), n in step.items():
            slots[func, size_class(size)].append((size, n))
        moved = sorted(slots.items(), key=lambda item: -sum(size * n for size, n in item[1]))
        for column, ((func, _), sizes) in enumerate(moved[:KEPT]):
            is_rs[row, column] = func == TUNED_FUNCS[1]
            n_bytes[row, column] = max(sizes, key=lambda s: s[0] * s[1])[0]
            calls[row, column] = sum(n for _, n in sizes)
    for array in (is_rs, n_bytes, calls):
        array.flags.writeable = False
    return Streams(tuple(counted), is_rs, n_bytes, calls)

"""Compute beside collectives, from a profile that shows both: what of a collective's time is exposed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

Array = np.ndarray[Any, Any]


def exposed_ns(events: pd.DataFrame, compute: pd.DataFrame) -> pd.Series[float]:
    """Of each event the ns in which its rank computes nothing; NaN where it has no times or its rank no kernels."""
    left = pd.Series(np.nan, index=events.index)
    for rank, kernels in compute.groupby("rank"):
        mine = events[(events["rank"] == rank) & events["start_ns"].notna()]
        start, end = (mine[c].astype("int64").to_numpy() for c in ("start_ns", "end_ns"))
        busy = _covered(*_union(kernels), end) - _covered(*_union(kernels), start)
        left.loc[mine.index] = (end - start) - busy
    return left


def _union(rows: pd.DataFrame) -> tuple[Array, Array]:
    """Begins and ends of the stretches that ``start_ns`` .. ``end_ns`` of the rows cover together, in order."""
    rows = rows.sort_values("start_ns")
    start, end = rows["start_ns"].astype("int64").to_numpy(), rows["end_ns"].astype("int64").to_numpy()
    reach = np.maximum.accumulate(end)
    first = np.flatnonzero(np.concatenate([[True], start[1:] > reach[:-1]]))
    return start[first], reach[np.concatenate([first[1:] - 1, [len(start) - 1]])]


def _covered(start: Array, end: Array, at: Array) -> Array:
    """How much of the stretches lies before each time of ``at``."""
    before = np.concatenate([[0], np.cumsum(end - start)])
    i = np.searchsorted(start, at, side="right")
    beyond = np.where(i > 0, np.maximum(end[np.maximum(i - 1, 0)] - at, 0), 0)
    return np.asarray(before[i] - beyond)

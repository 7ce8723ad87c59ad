"""How long a collective took without the wait for the last rank, and in what part of it nothing was computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

Array = np.ndarray[Any, Any]

#: How a duration was found. RANKS: from the latest start to the latest stop over all ranks of the communicator.
#: OWN: from the rank's own start to its own stop, waiting for later ranks included.
RANKS, OWN = "all ranks", "own start"

_CALL = ["comm_id", "func", "seq", "step", "table_generation"]
#: Collectives in which no rank can be through before every rank has begun.
_TOGETHER = ("all_gather", "reduce_scatter", "all_reduce")


def durations(events: pd.DataFrame) -> pd.DataFrame:
    """Microseconds of each event and how they were found: columns ``us`` (float64, NaN = not sampled) and ``timed_by``.

    The index is that of ``events``. RANKS needs the kernel times of every rank of the communicator, from one clock.
    A trace holds the events of one host, whose GPUs' clocks agree as far as their driver sets them; where a rank seems
    to have stopped before another began they do not, and each rank's own start counts.
    """
    # From the first start on: clock values have more digits than a float64 holds.
    start, end = ((events[n] - events["start_ns"].min()).astype("float64") for n in ("start_ns", "end_ns"))
    found = pd.DataFrame({"us": (end - start) / 1e3, "timed_by": OWN}, index=events.index).astype(
        {"timed_by": object}
    )
    columns = [*_CALL, "rank", "n_ranks"]
    timed = events[columns].assign(start=start, end=end)[found["us"].notna()]
    calls = timed.groupby(_CALL, sort=False)
    last_start = calls["start"].transform("max")
    whole = timed["func"].isin(_TOGETHER) & (calls["end"].transform("min") >= last_start)
    for count in ("nunique", "size"):  # of each rank one event
        whole &= calls["rank"].transform(count) == timed["n_ranks"]
    us = (calls["end"].transform("max") - last_start) / 1e3
    found.loc[timed.index[whole], "us"] = us[whole]
    found.loc[timed.index[whole], "timed_by"] = RANKS
    return found


def label(timed_by: pd.Series[str]) -> str:
    """How the sampled events of a slot were timed, for people: one of the two, or the share of the first."""
    share = float((timed_by == RANKS).mean()) if len(timed_by) else 0.0
    return RANKS if share == 1 else OWN if share == 0 else f"{RANKS} {share:.0%}"


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

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

    Index: that of ``events``. RANKS needs the kernel times of every rank of the communicator, from one clock: one
    host's GPUs agree as far as their driver sets them. Where a rank seems to stop before another began, each rank's own
    start counts.
    """
    # From the first start on: clock values have more digits than a float64 holds.
    zero = events["start_ns"].min()
    start = _since(zero, events["start_ns"])
    end = _since(zero, events["end_ns"])
    us = (end - start) / 1e3
    found = pd.DataFrame({"us": us})
    found["timed_by"] = OWN
    found["timed_by"] = found["timed_by"].astype(object)
    columns = [*_CALL, "rank", "n_ranks"]
    timed = events[columns].assign(start=start, end=end)
    timed = timed[us.notna()]
    calls = timed.groupby(_CALL, sort=False)
    last_start = calls["start"].transform("max")
    last_end = calls["end"].transform("max")
    first_end = calls["end"].transform("min")
    whole = timed["func"].isin(_TOGETHER) & (first_end >= last_start)
    for count in ("nunique", "size"):  # of each rank one event
        whole &= calls["rank"].transform(count) == timed["n_ranks"]
    together_us = (last_end - last_start) / 1e3
    rows = timed.index[whole]
    found.loc[rows, "us"] = together_us[whole]
    found.loc[rows, "timed_by"] = RANKS
    return found


def label(timed_by: pd.Series[str]) -> str:
    """How the sampled events of a slot were timed, for people: one of the two, or the share of the first."""
    share = 0.0
    if len(timed_by):
        share = float((timed_by == RANKS).mean())
    if share == 1:
        return RANKS
    return OWN if share == 0 else f"{RANKS} {share:.0%}"


def exposed_ns(events: pd.DataFrame, compute: pd.DataFrame) -> pd.Series[float]:
    """Of each event the ns in which its rank computes nothing; NaN where it has no times or its rank no kernels."""
    busy = covered_ns(events, compute, "rank")
    lasts = (events["end_ns"] - events["start_ns"]).astype("float64")
    return lasts - busy


def covered_ns(events: pd.DataFrame, stretches: pd.DataFrame, by: str) -> pd.Series[float]:
    """Of each event the ns that ``stretches`` (``start_ns``, ``end_ns``) of the same ``by`` (rank, process) cover; NaN
    where the event has no times, or there is no stretch."""
    found = pd.Series(np.nan, index=events.index)
    timed = events[events["start_ns"].notna()]
    for key, mine_only in stretches.groupby(by):
        mine = timed[timed[by] == key]
        begins, ends = _union(mine_only)
        starts_at = _times(mine, "start_ns")
        ends_at = _times(mine, "end_ns")
        until_end = _covered(begins, ends, ends_at)
        until_start = _covered(begins, ends, starts_at)
        found.loc[mine.index] = until_end - until_start
    return found


def merged(stretches: pd.DataFrame) -> pd.DataFrame:
    """The ``start_ns`` and ``end_ns`` that stretches of one rank cover together: what overlaps counts once."""
    found = stretches[["start_ns", "end_ns"]]
    if len(found):
        begins, ends = _union(found)
        found = pd.DataFrame({"start_ns": begins, "end_ns": ends})
    return found


def busy_ns(stretches: pd.DataFrame) -> int:
    """The ns in which one of these stretches runs; they are of one rank."""
    alone = merged(stretches)
    lasts = alone["end_ns"] - alone["start_ns"]
    return int(lasts.sum())


def _union(rows: pd.DataFrame) -> tuple[Array, Array]:
    """Begins and ends of the stretches that ``start_ns`` .. ``end_ns`` of the rows cover together, in order."""
    rows = rows.sort_values("start_ns")
    start = _times(rows, "start_ns")
    end = _times(rows, "end_ns")
    reach = np.maximum.accumulate(end)
    begins_anew = np.concatenate([[True], start[1:] > reach[:-1]])
    first = np.flatnonzero(begins_anew)
    last = np.append(first[1:] - 1, len(start) - 1)
    return start[first], reach[last]


def _times(rows: pd.DataFrame, column: str) -> Array:
    """A column of times in ns without gaps, (n,) int64."""
    return rows[column].astype("int64").to_numpy()


def _since(zero: Any, times: pd.Series[Any]) -> pd.Series[float]:
    """Times in ns from ``zero`` on; gaps become NaN."""
    return (times - zero).astype("float64")


def _covered(start: Array, end: Array, at: Array) -> Array:
    """How much of the stretches lies before each time of ``at``."""
    lasts = end - start
    so_far = np.cumsum(lasts)
    before = np.concatenate([[0], so_far])
    begun = np.searchsorted(start, at, side="right")
    last = np.maximum(begun - 1, 0)
    beyond = np.maximum(end[last] - at, 0)
    beyond[begun == 0] = 0
    return np.asarray(before[begun] - beyond)

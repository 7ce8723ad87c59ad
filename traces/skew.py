"""How long a collective really took: the wait of the early ranks for the last one is not the network's time."""

from __future__ import annotations

import numpy as np
import pandas as pd

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
    start, end = (
        events[name].astype("Float64").to_numpy(np.float64, na_value=np.nan) for name in ("start_ns", "end_ns")
    )
    # Clock values have more digits than a float64 holds; differences do not.
    base = int(events["start_ns"].min()) if events["start_ns"].notna().any() else 0
    for name, values in (("start_ns", start), ("end_ns", end)):
        timed = events[name].notna().to_numpy()
        values[timed] = events[name][timed].astype("int64").to_numpy() - base
    us, by = (end - start) / 1e3, np.full(len(events), OWN, object)
    timed = ~np.isnan(us)
    call = events.groupby(_CALL, sort=False).ngroup().to_numpy()
    n = int(call.max()) + 1 if len(call) else 0
    last_start, last_end, first_end = np.full(n, -np.inf), np.full(n, -np.inf), np.full(n, np.inf)
    np.maximum.at(last_start, call[timed], start[timed])
    np.maximum.at(last_end, call[timed], end[timed])
    np.minimum.at(first_end, call[timed], end[timed])
    ranks = pd.DataFrame({"call": call, "rank": events["rank"].to_numpy()})[timed].drop_duplicates()
    n_seen = np.bincount(ranks["call"], minlength=n)
    n_rows = np.bincount(call[timed], minlength=n)
    whole = (n_seen[call] == events["n_ranks"].to_numpy()) & (n_rows[call] == n_seen[call])
    whole &= timed & events["func"].isin(_TOGETHER).to_numpy() & (first_end[call] >= last_start[call])
    us[whole] = (last_end[call[whole]] - last_start[call[whole]]) / 1e3
    by[whole] = RANKS
    return pd.DataFrame({"us": us, "timed_by": by}, index=events.index)


def label(timed_by: pd.Series[str]) -> str:
    """How the sampled events of a slot were timed, for people: one of the two, or the share of the first."""
    share = float((timed_by == RANKS).mean()) if len(timed_by) else 0.0
    return RANKS if share == 1 else OWN if share == 0 else f"{RANKS} {share:.0%}"

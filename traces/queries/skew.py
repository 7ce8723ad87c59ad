"""How long a collective really took: the wait of the early ranks for the last one is not the network's time."""

from __future__ import annotations

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
    # From the first start on: clock values have more digits than a float64 holds.
    start, end = ((events[n] - events["start_ns"].min()).astype("float64") for n in ("start_ns", "end_ns"))
    found = pd.DataFrame({"us": (end - start) / 1e3, "timed_by": OWN}, index=events.index).astype({"timed_by": object})
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

"""Is a job held up by one rank? A kernel of a collective runs until all ranks have come: the last rank's is the
shortest, and takes what the network takes; by what the others' are longer they wait, which no algorithm gives back."""

from __future__ import annotations

import numpy as np

from ...traces.files import Trace

#: Waiting counts where it is over this part of the collectives' own time: hardly a setting makes them twice as fast.
MOST_SAVED = 0.5
#: One rank is to blame for it if it came last in calls that make this part of the waiting.
BLAMED = 0.6
#: Collectives below which nothing is said.
LEAST_CALLS = 30


#: What :func:`find` returns None for, in words.
TOO_FEW = (
    f"not known: this needs at least two ranks with the times of {LEAST_CALLS} collectives that both have run"
)


def find(trace: Trace) -> str | None:
    """A sentence about whom the ranks wait for; "" if they wait for nobody, None if too little is known."""
    events = trace.events
    of_all = events["func"].isin(("all_gather", "reduce_scatter", "all_reduce")) & (
        events["table_generation"] == 0
    )
    timed = events[of_all & events["start_ns"].notna() & events["end_ns"].notna()]
    lasted = (timed["end_ns"] - timed["start_ns"]).astype("float64")
    calls = (
        timed.assign(lasted=lasted).pivot_table("lasted", ["comm_id", "func", "seq", "step"], "rank").dropna()
    )
    if len(calls) < LEAST_CALLS or calls.shape[1] < 2:
        return None
    shortest = calls.min(axis=1)
    waited = calls.median(axis=1) - shortest
    blame = waited.groupby(calls.idxmin(axis=1)).sum() / max(float(waited.sum()), 1.0)
    if waited.sum() <= MOST_SAVED * shortest.sum():
        return ""
    n_steps = calls.index.get_level_values("step").nunique()
    step_ns = float(np.median(trace.steps["duration_ns"])) * n_steps
    part = waited.sum() / step_ns
    if blame.max() < BLAMED:
        return (
            f"ranks wait for each other in turn, {part:.0%} of the step, and no setting cures it: look for what delays "
            "single steps: data loading, garbage collection, other programs on the hosts"
        )
    return (
        f"the others wait for rank {blame.idxmax()}, {part:.0%} of the step: it is your fabric or a "
        "slow rank, not your algorithm, and no setting cures it: look at that rank's clocks, host and network card"
    )

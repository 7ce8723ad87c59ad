"""Is a job held up by one rank? A kernel of a collective runs until all ranks have come: the last rank's is the
shortest, and takes what the network takes; by what the others' are longer they wait, which no algorithm gives back."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ...traces.files import Trace

#: Waiting counts where it is over this part of the collectives' own time: hardly a setting makes them twice as fast.
MOST_SAVED = 0.5
#: One rank is to blame for it if it came last in calls that make this part of the waiting.
BLAMED = 0.6
#: Waiting of less than this part of the step is not worth a word.
LEAST_PART = 0.01
#: Collectives below which nothing is said.
LEAST_CALLS = 30


#: What :func:`find` returns None for, in words.
TOO_FEW = (
    f"not known: this needs at least two ranks with the times of {LEAST_CALLS} collectives that both have run"
)


def events_of_job(trace: Trace) -> pd.DataFrame:
    """The events with the ranks of the job. Those of our own traces have the ranks of their communicators."""
    events = trace.events
    if "source" in trace.header or trace.steps.empty:
        return events
    ranks = trace.steps.drop_duplicates("pid").set_index("pid")["rank"]
    of_job = events["pid"].map(ranks)
    return events.assign(rank=of_job.fillna(events["rank"]).astype("int32"))


def find(trace: Trace) -> str | None:
    """A sentence about whom the ranks wait for; "" if they wait for nobody, None if too little is known."""
    return find_in(events_of_job(trace), trace.steps)


def find_in(events: pd.DataFrame, steps: pd.DataFrame) -> str | None:
    """The same of the events of several nodes, with the ranks of the job."""
    calls = _calls(events)
    if len(calls) < LEAST_CALLS:
        return None
    waited = calls["median"] - calls["shortest"]
    total = float(waited.sum())
    if total <= MOST_SAVED * calls["shortest"].sum():
        return ""
    n_steps = calls.index.get_level_values("step").nunique()
    step_ns = float(np.median(steps["duration_ns"])) * n_steps
    part = total / step_ns
    if part < LEAST_PART:
        return ""
    blame = waited.groupby(calls["last"]).sum() / max(total, 1.0)
    if blame.max() < BLAMED:
        return (
            f"ranks wait for each other in turn, {part:.0%} of the step, and no setting cures it: look for what delays "
            "single steps: data loading, garbage collection, other programs on the hosts"
        )
    return (
        f"the others wait for rank {blame.idxmax()}, {part:.0%} of the step: it is your fabric or a "
        "slow rank, not your algorithm, and no setting cures it: look at that rank's clocks, host and network card"
    )


def _calls(events: pd.DataFrame) -> pd.DataFrame:
    """The default's calls with the times of all recorded ranks of their communicator: ``shortest`` and ``median``
    nanoseconds of a rank's kernel, and the rank that came ``last``."""
    of_all = events["func"].isin(("all_gather", "reduce_scatter", "all_reduce"))
    is_timed = events["start_ns"].notna() & events["end_ns"].notna()
    timed = events[of_all & is_timed & (events["table_generation"] == 0)]
    lasted = (timed["end_ns"] - timed["start_ns"]).astype("float64")
    call = ["comm_id", "func", "seq", "step"]
    by_rank = timed.assign(lasted=lasted).groupby([*call, "rank"], as_index=False)["lasted"].mean()
    members = by_rank.groupby("comm_id")["rank"].transform("nunique")
    here = by_rank.groupby(call)["rank"].transform("size")
    whole = by_rank[(here == members) & (members > 1)]
    by_call = whole.groupby(call)["lasted"]
    first = whole.loc[by_call.idxmin()].set_index(call)["rank"]
    return pd.DataFrame({"shortest": by_call.min(), "median": by_call.median(), "last": first})

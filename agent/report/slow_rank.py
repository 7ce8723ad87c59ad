"""Is a job held up by one rank? A kernel of a collective runs until all ranks have come: the last rank's is the
shortest, and takes what the network takes; by what the others' are longer they wait, which no algorithm gives back."""

from __future__ import annotations

import math

import pandas as pd

from ...traces.files import Trace
from ...traces.queries.lives import last_life

#: Waiting counts where it is over this part of the collectives' own time: hardly a setting makes them twice as fast.
MOST_SAVED = 0.5
#: A rank is to blame for it if it came last in calls that make this part of the waiting in its communicators.
BLAMED = 0.6
#: Waiting of less than this part of the step is not worth a word.
LEAST_PART = 0.01
#: Ranks that are named.
MOST_NAMED = 8
#: Collectives of a rank below which nothing is said of it.
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
    """A sentence about whom the ranks wait for since the job was started last; "" if they wait for nobody, None if too
    little is known."""
    life = last_life(trace)
    return find_in(events_of_job(life), life.steps)


def find_in(events: pd.DataFrame, steps: pd.DataFrame) -> str | None:
    """The same of the events of several nodes, with the ranks of the job.

    Each rank is judged by the calls of its own communicators: those of other ranks run at the same time.
    """
    ranks = _by_rank(_calls(events))
    ranks = ranks[ranks["calls"] >= LEAST_CALLS]
    if ranks.empty:
        return None
    step_ns = float(steps["duration_ns"].median())  # NaN where the recording has no steps
    ranks = ranks.assign(part=ranks["waited"] / (step_ns * ranks["steps"]))
    is_long = ranks["waited"] > MOST_SAVED * ranks["shortest"]
    waiting = ranks[is_long & ~(ranks["part"] < LEAST_PART)]
    if waiting.empty:
        return ""
    part = float(waiting["part"].median())
    of_step = "" if math.isnan(part) else f", {min(part, 1.0):.0%} of the step"
    blamed = waiting.index[waiting["held_up"] >= BLAMED * waiting["waited"]]
    if blamed.empty:
        return (
            f"ranks wait for each other in turn{of_step}, and no setting cures it: look for what delays "
            "single steps: data loading, garbage collection, other programs on the hosts"
        )
    whose = "that rank's clocks" if len(blamed) == 1 else "these ranks' clocks"
    return (
        f"the others wait for {_named(blamed.tolist())}{of_step}: it is your fabric or a "
        f"slow rank, not your algorithm, and no setting cures it: look at {whose}, host and network card"
    )


def _named(ranks: list[int]) -> str:
    """``rank 3``, or ``ranks 3, 11 and 2 more``: at most MOST_NAMED."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    named = ", ".join(map(str, ranks[:MOST_NAMED]))
    more = len(ranks) - MOST_NAMED
    return f"ranks {named} and {more} more" if more > 0 else f"ranks {named}"


def _by_rank(calls: pd.DataFrame) -> pd.DataFrame:
    """Of each rank: ns that the calls of its communicators ``waited``, for it (``held_up``) and for others, what they
    take without that (``shortest``), how many ``calls`` there are, and in how many ``steps``."""
    is_last = calls["rank"] == calls["last"]
    calls = calls.assign(held_up=calls["waited"].where(is_last, 0.0))
    of_rank = calls.groupby("rank")
    sums = of_rank[["waited", "held_up", "shortest"]].sum()
    return sums.assign(calls=of_rank.size(), steps=of_rank["step"].nunique())


#: What a call is, over all ranks.
_CALL = ["comm_id", "func", "seq", "step"]


def _calls(events: pd.DataFrame) -> pd.DataFrame:
    """The default's calls with the times of all recorded ranks of their communicator, a row for each rank: ``shortest``
    nanoseconds of a rank's kernel, by how many the median rank ``waited``, and the rank that came ``last``. Of two
    middle ranks the one that waits longer counts: of two ranks one always came last."""
    of_all = events["func"].isin(("all_gather", "reduce_scatter", "all_reduce"))
    is_timed = events["start_ns"].notna() & events["end_ns"].notna()
    timed = events[of_all & is_timed & (events["table_generation"] == 0)]
    lasted = (timed["end_ns"] - timed["start_ns"]).astype("float64")
    by_rank = timed.assign(lasted=lasted).groupby([*_CALL, "rank"], as_index=False)["lasted"].mean()
    members = by_rank.groupby("comm_id")["rank"].transform("nunique")
    here = by_rank.groupby(_CALL)["rank"].transform("size")
    whole = by_rank[(here == members) & (members > 1)]
    by_call = whole.groupby(_CALL)["lasted"]
    shortest = by_call.transform("min")
    waited = by_call.transform("quantile", q=0.5, interpolation="higher") - shortest
    last = whole.loc[by_call.transform("idxmin"), "rank"].to_numpy()
    return whole.assign(shortest=shortest, waited=waited, last=last)

"""A job that is started again (an elastic restart) counts its steps from 0 again: what is of its last life?

Segments of a trace say of each process which start of the job it is of, as its ranks told each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pandas as pd

from ..files import Trace
from ..records import MIXED
from .steps import of_one_rank


def last_life(trace: Trace) -> Trace:
    """The trace without the events, steps and waits of processes of earlier starts of the job.

    A warning says how many steps that leaves out. Verdicts of earlier lives go; tables and windows stay, as generations
    count on. The same trace for one life, and for another tool's recording.
    """
    life = lives(trace)
    earlier = life.index[life < life.max()]
    if earlier.empty:
        return trace
    gone = trace.steps[trace.steps["pid"].isin(earlier)]
    n_steps = len(of_one_rank(gone))
    left_out = f"its {n_steps} steps before that are left out where steps are counted or drawn"
    warning = f"the job was started again: {left_out}"
    return replace(
        trace,
        events=_without(trace.events, earlier),
        steps=_without(trace.steps, earlier),
        waits=_without(trace.waits, earlier),
        log=_without_verdicts(trace.log, gone),
        warnings=[*trace.warnings, warning],
    )


def starts(traces: Iterable[Trace]) -> dict[int, str]:
    """Process -> the start of the job that it is of, equal on all nodes. Without those that were never told of it."""
    segments = [segment for trace in traces for segment in trace.segments]
    return {pid: start for one in segments for pid, start in one.coverage.starts.items() if start}


def lives(trace: Trace) -> pd.Series[int]:
    """The life of each process that took a step, from 0; index: the process. None of a recording of another tool.

    The lives are in the order in which they ended. A process that was never told of its start (no agreement had begun)
    is of the last one.
    """
    if "source" in trace.header:
        return pd.Series(dtype=int)
    ended = trace.steps.groupby("pid")["end_ns"].max()
    start = ended.index.to_series().map(starts([trace]))
    last = ended.groupby(start).max()
    life = start.map(last.rank(method="dense") - 1)
    return life.fillna(max(len(last) - 1, 0)).astype(int)


def _without(rows: pd.DataFrame, pids: pd.Index[int]) -> pd.DataFrame:
    return rows[~rows["pid"].isin(pids)]


def _without_verdicts(log: list[dict[str, Any]], gone: pd.DataFrame) -> list[dict[str, Any]]:
    """The log without the verdicts of the steps that are gone: no newer table than theirs came before them."""
    generation = gone["table_generation"]
    newest = generation[generation != MIXED].max()
    is_of_this_life = False
    kept = []
    for line in log:
        if line["kind"] == "table" and line["table"]["generation"] > newest:
            is_of_this_life = True
        if is_of_this_life or line["kind"] != "verdict":
            kept.append(line)
    return kept

"""Which steps of a recording count: not all ranks record as many, and a job that starts anew counts from 0 again."""

from __future__ import annotations

import pandas as pd

from ..files import Trace

Frame = pd.DataFrame

#: A rank that recorded so large a part of the most steps may stand for all.
_ENOUGH = 0.9


def of_one_rank(steps: Frame) -> Frame:
    """The steps (STEP_COLUMNS) of the lowest rank that recorded about as many as any, in the order they ran in."""
    if steps.empty:
        return steps
    n_steps = steps.groupby("rank").size()
    enough = _ENOUGH * n_steps.max()
    full = n_steps[n_steps >= enough]
    rank = full.index.min()
    mine = steps[steps["rank"] == rank]
    lives = mine.groupby("pid")
    began = lives["end_ns"].transform("min")
    mine = mine.assign(began=began)
    in_order = mine.sort_values(["began", "pid", "index"])
    return in_order.drop(columns="began")


def without_first(rows: Frame, step: str) -> Frame:
    """``rows`` without those of each process's first step, which holds its set-up; all where no other is left.

    ``step``: the column of the step's number.
    """
    lives = rows.groupby("pid")
    first = lives[step].transform("min")
    is_later = rows[step] > first
    return rows[is_later] if is_later.any() else rows


def in_steps(events: Frame, steps: Frame) -> Frame:
    """The events of steps that were recorded as a whole: a job's last step, cut short, has events and no time."""
    known = pd.MultiIndex.from_frame(steps[["pid", "index"]])
    theirs = pd.MultiIndex.from_frame(events[["pid", "step"]])
    is_whole = theirs.isin(known)
    return events[is_whole]


def told_steps(trace: Trace) -> pd.Series[int] | None:
    """How many steps each process recorded, with those in which it called nothing.

    None where only the events tell: of our own traces some steps stay whose events do not, and some recordings have no
    steps.
    """
    if "source" not in trace.header or trace.steps.empty:
        return None
    return trace.steps.groupby("pid").size()


def counted(events: Frame, told: pd.Series[int] | None) -> pd.Series[int]:
    """Steps by process that these events are of: as ``told``, else those that hold an event."""
    seen = events.groupby("pid")["step"].nunique()
    if told is None:
        return seen
    return told.reindex(seen.index).fillna(seen).astype("int64")

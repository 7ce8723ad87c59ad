"""A run's course reduced to what a plot or a sparkline has room for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ....traces.outside import write_whole
from ..runs import SPARKS_FILE
from .course import Course

Array = np.ndarray[Any, Any]

#: Medians that a sparkline is drawn from, at most.
SPARKS = 48


def binned(steps: Array, times: Array, most: int) -> tuple[Array, Array]:
    """At most ``most`` points of the line through ``steps`` (n,) and their ``times`` (n,), ms.

    More steps are put into bins: each gives its shortest and its longest step, so no long step is lost. Steps that are
    missing leave a gap (NaN).
    """
    if len(steps) <= most:
        return _with_gaps(steps, times)
    n_bins = most // 2
    first = steps[0]
    n_steps = steps[-1] - first + 1
    width = n_steps / n_bins
    bins = (steps - first) // width
    grouped = pd.Series(times).groupby(bins)
    ends = grouped.agg(["min", "max"])
    every = np.arange(n_bins)
    ends = ends.reindex(every)
    places = first + width * (every + 0.5)
    return np.repeat(places, 2), ends.to_numpy(float).ravel()


def as_dashes(steps: Array, times: Array, length: float) -> tuple[Array, Array]:
    """The points as one path of dashes, each so many steps long: markers would be an element each."""
    half = length / 2
    places = np.repeat(steps, 3).astype(float)
    places[0::3] -= half
    places[1::3] += half
    heights = np.repeat(times, 3)
    heights[2::3] = np.nan
    return places, heights


def _with_gaps(steps: Array, times: Array) -> tuple[Array, Array]:
    """All points, with a NaN where steps are missing."""
    places = steps.astype(float)
    is_gap = np.diff(places) > 1
    missing = np.flatnonzero(is_gap) + 1
    heights = np.insert(times, missing, np.nan)
    return np.insert(places, missing, np.nan), heights


def trial_spans(course: Course, most: int) -> list[tuple[float, float]]:
    """(first, length) of the runs of steps on trial, in steps; runs that lie within one of ``most`` parts are one."""
    steps = course.steps[course.on_trial]
    if not steps.size:
        return []
    n_steps = np.ptp(course.steps)
    nearest = max(1, n_steps / most)
    breaks = np.flatnonzero(np.diff(steps) > nearest)
    spans = []
    for run in np.split(steps, breaks + 1):
        first = float(run[0])
        length = float(run[-1]) - first
        spans.append((first - 0.5, length + 1))
    return spans


def sparks(course: Course) -> list[float]:
    """What ``dynamiccl top`` draws its sparkline from: medians of the step times over the run, in ms."""
    if not course.steps.size:
        return []
    n_parts = min(SPARKS, len(course.ms))
    parts = np.array_split(course.ms, n_parts)
    return [round(float(np.median(part)), 3) for part in parts]


def write_sparks(folder: Path, course: Course) -> None:
    """Replace the folder's file of :func:`sparks`. Raises TraceError."""
    text = json.dumps({"step_ms": sparks(course)})
    path = folder / SPARKS_FILE
    write_whole(path, f"{text}\n")

"""Where a step begins, in recordings that do not say it themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from ..assemble import STEP_COLUMNS, complete, empty

Array = np.ndarray[Any, Any]

#: A period must be this regular; longer ones are not looked for.
_REGULAR, _LONGEST = 0.97, 5000


def infer_steps(events: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, int]:
    """(events with their steps, steps, calls a step) from the repeating order of the calls; 0 calls: nothing repeats.

    A step begins at the call before which the job pauses longest, in the median: the optimizer's turn. The calls before
    the first whole step are of step 0 and the steps count from 1; the last step has no end, so no row.
    """
    first = events[events["rank"] == events["rank"].min()].sort_values("enqueue_ns", kind="stable")
    kinds = first["func"] + " " + first["n_bytes"].astype(str) + " " + first["comm_id"].astype(str)
    codes = pd.factorize(kinds)[0]
    period = begin = 0
    for begin in (0, len(codes) // 3):  # a job's first calls may set it up
        if period := _period(codes[begin:]):
            break
    if not period:
        return events.assign(step=0), step_rows([]), 0
    while begin > 0 and codes[begin - 1] == codes[begin - 1 + period]:
        begin -= 1
    period, phase = _whole_step(first["enqueue_ns"].to_numpy(np.int64)[begin:], period)
    phase += begin
    place = events.groupby(["rank", "pid"]).cumcount() - phase  # of each rank's calls, in the order of ``enqueue_ns``
    events = events.assign(step=np.where(place < 0, 0, place // period + 1))
    begins = events[(place >= 0) & (place % period == 0)]
    ends = begins.groupby(["rank", "pid"])["enqueue_ns"].shift(-1, fill_value=0)
    steps = begins.assign(index=begins["step"], end_ns=ends, duration_ns=ends - begins["enqueue_ns"])[ends > 0]
    return events, step_rows(steps[["index", "rank", "pid", "end_ns", "duration_ns"]]), period


def _period(codes: Array) -> int:
    """The smallest number of calls after which they repeat, three times at least; 0 where they do not."""
    lengths = range(1, min(len(codes) // 3, _LONGEST) + 1)
    return next((p for p in lengths if (codes[:-p] == codes[p:]).mean() >= _REGULAR), 0)


def _whole_step(at: Array, period: int) -> tuple[int, int]:
    """(calls a step, first call of the first whole step): as many periods as make all steps last about as long.

    A step may hold the same calls several times over, as when gradients are accumulated.
    """
    gaps = np.diff(at)
    best = period, 0, np.inf
    for calls in range(period, min(8 * period, len(at) // 3) + 1, period):
        pause = [float(np.median(gaps[(k - 1) % calls :: calls])) for k in range(calls)]
        phase = int(np.argmax(pause))
        lasted = np.diff(at[phase::calls])
        uneven = float(np.percentile(np.abs(lasted - np.median(lasted)), 80) / max(np.median(lasted), 1.0))
        if uneven < 0.5 * best[2] - 1e-9:
            best = calls, phase, uneven
        if uneven < 0.05:
            break
    return best[0], best[1]


def step_rows(rows: list[dict[str, Any]] | pd.DataFrame) -> pd.DataFrame:
    """Rows of ``index, rank, pid, end_ns, duration_ns`` as STEP_COLUMNS, the rest unknown."""
    if not len(rows):
        return empty(STEP_COLUMNS)
    unknown = {"table_generation": 0, "memory_used": 0, "memory_total": 0}
    frame = complete(pd.DataFrame(rows).assign(**unknown), STEP_COLUMNS)
    return frame.sort_values(["index", "rank"]).reset_index(drop=True)

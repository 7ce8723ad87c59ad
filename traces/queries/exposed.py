"""How much of each slot's time is exposed: its calls run, and the rank that waits for them computes nothing.

A recording shows it in one of two ways: by the kernels that computed (PyTorch's profiler and Nsight Systems record
them), or by when the job stood still (an emulated job tells). Without either it is not known.
"""

from __future__ import annotations

from typing import Any, cast

import pandas as pd

from ..files import Trace
from ..names import tuned_funcs
from ..reasons import Happened, Why
from ..records import Slot
from .costs import of_whole_steps
from .skew import covered_ns, exposed_ns
from .slots import SLOT_KEYS, slot_of, with_sizes
from .steps import counted, told_steps

Frame = pd.DataFrame

#: A slot is on the critical path if this part of its time is exposed, and that takes this part of the step.
CRITICAL, CRITICAL_OF_STEP = 0.25, 0.01


def bare_ns(events: Frame, compute: Frame, waits: Frame) -> pd.Series[float]:
    """Of each event the ns in which it is exposed; NaN where the recording does not show it."""
    if len(compute):
        return exposed_ns(events, compute)
    return covered_ns(events, waits, "pid")


def exposed_parts(events: Frame, compute: Frame, waits: Frame, all_reduce: str = "") -> dict[Slot, float]:
    """Exposed part of the time of each slot, 0 to 1; empty if the recording does not show it.

    Args: events: those of default steps, EVENT_COLUMNS. compute: COMPUTE_COLUMNS. waits: WAIT_COLUMNS.
    all_reduce: the job's option.
    """
    rows = _tuned(events, compute, waits, all_reduce)
    rows = rows.dropna(subset="bare")
    rows["lasts"] = (rows["end_ns"] - rows["start_ns"]).astype(float)
    found = {}
    for key, of_slot in rows.groupby(SLOT_KEYS):
        slot = slot_of(key)
        bare = float(of_slot["bare"].sum())
        lasts = float(of_slot["lasts"].sum())
        found[slot] = bare / max(lasts, 1.0)
    return found


def exposed_parts_of(trace: Trace, generations: set[int]) -> dict[Slot, float]:
    """:func:`exposed_parts` of a trace's steps under tables of these generations."""
    events = trace.events
    is_mine = events["table_generation"].isin(generations)
    mine = events[is_mine]
    return exposed_parts(mine, trace.compute, trace.waits, trace.all_reduce)


def exposed_ms(trace: Trace, generations: set[int]) -> dict[Slot, float]:
    """Ms a step in which each slot is exposed, on the rank where that takes longest: that one may wait for the others.

    Its calls a step times the mean of those that were timed, in whole steps under tables of these generations.
    """
    events = of_whole_steps(trace.events, generations)
    n_steps = counted(events, told_steps(trace))
    rows = _tuned(events, trace.compute, trace.waits, trace.all_reduce)
    found = dict[Slot, float]()
    for key, calls in rows.groupby([*SLOT_KEYS, "pid"]):
        *of_slot, pid = cast(tuple[Any, ...], key)
        slot = slot_of(of_slot)
        call_ns = float(calls["bare"].mean())
        if call_ns >= 0:  # not NaN
            step_ns = call_ns * len(calls) / n_steps[pid]
            longest = found.get(slot, 0.0)
            found[slot] = max(step_ns / 1e6, longest)
    return found


def _tuned(events: Frame, compute: Frame, waits: Frame, all_reduce: str) -> Frame:
    """The calls of slots with ``bare``, the ns in which each is exposed."""
    events = events.reset_index(drop=True)  # labels of joined events may repeat
    bare = bare_ns(events, compute, waits)
    rows = with_sizes(events).assign(bare=bare)
    is_tuned = rows["func"].isin(tuned_funcs(all_reduce))
    return rows[is_tuned]


def is_critical(exposed: float, share: float) -> bool:
    """Whether a slot is on the critical path. ``share``: its part of the step."""
    of_step = exposed * share
    return exposed >= CRITICAL and of_step >= CRITICAL_OF_STEP


def exposed_text(exposed: float) -> str:
    """For people: ``exposed: 62 % of its time``."""
    return f"exposed: {exposed:.0%} of its time".replace("%", " %")


def critical(rows: list[dict[str, Any]]) -> list[Why]:
    """Names the slots on the critical path; ``rows`` have ``slot``, ``exposed`` (None: not known) and ``share``."""
    known = [row for row in rows if row["exposed"] is not None]
    if not known:
        return []
    found = [row for row in known if is_critical(row["exposed"], row["share"])]
    if not found:
        return [Happened.NONE_CRITICAL()]
    named = [f"{row['slot']} ({exposed_text(row['exposed'])})" for row in found]
    return [Happened.CRITICAL(slots=", ".join(named))]

"""How much of each slot's time is exposed: its calls run, and the rank that waits for them computes nothing.

A recording shows it in one of two ways: by the kernels that computed (PyTorch's profiler and Nsight Systems record
them), or by when the job stood still (an emulated job tells). Without either it is not known.
"""

from __future__ import annotations

from typing import Any, cast

import pandas as pd

from ..files import Trace
from ..records import TUNED_FUNCS, Slot
from .skew import covered_ns, exposed_ns
from .slots import with_sizes

#: A slot is on the critical path if this part of its time is exposed, and that takes this part of the step.
CRITICAL, CRITICAL_OF_STEP = 0.25, 0.01


def exposed_parts(events: pd.DataFrame, compute: pd.DataFrame, waits: pd.DataFrame) -> dict[Slot, float]:
    """Exposed part of the time of each slot, 0 to 1; empty if the recording does not show it.

    Args: events: those of default steps, EVENT_COLUMNS. compute: COMPUTE_COLUMNS. waits: WAIT_COLUMNS.
    """
    if len(compute):
        bare = exposed_ns(events, compute)
    elif len(waits):
        bare = covered_ns(events, waits, "pid")
    else:
        return {}
    rows = with_sizes(events).assign(bare=bare)
    rows = rows[rows["func"].isin(TUNED_FUNCS)].dropna(subset="bare")
    rows["lasts"] = (rows["end_ns"] - rows["start_ns"]).astype(float)
    found = {}
    for key, of_slot in rows.groupby(["n_ranks", "n_nodes", "func", "size_class"]):
        n_ranks, n_nodes, func, klass = cast(tuple[int, int, str, int], key)
        part = float(of_slot["bare"].sum()) / max(float(of_slot["lasts"].sum()), 1.0)
        found[Slot(int(n_ranks), int(n_nodes), func, int(klass))] = part
    return found


def exposed_parts_of(trace: Trace, generations: set[int]) -> dict[Slot, float]:
    """:func:`exposed_parts` of a trace's steps under tables of these generations."""
    events = trace.events
    mine = events[events["table_generation"].isin(generations)]
    return exposed_parts(mine, trace.compute, trace.waits)


def is_critical(exposed: float, share: float) -> bool:
    """Whether a slot is on the critical path. ``share``: its part of the step."""
    return exposed >= CRITICAL and exposed * share >= CRITICAL_OF_STEP


def exposed_text(exposed: float) -> str:
    """For people: ``exposed: 62 % of its time``."""
    return f"exposed: {exposed:.0%} of its time".replace("%", " %")


def critical_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Names the slots on the critical path; ``rows`` have ``slot``, ``exposed`` (None: not known) and ``share``."""
    known = [row for row in rows if row["exposed"] is not None]
    if not known:
        return []
    critical = [row for row in known if is_critical(row["exposed"], row["share"])]
    if not critical:
        return ["on the critical path: none, the step hides its collectives behind compute"]
    named = [f"{row['slot']} ({exposed_text(row['exposed'])})" for row in critical]
    return [f"on the critical path: {', '.join(named)}"]

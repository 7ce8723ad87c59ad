"""Two recordings of one job: do collectives explain why its steps became longer?

Compared are rank by rank the same things: the step, the time of each slot's calls, and the part of it in which nothing
is computed. The step waits for that part alone, so that part explains a change where both recordings show compute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd

from ...envs.replay.decisions import is_imported
from ...traces.files import Trace, TraceError
from ...traces.header import plain
from ...traces.queries.costs import default_generations
from ...traces.queries.exposed import bare_ns
from ...traces.queries.skew import busy_ns, covered_ns, merged
from ...traces.queries.slots import with_sizes
from ...traces.queries.steps import in_steps, without_first
from ...traces.records import format_range

#: Steps follow each other: with the lag-1 correlations measured in jobs (0.55 to 0.87) the standard error of a median
#: is up to so many times that of independent steps.
CORRELATED = 2.4
#: A smaller change of the step than this is not worth a cause.
LEAST = 0.01
#: From this part of a change on, something explains it.
MOST = 0.5
_KEYS = ["n_ranks", "func", "size_class"]
#: Columns of a slot that are shown as they are.
_CHANGES = ("calls_before", "calls_after", "us_before", "us_after")


@dataclass(frozen=True)
class Figures:
    """What one recording says of a rank's steps; times in ms a step, None where they are not known."""

    step_ms: float | None
    error_ms: float  # standard error of step_ms
    n_steps: int
    calls_ms: float | None
    exposed_ms: float | None
    compute_ms: float | None
    slots: pd.DataFrame  # by _KEYS: calls a step, us of a call, ms a step


def compare(before: Trace, after: Trace) -> dict[str, Any]:
    """Everything, for JSON and for people; unknown values are None. Raises TraceError where no rank is in both."""
    ranks = _ranks(before) & _ranks(after)
    if not ranks:
        raise TraceError(
            f"no rank is in both {before.folder} and {after.folder}: to advise on one recording give its files"
        )
    rank = max(sorted(ranks), key=lambda rank: min(_n_steps(before, rank), _n_steps(after, rank)))
    old, new = figures(before, rank), figures(after, rank)
    change = _difference(old.step_ms, new.step_ms)
    noise = math.hypot(old.error_ms, new.error_ms)
    slots = _slots(old, new)
    exposed = _difference(old.exposed_ms, new.exposed_ms)
    calls = _difference(old.calls_ms, new.calls_ms)
    told: dict[str, Any] = {
        "predicted": False,
        "before": {"recording": str(before.folder), **_shown(old)},
        "after": {"recording": str(after.folder), **_shown(new)},
        "rank": rank,
        "change_ms": change,
        "noise_ms": noise,
        "calls_change_ms": calls,
        "exposed_change_ms": exposed,
        "compute_change_ms": _difference(old.compute_ms, new.compute_ms),
        "slots": slots,
        "unknown": _unknown(before, after, exposed),
    }
    told["cause"] = _cause(told, old)
    found: dict[str, Any] = plain({"verdict": verdict(told), **told})
    return found


def _ranks(trace: Trace) -> set[int]:
    """The ranks whose steps were recorded; without steps those of the calls, which may be ranks in a group."""
    told = trace.events if trace.steps.empty else trace.steps
    return set(map(int, told["rank"]))


def _n_steps(trace: Trace, rank: int) -> int:
    return int((trace.steps["rank"] == rank).sum())


def figures(trace: Trace, rank: int) -> Figures:
    """What a recording says of a rank under NCCL's own choice."""
    default = default_generations(trace)
    steps = trace.steps[(trace.steps["rank"] == rank) & trace.steps["table_generation"].isin(default)]
    events = trace.events[trace.events["table_generation"].isin(default)]
    if not is_imported(trace):
        steps = without_first(steps, "index")
    events = in_steps(events, steps) if len(steps) else events[events["rank"] == rank]
    n_steps = len(steps)
    durations = steps["duration_ns"].to_numpy(float) / 1e6
    rows = with_sizes(events)
    slots = _slot_table(rows, _told_steps(trace, events, n_steps))
    known = n_steps > 0 and bool(rows["us"].notna().any())
    calls_ms, exposed_ms = _together(trace, rank, rows, float(slots["ms"].sum())) if known else (None, None)
    return Figures(
        step_ms=float(np.median(durations)) if n_steps else None,
        error_ms=_error(durations),
        n_steps=n_steps,
        calls_ms=calls_ms,
        exposed_ms=exposed_ms,
        compute_ms=_compute_ms(trace, rank, steps),
        slots=slots,
    )


def _told_steps(trace: Trace, events: pd.DataFrame, n_steps: int) -> int:
    """How many steps told of their calls: of a long run's trace some steps stay whose events do not."""
    return max(n_steps if is_imported(trace) else len(events[["pid", "step"]].drop_duplicates()), 1)


def _together(trace: Trace, rank: int, rows: pd.DataFrame, ms: float) -> tuple[float, float | None]:
    """Ms a step in which calls run, without the wait for the last rank, and in which they run exposed (None: not
    known). ``ms``: of all calls one after the other. What overlaps counts once; calls that were not timed are taken to
    be like those that were."""
    timed = rows[rows["us"].notna()]
    per_step = ms / max(float(timed["us"].sum()) * 1e3, 1.0)
    begins = timed["end_ns"] - (timed["us"] * 1e3).round().astype("int64")
    calls_ms = busy_ns(timed.assign(start_ns=begins)) * per_step
    parts = [merged(mine).assign(rank=rank, pid=cast(int, pid)) for pid, mine in timed.groupby("pid")]
    exposed = bare_ns(pd.concat(parts, ignore_index=True), trace.compute, trace.waits)
    return calls_ms, float(exposed.sum()) * per_step if exposed.notna().any() else None


def _compute_ms(trace: Trace, rank: int, steps: pd.DataFrame) -> float | None:
    """Ms a step in which other kernels run, within the steps; None where the recording does not show it."""
    begins = steps["end_ns"] - steps["duration_ns"]
    covered = covered_ns(merged(steps.assign(start_ns=begins)).assign(rank=rank), trace.compute, "rank")
    return float(covered.sum()) / 1e6 / len(steps) if covered.notna().any() else None


def _error(durations: Any) -> float:
    """Standard error of the median of a rank's steps, (n,) ms; 0 where fewer than three are known."""
    if len(durations) < 3:
        return 0.0
    spread = 1.4826 * float(np.median(np.abs(durations - np.median(durations))))
    return CORRELATED * 1.2533 * spread / math.sqrt(len(durations))


def _slot_table(rows: pd.DataFrame, n_steps: int) -> pd.DataFrame:
    """By _KEYS: ``calls`` a step, ``us`` of a call in the median, ``ms`` a step: its calls times their mean. Kernels
    are timed in one step of several, so times are no sums over all steps."""
    slots = rows.groupby(_KEYS)
    table = slots.agg(calls=("us", "size"), us=("us", "median"), ms=("us", "mean"))
    table["calls"] /= n_steps
    table["ms"] *= table["calls"] / 1e3
    return table


def _slots(old: Figures, new: Figures) -> list[dict[str, Any]]:
    """What changed in each slot, the largest change first."""
    both = old.slots.add_suffix("_before").join(new.slots.add_suffix("_after"), how="outer")
    found = []
    for row in both.reset_index().to_dict("records"):
        klass = int(row["size_class"])
        low = 2 ** (klass - 1) + 1 if klass else 0
        figures = {name: _number(row[name]) for name in _CHANGES}
        ms_before, ms_after = _number(row["ms_before"]), _number(row["ms_after"])
        slot = {"slot": f"{row['func']} {format_range(low, 2**klass)}", "n_ranks": int(row["n_ranks"])}
        found.append({**slot, **figures, "change_ms": (ms_after or 0.0) - (ms_before or 0.0)})
    return sorted(found, key=lambda slot: abs(slot["change_ms"]), reverse=True)


def _cause(told: dict[str, Any], old: Figures) -> str:
    """What explains the change of the step, as a code."""
    change, exposed, calls = told["change_ms"], told["exposed_change_ms"], told["calls_change_ms"]
    if change is None:
        return "no-steps"
    if abs(change) <= max(2 * told["noise_ms"], LEAST * float(old.step_ms or 0)):
        return "no-change"
    if calls is None:
        return "not-known"
    explained = calls if exposed is None else exposed
    if explained / change < MOST:
        return "not-collectives"
    if exposed is not None and calls / exposed < MOST:
        return "less-hidden" if change > 0 else "more-hidden"
    return "collectives" if exposed is not None else "perhaps-collectives"


def verdict(told: dict[str, Any]) -> str:
    """Whether collectives explain the change, in one line."""
    cause, change = told["cause"], told["change_ms"]
    if cause == "no-steps":
        return "a recording has no steps: only calls can be compared"
    before = told["before"]["step_ms"]
    how = "longer" if change > 0 else "shorter"
    step = (
        f"steps became {abs(change) / before:.1%} {how} ({before:.2f} -> {told['after']['step_ms']:.2f} ms)"
    )
    if cause == "no-change":
        return f"no regression: {step}, which is within the noise of {2 * told['noise_ms']:.2f} ms or below {LEAST:.0%}"
    if cause == "not-known":
        return f"{step}; the recordings hold no times of collectives: whether these explain it is not known"
    exposed, calls = told["exposed_change_ms"], told["calls_change_ms"]
    explained = f"{calls if exposed is None else exposed:+.2f} of {change:+.2f} ms"
    if cause == "not-collectives":
        compute = told["compute_change_ms"]
        beside = f"; compute changed by {compute:+.2f} ms a step" if compute is not None else ""
        return f"{step}; collectives do not explain it ({explained}){beside}"
    if cause in ("less-hidden", "more-hidden"):
        hidden = "less" if cause == "less-hidden" else "more"
        return f"{step}; not NCCL: collectives take as long, but are {hidden} hidden behind compute ({explained})"
    may = "explain" if cause == "collectives" else "may explain"
    return f"{step}; collectives {may} {explained}: {_largest(told['slots'], math.copysign(1.0, change))}"


def _largest(slots: list[dict[str, Any]], sign: float) -> str:
    """What changed in the slot that changed most in this direction. ``slots``: the largest change first."""
    alike = [slot for slot in slots if slot["change_ms"] * sign > 0]
    if not alike:  # calls overlap otherwise
        return "no slot by itself"
    slot = alike[0]
    ms = [one["change_ms"] * sign for one in alike]
    part = "most" if ms[0] > MOST * sum(ms) else "the largest part"
    calls, times = (slot["calls_before"], slot["calls_after"]), (slot["us_before"], slot["us_after"])
    name = f"{part} of it {slot['slot']}"
    if None in calls or None in times:
        where = "second" if calls[0] is None else "first"
        return f"{name}, which only the {where} recording holds"
    more_calls, longer = calls[1] / calls[0], times[1] / times[0]
    if abs(math.log(more_calls)) > abs(math.log(longer)):
        return f"{name}, {calls[0]:.3g} -> {calls[1]:.3g} calls a step"
    return f"{name}, {times[0] / 1e3:.2f} -> {times[1] / 1e3:.2f} ms a call"


def _unknown(before: Trace, after: Trace, exposed: float | None) -> list[str]:
    """What the recordings do not say, each once."""
    notes = [str(note) for trace in (before, after) for note in trace.header.get("notes") or ()]
    if exposed is None:
        notes.append(
            "what of the collectives the step waits for: record compute too (PyTorch's profiler does)"
        )
    notes.append("how much two runs of the same job differ: record each side twice before you act on it")
    return list(dict.fromkeys(notes))


def _shown(of: Figures) -> dict[str, Any]:
    """A recording's figures for JSON."""
    return {name: value for name, value in vars(of).items() if name != "slots"}


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _number(value: Any) -> float | None:
    return None if pd.isna(value) else float(value)

"""What each slot of a job costs under NCCL's own choice and under a table, from the events of a trace."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ..files import Trace
from ..records import Slot, decided
from .skew import OWN, label
from .slots import with_sizes

#: A rule as text: (func, min_bytes, max_bytes, decision).
RuleKey = tuple[str, int, int, str]


@dataclass(frozen=True)
class Generations:
    """Which table generations were NCCL's own choice everywhere, and which carried the table in question."""

    default: frozenset[int]
    tuned: frozenset[int]
    rules: frozenset[RuleKey]  # of the table in question


def generations(trace: Trace, decisions: Iterable[Mapping[str, Any]] | None = None) -> Generations:
    """Tell default generations from tuned ones by the tables that were logged.

    ``decisions`` are a summary's; without them the table in question is that of the last comparison, or the last that
    held any rule. A trace without logged tables has generation 0 as default and its newest generation as tuned.
    """
    tables = {g: frozenset(map(_key, rules)) for g, rules in trace.tables.items()}
    seen = set(map(int, trace.events["table_generation"].unique()))
    default = frozenset(g for g, rules in tables.items() if not rules)
    if len(tables) == 1:
        return Generations(default, frozenset(sorted(seen - default)[-1:]), frozenset())
    if decisions is not None:
        wanted = frozenset(_key({**d, "decision": decided(d)}) for d in decisions if decided(d) != "auto")
    else:
        held = [rules for rules in tables.values() if rules]
        wanted = tables.get(_compared(trace), held[-1] if held else frozenset())
    return Generations(
        default, frozenset(g for g, rules in tables.items() if rules and rules == wanted), wanted
    )


def _compared(trace: Trace) -> int:
    """Generation of the last window of a comparison, -1 if there was none."""
    compared = [line for line in trace.log if line["kind"] == "window" and line.get("phase") == "verify"]
    return int(compared[-1].get("generation", -1)) if compared else -1


def _key(rule: Mapping[str, Any]) -> RuleKey:
    return str(rule["func"]), int(rule["min_bytes"]), int(rule["max_bytes"]), str(rule["decision"])


def of_whole_steps(events: pd.DataFrame, generations: Collection[int]) -> pd.DataFrame:
    """The events of steps that ran under these tables from end to end; tables change within steps too."""
    right = events["table_generation"].isin(generations)
    return events[right.groupby([events["pid"], events["step"]]).transform("all")]


def slot_costs(events: pd.DataFrame, default: Collection[int], tuned: Collection[int]) -> pd.DataFrame:
    """One row per slot that ran in default steps, the dearest first.

    Columns: ``n_ranks, n_nodes, func, size_class, slot`` (text), ``n_bytes`` (of most calls), ``calls`` (a step, of
    one process), ``own`` and ``ran`` (algo/proto/channels of most calls, default and tuned; None if never seen),
    ``default_us`` and ``tuned_us`` (median GPU time of one call over all ranks, NaN where never sampled),
    ``n_default`` and ``n_tuned`` (sampled calls), ``timed_by`` (see skew.py). The job's first step is left out: it
    holds the set-up.
    """
    if events["step"].nunique() > 1:
        events = events[events["step"] > events["step"].min()]
    rows = with_sizes(events)
    rows["config"] = rows["algo"] + "/" + rows["proto"] + "/" + rows["n_channels"].astype("str")
    before, after = of_whole_steps(rows, default), rows[rows["table_generation"].isin(tuned)]
    if before.empty:
        return pd.DataFrame(columns=_COLUMNS)
    keys = _COLUMNS[:4]
    groups, both = before.groupby(keys), pd.concat([before, after])
    table = groups.agg(
        n_bytes=("n_bytes", _most),
        own=("config", _most),
        default_us=("us", "median"),
        n_default=("us", "count"),
    )
    n_steps = before.groupby("pid")["step"].nunique()
    table["calls"] = groups.size() / groups["pid"].agg(lambda pids: n_steps[pids.unique()].sum())
    late = after.groupby(keys).agg(ran=("config", _most), tuned_us=("us", "median"), n_tuned=("us", "count"))
    table = table.join(late)
    table = table.join(both[both["us"].notna()].groupby(keys)["timed_by"].agg(label))
    table = table.fillna({"n_tuned": 0, "timed_by": OWN}).astype({"n_tuned": "int64"})
    table["slot"] = [str(Slot(*key)) for key in table.index]
    table["ran"] = table["ran"].astype(object).where(table["ran"].notna(), None)
    order = (table["calls"] * table["default_us"].fillna(0)).sort_values(ascending=False, kind="stable").index
    return table.loc[order].reset_index()[_COLUMNS]


_COLUMNS = [
    "n_ranks",
    "n_nodes",
    "func",
    "size_class",
    "slot",
    "n_bytes",
    "calls",
    "own",
    "ran",
    "default_us",
]
_COLUMNS += ["tuned_us", "n_default", "n_tuned", "timed_by"]


def _most(values: pd.Series[Any]) -> Any:
    return values.mode().iloc[0]


def typical_step(trace: Trace, wanted: Collection[int]) -> int | None:
    """The step of these generations to look at: among the best sampled, the one nearest the median time."""
    steps = trace.steps[(trace.steps["rank"] == trace.steps["rank"].min())].set_index("index")
    events = trace.events[
        trace.events["table_generation"].isin(wanted) & trace.events["step"].isin(steps.index)
    ]
    if trace.events["step"].nunique() > 1:
        events = events[events["step"] > trace.events["step"].min()]
    sampled = events["start_ns"].notna().groupby(events["step"]).sum()
    if sampled.empty or sampled.max() == 0:
        return None
    best = sampled.index[sampled >= 0.9 * sampled.max()]
    durations = steps.loc[steps.index.isin(best), "duration_ns"]
    return int((durations - durations.median()).abs().idxmin())

"""What each slot of a job costs under NCCL's own choice and under a table, from the events of a trace."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from ..files import Trace, applies
from ..records import Slot, decided
from .skew import OWN, label
from .slots import SLOT_KEYS, with_sizes
from .steps import counted, of_one_rank, without_first


class RuleKey(NamedTuple):
    """A row of a table, as text; 0 ranks and 0 nodes: of any communicator."""

    func: str
    min_bytes: int
    max_bytes: int
    n_ranks: int
    n_nodes: int
    decision: str

    def fits(self, call: Mapping[Any, Any]) -> bool:
        """Whether the row applies to calls: see :func:`.files.applies`."""
        return applies(self._asdict(), call)


@dataclass(frozen=True)
class Generations:
    """Which table generations were NCCL's own choice everywhere, and which carried the table in question."""

    default: frozenset[int]
    tuned: frozenset[int]
    rules: frozenset[RuleKey]  # of the table in question


def default_generations(trace: Trace) -> set[int]:
    """Of the tables without a row: NCCL did as it likes.

    With --headroom NCCL has raised channels, and is not untouched, until the ranks have a table that says so.
    """
    raised = {0} if trace.header.get("headroom") else set()
    return {generation for generation, rules in trace.tables.items() if not rules} - raised


def generations(trace: Trace, decisions: Iterable[Mapping[str, Any]] | None = None) -> Generations:
    """Tell default generations from tuned ones by the tables that were logged.

    ``decisions`` are a summary's; without them the table in question is that of the last comparison, or the last that
    held any rule. A trace without logged tables has generation 0 as default and its newest generation as tuned.
    """
    tables = {}
    for generation, rules in trace.tables.items():
        tables[generation] = logged_rules(rules)
    default = frozenset(default_generations(trace))
    if len(tables) == 1:
        seen = set(map(int, trace.events["table_generation"].unique()))
        newest = sorted(seen - default)[-1:]
        return Generations(default, frozenset(newest), frozenset())
    if decisions is None:
        held = [rules for rules in tables.values() if rules]
        last = held[-1] if held else frozenset()
        wanted = tables.get(_compared(trace), last)
    else:
        wanted = rules_of(decisions)
    tuned = []
    for generation, held_rules in tables.items():
        if held_rules and held_rules == wanted:
            tuned.append(generation)
    return Generations(default, frozenset(tuned), wanted)


def rules_of(decisions: Iterable[Mapping[str, Any]]) -> frozenset[RuleKey]:
    """The rules of a summary's rows; a slot that NCCL decides has none."""
    rows = [{**d, "decision": decided(d)} for d in decisions]
    return frozenset(_key(row) for row in rows if row["decision"] != "auto")


def _compared(trace: Trace) -> int:
    """Generation of the last window of a comparison, -1 if there was none."""
    windows = [line for line in trace.log if line["kind"] == "window"]
    compared = [line for line in windows if line.get("phase") == "verify"]
    if not compared:
        return -1
    return int(compared[-1].get("generation", -1))


def logged_rules(rules: Iterable[Mapping[str, Any]]) -> frozenset[RuleKey]:
    """The rules of a table as it was logged."""
    return frozenset(map(_key, rules))


def _key(rule: Mapping[str, Any]) -> RuleKey:
    low = int(rule["min_bytes"])
    high = int(rule["max_bytes"])
    n_ranks = int(rule.get("n_ranks") or 0)
    n_nodes = int(rule.get("n_nodes") or 0)
    return RuleKey(str(rule["func"]), low, high, n_ranks, n_nodes, str(rule["decision"]))


def of_whole_steps(events: pd.DataFrame, generations: Collection[int]) -> pd.DataFrame:
    """The events of steps that ran under these tables from end to end; tables change within steps too."""
    right = events["table_generation"].isin(generations)
    steps = right.groupby([events["pid"], events["step"]])
    return events[steps.transform("all")]


def slot_costs(
    events: pd.DataFrame, default: Collection[int], tuned: Collection[int], told: pd.Series[int] | None = None
) -> pd.DataFrame:
    """One row per slot that ran in default steps, the dearest first.

    Columns: ``n_ranks, n_nodes, func, size_class, slot``, ``n_bytes`` (of most calls), ``calls`` (a step, of one
    process), ``own``, ``ran`` (algo/proto/channels, default and tuned, or None), ``default_us``, ``tuned_us`` (median
    GPU time of a call, or NaN), ``n_default``, ``n_tuned`` (sampled calls), ``timed_by`` (skew.py). The first step
    counts only with ``told`` (:func:`.steps.told_steps`).
    """
    if told is None:
        events = without_first(events, "step")
    rows = with_sizes(events)
    pair = rows["algo"] + "/" + rows["proto"]
    channels = rows["n_channels"].astype("str")
    rows["config"] = pair + "/" + channels
    before = of_whole_steps(rows, default)
    after = rows[rows["table_generation"].isin(tuned)]
    if before.empty:
        return pd.DataFrame(columns=_COLUMNS)
    table = _own_costs(before, told)
    tuned_costs = after.groupby(SLOT_KEYS).agg(
        ran=("config", _most), tuned_us=("us", "median"), n_tuned=("us", "count")
    )
    table = table.join(tuned_costs)
    both = pd.concat([before, after])
    timed = both[both["us"].notna()].groupby(SLOT_KEYS)
    table = table.join(timed["timed_by"].agg(label))
    table = table.fillna({"n_tuned": 0, "timed_by": OWN})
    table = table.astype({"n_tuned": "int64"})
    table["slot"] = [str(Slot(*key)) for key in table.index]
    ran = table["ran"].astype(object)
    table["ran"] = ran.where(ran.notna(), None)
    call_us = table["default_us"].fillna(0)
    total = table["calls"] * call_us
    order = total.sort_values(ascending=False, kind="stable").index
    return table.loc[order].reset_index()[_COLUMNS]


_COLUMNS = [*SLOT_KEYS, "slot", "n_bytes", "calls", "own", "ran", "default_us", "tuned_us"]
_COLUMNS += ["n_default", "n_tuned", "timed_by"]


def _own_costs(before: pd.DataFrame, told: pd.Series[int] | None) -> pd.DataFrame:
    """By slot what its calls cost in default steps, and how many of them a step of one process has."""
    slots = before.groupby(SLOT_KEYS)
    table = slots.agg(
        n_bytes=("n_bytes", _most),
        own=("config", _most),
        default_us=("us", "median"),
        n_default=("us", "count"),
    )
    n_steps = counted(before, told)
    steps_of_slot = slots["pid"].agg(lambda pids: n_steps[pids.unique()].sum())
    table["calls"] = slots.size() / steps_of_slot
    return table


def _most(values: pd.Series[Any]) -> Any:
    return values.mode().iloc[0]


def typical_step(trace: Trace, wanted: Collection[int]) -> int | None:
    """The step of these generations to look at: among the best sampled, the one nearest the median time."""
    steps = of_one_rank(trace.steps)
    duration = steps.set_index("index")["duration_ns"]
    events = trace.events
    right = events["table_generation"].isin(wanted)
    right &= events["step"].isin(duration.index)
    if events["step"].nunique() > 1:
        right &= events["step"] > events["step"].min()
    events = events[right]
    is_sampled = events["start_ns"].notna()
    sampled = is_sampled.groupby(events["step"]).sum()
    if sampled.empty or sampled.max() == 0:
        return None
    best = sampled.index[sampled >= 0.9 * sampled.max()]
    durations = duration[duration.index.isin(best)]
    distance = (durations - durations.median()).abs()
    nearest: Any = distance.idxmin()
    return int(nearest)

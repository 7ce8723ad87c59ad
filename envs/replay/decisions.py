"""A recorded trace as tasks: what it measured as measured, the rest predicted by a model fitted to it and marked so.

Measured: what each (slot, decision) saved, by ridge regression on step times of neighbouring tables
(:mod:`.neighbours`). Predicted: times of single collectives, interpolated, weighted by how much of a slot's time the
step waits for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ...traces import spaces
from ...traces.assemble import Offer
from ...traces.files import Trace, TraceError
from ...traces.fingerprint import Fingerprint
from ...traces.names import tuned_funcs
from ...traces.queries.costs import default_generations, of_whole_steps
from ...traces.queries.slots import SlotProfile, channels_of, find_slots, outside_the_offer
from ...traces.queries.steps import in_steps, of_one_rank, told_steps, without_first
from ...traces.records import MIXED, N_ALGOS, N_PROTOS, Slot, decision_from
from .neighbours import Rules, SteadyWindow, savings
from .predicted import Times, cluster_of, predict
from .recordings import is_placed

Array = np.ndarray[Any, Any]

#: What the regression takes apart: a slot's number and a config.
_Part = tuple[int, int]

_RIDGE = 0.05


@dataclass
class Recorded:
    """The tasks of a trace, one a slot, the dearest first; savings in units of the slot's share of the step."""

    profiles: list[SlotProfile]
    truth: Array  # (n, N_CONFIGS) mean measured or predicted saving, -inf where masked
    measured: Array  # (n, N_CONFIGS) bool: from windows of the trace
    share: Array  # (n,)
    default_ms: float
    n_steps: int  # of the default, that default_ms is of
    outside: dict[Slot, str]  # slots that no table reaches -> what NCCL runs there

    @property
    def fingerprint(self) -> Fingerprint:
        """All slots' fingerprints as one."""
        parts = [vars(p.fingerprint) for p in self.profiles]
        found = dict[str, Array]()
        for name in parts[0]:
            of_slots = [part[name] for part in parts]
            found[name] = np.concatenate(of_slots)
        return Fingerprint(**found)

    @property
    def slots(self) -> list[Slot]:
        """The slots, in the order of the rows."""
        return [p.slot for p in self.profiles]


def load(trace: Trace, min_share: float = 0.01) -> Recorded:
    """The tasks of a trace. Raises TraceError when it holds no steps or no slot that a tuner can reach."""
    windows = windows_of(trace)
    by_default = default_steps(trace)
    default_ms = float(np.median(by_default))
    step_us = default_ms * 1e3
    events = trace.events
    if not is_imported(trace):
        events = without_first(events, "step")
    profiles, outside = _profiles(trace, events, default_ms, min_share)
    effects = _effects(windows, trace.tables, profiles)
    share = np.array([p.share for p in profiles])
    actions = [spaces.action_mask(p.fingerprint) for p in profiles]
    allowed = spaces.config_mask(np.concatenate(actions))
    truth = np.full(allowed.shape, -np.inf)
    measured = np.zeros_like(allowed)
    times = Times(trace, events, profiles)
    for i, profile in enumerate(profiles):
        may_run = allowed[i]
        known = {config: saving for (slot, config), saving in effects.items() if slot == i}
        configs = list(known)
        predicted = predict(times, profile, may_run, known, step_us)
        predicted[configs] = list(known.values())
        savings = spaces.scale_saving(predicted, share[i])
        truth[i, may_run] = savings[may_run]
        truth[i, 0] = 0.0
        seen = [config for config in configs if may_run[config]]
        measured[i, seen] = True
    return Recorded(profiles, truth, measured, share, default_ms, len(by_default), outside)


def _profiles(
    trace: Trace, events: pd.DataFrame, default_ms: float, min_share: float
) -> tuple[list[SlotProfile], dict[Slot, str]]:
    """The slots under NCCL's own choice that a table reaches, and the others with what NCCL runs there. Raises
    TraceError where there is none of the first."""
    whole = in_steps(events, trace.steps)
    quiet = of_whole_steps(whole, default_generations(trace))
    steps = trace.steps
    known = steps[steps["memory_total"] > 0]
    pressure = 0.0
    if len(known):
        used = known["memory_used"] / known["memory_total"]
        pressure = float(used.mean())
    offers = offers_of(trace)
    way = trace.all_reduce
    outside = outside_the_offer(quiet, offers, way)
    found = find_slots(quiet, offers, default_ms * 1e3, pressure, told_steps(trace), all_reduce=way)
    every = [p for p in found if p.slot not in outside]
    profiles = [p for p in every if p.share >= min_share]
    if not profiles:
        funcs = tuned_funcs(way)
        n = int(events["func"].isin(funcs).sum())
        if n and not offers:
            cure = "name the cluster that was recorded with --cluster"
            raise TraceError(
                f"{trace.folder} holds {n} calls to tune, but not what NCCL offers for them: {cure}"
            )
        small = f"; the largest takes {every[0].share:.2%} of the step" if every else ""
        runs = f"; NCCL runs {next(iter(outside.values()))} for {next(iter(outside))}" if outside else ""
        raise TraceError(f"{trace.folder} holds no {' or '.join(funcs)} that a tuner can reach{small}{runs}")
    most = channels_of(events)  # tables may have asked for more than NCCL's own choice
    for p in profiles:
        n_channels = max(most[p.slot.n_ranks, p.slot.n_nodes], _told_channels(trace, p.slot))
        p.fingerprint.comm_channels = np.array([n_channels])
    return profiles, outside


def _told_channels(trace: Trace, slot: Slot) -> float:
    """How many channels a slot's communicators have as the cluster says that another tool's recording was placed on; 0
    of other recordings, which show it."""
    if not is_placed(trace):
        return 0.0
    return float(cluster_of(trace, slot.n_ranks, slot.n_nodes).comm_channels)


def is_imported(trace: Trace) -> bool:
    """The trace is another tool's recording: of some steps of a running job, all of them NCCL's own choice."""
    return "source" in trace.header


def default_steps(trace: Trace) -> Array:
    """The steps in which NCCL did as it likes, in order: ms (n,). Raises TraceError when there are none."""
    default = default_generations(trace)
    base = [w.durations_ms for w in windows_of(trace) if w.generation in default]
    if not base:
        raise TraceError(f"{trace.folder} holds no two steps under NCCL's default: nothing to compare with")
    return np.concatenate(base)


def windows_of(trace: Trace) -> list[SteadyWindow]:
    """All windows in order. Raises TraceError when there are none."""
    if not len(trace.steps):
        raise TraceError(f"{trace.folder} holds no steps: record a run with at least a few optimizer steps")
    steps = of_one_rank(trace.steps)
    imported = is_imported(trace)
    if not imported:
        steps = without_first(steps, "index")
    found = []
    steps = steps[steps["table_generation"] != MIXED]
    state = steps[["table_generation", "pid"]]
    is_change = (state != state.shift()).any(axis=1)
    for _, group in steps.groupby(is_change.cumsum()):
        if not imported:
            group = group.iloc[1:]  # a switch's first step is of both
        if group.empty:
            continue
        durations_ms = group["duration_ns"].to_numpy() / 1e6
        generation = int(group["table_generation"].iloc[0])
        first, last = group["index"].iloc[[0, -1]]
        pid = int(group["pid"].iloc[0])
        found.append(SteadyWindow(generation, durations_ms, int(first), int(last), pid))
    return found


def offers_of(trace: Trace) -> dict[tuple[int, str, int], Offer]:
    """What NCCL offered, by communicator, function and bytes."""
    offers = {}
    for row in trace.offers.to_dict("records"):
        cost_us = np.asarray(row["cost_us"], np.float32)
        by_pair = cost_us.reshape(N_ALGOS, N_PROTOS)
        algo = str(row["algo"])
        proto = str(row["proto"])
        n_pipe_ops = int(row["n_pipe_ops"])
        key = int(row["comm_id"]), str(row["func"]), int(row["n_bytes"])
        offers[key] = Offer(by_pair, algo, proto, n_pipe_ops)
    return offers


def _effects(
    windows: list[SteadyWindow], tables: dict[int, Rules], profiles: list[SlotProfile]
) -> dict[_Part, float]:
    """Relative step time that each (slot, config) saved, by the regression."""
    measured = []
    for table in savings(windows, tables):
        if parts := _parts(table.rules, profiles):
            measured.append((table, parts))
    keys = sorted({part for _, parts in measured for part in parts})
    if not keys:
        return {}
    rows = []
    for _, parts in measured:
        row = [float(key in parts) for key in keys]
        rows.append(row)
    design = np.array(rows)
    saving = np.array([table.saving for table, _ in measured])
    weight = np.array([table.n_steps for table, _ in measured])
    weighted = design * weight[:, None]
    ridge = _RIDGE * np.eye(len(keys))
    normal = design.T @ weighted + ridge
    right = design.T @ (weight * saving)
    effects = np.linalg.solve(normal, right)
    return dict(zip(keys, effects.tolist(), strict=True))


def _parts(rules: Rules, profiles: list[SlotProfile]) -> list[_Part]:
    """What a table holds of these slots."""
    found = []
    for rule in rules:
        try:
            config = spaces.config_of(decision_from(str(rule["decision"])), str(rule["func"]))
        except (ValueError, KeyError):  # outside the action space
            continue
        sizes = int(rule["n_ranks"]), int(rule["n_nodes"])
        least = int(rule["min_bytes"])
        most = int(rule["max_bytes"])
        for i, p in enumerate(profiles):
            own_sizes = p.slot.n_ranks, p.slot.n_nodes
            is_func = rule["func"] == p.slot.func
            is_within = least <= p.n_bytes <= most
            if is_func and is_within and sizes in ((0, 0), own_sizes):
                found.append((i, config))
    return found

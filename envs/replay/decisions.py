"""A recorded trace as tasks: what it measured as measured, the rest predicted by a model fitted to it and marked so.

Measured: the step time under each published table against the default's beside it gives what each (slot, decision)
saved, by ridge regression (a table may hold several slots' decisions at once). Predicted: the times of single
collectives, interpolated between those that the trace sampled, weighted by how much of a slot's time the step is seen
to wait for.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ...traces import spaces
from ...traces.assemble import Offer
from ...traces.files import Trace, TraceError
from ...traces.fingerprint import Fingerprint
from ...traces.queries.costs import of_whole_steps
from ...traces.queries.slots import SlotProfile, channels_of, find_slots
from ...traces.records import MIXED, N_ALGOS, N_PROTOS, PAIRS, TUNED_FUNCS, Slot, decision_from
from ..nccl_model import clusters, cost_model
from ..nccl_model.clusters import Cluster, ClusterArrays
from ..sim.fabric.fabric import Fabric
from ..sim.fabric.params import nominal
from .measured import Measured

Array = np.ndarray[Any, Any]

#: What part of a slot's time the step is taken to wait for, before anything was measured, and how firmly.
_PRIOR_WAIT, _PRIOR_WEIGHT = 0.6, 0.02
_RIDGE = 0.05


@dataclass
class Recorded:
    """The tasks of a trace, one a slot, the dearest first; savings in units of the slot's share of the step."""

    profiles: list[SlotProfile]
    truth: Array  # (n, N_CONFIGS) mean measured or predicted saving, -inf where masked
    measured: Array  # (n, N_CONFIGS) bool: from windows of the trace
    share: Array  # (n,)
    default_ms: float

    @property
    def fingerprint(self) -> Fingerprint:
        """All slots' fingerprints as one."""
        parts = [vars(p.fingerprint) for p in self.profiles]
        return Fingerprint(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})

    @property
    def slots(self) -> list[Slot]:
        """The slots, in the order of the rows."""
        return [p.slot for p in self.profiles]


@dataclass(frozen=True)
class SteadyWindow:
    """Consecutive steps of one table: rank 0's durations in ms, the first step left out."""

    generation: int
    ms: float
    n_steps: int


def load(trace: Trace, min_share: float = 0.01) -> Recorded:
    """The tasks of a trace. Raises TraceError when it holds no steps or no slot that a tuner can reach."""
    windows = windows_of(trace)
    default_ms = float(np.median([w.ms for w in default_windows(trace)]))
    events = trace.events
    if not is_imported(trace):
        events = events[events["step"] > events["step"].min()]
    profiles = _profiles(trace, events, default_ms, min_share)
    effects = _effects(windows, trace.tables, profiles)
    share = np.array([p.share for p in profiles])
    allowed = spaces.config_mask(np.concatenate([spaces.action_mask(p.fingerprint) for p in profiles]))
    truth, measured = np.full(allowed.shape, -np.inf), np.zeros_like(allowed)
    took = _Times(trace, events, profiles)
    for i, profile in enumerate(profiles):
        known = {config: saving for (slot, config), saving in effects.items() if slot == i}
        predicted = _predict(took, profile, allowed[i], known, default_ms * 1e3)
        predicted[list(known)] = list(known.values())
        truth[i, allowed[i]] = spaces.scale_saving(predicted, share[i])[allowed[i]]
        truth[i, 0] = 0.0
        measured[i, [config for config in known if allowed[i, config]]] = True
    return Recorded(profiles, truth, measured, share, default_ms)


def _profiles(trace: Trace, events: pd.DataFrame, default_ms: float, min_share: float) -> list[SlotProfile]:
    """The slots under NCCL's own choice. Raises TraceError where there is none."""
    quiet = of_whole_steps(events, default_generations(trace))
    known = trace.steps[trace.steps["memory_total"] > 0]
    memory = float((known["memory_used"] / known["memory_total"]).mean()) if len(known) else 0.0
    offers = offers_of(trace)
    every = find_slots(quiet, offers, default_ms * 1e3, memory)
    profiles = [p for p in every if p.share >= min_share]
    if not profiles:
        n = int(events["func"].isin(TUNED_FUNCS).sum())
        if n and not offers:
            cure = "name the cluster that was recorded with --cluster"
            raise TraceError(
                f"{trace.folder} holds {n} calls to tune, but not what NCCL offers for them: {cure}"
            )
        small = f"; the largest takes {every[0].share:.2%} of the step" if every else ""
        raise TraceError(
            f"{trace.folder} holds no all_gather or reduce_scatter that a tuner can reach{small}"
        )
    most = channels_of(events)  # tables may have asked for more than NCCL's own choice
    for p in profiles:
        # Of an imported recording the cluster says how many there are.
        n_channels = max(most[p.slot.n_ranks, p.slot.n_nodes], float(trace.header.get("comm_channels") or 0))
        p.fingerprint.comm_channels = np.array([n_channels])
    return profiles


def is_imported(trace: Trace) -> bool:
    """The trace is another tool's recording: of some steps of a running job, all of them NCCL's own choice."""
    return "source" in trace.header


def default_generations(trace: Trace) -> set[int]:
    """Of the tables without a row: NCCL did as it likes."""
    return {generation for generation, rules in trace.tables.items() if not rules}


def default_windows(trace: Trace) -> list[SteadyWindow]:
    """The windows in which NCCL did as it likes, in order. Raises TraceError when there are none."""
    default = default_generations(trace)
    base = [w for w in windows_of(trace) if w.generation in default]
    if not base:
        raise TraceError(f"{trace.folder} holds no two steps under NCCL's default: nothing to compare with")
    return base


def windows_of(trace: Trace) -> list[SteadyWindow]:
    """All windows in order. Raises TraceError when there are none."""
    steps = trace.steps
    if not len(steps):
        raise TraceError(f"{trace.folder} holds no steps: record a run with at least a few optimizer steps")
    steps = steps[steps["rank"] == steps["rank"].min()].sort_values("index")
    imported = is_imported(trace)
    if not imported:
        steps = steps[steps["index"] > steps["index"].min()]  # the job's first step holds its set-up
    found = []
    steps = steps[steps["table_generation"] != MIXED]
    change = (steps["table_generation"] != steps["table_generation"].shift()).cumsum()
    for _, group in steps.groupby(change):
        durations = (
            group["duration_ns"].to_numpy()[0 if imported else 1 :] / 1e6
        )  # a switch's first step is of both
        if len(durations):
            found.append(
                SteadyWindow(
                    int(group["table_generation"].iloc[0]), float(np.median(durations)), len(durations)
                )
            )
    return found


def offers_of(trace: Trace) -> dict[tuple[int, str, int], Offer]:
    """What NCCL offered, by communicator, function and bytes."""
    offers = {}
    for row in trace.offers.to_dict("records"):
        cost = np.asarray(row["cost_us"], np.float32).reshape(N_ALGOS, N_PROTOS)
        key = int(row["comm_id"]), str(row["func"]), int(row["n_bytes"])
        offers[key] = Offer(cost, str(row["algo"]), str(row["proto"]), int(row["n_pipe_ops"]))
    return offers


#: What the regression takes apart: a slot's number and a config.
_Part = tuple[int, int]


def _effects(
    windows: list[SteadyWindow], tables: dict[int, tuple[dict[str, Any], ...]], profiles: list[SlotProfile]
) -> dict[_Part, float]:
    """Relative step time that each (slot, config) saved, by the regression."""
    measured = _measured(windows, tables, profiles)
    keys = sorted({part for _, _, parts in measured for part in parts})
    if not keys:
        return {}
    design = np.array([[float(key in parts) for key in keys] for _, _, parts in measured])
    saving = np.array([saved for _, saved, _ in measured])
    weight = np.array([float(w.n_steps) for w, _, _ in measured])
    normal = design.T @ (design * weight[:, None]) + _RIDGE * np.eye(len(keys))
    effects = np.linalg.solve(normal, design.T @ (weight * saving))
    return dict(zip(keys, effects.tolist(), strict=True))


def _measured(
    windows: list[SteadyWindow], tables: dict[int, tuple[dict[str, Any], ...]], profiles: list[SlotProfile]
) -> list[tuple[SteadyWindow, float, list[_Part]]]:
    """The windows under tables: each with what it saved against the default before it, and what its table holds."""
    measured = []
    last_ms = next((w.ms for w in windows if tables.get(w.generation) == ()), np.nan)
    parts_of = {generation: _parts(rules, profiles) for generation, rules in tables.items()}
    for w in windows:
        parts = parts_of.get(w.generation)
        if tables.get(w.generation) == ():
            last_ms = w.ms
        elif parts:
            saved = 1.0 - w.ms / last_ms
            measured.append((w, saved, parts))
    return measured


def _parts(rules: tuple[dict[str, Any], ...], profiles: list[SlotProfile]) -> list[_Part]:
    """What a table holds of these slots."""
    found = []
    for rule in rules:
        try:
            config = spaces.config_of(decision_from(str(rule["decision"])))
        except ValueError:  # outside the action space
            continue
        sizes = int(rule["n_ranks"]), int(rule["n_nodes"])
        for i, p in enumerate(profiles):
            inside = int(rule["min_bytes"]) <= p.n_bytes <= int(rule["max_bytes"])
            if inside and rule["func"] == p.slot.func and sizes in ((0, 0), (p.slot.n_ranks, p.slot.n_nodes)):
                found.append((i, config))
    return found


class _Times:
    """Times of single collectives: sampled ones of the trace, and a nominal fabric fitted to them."""

    def __init__(self, trace: Trace, events: pd.DataFrame, profiles: list[SlotProfile]) -> None:
        first = profiles[0].fingerprint
        self.cluster = cluster_of(trace, int(first.n_ranks[0]), int(first.n_nodes[0]))
        fleet = ClusterArrays.of([self.cluster])
        # Deliberately without a preset's own parameters: a replay must not know what the trace did not see.
        self.fabric = Fabric(fleet, nominal(fleet))
        sampled = events.dropna(subset=["start_ns", "end_ns"])
        sampled = sampled.assign(us=(sampled["end_ns"] - sampled["start_ns"]).astype(float) / 1e3)
        sampled = sampled[sampled["us"] > 0]
        self._models: dict[tuple[str, str, str], Measured] = {}
        shifts: dict[str, list[float]] = defaultdict(list)
        for key, group in sampled.groupby(["func", "algo", "proto"]):
            func, algo, proto = map(str, key)
            if (algo, proto) in PAIRS:
                formula = functools.partial(self._formula, func, algo, proto)
                n_bytes, n_channels, us = (group[name].to_numpy() for name in ("n_bytes", "n_channels", "us"))
                model = self._models[func, algo, proto] = Measured(n_bytes, n_channels, us, formula)
                shifts[func].append(float(model.misses[-1]))  # of the largest message
        self._shift = {func: float(np.median(values)) for func, values in shifts.items()}

    def _formula(self, func: str, algo: str, proto: str, n_bytes: Array, n_channels: Array) -> Array:
        """log us of points, by the fabric."""
        us = [
            self.fabric.time_us(func, int(size), algo, proto, max(int(count), 1))
            for size, count in zip(n_bytes, n_channels, strict=True)
        ]
        return np.log(us)

    def us(self, func: str, n_bytes: int, algo: str, proto: str, n_channels: int) -> float:
        """Microseconds of one call on the trace's machine."""
        model = self._models.get((func, algo, proto))
        if model is not None:
            return model.predict_us(n_bytes, n_channels)
        base = self._formula(func, algo, proto, np.array([n_bytes]), np.array([n_channels]))[0]
        return float(np.exp(base + self._shift.get(func, 0.0)))


def cluster_of(trace: Trace, n_ranks: int, n_nodes: int) -> Cluster:
    """The header's preset where it names one, else an H100-like cluster of that shape."""
    try:
        return clusters.cluster(str(trace.header["cluster"]))
    except (KeyError, ValueError):
        per_node = max(n_ranks // max(n_nodes, 1), 1)
        kind = "one-gpu-per-node-8x1" if per_node == 1 else f"dgx-h100-{'1' if n_nodes == 1 else '2'}x8"
        like = {
            "like": kind,
            "n_nodes": max(n_nodes, 1),
            "gpus_per_node": max(per_node, 2 if n_nodes <= 1 else 1),
        }
        return clusters.from_mapping("trace", like)


def _predict(took: _Times, p: SlotProfile, allowed: Array, known: dict[int, float], step_us: float) -> Array:
    """Relative step time that every allowed config of a slot should save, (N_CONFIGS,)."""
    f = p.fingerprint
    own_pair, own_channels = PAIRS[int(f.own_pair[0])], max(int(f.own_channels[0]), 1)
    default_us = took.us(p.slot.func, p.n_bytes, *own_pair, own_channels)
    waits, slows = np.zeros(spaces.N_CONFIGS), np.zeros(spaces.N_CONFIGS)
    for config in np.flatnonzero(allowed).tolist():
        decision = spaces.decision_of(config)
        algo, proto = (decision.algo, str(decision.proto)) if decision.algo else own_pair
        if decision.n_channels or (algo, proto) != own_pair:
            ran, _ = cost_model.channels(
                took.cluster, p.slot.func, p.n_bytes, algo, proto, decision.n_channels
            )
        else:
            ran = own_channels
        us = took.us(p.slot.func, p.n_bytes, algo, proto, ran)
        waits[config] = p.calls * (default_us - us) / step_us
        hidden = default_us * took.fabric.slowdown(own_channels) - min(us, default_us) * took.fabric.slowdown(
            ran
        )
        slows[config] = p.calls * hidden / step_us
    # The part of the slot's time that the step waits for, from what was measured; the rest only slows compute.
    x = np.array([waits[c] for c in known])
    y = np.array(list(known.values()))
    wait = (_PRIOR_WEIGHT * _PRIOR_WAIT + x @ y) / (_PRIOR_WEIGHT + x @ x) if len(x) else _PRIOR_WAIT
    wait = float(np.clip(wait, 0.0, 1.2))
    return wait * waits + (1.0 - min(wait, 1.0)) * slows

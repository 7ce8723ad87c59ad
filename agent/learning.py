"""A recorded job as a record of the memory: what its windows measured, taken from the trace alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from ..envs.memory import Notes
from ..envs.replay import default_windows, load, windows_of
from ..envs.sequential import window_noise
from ..envs.sim.arms import distinct
from ..envs.sim.emulated import Emulated
from ..envs.windows import Job, warm_up_families
from ..traces import spaces
from ..traces.files import Trace
from ..traces.records import decision_from
from ..traces.skew import durations
from ..traces.slots import SlotProfile
from .clusters import FACTS, record_of
from .remembering import hardware_of, layout_of

Array = np.ndarray[Any, Any]


def record_of_trace(trace: Trace, hardware: str | None = None, nccl: str | None = None) -> dict[str, Any]:
    """The record. ``hardware`` and ``nccl`` say what the trace does not. Raises TraceError without a slot, and
    ValueError where the cluster cannot be told."""
    profiles = load(trace).profiles
    own = np.array([int(p.fingerprint.own_pair[0]) for p in profiles])
    events = trace.events
    default = [g for g, rules in trace.tables.items() if not rules]
    usual = np.array([_call_us(events[events["table_generation"].isin(default)], p) for p in profiles])
    job = Job(
        features=np.concatenate([p.fingerprint.vector() for p in profiles]),
        mask=np.concatenate([distinct(p.fingerprint) for p in profiles]),
        share=np.array([p.share for p in profiles]),
        call_us=usual,
        families=warm_up_families(own),
    )
    notes, steps = Notes(len(profiles)), _single_steps(trace, default)
    last = default_windows(trace)[0].ms
    for window in windows_of(trace):
        configs = _configs(trace.tables.get(window.generation, ()), profiles)
        if not configs.any():
            last = window.ms if window.generation in default else last
            continue
        mine = events[events["table_generation"] == window.generation]
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(np.array([_call_us(mine, p) for p in profiles]) / usual)
        notes.add(configs, math.log(window.ms / last), window_noise(steps, window.n_steps), logs)
    confirmed = _configs(_confirmed(trace), profiles)
    evidence = notes.evidence(job, usual, confirmed)
    run = str(trace.header.get("run") or "").rpartition("/")[2] or trace.folder.resolve().parent.name
    more = {"job": trace.header.get("job"), "gain": None, "contradicts": False}
    return record_of(_facts(trace, profiles, hardware, nccl), run, profiles, evidence, **more)


def _facts(trace: Trace, profiles: list[SlotProfile], hardware: str | None, nccl: str | None) -> dict[str, str]:
    header = trace.header
    known = {name: header.get(name) for name in FACTS}
    if header.get("emulated") and not known["hardware"]:  # recorded before headers told
        emulated = Emulated(header["cluster"], float(header["bytes_scale"]), float(header["time_scale"]))
        known |= hardware_of(emulated)
    if not known["layout"]:
        slot = max((p.slot for p in profiles), key=lambda slot: (slot.n_ranks, slot.n_nodes))
        known["layout"] = layout_of(slot.n_ranks, slot.n_nodes)
    known |= {name: value for name, value in (("hardware", hardware), ("nccl", nccl)) if value}
    missing = [name for name in FACTS if not known[name]]
    if missing:
        raise ValueError(f"the recording does not say its {' and '.join(missing)}: give --hardware and --nccl")
    return {name: str(value) for name, value in known.items()}


def _configs(rules: Sequence[dict[str, Any]], profiles: list[SlotProfile]) -> Array:
    """Configs (s,) of the slots under a published table; 0 where it has no row for one, or none that we know."""
    out = np.zeros(len(profiles), np.int64)
    for rule in rules:
        try:
            config = int(spaces.config_index(spaces.action_of(decision_from(str(rule["decision"])))[None])[0])
        except ValueError:
            continue
        for i, p in enumerate(profiles):
            sizes = int(rule.get("n_ranks", 0)), int(rule.get("n_nodes", 0))
            inside = int(rule["min_bytes"]) <= p.n_bytes <= int(rule["max_bytes"])
            if inside and rule["func"] == p.slot.func and sizes in ((0, 0), (p.slot.n_ranks, p.slot.n_nodes)):
                out[i] = config
    return out


def _confirmed(trace: Trace) -> Sequence[dict[str, Any]]:
    """Rules of the table that was in force at the end to stay; none of a trace from before trials had leases."""
    tables = [line["table"] for line in trace.log if line["kind"] == "table"]
    if not any("lease" in table for table in tables):
        return ()
    kept = [table for table in tables if "lease" not in table]
    return kept[-1]["rules"] if kept else ()


def _call_us(events: pd.DataFrame, profile: SlotProfile) -> float:
    """Median time of a slot's calls, us; NaN where none was sampled."""
    slot = profile.slot
    mine = (events["func"] == slot.func) & events["n_bytes"].between(slot.min_bytes, slot.max_bytes)
    mine &= (events["n_ranks"] == slot.n_ranks) & (events["n_nodes"] == slot.n_nodes) & events["start_ns"].notna()
    calls = events[mine]
    if not len(calls):
        return math.nan
    us = durations(calls)["us"]
    return float(us[(calls["rank"] == calls["rank"].min()) & us.notna()].median())


def _single_steps(trace: Trace, default: Sequence[int]) -> Array:
    """Logs of the default's steps, in order, about their middle."""
    steps = trace.steps[(trace.steps["rank"] == trace.steps["rank"].min())].sort_values("index")
    ms = steps[steps["table_generation"].isin(default)]["duration_ns"].to_numpy(float)[1:] / 1e6
    return np.log(ms / np.median(ms)) if len(ms) else np.zeros(0)

"""From a recording to advice: what communication costs the step, and which table to try first.

All gains are predicted, by :mod:`.gain`. To follow the advice is to measure the table in a tuning run, which keeps it
only where it is faster; it may be applied unseen where a loss is unlikely enough.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from ...envs.nccl_model.arms import distinct
from ...envs.nccl_model.clusters import Cluster, ClusterArrays
from ...envs.replay.decisions import cluster_of, load
from ...envs.replay.recordings import named, of_size, on_cluster
from ...envs.search.belief import Belief, Prior
from ...traces.files import Trace, TraceError
from ...traces.importers.recording import read_recording, recording_files
from ...traces.records import Decision, Slot
from ...traces.spaces import decision_of
from ..report.terminal import terminal
from .gain import Gains, exposure, tell

LEVEL = 0.8
#: A table may be applied unseen where it is no likelier than this to make steps longer by over 1 %.
UNSEEN = 0.01
#: A tuning run is worth its price where the best table should save this part of the step.
WORTH = 0.01
#: Of fewer recorded steps no gain of a table is told.
LEAST_STEPS = 30
# What no table can reach, with figures that others measured on other jobs, losses beside gains.
SUM = (
    "FSDP2 averages in reduce_scatter, which NVLS, PAT and symmetric kernels cannot (pytorch#155915, nccl#1670): "
    "module.set_force_sum_reduction_for_comms(True) opens these to NCCL and to a tuner. No public figure of a whole job"
)
SYMMETRIC = (
    "FSDP2's set_symm_mem_for_comm within one NVLink domain: +1.1 to +6.3 % tokens/s on 4 GB200 (torchtitan#3105); "
    "its kernels ask no tuner"
)
COPY_ENGINES = (
    "all_gather by copy engines, with cta_policy 2 (ZERO), NCCL 2.28 and PyTorch 2.13; reduce_scatter stays a kernel. "
    "Copy engines: +2.4 % tokens/s for Llama3-8B on 8 H100, nothing with tensor parallelism (pytorch#179937), a loss "
    "on 128 GPUs (Megatron-LM#5657). Asked for on 8 H20, a kernel came instead without a word, -1.8 % (UniRL#467): "
    "look for the kernel's name in a profile"
)
EFFICIENCY = "cta_policy 1 is EFFICIENCY, not ZERO: NCCL drops it while a tuner is loaded, so not beside dynamiccl"


def read(
    paths: list[Path], cluster: str | None = None, nccl: str | None = None, ranks_per_node: int | None = None
) -> Trace:
    """The recording, with offers of the named cluster where it has none. Raises TraceError or ValueError."""
    c = named(cluster, nccl) if cluster else None
    total = sum(p.stat().st_size for p in recording_files(paths))
    if ranks_per_node is None and c is not None:
        ranks_per_node = c.gpus_per_node
    with terminal(stderr=True).status(f"reading {total / 1e6:,.0f} MB"):
        trace = read_recording(paths, ranks_per_node)
    if c is None and not len(trace.offers):
        raise TraceError("the recording does not say what NCCL offers: name the recorded cluster with --cluster")
    return on_cluster(trace, named(str(cluster), nccl, trace.header.get("nccl"))) if c else trace


class Advice:
    """What a recording says, and what is predicted from it. Raises TraceError for one without steps or slots."""

    def __init__(self, trace: Trace, cluster: Cluster | None = None) -> None:
        self.trace, self.notes = trace, [str(note) for note in trace.header.get("notes") or ()]
        self.tasks = load(trace, min_share=0.0)
        first = self.tasks.slots[0]
        self.cluster = given = cluster or cluster_of(trace, first.n_ranks, first.n_nodes)
        profiles, fingerprint = self.tasks.profiles, self.tasks.fingerprint
        try:
            places = [of_size(self.cluster, p.slot.n_ranks, p.slot.n_nodes) for p in profiles]
        except ValueError as error:
            raise TraceError(f"{error}: name the cluster that was recorded with --cluster") from None
        self.cluster = max(places, key=lambda place: place.n_ranks)
        self.n_steps = int(trace.steps["index"].nunique())
        if self.cluster.n_ranks != given.n_ranks:
            ranks = f"{self.cluster.n_ranks} ranks were recorded, {given.name} has {given.n_ranks}"
            self.notes.insert(0, f"{ranks}: as many nodes of its kind are assumed as they fill, {self.cluster.n_nodes}")
        belief = Belief(
            Prior.load(),
            fingerprint.vector(),
            distinct(fingerprint, ClusterArrays.of(places).release),
            self.tasks.share,
        )
        seen = exposure(trace)
        self.exposed = np.array([seen.get(slot, np.nan) for slot in self.tasks.slots])
        tell(belief, self.exposed)
        self.gains = Gains(belief)
        self.configs = self.gains.best()

    @property
    def decisions(self) -> dict[Slot, Decision]:
        """The table to try first; slots that are left to NCCL are not in it."""
        return {slot: decision_of(c) for slot, c in zip(self.tasks.slots, self.configs, strict=True) if c}

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON and for people; unknown values are None."""
        header, profiles = self.trace.header, self.tasks.profiles
        found = bool(self.configs.any()) and self.n_steps >= LEAST_STEPS
        gain = _interval(*self.gains.interval(self.configs, LEVEL)) if found else None
        risk = self.gains.risk(self.configs) if found else None
        told = {"predicted": True, "recording": str(self.trace.folder), "source": header.get("source") or "dynamiccl"}
        told |= {"emulated": bool(header.get("emulated")), "cluster": self.cluster.name, "nccl": self.cluster.nccl}
        told |= {"step_ms": self.tasks.default_ms, "steps": self.n_steps}
        told |= {"communication": float(sum(p.share for p in profiles)), "gain": gain, "risk": risk, "level": LEVEL}
        told |= {"unseen": risk is not None and risk <= UNSEEN, "possible": _interval(*self.gains.possible(LEVEL))}
        told |= {"slots": [self._slot(i, found) for i in range(len(profiles))], "unknown": self._unknown()}
        told["launch"] = settings({slot.func for slot in self.tasks.slots}, self.cluster.n_nodes)
        return {"verdict": verdict(told), **told}

    def _slot(self, i: int, found: bool) -> dict[str, Any]:
        p = self.tasks.profiles[i]
        alone = np.zeros(len(self.configs), int)
        alone[i] = self.configs[i]
        told = {"slot": str(p.slot), "func": p.slot.func, "n_ranks": p.slot.n_ranks, "n_nodes": p.slot.n_nodes}
        told |= {"n_bytes": p.n_bytes, "calls": p.calls, "call_us": p.call_us, "timed_by": p.timed_by}
        told |= {"share": p.share, "advice": str(decision_of(self.configs[i]))}
        told["exposed_share"] = float(self.exposed[i]) * p.share if np.isfinite(self.exposed[i]) else None
        told["own"] = p.own
        told["saves"] = _interval(*self.gains.interval(alone, LEVEL)) if found and self.configs[i] else None
        return told

    def _unknown(self) -> list[str]:
        """What the recording does not say, each once."""
        notes = list(self.notes)
        if self.n_steps < LEAST_STEPS:
            notes.append(f"what a table gains: {self.n_steps} steps are too few to say, {LEAST_STEPS} are needed")
        if not np.isfinite(self.exposed).any():
            notes.append("what of the communication the step waits for: record compute too (PyTorch's profiler does)")
        if any(p.timed_by == "NCCL's price" for p in self.tasks.profiles):
            notes.append("how long calls take: NCCL's own price stands in for it")
        if not self.tasks.measured[:, 1:].any():
            notes.append("how other settings behave on this network: only NCCL's own choice was recorded")
        return list(dict.fromkeys(notes))


def settings(funcs: Collection[str], n_nodes: int) -> list[str]:
    """Settings of the launch that no table can reach, for a job that runs these collectives, whose largest communicator
    spans ``n_nodes``: each is to be tried, and step times compared."""
    found = [SUM] if "reduce_scatter" in funcs else []
    return found + ([SYMMETRIC, COPY_ENGINES, EFFICIENCY] if "all_gather" in funcs and n_nodes == 1 else [])


def verdict(told: dict[str, Any]) -> str:
    """What to do, in one line."""
    low, high = (max(0.0, told["possible"][end]) for end in ("low", "high"))
    if told["unseen"]:
        return f"apply the table: it should save {text(told['gain'])} of the step (predicted)"
    if told["possible"]["median"] >= WORTH:
        return f"nothing to apply blindly; a tuning run may save {low:.0%} to {high:.0%} of the step (predicted)"
    return f"nothing to apply, and not worth a tuning run: at most {high:.1%} of the step is to be saved (predicted)"


def text(gain: dict[str, float]) -> str:
    """A gain for people: ``2.1% [0.3%, 4.0%]``."""
    return f"{gain['median']:.1%} [{gain['low']:.1%}, {gain['high']:.1%}]"


def _interval(median: float, low: float, high: float) -> dict[str, float]:
    return {"median": median, "low": low, "high": high}

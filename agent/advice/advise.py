"""From a recording to advice: what communication costs the step, and which table to try first.

Gains are predicted by the search's belief (``envs/search/belief/``), whose prior has seen simulated jobs only. A tuning
run keeps only what is faster, so the boldest within reason is tried first. Unseen a table may be applied where a loss
is unlikely enough.
"""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from ...envs.nccl_model.arms import distinct
from ...envs.nccl_model.clusters import Cluster, ClusterArrays
from ...envs.replay.decisions import load
from ...envs.replay.predicted import cluster_of
from ...envs.replay.recordings import cluster_in, named, of_size, on_cluster
from ...envs.search.belief.belief import Belief
from ...envs.search.belief.effects import LOG_RANGE
from ...envs.search.belief.prior import Prior
from ...traces.files import Trace, TraceError
from ...traces.importers.recording import read_recording, recording_files, trace_folder
from ...traces.names import tuned_funcs
from ...traces.queries.costs import default_generations
from ...traces.queries.exposed import exposed_ms, exposed_parts_of
from ...traces.queries.stage import looks_like
from ...traces.records import Decision, Slot
from ...traces.spaces import decision_of
from ..report.terminal import terminal
from .alignment import as_dicts, misaligned
from .settings import settings

Array = np.ndarray[Any, Any]

LEVEL = 0.8
#: A table may be applied unseen where it is no likelier than this to make steps longer by over 1 %.
UNSEEN = 0.01
#: A tuning run is worth its price where the best table should save this part of the step.
WORTH = 0.01
#: Of fewer recorded steps under NCCL's own choice no table is advised.
LEAST_STEPS = 30
#: A slot's gain below this part of the step is not worth a row; a loss above this is one.
LEAST, LOSS = 0.001, 0.01
#: The belief doubts itself on purpose, for the search: what is told to people is so much narrower. Chosen on simulated
#: jobs of both families (``tests/tools/check_advice.py`` with seeds 11 and 31); other seeds then judge.
NARROWER = 0.8
#: Among configs that should gain, so many standard deviations count beside the mean. Chosen in the same way.
BOLD = 0.5
#: Exposure in the belief's sense for a part ``x`` of the time without compute: ``EXPOSED[0] + EXPOSED[1] * x``, give
#: or take ``EXPOSED[2]``. As simulated jobs of both families show it (``tests/tools/check_advice.py fit``).
EXPOSED = (0.49, 0.31, 0.25)
_DRAWS = 2000


def read(
    paths: list[Path],
    cluster: str | None = None,
    nccl: str | None = None,
    ranks_per_node: int | None = None,
    all_reduce: str | None = None,
) -> Trace:
    """The recording, with offers of the named cluster where it has none. ``all_reduce``: read as of a job with that
    option.

    A recording without steps is returned as it is: no gain can be predicted from it. Raises TraceError or ValueError.
    """
    c = named(cluster, nccl) if cluster else None
    if ranks_per_node is None and c is not None:
        ranks_per_node = c.gpus_per_node
    total = 0
    if not any(map(trace_folder, paths)):
        files = recording_files(paths)
        total = sum(file.stat().st_size for file in files)
    with terminal(stderr=True).status(f"reading {total / 1e6:,.0f} MB"):
        trace = read_recording(paths, ranks_per_node)
    if all_reduce:
        trace.header["all_reduce"] = all_reduce
    if trace.steps.empty:
        return trace
    # Of a job without any of these, as of DDP, our own plugin tells no offers either.
    funcs = trace.events["func"]
    has_tuned = funcs.isin(tuned_funcs(trace.all_reduce)).any()
    if c is None:
        if has_tuned and not len(trace.offers):
            raise TraceError(
                "the recording does not say what NCCL offers: name the recorded cluster with --cluster"
            )
        return trace
    recorded = trace.header.get("nccl")
    return on_cluster(trace, named(str(cluster), nccl, recorded))


def exposure(trace: Trace) -> dict[Slot, float]:
    """Exposed part of the time of each slot under the default, 0 to 1; empty if the recording does not show it."""
    return exposed_parts_of(trace, default_generations(trace))


def tell(belief: Belief, exposed: Array) -> None:
    """Let the belief know what part of its slots' time was seen without compute, (s,); NaN: not seen."""
    seen = np.flatnonzero(np.isfinite(exposed))
    if len(seen):
        at = [belief.parts[i].start for i in seen]
        values = EXPOSED[0] + EXPOSED[1] * np.minimum(exposed[seen], 1.0)
        unsure = np.full(len(at), EXPOSED[2])
        belief.learn(at, values, unsure)


class Gains:
    """What tables save, as parts of the step; see :class:`envs.search.belief.Belief` for ``belief``."""

    def __init__(self, belief: Belief) -> None:
        self.belief = belief

    def best(self) -> Array:
        """The table to try first, (s,) configs; 0 leaves a slot to NCCL."""
        configs = []
        for slot in range(len(self.belief.arms)):
            means, deviations = self.belief.figures(slot)
            hopes = means + BOLD * deviations
            hopes = np.where(means >= LEAST, hopes, 0.0)
            configs.append(hopes.argmax())
        return np.array(configs, int)

    def interval(self, configs: Array, level: float = 0.8) -> tuple[float, float, float]:
        """(middle, low, high) of what a table saves; the interval holds the truth in ``level`` of the cases."""
        mean, deviation = self.belief.saving(configs)
        half = NormalDist().inv_cdf((1 + level) / 2) * NARROWER * deviation
        return mean, mean - half, mean + half

    def risk(self, configs: Array) -> float:
        """Probability that a table makes steps longer by more than LOSS."""
        if not np.any(configs):
            return 0.0
        mean, deviation = self.belief.saving(configs)
        return NormalDist(mean, max(NARROWER * deviation, 1e-9)).cdf(-LOSS)

    def possible(self, level: float = 0.8) -> tuple[float, float, float]:
        """(median, low, high) of what the best table would save, were it known: drawn from the belief."""
        belief = self.belief
        values, vectors = np.linalg.eigh(belief.cov)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        rng = np.random.default_rng(0)
        normal = rng.normal(size=(_DRAWS, len(belief.mean)))
        drawn = belief.mean + NARROWER * normal @ root.T
        most = np.zeros(_DRAWS)
        for slot, share in enumerate(belief.share):
            n_arms = len(belief.arms[slot])
            if n_arms:
                of_slot = drawn[:, belief.parts[slot]]
                most += share * _best_saving(of_slot, n_arms)
        ends = ((1 - level) / 2, 0.5, (1 + level) / 2)
        low, middle, high = np.quantile(most, ends)
        return float(middle), float(low), float(high)


def _best_saving(drawn: Array, n_arms: int) -> Array:
    """What the best arm of a slot saves of the slot's time, for each draw of the slot's part of the belief."""
    exposure, logs, rest = np.split(drawn, [1, 1 + n_arms], axis=1)
    shorter = 1 - np.exp(np.clip(logs, *LOG_RANGE))
    saved = np.clip(exposure, 0, 1.3) * shorter + rest
    return np.asarray(np.clip(saved.max(axis=1), 0, 1))


class Advice:
    """What a recording says, and what is predicted from it. Raises TraceError for one without steps or slots."""

    def __init__(self, trace: Trace, cluster: Cluster | None = None) -> None:
        self.trace = trace
        notes = trace.header.get("notes") or ()
        self.notes = [str(note) for note in notes]
        self.tasks = load(trace, min_share=0.0)
        first = self.tasks.slots[0]
        named_there = cluster_in(trace.header)
        given = cluster or named_there or cluster_of(trace, first.n_ranks, first.n_nodes)
        places = self._places(given)
        self.cluster = max(places, key=lambda place: place.n_ranks)
        self.n_steps = self.tasks.n_steps
        self._note_size(given)
        fingerprint = self.tasks.fingerprint
        arms = distinct(fingerprint, ClusterArrays.of(places).release)
        features = fingerprint.vector()
        belief = Belief(Prior.load(), features, arms, self.tasks.share)
        seen = exposure(trace)
        parts = [seen.get(slot, np.nan) for slot in self.tasks.slots]
        self.exposed = np.array(parts)
        tell(belief, self.exposed)
        self.exposed_ms = exposed_ms(trace, default_generations(trace))
        self.gains = Gains(belief)
        self.is_long = self.n_steps >= LEAST_STEPS
        self.configs = np.zeros(len(arms), int)
        if self.is_long:
            self.configs = self.gains.best()

    def _places(self, given: Cluster) -> list[Cluster]:
        """The cluster in the size of each slot's communicator. Raises TraceError where one does not fit."""
        try:
            return [of_size(given, slot.n_ranks, slot.n_nodes) for slot in self.tasks.slots]
        except ValueError as error:
            raise TraceError(f"{error}: name the cluster that was recorded with --cluster") from None

    def _note_size(self, given: Cluster) -> None:
        """Say it where the recording is of another number of ranks than the named cluster."""
        n_ranks = self.cluster.n_ranks
        n_nodes = self.cluster.n_nodes
        if n_ranks != given.n_ranks:
            ranks = f"{n_ranks} ranks were recorded, {given.name} has {given.n_ranks}"
            self.notes.insert(0, f"{ranks}: as many nodes of its kind are assumed as they fill, {n_nodes}")

    @property
    def decisions(self) -> dict[Slot, Decision]:
        """The table to try first; slots that are left to NCCL are not in it."""
        found = {}
        for slot, config in zip(self.tasks.slots, self.configs, strict=True):
            if config:
                found[slot] = decision_of(config, slot.func)
        return found

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON and for people; unknown values are None."""
        header = self.trace.header
        found = bool(self.configs.any())
        risk = self.gains.risk(self.configs) if found else None
        shares = sum(p.share for p in self.tasks.profiles)
        told = {
            "predicted": True,
            "recording": str(self.trace.folder),
            "source": header.get("source") or "dynamiccl",
            "emulated": bool(header.get("emulated")),
            "all_reduce": self.trace.all_reduce,
            "cluster": self.cluster.name,
            "nccl": self.cluster.nccl,
            "step_ms": self.tasks.default_ms,
            "steps": self.n_steps,
            "stage": looks_like(self.trace.events)._asdict(),
            "communication": float(min(1.0, shares)),
            "left_out": self._left_out(),
            "gain": _interval(*self.gains.interval(self.configs, LEVEL)) if found else None,
            "risk": risk,
            "level": LEVEL,
            "unseen": risk is not None and risk <= UNSEEN,
            "possible": _interval(*self.gains.possible(LEVEL)),
            "slots": [self._slot(i, found) for i in range(len(self.configs))],
            "misaligned": as_dicts(misaligned(self.trace)),
            "unknown": self._unknown(),
        }
        funcs = {slot.func for slot in self.tasks.slots}
        told["launch"] = settings(funcs, self.cluster.n_nodes, header.get("framework"))
        return {"verdict": verdict(told), **told}

    def _slot(self, i: int, found: bool) -> dict[str, Any]:
        p = self.tasks.profiles[i]
        alone = np.zeros(len(self.configs), int)
        alone[i] = self.configs[i]
        saves = None
        bare_ms = self.exposed_ms.get(p.slot)
        if found and self.configs[i]:
            saves = _interval(*self.gains.interval(alone, LEVEL))
        slot = p.slot
        return {
            "slot": str(slot),
            "func": slot.func,
            "n_ranks": slot.n_ranks,
            "n_nodes": slot.n_nodes,
            "n_bytes": p.n_bytes,
            "calls": p.calls,
            "call_us": p.call_us,
            "timed_by": p.timed_by,
            "share": min(1.0, p.share),  # calls of a slot may run at the same time
            "advice": str(decision_of(self.configs[i], slot.func)),
            "exposed_share": None if bare_ms is None else min(1.0, bare_ms / self.tasks.default_ms),
            "own": p.own,
            "saves": saves,
        }

    def _left_out(self) -> float:
        """The part of the step in NCCL's kernels that the recording does not tell enough of; at most 1."""
        left_out = self.trace.header.get("left_out") or {}
        durations = self.trace.steps["duration_ns"]
        steps_ns = float(durations.sum())
        left_out_ns = left_out.get("ns", 0)
        return min(1.0, left_out_ns / steps_ns) if steps_ns else 0.0

    def _unknown(self) -> list[str]:
        """What the recording does not say, each once."""
        notes = list(self.notes)
        for slot, ran in self.tasks.outside.items():
            notes.append(f"what a table changes of {slot}: NCCL runs {ran} there, which no table reaches")
        if not self.is_long:
            notes.append(
                f"what a table gains: {self.n_steps} steps are too few to say, {LEAST_STEPS} are needed"
            )
        if sum(p.share for p in self.tasks.profiles) > 1:
            notes.append("how much of the step communicates: collectives ran at the same time")
        if not np.isfinite(self.exposed).any():
            notes.append(
                "what of the communication the step waits for: record compute too (PyTorch's profiler does)"
            )
        if any(p.timed_by == "NCCL's price" for p in self.tasks.profiles):
            notes.append("how long calls take: NCCL's price stands in for it")
        if not self.tasks.measured[:, 1:].any():
            notes.append("how other settings behave on this network: only NCCL's default was recorded")
        return list(dict.fromkeys(notes))


def verdict(told: dict[str, Any]) -> str:
    """What to do, in one line."""
    low, high = (max(0.0, told["possible"][end]) for end in ("low", "high"))
    if told["unseen"]:
        return f"apply the table: it should save {text(told['gain'])} of the step (predicted)"
    if told["possible"]["median"] >= WORTH:
        return (
            f"nothing to apply blindly; a tuning run may save {low:.0%} to {high:.0%} of the step (predicted)"
        )
    return f"nothing to apply, and not worth a tuning run: at most {high:.1%} of the step is to be saved (predicted)"


def text(gain: dict[str, float]) -> str:
    """A gain for people: ``2.1% [0.3%, 4.0%]``."""
    return f"{gain['median']:.1%} [{gain['low']:.1%}, {gain['high']:.1%}]"


def _interval(median: float, low: float, high: float) -> dict[str, float]:
    return {"median": median, "low": low, "high": high}

"""From a recording to advice: what communication costs the step, and which table to try first.

All gains are predicted, by the search's own belief before it has tried anything (``envs/search/belief.py``). Its prior
has seen many simulated jobs: it knows how long every config of a slot takes there beside NCCL's own choice, and what
the step feels of that. What a recording shows of compute beside communication is told to it. To follow the advice is to
measure the table in a tuning run, which keeps it only where it is faster: so of what should gain, the boldest within
reason is tried first. It may be applied unseen where a loss is unlikely enough.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from ...envs.nccl_model.arms import distinct
from ...envs.nccl_model.clusters import Cluster, ClusterArrays
from ...envs.replay.decisions import cluster_of, load
from ...envs.replay.recordings import named, of_size, on_cluster
from ...envs.search.belief import LOG_RANGE, Belief, Prior
from ...traces.files import Trace, TraceError
from ...traces.importers.recording import read_recording, recording_files
from ...traces.queries.skew import exposed_ns
from ...traces.records import Decision, Slot, size_class
from ...traces.spaces import decision_of
from ..report.terminal import terminal

Array = np.ndarray[Any, Any]

LEVEL = 0.8
#: A table may be applied unseen where it is no likelier than this to make steps longer by over 1 %.
UNSEEN = 0.01
#: A tuning run is worth its price where the best table should save this part of the step.
WORTH = 0.01
#: Of fewer recorded steps no gain of a table is told.
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
EFFICIENCY = (
    "cta_policy 1 is EFFICIENCY, not ZERO: NCCL drops it while a tuner is loaded, so not beside dynamiccl"
)


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
        raise TraceError(
            "the recording does not say what NCCL offers: name the recorded cluster with --cluster"
        )
    return on_cluster(trace, named(str(cluster), nccl, trace.header.get("nccl"))) if c else trace


def exposure(trace: Trace) -> dict[Slot, float]:
    """Of slots under NCCL's own choice: the part of their time in which nothing is computed; empty where the recording
    shows no compute."""
    if not len(trace.compute):
        return {}
    default = {g for g, rules in trace.tables.items() if not rules}
    events = trace.events[trace.events["table_generation"].isin(default)]
    events = events.assign(bare=exposed_ns(events, trace.compute)).dropna(subset="bare")
    lasts = (events["end_ns"] - events["start_ns"]).astype(float)
    sizes = events["n_bytes"].map(lambda n: size_class(int(n)))
    grouped = events.assign(lasts=lasts, size_class=sizes).groupby(
        ["n_ranks", "n_nodes", "func", "size_class"]
    )
    sums = grouped[["bare", "lasts"]].sum()
    return {Slot(*key): bare / max(lasts, 1.0) for key, bare, lasts in sums.itertuples()}


def tell(belief: Belief, exposed: Array) -> None:
    """Let the belief know what part of its slots' time was seen without compute, (s,); NaN: not seen."""
    seen = np.flatnonzero(np.isfinite(exposed))
    if len(seen):
        at = [belief.parts[i].start for i in seen]
        values = EXPOSED[0] + EXPOSED[1] * np.minimum(exposed[seen], 1.0)
        belief.learn(at, values, np.full(len(at), EXPOSED[2]))


class Gains:
    """What tables save, as parts of the step; see :class:`envs.search.belief.Belief` for ``belief``."""

    def __init__(self, belief: Belief) -> None:
        self.belief = belief

    def best(self) -> Array:
        """The table to try first, (s,) configs; 0 leaves a slot to NCCL."""
        figures = [self.belief.figures(i) for i in range(len(self.belief.arms))]
        means, deviations = (np.array(part) for part in zip(*figures, strict=True))
        return np.asarray(np.where(means >= LEAST, means + BOLD * deviations, 0.0).argmax(axis=1))

    def interval(self, configs: Array, level: float = 0.8) -> tuple[float, float, float]:
        """(middle, low, high) of what a table saves; the interval holds the truth in ``level`` of the cases."""
        mean, deviation = self.belief.saving(configs)
        half = NormalDist().inv_cdf((1 + level) / 2) * NARROWER * deviation
        return mean, mean - half, mean + half

    def risk(self, configs: Array) -> float:
        """Probability that a table makes steps longer by more than LOSS."""
        mean, deviation = self.belief.saving(configs)
        return NormalDist(mean, max(NARROWER * deviation, 1e-9)).cdf(-LOSS) if np.any(configs) else 0.0

    def possible(self, level: float = 0.8) -> tuple[float, float, float]:
        """(median, low, high) of what the best table would save, were it known: drawn from the belief."""
        b, rng = self.belief, np.random.default_rng(0)
        values, vectors = np.linalg.eigh(b.cov)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        drawn = b.mean + NARROWER * rng.normal(size=(_DRAWS, len(b.mean))) @ root.T
        most = np.zeros(_DRAWS)
        for part, arms, share in zip(b.parts, b.arms, b.share, strict=True):
            if len(arms):
                exposure, logs, rest = np.split(drawn[:, part], [1, 1 + len(arms)], axis=1)
                saved = np.clip(exposure, 0, 1.3) * (1 - np.exp(np.clip(logs, *LOG_RANGE))) + rest
                most += share * np.clip(saved.max(axis=1), 0, 1)
        low, middle, high = np.quantile(most, ((1 - level) / 2, 0.5, (1 + level) / 2))
        return float(middle), float(low), float(high)


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
            self.notes.insert(
                0, f"{ranks}: as many nodes of its kind are assumed as they fill, {self.cluster.n_nodes}"
            )
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
        told = {
            "predicted": True,
            "recording": str(self.trace.folder),
            "source": header.get("source") or "dynamiccl",
        }
        told |= {
            "emulated": bool(header.get("emulated")),
            "cluster": self.cluster.name,
            "nccl": self.cluster.nccl,
        }
        told |= {"step_ms": self.tasks.default_ms, "steps": self.n_steps}
        told |= {
            "communication": float(sum(p.share for p in profiles)),
            "gain": gain,
            "risk": risk,
            "level": LEVEL,
        }
        told |= {
            "unseen": risk is not None and risk <= UNSEEN,
            "possible": _interval(*self.gains.possible(LEVEL)),
        }
        told |= {"slots": [self._slot(i, found) for i in range(len(profiles))], "unknown": self._unknown()}
        told["launch"] = settings({slot.func for slot in self.tasks.slots}, self.cluster.n_nodes)
        return {"verdict": verdict(told), **told}

    def _slot(self, i: int, found: bool) -> dict[str, Any]:
        p = self.tasks.profiles[i]
        alone = np.zeros(len(self.configs), int)
        alone[i] = self.configs[i]
        told = {
            "slot": str(p.slot),
            "func": p.slot.func,
            "n_ranks": p.slot.n_ranks,
            "n_nodes": p.slot.n_nodes,
        }
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
            notes.append(
                f"what a table gains: {self.n_steps} steps are too few to say, {LEAST_STEPS} are needed"
            )
        if not np.isfinite(self.exposed).any():
            notes.append(
                "what of the communication the step waits for: record compute too (PyTorch's profiler does)"
            )
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
        return (
            f"nothing to apply blindly; a tuning run may save {low:.0%} to {high:.0%} of the step (predicted)"
        )
    return f"nothing to apply, and not worth a tuning run: at most {high:.1%} of the step is to be saved (predicted)"


def text(gain: dict[str, float]) -> str:
    """A gain for people: ``2.1% [0.3%, 4.0%]``."""
    return f"{gain['median']:.1%} [{gain['low']:.1%}, {gain['high']:.1%}]"


def _interval(median: float, low: float, high: float) -> dict[str, float]:
    return {"median": median, "low": low, "high": high}

"""From a recording to advice: what communication costs the step, which table to try first, and what no table can say.

All gains are predicted, by :mod:`.gain`; nothing here has been measured but what the recording says. To follow the
advice is to measure the table in a tuning run, which keeps it only where it is faster; it may be applied unseen where a
loss is unlikely enough.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..envs.belief import Belief, Prior
from ..envs.evidence import SlotOverlap, given_back, ratios, seen_in, tell
from ..envs.recordings import of_size
from ..envs.replay import Recorded as Tasks
from ..envs.replay import cluster_of, load
from ..envs.sim.arms import distinct
from ..envs.sim.clusters import Cluster, Fleet
from ..traces.costs import size_text
from ..traces.files import Trace, TraceError
from ..traces.overlap import Overlap
from ..traces.records import PAIRS, Decision, Slot, Table, decision_from
from .gain import Gains, config_decision
from .knobs import knobs

Array = np.ndarray[Any, Any]
LEVEL = 0.8
#: A table may be applied unseen where it is no likelier than this to make steps longer by over 1 %.
UNSEEN = 0.01


class Advice:
    """What a recording says, and what is predicted from it. Raises TraceError for one without steps or slots."""

    def __init__(self, trace: Trace, cluster: Cluster | None = None, min_share: float = 0.0) -> None:
        self.trace = trace
        self.tasks: Tasks = load(trace, min_share)
        first = self.tasks.slots[0]
        self.cluster = cluster or cluster_of(trace, first.n_ranks, first.n_nodes)
        self.scale = float(trace.header.get("time_scale") or 1.0)
        self.step_us = self.tasks.default_ms * 1e3
        seen, self.overlaps = seen_in(trace, self.step_us)
        self.evidence = [seen.get(slot, SlotOverlap()) for slot in self.tasks.slots]
        self.exposed = np.array([one.exposed for one in self.evidence])
        self.gains = self._predict()
        self.configs = self.gains.best()

    @property
    def decisions(self) -> dict[Slot, Decision]:
        """The table to try first; slots that are left to NCCL are not in it."""
        found = zip(self.tasks.slots, map(config_decision, self.configs), strict=True)
        return {slot: decision for slot, decision in found if not decision.is_auto}

    @property
    def table(self) -> Table:
        """The same as rows."""
        return Table.of(1, self.decisions)

    def _predict(self) -> Gains:
        profiles, f = self.tasks.profiles, self.tasks.fingerprint
        places = []
        for p in profiles:
            try:
                places.append(of_size(self.cluster, p.slot.n_ranks, p.slot.n_nodes))
            except ValueError as error:
                raise TraceError(f"{error}: name the cluster that was recorded with --cluster") from None
        mask = distinct(f, Fleet.of(places).release)
        belief = Belief(Prior.load(), f.vector(), mask, self.tasks.share)
        tell(belief, self.evidence)
        return Gains(belief)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON and for people; unknown values are None."""
        header = self.trace.header
        middle, low, high = self.gains.interval(self.configs, LEVEL)
        found = bool(self.configs.any())
        possible = dict(zip(("median", "low", "high"), self.gains.possible(LEVEL), strict=True))
        steps = self.trace.steps
        scatter = steps[steps["rank"] == steps["rank"].min()]["duration_ns"].astype(float)
        noise = (
            float(1.4826 * (scatter - scatter.median()).abs().median() / scatter.median()) if len(scatter) > 4 else None
        )
        return {
            "predicted": True,
            "recording": str(self.trace.folder),
            "source": header.get("source") or "dynamiccl",
            "emulated": bool(header.get("emulated")),
            "cluster": self.cluster.name,
            "nccl": self.cluster.nccl,
            "step_ms": self.tasks.default_ms,
            "steps": int(steps["index"].nunique()),
            "communication": float(sum(p.share for p in self.tasks.profiles)),
            "slots": [self._slot(i) for i in range(len(self.tasks.slots))],
            "overlap": [self._overlap(o) for o in self.overlaps if o.lost >= 0.001],
            "gain": {"median": middle, "low": low, "high": high, "level": LEVEL} if found else None,
            "risk": self.gains.risk(self.configs) if found else None,
            "unseen": found and self.gains.risk(self.configs) <= UNSEEN,
            "possible": {**possible, "level": LEVEL},
            "seen_with_600_steps": None if noise is None else 2 * noise * float(np.sqrt(2 / 600)),
            "knobs": knobs(self),
            "unknown": self._unknown(),
        }

    def _slot(self, i: int) -> dict[str, Any]:
        p = self.tasks.profiles[i]
        cost = p.fingerprint.cost_us[0]
        own = f"{'/'.join(PAIRS[int(p.fingerprint.own_pair[0])])}/{int(p.fingerprint.own_channels[0])}"
        choice = np.zeros(len(self.configs), int)
        choice[i] = self.configs[i]
        middle, low, high = self.gains.interval(choice, LEVEL)
        exposed = float(self.exposed[i]) if np.isfinite(self.exposed[i]) else None
        return {
            "slot": str(p.slot),
            "func": p.slot.func,
            "messages": size_text(p.slot.min_bytes, p.slot.max_bytes),
            "n_ranks": p.slot.n_ranks,
            "n_nodes": p.slot.n_nodes,
            "n_bytes": p.n_bytes,
            "calls": p.calls,
            "call_us": p.call_us,
            "timed_by": p.timed_by,
            "share": p.share,
            "exposed_share": None if exposed is None else exposed * p.share,
            "own": own,
            "offered": {"/".join(pair): float(us) for pair, us in zip(PAIRS, cost, strict=True) if us >= 0},
            "advice": str(config_decision(self.configs[i])),
            "saves": None if not self.configs[i] else {"median": middle, "low": low, "high": high},
        }

    def _overlap(self, o: Overlap) -> dict[str, Any]:
        n_ranks, n_nodes, func, klass, algo, proto, channels = o.key
        slot = Slot(n_ranks, n_nodes, func, klass)
        row = {"slot": str(slot), "ran": f"{algo}/{proto}/{channels}", "slowdown": o.slowdown, "low": o.low}
        row |= {"high": o.high, "kernels": o.kernels, "kinds": o.kinds, "lost": o.lost, "fewer": None}
        if slot in self.tasks.slots:
            i, half = self.tasks.slots.index(slot), channels // 2
            arms, belief = self.gains.belief.arms[i], self.gains.belief
            config = next((c for c in arms if _is(c, algo, proto, half)), None)
            if config is not None and o.slowdown > 0:
                back = given_back(float(self.exposed[i]), o.slowdown, channels, ratios(belief, i))
                part = float(back[config]) * float(self.tasks.share[i])
                row["fewer"] = {"channels": half, "gives_back": min(part, o.lost)}
        return row

    def _unknown(self) -> list[str]:
        """What the recording does not say, each once."""
        notes = [str(n) for n in self.trace.header.get("notes") or ()]
        if not np.isfinite(self.exposed).any():
            notes.append("what of the communication the step waits for: record compute too (a Kineto or nsys profile)")
        if not self.overlaps:
            notes.append("what collectives cost the compute beside them: no kernel was seen both beside one and alone")
        if any(p.timed_by == "NCCL's price" for p in self.tasks.profiles):
            notes.append("how long calls take: NCCL's own price stands in for it")
        if self.tasks.measured[:, 1:].any():
            notes.append("what steps under a tuner's tables say: only those under NCCL's own choice were used")
        else:
            notes.append("how other settings behave on this network: only NCCL's own choice was recorded")
        return list(dict.fromkeys(notes))


def _is(config: Any, algo: str, proto: str, channels: int) -> bool:
    d = config_decision(config)
    return d == decision_from(f"{algo}/{proto}/{channels}") or (d.algo is None and d.n_channels == channels > 0)

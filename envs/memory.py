"""What one search leaves to the next on the same cluster, and how far the next one believes it.

A search leaves what it *measured* (:class:`Evidence`), not what it believed: durations of the slots' calls under each
config against the default's, what whole tables did to the step, what was confirmed. The next search takes the slots of
before into its Gaussian as further slots of its own: slots of one fabric share factors (the prior's), slots of one
class and of like size share the rest too, the less the further their sizes are apart (a kernel over log2 bytes, see
Rasmussen and Williams 2006, chapter 4). Older evidence counts for less. Where the very same job runs again, what the
step did under whole tables counts as well, and the table that was confirmed is the first to be tried.

None of it is trusted. Durations of the default that are not those remembered throw it away before a step is spent
(:data:`UNLIKE`); after that a second belief that knows nothing of it sees the same windows, and once these are likelier
under that one, it goes on alone (:class:`Recalled`). Whatever is remembered, a table stays only by the same comparison.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..traces.fingerprint import N_FEATURES
from ..traces.records import PAIRS
from ..traces.spaces import N_CONFIGS
from .belief import CALL_FLOOR, DOUBT, LOG_RANGE, Belief, Prior
from .windows import Job

Array = np.ndarray[Any, Any]

#: Days in which the weight of evidence (one over its variance) is halved.
HALF_LIFE_DAYS = 30.0
#: Standard deviations by which the same figure differs between two jobs: a log duration, the log of a whole step.
BETWEEN_CALLS, BETWEEN_STEPS = 0.04, 0.004
#: ... and what of a saving of the step may not come back.
BETWEEN_SAVINGS = 0.15
#: Octaves of message size over which slots of a class stop being alike.
OCTAVES = 8.0
#: Default durations of like slots further apart than this (log) mean another cluster, whatever its name.
UNLIKE = 0.5
#: Sizes (octaves) and shares of the step (log) within which a slot is the same as before.
SAME_SIZE, SAME_SHARE = 0.02, 0.3
#: The memory goes once the windows speak against it by so much (log odds); one window counts for at most that much.
AGAINST, AT_MOST = -1.5, 3.0
#: No direction of a belief is surer than this (a variance).
LEAST_VARIANCE = 1e-9
#: Remembered slots that are taken in, at most.
MOST_SLOTS = 24

#: Places in ``Fingerprint.vector``: function, log2 of bytes, calls, ranks, nodes; NCCL's prices, its own choice.
_FUNC, _BYTES, _CALLS, _RANKS, _NODES = 0, 1, 3, 4, 5
_PRICES, _OWN = slice(N_FEATURES - 2 * len(PAIRS), N_FEATURES - len(PAIRS)), slice(N_FEATURES - len(PAIRS), N_FEATURES)


@dataclass(frozen=True)
class Evidence:
    """What a search over a job of ``s`` slots measured."""

    features: Array  # (s, N_FEATURES)
    mask: Array  # (s, N_CONFIGS) bool: what could be chosen
    share: Array  # (s,) of the default's step
    call_us: Array  # (s,) of the default's calls; NaN: never sampled
    logs: Array  # (s, N_CONFIGS) mean log time of a call over the default's; NaN: never sampled
    counts: Array  # (s, N_CONFIGS) windows that it is the mean of
    tables: Array  # (k, s) configs of the windows, each table once
    savings: Array  # (k,) mean log of the default's step time over the table's
    deviations: Array  # (k,) its standard deviation
    confirmed: Array  # (s,) configs in force at its end, 0: the default's
    age_days: float = 0.0


@dataclass
class Notes:
    """Gathers the :class:`Evidence` of a search of ``s`` slots."""

    n_slots: int
    sums: Array = field(init=False)
    counts: Array = field(init=False)
    steps: dict[tuple[int, ...], list[tuple[float, float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sums, self.counts = np.zeros((2, self.n_slots, N_CONFIGS))

    def add(self, configs: Array, log_step: float, noise: float, call_logs: Array) -> None:
        """A window: its configs (s,), the log of its step time over the default's of that moment with its standard
        deviation, and logs of the call times (s,) over the default's; NaN: not measured."""
        seen = np.flatnonzero(np.isfinite(call_logs) & (configs > 0))
        self.sums[seen, configs[seen]] += np.clip(call_logs[seen], *LOG_RANGE)
        self.counts[seen, configs[seen]] += 1
        if configs.any() and math.isfinite(log_step):
            self.steps.setdefault(tuple(configs.tolist()), []).append((-log_step, noise))

    def evidence(self, job: Job, call_us: Array, confirmed: Array) -> Evidence:
        """All that was added; ``call_us`` (s,) of the default's calls."""
        savings, deviations = [], []
        for windows in self.steps.values():
            weight = np.array([1 / noise**2 for _, noise in windows])
            savings.append(float(weight @ [saving for saving, _ in windows] / weight.sum()))
            deviations.append(float(weight.sum() ** -0.5))
        with np.errstate(invalid="ignore"):
            logs = self.sums / self.counts
        tables = np.array(list(self.steps), np.int64).reshape(len(self.steps), self.n_slots)
        return Evidence(
            np.array(job.features),
            np.array(job.mask),
            np.array(job.share),
            np.array(call_us),
            logs,
            self.counts.copy(),
            tables,
            np.array(savings),
            np.array(deviations),
            confirmed.copy(),
        )


class Memory:
    """What is known of a cluster, the newest first. Raises ValueError for evidence of other features."""

    def __init__(self, evidence: Sequence[Evidence]) -> None:
        if any(e.features.shape[1] != N_FEATURES or e.logs.shape[1] != N_CONFIGS for e in evidence):
            raise ValueError("the evidence is of another version of dynamiccl")
        self.evidence = sorted(evidence, key=lambda e: e.age_days)

    def recall(self, job: Job, prior: Prior, belief: Belief) -> Recalled:
        """What of it bears on this job, whose belief is as yet nothing but the prior's."""
        if not self.evidence:
            return Recalled(belief, belief, None, "nothing is known of this cluster yet")
        slots = _Slots.of(self.evidence, job)
        if not len(slots.features):
            return Recalled(belief, belief, None, "jobs before had no slot like these")
        apart = slots.apart(job)
        if abs(apart) > UNLIKE:
            text = f"calls take {math.exp(apart):.2f} times what they took in jobs before: the cluster has changed"
            return Recalled(belief, belief, None, text, is_contradicted=True)
        informed = copy.deepcopy(belief)
        slots.inform(informed, job, prior)
        table = None
        for evidence in reversed(self.evidence):  # the newest has the last word
            twin = _twins(evidence, job)
            if twin is not None:
                _replay(informed, evidence, twin, job)
                table = evidence.confirmed[twin] if evidence.confirmed.any() else table
        if table is None or not job.mask[np.arange(len(table)), table].all():
            table = informed.best()
        return Recalled(informed, belief, table if table.any() else None, f"{len(slots.features)} slots are known")


@dataclass
class Recalled:
    """A belief that begins with what is remembered, and beside it the one that does not."""

    belief: Belief
    plain: Belief
    table: Array | None  # (s,) to be tried first
    text: str  # what came of the memory, for people
    odds: float = 0.0  # log odds of the memory against none, by this job's windows
    windows: int = 0
    is_contradicted: bool = False  # what was measured here is not what is remembered

    @property
    def is_used(self) -> bool:
        """Whether the belief still holds what was remembered."""
        return self.belief is not self.plain

    def observe(self, *seen: Any) -> None:
        """One window, as :meth:`belief.Belief.observe` takes it."""
        told = self.belief.observe(*seen)
        if not self.is_used:
            return
        self.odds += float(np.clip(told - self.plain.observe(*seen), -AT_MOST, AT_MOST))
        self.windows += 1
        if self.odds < AGAINST:
            self.belief, self.table, self.is_contradicted = self.plain, None, True
            self.text = f"not as in jobs before (log odds {self.odds:.1f} after {self.windows} windows): forgotten"


class Remembering:
    """A search's own part: it begins from the memory, if there is any, and gathers what it leaves."""

    def __init__(self, memory: Memory | None) -> None:
        self.memory, self.notes = memory, Notes(0)
        self.recalled: Recalled | None = None

    def begin(self, job: Job, prior: Prior, belief: Belief) -> tuple[Belief, Array]:
        """The belief (as yet the prior's) to begin with, and the table (s,) to try first; zeros: none. What was there
        before a job changed is not asked again."""
        self.notes, none = Notes(len(job.share)), np.zeros(len(job.share), np.int64)
        self.recalled = self.memory.recall(job, prior, belief) if self.memory else None
        self.memory = None
        if self.recalled is None:
            return belief, none
        return self.recalled.belief, none if self.recalled.table is None else self.recalled.table.copy()

    def observe(self, belief: Belief, *seen: Any) -> Belief:
        """One window, as :meth:`belief.Belief.observe` takes it; the belief to go on with."""
        if self.recalled is None:
            belief.observe(*seen)
        else:
            self.recalled.observe(*seen)
            belief = self.recalled.belief
        configs, log_step, noise, call_logs, *_ = seen
        self.notes.add(configs, log_step - float(belief.mean[0]), noise, call_logs)
        return belief

    @property
    def beliefs(self) -> tuple[Belief, ...]:
        """The one with the memory and the one without, where there are two."""
        r = self.recalled
        return (r.belief, r.plain) if r is not None and r.is_used else ()

    @property
    def is_borne_out(self) -> bool:
        """This job's own windows speak for the memory."""
        r = self.recalled
        return r is not None and r.is_used and r.windows > 0 and r.odds > 0


@dataclass
class _Slots:
    """Remembered slots of a job's classes, each once; logs are of its calls."""

    features: Array  # (r, N_FEATURES)
    mask: Array  # (r, N_CONFIGS)
    call_us: Array  # (r,)
    logs: Array  # (r, N_CONFIGS)
    variance: Array  # (r, N_CONFIGS) of logs as evidence, age included; inf: never measured

    @classmethod
    def of(cls, evidence: Sequence[Evidence], job: Job) -> _Slots:
        """Of the evidence, newest first: the same slot of several jobs becomes one."""
        found: list[list[tuple[Evidence, int]]] = []
        for e in evidence:
            for i in range(len(e.features)):
                for same in found:
                    first, k = same[0]
                    if likeness(first.features[k : k + 1], e.features[i : i + 1], SAME_SIZE)[0, 0] > 0.3:
                        same.append((e, i))
                        break
                else:
                    found.append([(e, i)])
        features = np.array([same[0][0].features[same[0][1]] for same in found]).reshape(-1, N_FEATURES)
        near = likeness(features, job.features, OCTAVES).max(axis=1, initial=0.0)
        kept = [i for i in np.argsort(-near, kind="stable")[:MOST_SLOTS] if _is_near(features[i], job)]
        logs, variance, us = np.zeros((len(kept), N_CONFIGS)), np.full((len(kept), N_CONFIGS), np.inf), []
        mask = np.array([found[i][0][0].mask[found[i][0][1]] for i in kept]).reshape(-1, N_CONFIGS)
        for row, i in enumerate(kept):
            weight = np.zeros(N_CONFIGS)
            for e, k in found[i]:
                with np.errstate(divide="ignore"):
                    own = BETWEEN_CALLS**2 + CALL_FLOOR**2 * 4 / e.counts[k]
                part = np.where(e.counts[k] > 0, 2 ** (-e.age_days / HALF_LIFE_DAYS) / own, 0.0)
                logs[row] += part * np.nan_to_num(e.logs[k])
                weight += part
            with np.errstate(divide="ignore", invalid="ignore"):
                logs[row], variance[row] = np.where(weight > 0, logs[row] / weight, 0.0), 1 / weight
            us.append(found[i][0][0].call_us[found[i][0][1]])
        return cls(features[kept], mask, np.array(us), logs, variance)

    def apart(self, job: Job) -> float:
        """Median log of the default's durations over those remembered of slots of the same size, 0 without any."""
        same = likeness(job.features, self.features, SAME_SIZE) > 0.3
        with np.errstate(invalid="ignore"):
            logs = np.log(job.call_us[:, None] / self.call_us[None])[same]
        logs = logs[np.isfinite(logs)]
        return float(np.median(logs)) if len(logs) else 0.0

    def inform(self, belief: Belief, job: Job, prior: Prior) -> None:
        """Condition a belief that is the prior's on what is remembered."""
        slot, config = np.nonzero(np.isfinite(self.variance))
        mean, own, loadings = prior(self.features, self.mask)
        n = prior.n_shared
        theirs = loadings[slot, config]  # (m, k) of the remembered log times
        alike = likeness(job.features, self.features, OCTAVES)  # (s, r)
        among = likeness(self.features, self.features, OCTAVES)[np.ix_(slot, slot)]
        spread = theirs[:, :n] @ theirs[:, :n].T + among * (theirs[:, n:] @ theirs[:, n:].T)
        sd = np.sqrt(own[slot, config])
        spread += among * np.outer(sd, sd) * (config[:, None] == config[None])
        _, my_own, mine = prior(job.features, job.mask)
        siblings = likeness(job.features, job.features, OCTAVES)
        picks = [np.concatenate([[2 * N_CONFIGS], arms, N_CONFIGS + arms]) for arms in belief.arms]
        cross = np.zeros((len(belief.mean), len(slot)))
        for s, (pick, part) in enumerate(zip(picks, belief.parts, strict=True)):
            k = alike[s, slot]
            cross[part] = mine[s, pick, :n] @ theirs[:, :n].T + k * (mine[s, pick, n:] @ theirs[:, n:].T)
            same = pick[:, None] == config[None]
            cross[part] += same * k * np.sqrt(my_own[s, pick])[:, None] * sd[None]
            for t in range(s):  # as alike as two slots are to a third, they are to each other
                other, at = picks[t], belief.parts[t]
                both = mine[s, pick, n:] @ mine[t, other, n:].T
                both += (pick[:, None] == other[None]) * np.sqrt(np.outer(my_own[s, pick], my_own[t, other]))
                belief.cov[part, at] += DOUBT * siblings[s, t] * both
                belief.cov[at, part] += DOUBT * siblings[s, t] * both.T
        spread = DOUBT * spread + np.diag(self.variance[slot, config])
        gain = np.linalg.solve(spread, DOUBT * cross.T).T
        belief.mean = belief.mean + gain @ (self.logs[slot, config] - mean[slot, config])
        belief.cov -= gain @ (DOUBT * cross.T)
        # What slots are taken to have in common is not always a covariance: what would be a negative variance is none.
        values, vectors = np.linalg.eigh(belief.cov)
        if values[0] < LEAST_VARIANCE:
            belief.cov = (vectors * np.maximum(values, LEAST_VARIANCE)) @ vectors.T
        belief.touched()


def likeness(a: Array, b: Array, octaves: float) -> Array:
    """(n, m) correlation of what slots of features ``a`` (n, N_FEATURES) and ``b`` (m, N_FEATURES) have beyond the
    factors that all share: 0 between classes, and where NCCL's own choice is another."""
    same = np.ones((len(a), len(b)), bool)
    for at in (_FUNC, _RANKS, _NODES):
        same &= np.abs(a[:, None, at] - b[None, :, at]) < 1e-3
    same &= (a[:, None, _OWN].argmax(axis=2)) == (b[None, :, _OWN].argmax(axis=2))
    apart = 32.0 * np.abs(a[:, None, _BYTES].astype(float) - b[None, :, _BYTES])
    return np.asarray(np.where(same, np.exp(-apart / octaves), 0.0))


def _is_near(features: Array, job: Job) -> bool:
    """Whether a remembered slot lies on communicators of a class that this job has too."""
    classes = np.abs(job.features[:, [_RANKS, _NODES]] - features[[_RANKS, _NODES]]).max(axis=1)
    return bool((classes < 1e-3).any())


def _twins(evidence: Evidence, job: Job) -> Array | None:
    """Which slot of before each slot (s,) is again, or None where it is not the same job."""
    if len(evidence.features) != len(job.features):
        return None
    alike = likeness(job.features, evidence.features, SAME_SIZE) > 0.3
    alike &= np.abs(job.features[:, None, _CALLS] - evidence.features[None, :, _CALLS]) < 0.02
    prices = np.abs(job.features[:, None, _PRICES] - evidence.features[None, :, _PRICES]).max(axis=2)
    alike &= prices < 0.05
    with np.errstate(divide="ignore"):
        alike &= np.abs(np.log(job.share[:, None] / evidence.share[None])) < SAME_SHARE
    found = alike.argmax(axis=1)
    return found if alike.any(axis=1).all() and len(set(found.tolist())) == len(found) else None


def _replay(belief: Belief, evidence: Evidence, twin: Array, job: Job) -> None:
    """Whole tables' step times of the same job before."""
    doubt = 2 ** (evidence.age_days / HALF_LIFE_DAYS)
    none = np.full(len(twin), np.nan)
    drift = belief.cov[0, 0]
    for table, saving, deviation in zip(evidence.tables, evidence.savings, evidence.deviations, strict=True):
        configs = table[twin]
        if job.mask[np.arange(len(twin)), configs].all():
            noise = math.sqrt(doubt * (deviation**2 + BETWEEN_STEPS**2 + (BETWEEN_SAVINGS * saving) ** 2))
            belief.observe(configs, -float(saving), noise, none, none, 0)
    # Its default's drift is not this one's.
    belief.mean[0], belief.cov[0, :], belief.cov[:, 0] = 0.0, 0.0, 0.0
    belief.cov[0, 0] = drift
    belief.touched()


def aged(evidence: Evidence, days: float) -> Evidence:
    """The same, so many days old."""
    return replace(evidence, age_days=days)

"""Does the LSTM's state know what kind of training it rides beside? A linear probe on it (Alain and Bengio 2016).

The policy reads each slot of a job once, before the first window; a linear classifier then names the engine and its
stage from the state alone. Nothing in the policy's training says what they are. Two controls say what that is worth:
the same probe on the state of an LSTM with random weights, and on the slots' fingerprints themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..envs.belief import Prior
from ..envs.sim.job_family import HELD_OUT, STANDARD, JobFamily
from ..envs.sim.jobs import draw_jobs
from ..envs.sim_windows import SimSearch
from ..traces.fingerprint import N_FEATURES
from ..traces.spaces import config_index
from .policy import LstmPolicy

Array = np.ndarray[Any, Any]

#: Jobs that are drawn at once.
BLOCK = 64
#: What is added to the classes' common variance, as a part of it: features are many and go together.
RIDGE = 0.01


def regime_of(workload: str) -> str:
    """Engine and stage of a simulated workload, from its name: zero-1, zero-2, zero-3 or fsdp2 (both of its kinds).

    Stage 0 all-reduces: it has no slot that a tuner could reach, so no search ever sees it.
    """
    engine = workload.partition(",")[0].split(" ")[1]
    return "fsdp2" if engine.startswith("fsdp2") else engine[: len("zero-1")]


@dataclass
class Read:
    """``n`` jobs as a policy reads them: of each its observations (slots, N_OBSERVATION), and its regime."""

    seen: list[Array]
    regime: Array  # (n,) str


def read(family: JobFamily, seed: int, n: int, policy: LstmPolicy) -> Read:
    """``n`` fresh jobs (whole blocks of them), each slot read once in its turn; ``policy`` decides."""
    rng, prior, seen, regimes = np.random.default_rng([seed, 17]), Prior.load(), list[Array](), list[str]()
    while len(seen) < n:
        jobs = draw_jobs(family, rng, BLOCK)
        for i, search in enumerate(SimSearch(jobs, prior, rng).searches):
            rows, state = [], None
            for _ in range(search.n_slots):
                rows.append(search.observe())
                action, state = policy.predict(rows[-1][None], state)
                search.decide(int(config_index(action)[0]))
            seen.append(np.array(rows))
            regimes.append(regime_of(jobs.works.names[jobs.which[i]]))
    return Read(seen[:n], np.array(regimes[:n]))


def states(policy: LstmPolicy, seen: list[Array]) -> Array:
    """The LSTM's state after each job's slots were read, (n, 2 * hidden): its output and its cells."""
    rows = []
    for job in seen:
        state = policy._fresh(1)
        for observation in job:
            _, state = policy.scores(observation[None], state)
        rows.append(np.concatenate([state[0][0], state[1][0]]))
    return np.array(rows)


def fingerprints(seen: list[Array]) -> Array:
    """What can be had without a state: mean, least and most of the slots' features, and their number."""
    rows = []
    for job in seen:
        x = job[:, :N_FEATURES]
        rows.append(np.concatenate([x.mean(axis=0), x.min(axis=0), x.max(axis=0), [len(x)]]))
    return np.array(rows)


class Linear:
    """A linear classifier: normal classes with one common covariance (Fisher's discriminant)."""

    def __init__(self, x: Array, names: Array) -> None:
        """``x`` (n, d), ``names`` (n,)."""
        self.names, which = np.unique(names, return_inverse=True)
        self.middle, self.scale = x.mean(axis=0), x.std(axis=0) + 1e-6
        z = (x - self.middle) / self.scale
        means = np.array([z[which == k].mean(axis=0) for k in range(len(self.names))])
        away = z - means[which]
        common = away.T @ away / len(z) + RIDGE * np.eye(z.shape[1])
        self.slopes = np.linalg.solve(common, means.T)
        share = np.bincount(which) / len(which)
        self.offsets = np.log(share) - 0.5 * (means.T * self.slopes).sum(axis=0)

    def __call__(self, x: Array) -> Array:
        """The likeliest name of each row, (n,)."""
        scores = (x - self.middle) / self.scale @ self.slopes + self.offsets
        return np.asarray(self.names[scores.argmax(axis=1)])


def untrained(policy: LstmPolicy, seed: int = 0) -> LstmPolicy:
    """The same network with random weights, as torch begins an LSTM."""
    rng, bound = np.random.default_rng(seed), policy.hidden**-0.5
    drawn = {k: rng.uniform(-bound, bound, w.shape).astype(np.float32) for k, w in policy.weights.items()}
    return LstmPolicy(drawn | {"rule": policy.weights["rule"]}, policy.record)


def probe(policy: LstmPolicy, jobs: int, seed: int = 0) -> dict[str, Any]:
    """Fit on ``jobs`` jobs of the standard family, name the regime of half as many fresh ones of each family.

    Returns for each family the part that is named right, by what it is read from, and what was taken for what. The
    held-out family has other models and clusters, and no zero-1.
    """
    known = read(STANDARD, seed, jobs, policy)
    fresh = {family.name: read(family, seed + 1, jobs // 2, policy) for family in (STANDARD, HELD_OUT)}
    chance = untrained(policy, seed)
    ways = {
        "state": lambda seen: states(policy, seen),
        "state, untrained": lambda seen: states(chance, seen),
        "fingerprints": fingerprints,
    }
    found: dict[str, Any] = {"jobs": jobs, "seed": seed, "right": {name: {} for name in fresh}}
    for way, of in ways.items():
        classifier = Linear(of(known.seen), known.regime)
        for name, some in fresh.items():
            said = classifier(of(some.seen))
            found["right"][name][way] = round(float((said == some.regime).mean()), 4)
            if way == "state":
                pairs, counts = np.unique([*zip(some.regime, said, strict=True)], axis=0, return_counts=True)
                taken = {f"{a} as {b}": int(n) for (a, b), n in zip(pairs, counts, strict=True) if a != b}
                found.setdefault("mistaken", {})[name] = taken
    return found

"""Does the LSTM's state know what kind of training it rides beside? A linear probe on it (Alain and Bengio 2016).

The policy reads each slot of a job once, before the first window; a linear classifier then names the engine and its
stage from the state alone. Nothing in the policy's training says what they are. Two controls say what that is worth:
the same probe on the state of an LSTM with random weights, and on the slots' fingerprints themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

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
#: Weights of the squared slopes that are tried, each judged by one in so many jobs.
PENALTIES, KEPT_BACK = (1e-3, 1e-4, 1e-5, 1e-6), 5


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
    """A linear classifier: multinomial logistic regression. How much its slopes are held back is chosen on a part of
    what it is given."""

    def __init__(self, x: Array, names: Array) -> None:
        """``x`` (n, d), ``names`` (n,)."""
        self.names, which = np.unique(names, return_inverse=True)
        self.middle, self.scale = x.mean(axis=0), x.std(axis=0) + 1e-6
        z, back = (x - self.middle) / self.scale, len(x) // KEPT_BACK
        tries = [self._fit(z[back:], which[back:], penalty) for penalty in PENALTIES]
        right = [((z[:back] @ slopes + offsets).argmax(axis=1) == which[:back]).mean() for slopes, offsets in tries]
        self.slopes, self.offsets = self._fit(z, which, PENALTIES[int(np.argmax(right))])

    def _fit(self, z: Array, which: Array, penalty: float) -> tuple[Array, Array]:
        data, told = torch.from_numpy(np.asarray(z, np.float64)), torch.from_numpy(which)
        slopes = torch.zeros(z.shape[1], len(self.names), dtype=torch.float64, requires_grad=True)
        offsets = torch.zeros(len(self.names), dtype=torch.float64, requires_grad=True)
        fit = torch.optim.LBFGS([slopes, offsets], max_iter=300, line_search_fn="strong_wolfe")

        def loss() -> torch.Tensor:
            fit.zero_grad()
            found = torch.nn.functional.cross_entropy(data @ slopes + offsets, told) + penalty * (slopes**2).sum()
            found.backward()
            return found

        fit.step(loss)
        return slopes.detach().numpy(), offsets.detach().numpy()

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
    """Fit a probe on ``jobs`` jobs of each family, name the regime of half as many fresh ones.

    Returns for each family the part that is named right, by what it is read from, and what was taken for what;
    ``elsewhere``: the part of the held-out family that the standard family's probe names right. That family has other
    models and clusters, and no zero-1.
    """
    chance = untrained(policy, seed)
    ways = {
        "state": lambda seen: states(policy, seen),
        "state, untrained": lambda seen: states(chance, seen),
        "fingerprints": fingerprints,
    }
    found: dict[str, Any] = {"jobs": jobs, "seed": seed, "right": {}, "mistaken": {}, "elsewhere": {}}
    before: dict[str, Linear] = {}
    for family in (STANDARD, HELD_OUT):
        known, fresh = read(family, seed, jobs, policy), read(family, seed + 1, jobs // 2, policy)
        right = found["right"][family.name] = dict[str, float]()
        for way, of in ways.items():
            x, own = of(fresh.seen), Linear(of(known.seen), known.regime)
            said = own(x)
            right[way] = _part(said == fresh.regime)
            if way in before:
                found["elsewhere"][way] = _part(before[way](x) == fresh.regime)
            before[way] = own
            if way == "state":
                pairs, counts = np.unique([*zip(fresh.regime, said, strict=True)], axis=0, return_counts=True)
                taken = {f"{a} as {b}": int(n) for (a, b), n in zip(pairs, counts, strict=True) if a != b}
                found["mistaken"][family.name] = taken
    return found


def _part(is_right: Array) -> float:
    return round(float(is_right.mean()), 4)

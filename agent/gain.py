"""What a table should gain, predicted from a recording alone: many machines that could have made it, and each's answer.

Machines are drawn from the family of fabrics around the recorded cluster and pulled to what was recorded, the times of
NCCL's own choice and how much compute is slowed, by an ensemble Kalman update (Evensen 1994). Each then says how long
every config would take. Of a call that gets shorter the step gains what it waits for, and the compute that is slowed
less; how the first depends on what is exposed differs from job to job, and is drawn too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..envs.arms import distinct
from ..envs.sim.clusters import Fleet
from ..envs.sim.fabric import Fabric, nominal, spread
from ..envs.sim.jobs import call_tables
from ..envs.spaces import N_CONFIGS, actions_of, decision_of
from ..traces.fingerprint import Fingerprint
from ..traces.records import Decision

Array = np.ndarray[Any, Any]

#: Machines drawn; what a recorded time may differ from a collective alone on an idle fabric (log, one sigma).
MACHINES, RECORDED = 500, 0.2
#: Size of what no formula knows of a fabric, drawn within (log scale).
_MISSED = (0.05, 0.45)
#: A gain less likely than this to be a loss of over LOSS may be advised; smaller ones than LEAST are not worth a table.
RISK, LOSS, LEAST = 0.01, 0.01, 0.001
#: Factor on the spread of predicted gains.
_WIDER = 1.3
#: What part of a predicted saving a step really shows, where exposure is known and where it is not; like _WIDER chosen
#: on simulated jobs of both families (tests/check_advice.py with seeds 11, 31, 51), other seeds then judge.
_REALISED = {True: (0.3, 1.45), False: (0.1, 2.0)}


@dataclass(frozen=True)
class Recorded:
    """What is known of the ``n`` slots of a job, the step being 1: arrays (n,)."""

    fingerprint: Fingerprint  # share: of the step, all calls together
    fleet: Fleet  # the communicator's machine, one a slot
    call_us: Array  # of one call, NaN where not timed
    exposed: Array  # part of a slot's time in which nothing is computed, NaN where not known
    slowdown: Array  # of compute beside a call under NCCL's own choice, NaN where not measured
    slowdown_error: Array


@dataclass(frozen=True)
class Gains:
    """Relative step time saved, for every machine, slot and config: (m, n, N_CONFIGS); AUTO saves 0."""

    saved: Array
    mask: Array  # (n, N_CONFIGS) configs that NCCL offers, one an arm
    given_back: Array  # of `saved`, what compute is slowed less

    def of(self, configs: Array) -> Array:
        """Saved by a table, ``configs`` (n,) by slot, on every machine: (m,)."""
        return np.asarray(self.saved[:, np.arange(len(configs)), configs].sum(axis=1))

    def interval(self, configs: Array, level: float = 0.8) -> tuple[float, float, float]:
        """(median, low, high) of what a table saves; the interval holds the truth in ``level`` of the cases."""
        low, middle, high = np.quantile(self.of(configs), ((1 - level) / 2, 0.5, (1 + level) / 2))
        return float(middle), float(low), float(high)

    def possible(self, level: float = 0.8) -> tuple[float, float, float]:
        """(median, low, high) of what the best table would save, were it known: each machine's own best configs."""
        most = np.where(self.mask, self.saved, 0.0).max(axis=2).sum(axis=1)
        low, middle, high = np.quantile(most, ((1 - level) / 2, 0.5, (1 + level) / 2))
        return float(middle), float(low), float(high)

    def best(self) -> Array:
        """The table to try first, (n,) configs: the largest mean gain that hardly ever is a loss; 0 leaves a slot."""
        mean, loses = self.saved.mean(axis=0), (self.saved < -LOSS).mean(axis=0)
        worth = np.where(self.mask & (loses <= RISK) & (mean >= LEAST), mean, 0.0)
        configs = worth.argmax(axis=1)
        while (self.of(configs) < -LOSS).mean() > RISK:
            risk = [
                (self.of(np.where(np.arange(len(configs)) == i, 0, configs)) < -LOSS).mean()
                for i in range(len(configs))
            ]
            configs[int(np.argmin(np.where(configs > 0, risk, 2.0)))] = 0
        return np.asarray(configs)


def config_decision(config: Any) -> Decision:
    """Index of a config -> Decision."""
    return decision_of(actions_of(np.array([int(config)]))[0])


def predict(job: Recorded, seed: int = 0) -> Gains:
    """What each config of each slot should save."""
    rng, n, m = np.random.default_rng(seed), len(job.call_us), MACHINES
    f = job.fingerprint
    missed = np.exp(rng.uniform(np.log(_MISSED[0]), np.log(_MISSED[1]), m))
    log_us, log_slow = np.zeros((m, n, N_CONFIGS)), np.zeros((m, n, N_CONFIGS))
    for i in range(n):
        rows = np.full(m, i)
        fleet = job.fleet.take(rows)
        # The same draws for each slot: communicators of several sizes lie on one machine.
        fabric = Fabric(fleet, spread(nominal(fleet), np.random.default_rng(seed + 1), sigma=missed))
        is_rs, n_bytes = f.is_reduce_scatter[rows].astype(int), f.n_bytes[rows].astype(np.int64)
        tables, _ = call_tables(fabric, is_rs, n_bytes, np.asarray(f.own_pair, int)[rows], False, 1)
        log_us[:, i] = np.log(tables.us[:, 0].astype(float))
        log_slow[:, i] = np.log(np.maximum(tables.slow[:, 0].astype(float), 1e-6))
    state = np.concatenate([log_us.reshape(m, -1), log_slow.reshape(m, -1)], axis=1)
    seen = np.concatenate([log_us[:, :, 0], log_slow[:, :, 0]], axis=1)
    told = np.concatenate([np.log(job.call_us), np.log(np.maximum(job.slowdown, 1e-6))])
    error = np.concatenate([np.full(n, RECORDED), job.slowdown_error / np.maximum(job.slowdown, 1e-6)])
    known = np.isfinite(told) & np.isfinite(error)
    if known.any():
        state = _pulled(state, seen[:, known], told[known], np.maximum(error[known], 0.03), rng)
    log_us, log_slow = (part.reshape(m, n, N_CONFIGS) for part in np.split(state, 2, axis=1))
    ratio = np.exp(np.clip(log_us - log_us[:, :, :1], -3, 3))
    slow = np.exp(np.minimum(log_slow, 1.5))
    # Where nobody saw what was exposed, anything is possible.
    unknown = rng.beta(0.5, 1.3, (m, n))
    exposed = np.where(np.isfinite(job.exposed), np.clip(job.exposed, 0.005, 1.0), unknown)[:, :, None]
    share = np.asarray(f.share, float)[None, :, None]
    waits = exposed ** rng.uniform(0.1, 1.3, (m, 1, 1))
    shorter = share * (1 - ratio)
    bare = (exposed * share).sum(axis=1, keepdims=True)
    saved = np.minimum(waits * shorter, bare)
    hidden = share * (1 - exposed)
    lost = hidden * ratio * slow / (1 + slow)
    back = (lost[:, :, :1] - lost) * rng.uniform(0.3, 1.0, (m, 1, 1))
    saved = saved + back
    # What collectives side by side, late ranks and the job's own waits make of it.
    low, high = _REALISED[bool(np.isfinite(job.exposed).all())]
    saved = saved * rng.uniform(low, high, (m, 1, 1))
    middle = np.median(saved, axis=0, keepdims=True)
    saved = middle + _WIDER * (saved - middle)
    saved[:, :, 0] = 0.0
    return Gains(saved, distinct(f, job.fleet.release), back)


def _pulled(state: Array, seen: Array, told: Array, error: Array, rng: np.random.Generator) -> Array:
    """The ensemble (m, k) pulled to observations: ``seen`` (m, p) is what each member would show, ``told`` (p,)."""
    m = len(state)
    x, y = state - state.mean(axis=0), seen - seen.mean(axis=0)
    gain = np.linalg.solve(y.T @ y / (m - 1) + np.diag(error**2), y.T @ x / (m - 1))
    return np.asarray(state + (told + rng.normal(0.0, error, seen.shape) - seen) @ gain)

"""What lies between a step's true time and what is measured: jobs differ in it by far more than a factor of ten.

Public: the steps of an 18 s FSDP job scatter by 0.3 % (median absolute deviation, marin-community/marin#8054), single
collectives elsewhere jump 50-280 fold (NVIDIA/nccl#361). The rest is drawn: how long a disturbance lasts, machines with
two paces, a rank that comes late, steps that also save a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Range = tuple[float, float]


def even(rng: np.random.Generator, bounds: Range, n: int) -> Array:
    """``n`` numbers within ``bounds``, even on a log scale."""
    return np.asarray(np.exp(rng.uniform(np.log(bounds[0]), np.log(bounds[1]), n)))


@dataclass(frozen=True)
class NoiseFamily:
    """What the noise of a job is drawn from; ranges are (low, high), even on a log scale, others probabilities."""

    sigma: Range = (0.002, 0.03)  # of one step's log time
    memory: Range = (0.0, 0.9)  # correlation of one step with the next, evenly drawn
    tail: Range = (0.0002, 0.01)  # probability of a step that takes up to three times as long
    two_paces: float = 0.15  # jobs that change between two paces ...
    pace: Range = (0.01, 0.06)  # ... this far apart ...
    hold: Range = (20, 400)  # ... for so many steps at a stretch
    late_rank: float = 0.1  # jobs with a rank that comes late ...
    late: Range = (0.005, 0.05)  # ... by this part of a step, in the mean
    saves: float = 0.5  # jobs with steps that save ...
    save_every: Range = (100, 5000)
    save_cost: Range = (0.3, 8.0)  # ... which takes this many steps' time
    call_sigma: Range = (0.004, 0.04)  # of a slot's mean call in one sampled step
    sampled: tuple[int, int] = (4, 8)  # one step in so many has its kernels sampled
    unsampled: float = 0.05  # jobs whose kernels are never sampled


@dataclass
class Noise:
    """The noise of ``n`` jobs, and where each is in it; arrays (n,)."""

    sigma: Array
    memory: Array
    tail: Array
    pace: Array
    hold: Array
    late: Array
    save_every: Array  # 0: never
    save_cost: Array
    call_sigma: Array
    sampled: Array  # 0: never
    at: Array  # steps since the job's first
    level: Array  # of the disturbance that lasts, in units of sigma
    is_slow: Array  # at the slower of two paces

    @classmethod
    def draw(cls, family: NoiseFamily, rng: np.random.Generator, n: int) -> Noise:
        """``n`` jobs at their first step."""

        def some(share: float, value: Array) -> Array:
            return np.where(rng.random(n) < share, value, 0.0)

        every = some(family.saves, even(rng, family.save_every, n).round()).astype(int)
        sampled = np.where(
            rng.random(n) < family.unsampled, 0, rng.integers(family.sampled[0], family.sampled[1] + 1, n)
        )
        return cls(
            sigma=even(rng, family.sigma, n),
            memory=rng.uniform(*family.memory, n),
            tail=even(rng, family.tail, n),
            pace=some(family.two_paces, even(rng, family.pace, n)),
            hold=even(rng, family.hold, n),
            late=some(family.late_rank, even(rng, family.late, n)),
            save_every=every,
            save_cost=even(rng, family.save_cost, n),
            call_sigma=even(rng, family.call_sigma, n),
            sampled=sampled,
            at=rng.integers(5, 200, n),
            level=rng.normal(0.0, 1.0, n),
            is_slow=rng.random(n) < 0.5,
        )

    def take(self, rows: Array) -> Noise:
        """Copies of the jobs at ``rows``."""
        return Noise(**{f.name: getattr(self, f.name)[rows].copy() for f in fields(self)})

    def steps(self, us: Array, n_steps: Array, rng: np.random.Generator) -> Array:
        """Measured times (n, max(n_steps)) of the next ``n_steps`` (n,) steps of true time ``us`` (n,); then NaN."""
        n, most = len(us), int(n_steps.max(initial=0))
        out = np.full((n, most), np.nan)
        shock, heavy = rng.standard_t(5, (most, n)) / np.sqrt(5 / 3), rng.random((most, n))
        flips, late = rng.random((most, n)), rng.exponential(1.0, (most, n))
        size = 0.1 + np.minimum(rng.pareto(1.5, (most, n)), 2.0)
        stay = np.sqrt(1.0 - self.memory**2)
        for t in range(most):
            on = n_steps > t
            self.level = np.where(on, self.memory * self.level + stay * shock[t], self.level)
            self.is_slow = np.where(on & (flips[t] < 1.0 / self.hold), ~self.is_slow, self.is_slow)
            self.at = self.at + on
            log = self.sigma * self.level + self.pace * (self.is_slow - 0.5)
            factor = np.exp(log) + self.late * late[t] + np.where(heavy[t] < self.tail, size[t], 0.0)
            saving = (self.save_every > 0) & (self.at % np.maximum(self.save_every, 1) == 0)
            out[:, t] = np.where(on, us * (factor + np.where(saving, self.save_cost, 0.0)), np.nan)
        return out

    def calls(self, call_us: Array, n_steps: Array, rng: np.random.Generator) -> Array:
        """Measured mean durations (n, S) over the last ``n_steps``, NaN where no step of them was sampled."""
        every = np.maximum(self.sampled, 1)
        count = self.at // every - (self.at - n_steps) // every
        count = np.where(self.sampled > 0, count, 0)[:, None]
        spread = (self.call_sigma * (1.0 + 10.0 * self.late))[:, None] / np.sqrt(np.maximum(count, 1))
        return np.where(count > 0, call_us * np.exp(rng.normal(0.0, 1.0, call_us.shape) * spread), np.nan)

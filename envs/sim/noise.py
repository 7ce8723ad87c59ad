"""What lies between a step's true time and what is measured: jobs differ in it by far more than a factor of ten.

Public: the steps of an 18 s FSDP job scatter by 0.3 % (median absolute deviation, marin-community/marin#8054), single
collectives elsewhere jump 50-280 fold (NVIDIA/nccl#361). The rest is drawn: how long a disturbance lasts, machines with
two paces, a rank that comes late, steps that also save a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..nccl_model.columns import Columns

Array = np.ndarray[Any, Any]
Range = tuple[float, float]


def log_uniform(rng: np.random.Generator, bounds: Range, n: int) -> Array:
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


#: Steps of a job whose random numbers are drawn at once; a window is shorter.
BLOCK = 256


class NoiseStream:
    """Random numbers of ``n`` jobs, each from a stream of its own.

    In its step t a job meets the same, whoever plays it, in whatever windows and beside whatever other jobs: entrants
    can be compared job by job, and a few jobs can be played again alone.
    """

    def __init__(self, seed: int, jobs: Array, n_calls: int) -> None:
        """``jobs`` (n,): numbers that tell the jobs apart; ``n_calls``: kinds of call of each."""
        self.keys = [(seed, int(job)) for job in jobs]
        self.first = np.full(len(self.keys), -1)  # block that a job's part of the buffers begins with
        self._steps = np.zeros((len(self.keys), 2 * BLOCK, 5))
        self._calls = np.zeros((len(self.keys), 2 * BLOCK, n_calls))

    def _fill(self, at: Array, rows: Array) -> Array:
        """Numbers of the two blocks from step ``at`` (n,) on, of the jobs at ``rows``; where ``at`` is in them."""
        for i in rows[self.first[rows] != at[rows] // BLOCK]:
            self.first[i] = at[i] // BLOCK
            for k in (0, 1):
                rng = np.random.default_rng([*self.keys[i], int(self.first[i]) + k])
                part = slice(k * BLOCK, (k + 1) * BLOCK)
                self._steps[i, part] = np.stack(drawn(rng, (BLOCK,)), axis=1)
                self._calls[i, part] = rng.normal(0.0, 1.0, (BLOCK, self._calls.shape[2]))
        return at - self.first * BLOCK

    def steps(self, at: Array, n_steps: Array) -> tuple[Array, ...]:
        """As :func:`drawn`, (max(n_steps), n) each, for the steps from ``at`` (n,) on; 0 where a job does not run."""
        rows, most = np.flatnonzero(n_steps > 0), int(n_steps.max(initial=0))
        place = self._fill(at, rows)[rows][:, None] + np.arange(most)
        out = np.zeros((5, most, len(at)))
        out[:, :, rows] = self._steps[rows[:, None], np.minimum(place, 2 * BLOCK - 1)].transpose(2, 1, 0)
        return tuple(out)

    def calls(self, at: Array, n_steps: Array) -> Array:
        """Standard normal numbers (n, n_calls) of windows that ended before step ``at`` (n,)."""
        rows = np.flatnonzero(n_steps > 0)
        out = np.zeros((len(at), self._calls.shape[2]))
        out[rows] = self._calls[rows, self._fill(at, rows)[rows]]
        return out


def drawn(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[Array, ...]:
    """What makes up the noise of steps: shocks, chances of a far too long step and of a change of pace, lateness, and
    how long a far too long step is."""
    shock, heavy = rng.standard_t(5, shape) / np.sqrt(5 / 3), rng.random(shape)
    flips, late = rng.random(shape), rng.exponential(1.0, shape)
    return shock, heavy, flips, late, 0.1 + np.minimum(rng.pareto(1.5, shape), 2.0)


@dataclass
class Noise(Columns):
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

        every = some(family.saves, log_uniform(rng, family.save_every, n).round()).astype(int)
        low, high = family.sampled
        sampled = np.where(rng.random(n) < family.unsampled, 0, rng.integers(low, high + 1, n))
        return cls(
            sigma=log_uniform(rng, family.sigma, n),
            memory=rng.uniform(*family.memory, n),
            tail=log_uniform(rng, family.tail, n),
            pace=some(family.two_paces, log_uniform(rng, family.pace, n)),
            hold=log_uniform(rng, family.hold, n),
            late=some(family.late_rank, log_uniform(rng, family.late, n)),
            save_every=every,
            save_cost=log_uniform(rng, family.save_cost, n),
            call_sigma=log_uniform(rng, family.call_sigma, n),
            sampled=sampled,
            at=rng.integers(5, 200, n),
            level=rng.normal(0.0, 1.0, n),
            is_slow=rng.random(n) < 0.5,
        )

    def steps(
        self, us: Array, n_steps: Array, rng: np.random.Generator | NoiseStream, late: tuple[Array, Array]
    ) -> Array:
        """Measured times (n, max(n_steps)) of the next ``n_steps`` (n,) steps of true time ``us`` (n,); then NaN.

        ``late``: probability that the configs that run make a step straggle, and by how many steps, each (n,).
        """
        n, most = len(us), int(n_steps.max(initial=0))
        out = np.full((n, most), np.nan)
        numbers = rng.steps(self.at, n_steps) if isinstance(rng, NoiseStream) else drawn(rng, (most, n))
        shock, heavy, flips, waits, size = numbers
        stay = np.sqrt(1.0 - self.memory**2)
        for t in range(most):
            on = n_steps > t
            self.level = np.where(on, self.memory * self.level + stay * shock[t], self.level)
            self.is_slow = np.where(on & (flips[t] < 1.0 / self.hold), ~self.is_slow, self.is_slow)
            self.at = self.at + on
            log = self.sigma * self.level + self.pace * (self.is_slow - 0.5)
            factor = np.exp(log) + self.late * waits[t] + np.where(heavy[t] < self.tail, size[t], 0.0)
            factor += np.where((heavy[t] >= self.tail) & (heavy[t] < self.tail + late[0]), late[1], 0.0)
            saving = (self.save_every > 0) & (self.at % np.maximum(self.save_every, 1) == 0)
            out[:, t] = np.where(on, us * (factor + np.where(saving, self.save_cost, 0.0)), np.nan)
        return out

    def calls(
        self, call_us: Array, n_steps: Array, rng: np.random.Generator | NoiseStream, all_: Any = False
    ) -> Array:
        """Mean durations (n, S) over the last ``n_steps``, NaN where no step was sampled; of ``all_`` each is."""
        every = np.where(all_, 1, np.maximum(self.sampled, 1))
        count = self.at // every - (self.at - n_steps) // every
        count = np.where(self.sampled > 0, count, 0)[:, None]
        spread = (self.call_sigma * (1.0 + 10.0 * self.late))[:, None] / np.sqrt(np.maximum(count, 1))
        off = (
            rng.calls(self.at, n_steps)
            if isinstance(rng, NoiseStream)
            else rng.normal(0.0, 1.0, call_us.shape)
        )
        return np.where(count > 0, call_us * np.exp(off * spread), np.nan)

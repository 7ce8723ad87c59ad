"""Regimes of simulated jobs: a job changes between batches, for hundreds of steps each, and comes back.

A larger batch computes longer and holds more memory. Weights are as large as before, so the calls of most jobs keep
their sizes; where activations are gathered, calls grow with the batch. How far batches are apart, and for how long each
stays, is drawn. No public figure says how often the best config changes with the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..nccl_model.columns import Columns
from .noise import Range, log_uniform
from .worlds import chance

Array = np.ndarray[Any, Any]
#: A job has at most so many.
MOST_REGIMES = 4
#: Part of a job's memory that does not grow with its batch: weights, gradients and the optimizer's state.
FIXED_MEMORY = 0.35


@dataclass(frozen=True)
class RegimeFamily:
    """What the regimes of jobs are drawn from. Ranges are (low, high), even on a log scale."""

    count: tuple[int, int] = (1, 1)  # evenly; one: the job never changes
    stay: Range = (100, 2000)  # steps
    batch: Range = (0.3, 3.0)  # of a regime, in that of the first
    resized: float = 0.5  # jobs whose calls grow with the batch ...
    growth: Range = (0.3, 1.0)  # ... by this power of it, evenly
    shuffled: bool = False  # they come in another order in every cycle


@dataclass
class Regimes(Columns):
    """Of ``n`` jobs; arrays (n, MOST_REGIMES) unless the comment says more. A job of fewer has copies of its first."""

    count: Array  # (n,)
    ends: Array  # step of a cycle at which each ends; beyond a job's count: the cycle's end
    batch: Array
    octaves: Array  # by which calls are larger
    growth: Array  # (n, S, N_CONFIGS) float32: log of a call's time over that of its size
    default_us: Array  # true default step, in fair weather
    shuffled: Array  # (n,) bool
    key: Array  # (n,) uint64

    @classmethod
    def draw(cls, family: RegimeFamily, rng: np.random.Generator, growth: Array) -> Regimes:
        """Of the jobs whose calls grow by ``growth``; nothing is drawn where no job of the family changes."""
        n = len(growth)
        shape = n, MOST_REGIMES
        if family.count == (1, 1):
            return cls(
                count=np.ones(n, int),
                ends=np.ones(shape),
                batch=np.ones(shape),
                octaves=np.zeros(shape),
                growth=growth,
                default_us=np.zeros(shape),
                shuffled=np.zeros(n, bool),
                key=np.zeros(n, np.uint64),
            )
        count = rng.integers(family.count[0], family.count[1] + 1, n)
        there = np.arange(MOST_REGIMES) < count[:, None]
        stay = log_uniform(rng, family.stay, n * MOST_REGIMES)
        stay = stay.reshape(shape).round()
        batch = log_uniform(rng, family.batch, n * MOST_REGIMES)
        batch = batch.reshape(shape)
        batch[:, 0] = 1.0
        batch = np.where(there, batch, 1.0)
        resized = rng.random(n) < family.resized
        drawn = rng.uniform(*family.growth, n)
        power = np.where(resized, drawn, 0.0)
        return cls(
            count=count,
            ends=np.cumsum(np.where(there, stay, 0.0), axis=1),
            batch=batch,
            octaves=power[:, None] * np.log2(batch),
            growth=growth,
            default_us=np.zeros(shape),
            shuffled=np.full(n, family.shuffled),
            key=rng.integers(0, 2**63, n).astype(np.uint64),
        )

    def at(self, step: Array) -> Array:
        """Which one rules at ``step`` (n,), (n,)."""
        cycle, within = np.divmod(step, self.ends[:, -1])
        place = (within[:, None] >= self.ends[:, :-1]).sum(axis=1)
        place = np.minimum(place, self.count - 1)
        drawn = chance(self.key, 1, cycle) * self.count
        turned = np.where(self.shuffled, drawn, 0.0).astype(int)
        return np.asarray((place + turned) % self.count)

    def left(self, step: Array) -> Array:
        """Steps from ``step`` (n,) on until another may rule, (n,)."""
        within = step % self.ends[:, -1]
        later = self.ends > within[:, None]
        ends = np.where(later, self.ends, np.inf)
        after = ends.min(axis=1)
        return np.where(self.count > 1, after - within, np.inf)

    @property
    def weights(self) -> Array:
        """Part of all steps that each rules for, (n, MOST_REGIMES)."""
        stays = np.diff(self.ends, axis=1, prepend=0.0)
        there = np.arange(MOST_REGIMES) < self.count[:, None]
        even = there / self.count[:, None]
        by_stay = stays / self.ends[:, -1:]
        return np.where(self.shuffled[:, None], even, by_stay)

    def settled(self, which: Array) -> Regimes:
        """The same jobs, in their regime ``which`` (n,) for good."""
        rows = np.arange(len(self))

        def only(values: Array) -> Array:
            return np.repeat(values[rows, which, None], MOST_REGIMES, axis=1)

        return replace(
            self,
            count=np.ones(len(self), int),
            batch=only(self.batch),
            octaves=only(self.octaves),
            default_us=only(self.default_us),
            shuffled=np.zeros(len(self), bool),
        )

    def pressure(self, most: Array) -> Array:
        """Part of the memory in use in each regime, where it is ``most`` (n,) in the one with the largest batch."""
        largest = self.batch.max(axis=1, keepdims=True)
        moves = (1 - FIXED_MEMORY) * self.batch / largest
        return np.asarray(most[:, None] * (FIXED_MEMORY + moves))

"""What lies between a step's true time and what is measured: jobs differ in it by far more than a factor of ten.

Public: the steps of an 18 s FSDP job scatter by 0.3 % (median absolute deviation, marin-community/marin#8054), single
collectives elsewhere jump 50-280 fold (NVIDIA/nccl#361). The rest of :class:`NoiseFamily` is drawn: how long a
disturbance lasts, machines with two paces, a rank that comes late, steps that also save a checkpoint. ``NODE`` is
fitted to public series of real steps, ``SHARED`` lies around what two processes on one GPU met (``measured.json``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.random import Generator

from ..nccl_model.columns import Columns
from .fabric.measured import ranges

Array = np.ndarray[Any, Any]
Range = tuple[float, float]


def log_uniform(rng: Generator, bounds: Range, n: int) -> Array:
    """``n`` numbers within ``bounds``, even on a log scale."""
    low, high = np.log(bounds)
    logs = rng.uniform(low, high, n)
    values = np.exp(logs)
    return np.asarray(values)


def longest(n_steps: Array) -> int:
    """The largest of the numbers of steps ``n_steps`` (n,) that jobs run; 0 of no jobs."""
    most = n_steps.max(initial=0)
    return int(most)


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
    slow: Range = (0.0, 0.0)  # of a part that lasts, on two time scales; 0: none ...
    slow_steps: Range = (5, 60)  # ... the shorter of which is so many steps ...
    longer: float = 15.0  # ... and the other so many times as long
    call_sigma: Range = (0.004, 0.04)  # of a slot's mean call in one sampled step
    sampled: tuple[int, int] = (4, 8)  # one step in so many has its kernels sampled
    unsampled: float = 0.05  # jobs whose kernels are never sampled


#: The steps of real nodes; and its extreme end, a GPU that ranks share.
NODE, SHARED = (NoiseFamily(**ranges(name)) for name in ("node_noise", "shared_gpu_noise"))


@dataclass(frozen=True)
class Shocks:
    """Random numbers that make up the noise of steps, arrays of one shape."""

    shock: Array  # to the level, of unit variance with heavy tails
    heavy: Array  # in [0, 1): chance of a far too long step
    flips: Array  # in [0, 1): chance of a change of pace
    waits: Array  # lateness of a rank, in means
    size: Array  # of a far too long step, in steps
    slow: Array  # to the part that lasts, standard normal

    @classmethod
    def draw(cls, rng: Generator, shape: tuple[int, ...], lasting: bool) -> Shocks:
        """Numbers of ``shape``. Those of the part that lasts are drawn where there is one (``lasting``)."""
        spread = np.sqrt(5 / 3)  # standard deviation of Student's t with 5 degrees of freedom
        shock = rng.standard_t(5, shape) / spread
        heavy = rng.random(shape)
        flips = rng.random(shape)
        waits = rng.exponential(1.0, shape)
        beyond = rng.pareto(1.5, shape)
        size = 0.1 + np.minimum(beyond, 2.0)
        slow = np.zeros(shape)
        if lasting:
            slow = rng.normal(0.0, 1.0, shape)
        return cls(shock, heavy, flips, waits, size, slow)


#: Steps of a job whose random numbers are drawn at once.
BLOCK = 256


class NoiseStream:
    """Random numbers of ``n`` jobs, each from a stream of its own.

    In its step t a job meets the same, whoever plays it, in whatever windows and beside whatever other jobs: entrants
    can be compared job by job, and a few jobs can be played again alone.
    """

    def __init__(self, seed: int, jobs: Array, n_calls: int) -> None:
        """``jobs`` (n,): numbers that tell the jobs apart; ``n_calls``: kinds of call of each."""
        self.keys = [(seed, int(job)) for job in jobs]
        self.n_calls = n_calls
        self.n_blocks = 0  # that are kept of each job
        self._make_room(BLOCK)

    def _make_room(self, most: int) -> None:
        """For the numbers of windows of ``most`` steps, wherever in a block they begin."""
        n_blocks = 1 + math.ceil(most / BLOCK)
        if n_blocks <= self.n_blocks:
            return
        self.n_blocks = n_blocks
        n = len(self.keys)
        n_steps = n_blocks * BLOCK
        n_shocks = len(fields(Shocks))
        self.first = np.full(n, -1)  # block that a job's part of the buffers begins with
        self._steps = np.zeros((n, n_steps, n_shocks))
        self._calls = np.zeros((n, n_steps, self.n_calls))

    def _fill(self, at: Array, rows: Array) -> Array:
        """Numbers of the blocks from step ``at`` (n,) on, of the jobs at ``rows`` (m,); where each job's ``at`` is in
        them, (m,)."""
        block = at // BLOCK
        has_other = self.first[rows] != block[rows]
        for row in rows[has_other]:
            i = int(row)
            first = int(block[i])
            self.first[i] = first
            for k in range(self.n_blocks):
                key = [*self.keys[i], first + k]
                begin = k * BLOCK
                part = slice(begin, begin + BLOCK)
                own = np.random.default_rng(key)
                self._draw(i, part, own)
        first_step = self.first[rows] * BLOCK
        return at[rows] - first_step

    def _draw(self, i: int, part: slice, rng: Generator) -> None:
        """The numbers of one block of job ``i``."""
        shocks = Shocks.draw(rng, (BLOCK,), lasting=False)
        calls = rng.normal(0.0, 1.0, (BLOCK, self.n_calls))
        self._calls[i, part] = calls
        # Last, so that all other numbers are what they were before a part of the noise could last.
        slow = rng.normal(0.0, 1.0, BLOCK)
        shocks = replace(shocks, slow=slow)
        columns = vars(shocks).values()
        for k, values in enumerate(columns):
            self._steps[i, part, k] = values

    def steps(self, at: Array, n_steps: Array) -> Shocks:
        """Shocks (max(n_steps), n) of the steps from ``at`` (n,) on; 0 where a job does not run."""
        rows = np.flatnonzero(n_steps > 0)
        most = longest(n_steps)
        self._make_room(most)
        begin = self._fill(at, rows)
        place = begin[:, None] + np.arange(most)
        numbers = self._steps[rows[:, None], place]
        n_shocks = numbers.shape[2]
        n = len(at)
        out = np.zeros((n_shocks, most, n))
        out[:, :, rows] = numbers.transpose(2, 1, 0)
        return Shocks(*out)

    def calls(self, at: Array, n_steps: Array) -> Array:
        """Standard normal numbers (n, n_calls) of windows that ended before step ``at`` (n,)."""
        rows = np.flatnonzero(n_steps > 0)
        place = self._fill(at, rows)
        n = len(at)
        out = np.zeros((n, self.n_calls))
        out[rows] = self._calls[rows, place]
        return out


#: Where random numbers come from: one source for all jobs together, or one for each job.
RandomNumbers = Generator | NoiseStream


@dataclass
class Drift(Columns):
    """A part of the noise of ``n`` jobs that lasts, on two time scales."""

    size: Array  # (n,) of the log time; 0: none
    keep: Array  # (n, 2) what is left of each scale after a step
    level: Array  # (n, 2) each of unit variance

    def step(self, on: Array, shock: Array) -> Array:
        """Log time (n,) one step later, for the jobs that are ``on``: the sum of two scales that the same shocks
        (n,) move."""
        keep = self.keep
        stay = np.sqrt(1.0 - keep**2)
        kept = keep * self.level
        moved = kept + stay * shock[:, None]
        is_on = on[:, None]
        self.level = np.where(is_on, moved, self.level)
        both_stay = stay.prod(axis=1)
        both_keep = keep.prod(axis=1)
        together = both_stay / (1.0 - both_keep)  # correlation of the two
        spread = np.sqrt(2.0 + 2.0 * together)
        total = self.level.sum(axis=1)
        log = self.size * total / spread
        return np.asarray(log)


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
    drift: Drift  # the part that lasts
    swing: Array  # (n, 3) of the network's pace: size, period in steps, phase
    call_sigma: Array
    sampled: Array  # 0: never
    at: Array  # steps since the job's first
    level: Array  # of the disturbance that lasts, in units of sigma
    is_slow: Array  # at the slower of two paces

    @classmethod
    def draw(cls, family: NoiseFamily, rng: Generator, n: int) -> Noise:
        """``n`` jobs at their first step."""

        def some(share: float, value: Array) -> Array:
            has = rng.random(n) < share
            return np.where(has, value, 0.0)

        def drawn(bounds: Range) -> Array:
            return log_uniform(rng, bounds, n)

        # The order of draws is the order of jobs. What only some have is drawn for all, before it is drawn who has it.
        save_every = drawn(family.save_every).round()
        every = some(family.saves, save_every)
        low, high = family.sampled
        unsampled = rng.random(n) < family.unsampled
        often = rng.integers(low, high + 1, n)
        sampled = np.where(unsampled, 0, often)
        none = np.zeros(n)
        at_rest = np.zeros((n, 2))
        no_drift = Drift(none, at_rest, at_rest.copy())
        noise = cls(
            sigma=drawn(family.sigma),
            memory=rng.uniform(*family.memory, n),
            tail=drawn(family.tail),
            pace=some(family.two_paces, drawn(family.pace)),
            hold=drawn(family.hold),
            late=some(family.late_rank, drawn(family.late)),
            save_every=every.astype(int),
            save_cost=drawn(family.save_cost),
            drift=no_drift,
            swing=np.zeros((n, 3)),
            call_sigma=drawn(family.call_sigma),
            sampled=sampled,
            at=rng.integers(5, 200, n),
            level=rng.normal(0.0, 1.0, n),
            is_slow=rng.random(n) < 0.5,
        )
        if family.slow[1] > 0:
            short = drawn(family.slow_steps)
            size = drawn(family.slow)
            long = family.longer * short
            steps = np.stack([short, long], axis=1)
            memory = np.exp(-1 / steps)
            begin = rng.normal(0.0, 1.0, (n, 2))
            noise.drift = Drift(size, memory, begin)
        return noise

    def steps(
        self,
        us: Array,  # (n,) or (n, max(n_steps)); so are the others that say "as us"
        n_steps: Array,  # (n,)
        rng: RandomNumbers,
        late: tuple[Array, Array],  # each as us
        more_us: Array | float = 0.0,  # as us, or a number
        limit_us: Array | float = np.inf,  # as us, or a number
    ) -> Array:
        """Measured times (n, max(n_steps)) of the next ``n_steps`` steps, then NaN; ``us``: their true times.

        ``late``: probability that the configs that run make a step straggle, and by how many steps; ``more_us``: what
        comes on top, without noise. A job ends with its first step above ``limit_us``: no later one is taken.
        """
        n = len(us)
        most = longest(n_steps)

        def by_step(values: Array | float) -> Array:
            found = np.asarray(values, float)
            columns = found[:, None] if found.ndim == 1 else found
            return np.broadcast_to(columns, (n, most))

        us = by_step(us)
        late_often, late_size = late
        often = by_step(late_often)
        size = by_step(late_size)
        more_us = by_step(more_us)
        limit_us = by_step(limit_us)
        out = np.full((n, most), np.nan)
        runs = np.ones(n, bool)
        lasting = bool(self.drift.size.any())
        numbers = self._numbers(rng, n_steps, most, lasting)
        for t in range(most):
            on = runs & (n_steps > t)
            log = self._move(on, numbers, t, lasting)
            waits = self.late * numbers.waits[t]
            factor = np.exp(log) + waits
            heavy = numbers.heavy[t]
            heavy_size = numbers.size[t]
            late_now = often[:, t], size[:, t]
            factor += self._long(heavy, heavy_size, late_now)
            took = us[:, t] * factor + more_us[:, t]
            out[:, t] = np.where(on, took, np.nan)
            is_over = took > limit_us[:, t]
            runs &= ~is_over
        return out

    def skip(self, n_steps: Array, rng: RandomNumbers) -> None:
        """Let the next ``n_steps`` (n,) steps pass unmeasured. What lasts moves on: whether a step is measured changes
        no later one."""
        lasting = bool(self.drift.size.any())
        most = longest(n_steps)
        numbers = self._numbers(rng, n_steps, most, lasting)
        for t in range(most):
            on = n_steps > t
            self._move(on, numbers, t, lasting)

    def _numbers(self, rng: RandomNumbers, n_steps: Array, most: int, lasting: bool) -> Shocks:
        """Random numbers of the next ``n_steps`` (n,) steps, (most, n)."""
        if isinstance(rng, NoiseStream):
            return rng.steps(self.at, n_steps)
        shape = most, len(n_steps)
        return Shocks.draw(rng, shape, lasting)

    def _move(self, on: Array, numbers: Shocks, t: int, lasting: bool) -> Array:
        """One step later, for the jobs that are ``on`` (n,) bool, by the numbers at ``t``: the log (n,) of what lasts,
        a part of which is drift if it is ``lasting``."""
        keep = self.memory
        stay = np.sqrt(1.0 - keep**2)
        kept = keep * self.level
        moved = kept + stay * numbers.shock[t]
        self.level = np.where(on, moved, self.level)
        probability = 1.0 / self.hold
        is_flip = on & (numbers.flips[t] < probability)
        before = self.is_slow
        self.is_slow = np.where(is_flip, ~before, before)
        self.at = self.at + on
        pace = self.pace * (self.is_slow - 0.5)
        log = self.sigma * self.level + pace
        if lasting:
            slow = numbers.slow[t]
            log = log + self.drift.step(on, slow)
        return np.asarray(log)

    def _long(self, heavy: Array, size: Array, late: tuple[Array, Array]) -> Array:
        """What single steps take longer (n,), in steps: far too long ones, stragglers, those that save."""
        often, by = late
        tail = self.tail
        is_far_too_long = heavy < tail
        more = np.where(is_far_too_long, size, 0.0)
        either = tail + often
        straggles = (heavy >= tail) & (heavy < either)
        more += np.where(straggles, by, 0.0)
        every = np.maximum(self.save_every, 1)
        since = self.at % every
        is_saving = (self.save_every > 0) & (since == 0)
        saving = np.where(is_saving, self.save_cost, 0.0)
        return np.asarray(more + saving)

    def calls(self, call_us: Array, n_steps: Array, rng: RandomNumbers, all_: Any = False) -> Array:
        """Mean durations (n, S) over the last ``n_steps``, NaN where no step was sampled; of ``all_`` each is."""
        often = np.maximum(self.sampled, 1)
        every = np.where(all_, 1, often)
        begin = self.at - n_steps
        before = begin // every
        after = self.at // every
        count = after - before
        is_sampled = self.sampled > 0
        count = np.where(is_sampled, count, 0)
        count = count[:, None]
        more = 1.0 + 10.0 * self.late
        sigma = self.call_sigma * more
        at_least_one = np.maximum(count, 1)
        spread = sigma[:, None] / np.sqrt(at_least_one)
        shape = call_us.shape
        off = self._call_numbers(rng, n_steps, shape)
        factor = np.exp(off * spread)
        seen = call_us * factor
        return np.where(count > 0, seen, np.nan)

    def _call_numbers(self, rng: RandomNumbers, n_steps: Array, shape: tuple[int, ...]) -> Array:
        """Standard normal numbers of ``shape`` for windows of ``n_steps`` (n,) that have just ended."""
        if isinstance(rng, NoiseStream):
            return rng.calls(self.at, n_steps)
        return rng.normal(0.0, 1.0, shape)

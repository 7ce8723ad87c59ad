"""Whole jobs, many at once, as time passes: what steps take under any configs, and what is measured of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from .mixes import Few, Moment, Turns, default_tables
from .moments import JobsAtMoment, Pair
from .noise import RandomNumbers, longest
from .regimes import MOST_REGIMES

Array = np.ndarray[Any, Any]
#: Of PAIRS the last of a ring; each after it is an algorithm of its own.
LAST_RING = 2


@dataclass
class Jobs(JobsAtMoment):
    """``n`` jobs, each at a step of its own: :class:`.noise.Noise` counts them."""

    def step_us(
        self,
        configs: Array,  # (m, S)
        rows: Array | None = None,  # (m,) indices of jobs; None: all
        few: Few | None = None,  # of the m jobs
        at: Array | None = None,  # (m,) their steps; None: now
    ) -> Pair:
        """The truth of a moment under ``configs`` of the jobs at ``rows``, of some at ``few`` calls.

        Returns the step's us (m,), what stragglers cost in the mean counted, and the mean call's (m, S): what a
        profiler would see, with what runs beside it. Places without a slot are NaN. Raises ValueError for a config that
        is masked.
        """
        rows, configs = self._asked(configs, rows)
        if at is None:
            at = self.noise.at[rows]
        total, call_us = self._at(configs, rows, few, at)
        step_us = self._with_stragglers(total, configs, rows)
        return step_us, call_us

    def usual_us(self, configs: Array, rows: Array | None = None) -> Array:
        """The mean step (m,) us over a long job, arguments as of :meth:`step_us`; the network's pace at its best.

        Where regimes alternate, each step counts in default steps of its regime, for that is how time lost is told.
        """
        rows, configs = self._asked(configs, rows)
        n = len(rows)
        first = np.zeros(n, int)
        us = self._usual(configs, rows, first)
        changing = self._changing(rows)
        if len(changing):
            jobs = rows[changing]
            theirs = configs[changing, None]
            tables = np.repeat(theirs, MOST_REGIMES, axis=1)
            us[changing] = self._followed(tables, jobs)
        return us

    def regime_us(self, configs: Array, regime: Array) -> Array:
        """As :meth:`usual_us`, in one ``regime`` (n,) of each job."""
        every, configs = self._asked(configs, None)
        return self._usual(configs, every, regime)

    def followed_us(self, tables: Array) -> Array:
        """As :meth:`usual_us`, where in each regime a table of its own is in force: ``tables`` (n, MOST_REGIMES, S)."""
        us = self.usual_us(tables[:, 0])
        every = np.arange(len(self))
        changing = self._changing(every)
        if len(changing):
            theirs = tables[changing]
            us[changing] = self._followed(theirs, changing)
        return us

    def window(
        self,
        configs: Array,  # (n, S)
        n_steps: Array | int,  # (n,), or a number
        rng: RandomNumbers,
        few: Few | None = None,
        turns: Turns | None = None,
        limit_us: Array | float = np.inf,  # (n, most), or a number
    ) -> Pair:
        """Run ``n_steps`` under ``configs``, of some in ``turns`` with the current table, and measure; time goes on.

        Returns step times (n, most) us, NaN beyond a job's own number, and mean durations of the calls (n, S) us,
        NaN where no step's kernels were sampled. A job with 0 steps does not run; one ends with its first step above
        ``limit_us``. With turns one quad is sampled.
        """
        n = len(self)
        each = np.asarray(n_steps, int)
        n_steps = np.broadcast_to(each, n)
        most = longest(n_steps)
        rows = np.flatnonzero(n_steps > 0)
        of_all = np.asarray(configs)
        rows, configs = self._asked(of_all[rows], rows)
        us = np.zeros((n, most))
        call_us = np.full((n, self.width), np.nan)
        late = np.zeros((2, n, most))
        at_few = few and few.take(rows)
        counts = n_steps[rows]
        ran_us, mean_us = self._through(configs, rows, at_few, counts)
        us[rows] = ran_us
        call_us[rows] = mean_us
        late[:, rows] = self._straggles(configs, rows)
        first = np.zeros(len(rows), int)  # step with the first use
        sampled = n_steps
        if turns is not None and turns.steps[rows].any():
            here = np.flatnonzero(turns.steps[rows])
            at = rows[here]
            of_these = turns.take(at)
            length = of_these.steps
            self._take_turns(of_these, at, n_steps[at], us, late)
            first[here] = length
            sampled = n_steps.copy()
            sampled[at] = 2 * length
        noise = self.noise
        often, size = late
        more_us = np.zeros((n, most))
        more_us[rows, first] = self._connect(configs, rows)
        measured = noise.steps(us, n_steps, rng, (often, size), more_us, limit_us)
        is_every = sampled < n_steps
        ran = np.isfinite(measured).sum(axis=1)
        sampled = np.minimum(sampled, ran)
        if few is not None:
            is_every |= few.part < 1
        seen_us = noise.calls(call_us, sampled, rng, is_every)
        return measured, seen_us

    def advance(self, n_steps: Array | int, rng: RandomNumbers) -> None:
        """Let ``n_steps``, or (n,) of them, pass unmeasured."""
        counts = np.broadcast_to(np.asarray(n_steps, int), (len(self),))
        self.noise.skip(counts, rng)

    def straggled(self, configs: Array, rows: Array, heavy: Array) -> tuple[Array, Array, Array]:
        """Which steps stragglers of ``configs`` (m, S) make longer, in the jobs at ``rows``, (m, k) bool: those that
        the default would make longer too are left out. By how many steps; what that is in the mean; (m,).

        ``heavy`` (m, k): of each step, the number of :class:`.noise.Shocks` that decides it.
        """
        often, size = self._late(configs, rows)
        default = np.zeros_like(configs)
        usual, _ = self._late(default, rows)
        tail = self.noise.tail[rows]
        first = tail + usual
        end = tail + often
        begun = heavy >= first[:, None]
        ended = heavy >= end[:, None]
        is_late = begun & ~ended
        mean = often * size
        return is_late, size, mean

    def settled(self, which: Array) -> Self:
        """The same jobs, in their regime ``which`` (n,) for good."""
        regimes = self.regimes.settled(which)
        settled = replace(self, regimes=regimes)
        default = default_tables(self)
        settled.default_us = settled.usual_us(default)
        return settled

    def _asked(self, configs: Array, rows: Array | None) -> Pair:
        """``rows`` (m,), all where there are none, and ``configs`` (m, S) as arrays. Raises ValueError for a config
        that is masked, and for another shape."""
        if rows is None:
            rows = np.arange(len(self))
        rows = np.asarray(rows)
        configs = np.asarray(configs)
        shape = len(rows), self.width
        slot = np.arange(self.width)
        place = rows[:, None], slot[None], configs
        is_shaped = configs.shape == shape
        if not (is_shaped and self.mask[place].all()):
            raise ValueError(f"configs are {shape} and within the mask, not {configs.shape}")
        return rows, configs

    def _take_turns(
        self,
        turns: Turns,
        rows: Array,  # (m,)
        n_steps: Array,  # (m,)
        us: Array,  # (n, most) the truth
        late: Array,  # (2, n, most) stragglers
    ) -> None:
        """Put the steps of the current tables (m, S) into those of the jobs at ``rows``, into ``us`` and ``late``. A
        part of each table's effect carries over into the next step."""
        most = us.shape[1]
        is_own = turns.arms(most) == 1
        rows, others = self._asked(turns.others, rows)
        own_us = us[rows]
        other_us, _ = self._through(others, rows, None, n_steps)
        carry = self.carry[rows]
        us[rows] = turns.mixed(own_us, other_us, carry)
        other_late = self._straggles(others, rows)
        own_late = late[:, rows]
        mixed = np.where(is_own, own_late, other_late)
        late[:, rows] = mixed

    def _straggles(self, configs: Array, rows: Array) -> Array:
        """As :meth:`_late`, as one array: (2, m, 1)."""
        often, size = self._late(configs, rows)
        both = np.stack([often, size])
        return both[:, :, None]

    def _with_stragglers(self, us: Array, configs: Array, rows: Array) -> Array:
        """The mean of steps that take ``us`` (m,), what stragglers cost counted."""
        often, size = self._late(configs, rows)
        more = often * size
        return us * (1 + more)

    def _connect(self, configs: Array, rows: Array) -> Array:
        """What the first use of algorithms costs now, us (m,)."""
        of_slots = self.fingerprint.func.reshape(-1, self.width)
        func = np.minimum(of_slots[rows], 1)
        pair = self._pair(configs, rows)
        algo = np.maximum(pair - LAST_RING, 0)
        used = self._used(rows)
        return self.first_use.of(rows, func, algo, used)

    def _at(
        self,
        configs: Array,  # (m, S)
        rows: Array,  # (m,) indices of jobs
        few: Few | None,  # of the m jobs
        at: Array,  # (m,) their steps
    ) -> Pair:
        """Step us without stragglers, and mean calls' us. At a part of the calls a table costs its part."""
        moment = self._moment(rows, at)
        total, spent = self._truth(configs, rows, moment)
        if few is not None and (few.part < 1).any():
            some = np.flatnonzero(few.part < 1)
            then = moment.take(some)
            part = few.part[some]
            jobs = rows[some]
            others = few.others[some]
            others_us, _ = self._truth(others, jobs, then)
            more_us = total[some] - others_us
            total[some] = others_us + part * more_us
        calls = self.calls[rows]
        with np.errstate(invalid="ignore"):
            mean_us = spent / calls
        is_slot = calls > 0
        call_us = np.where(is_slot, mean_us, np.nan)
        return total, call_us

    def _through(
        self,
        configs: Array,  # (m, S)
        rows: Array,  # (m,) indices of jobs
        few: Few | None,  # of the m jobs
        n_steps: Array,  # (m,)
    ) -> Pair:
        """As :meth:`_at`, of each of the next ``n_steps``: step us (m, most). Calls are those of the first."""
        at = self.noise.at[rows]
        begun, call_us = self._at(configs, rows, few, at)
        most = longest(n_steps)
        column = begun[:, None]
        us = np.repeat(column, most, axis=1)
        if not self._changing(rows).size:
            return us, call_us
        regimes = self.regimes.take(rows)
        done = regimes.left(at)
        while (done < n_steps).any():
            later = np.flatnonzero(done < n_steps)
            these = rows[later]
            from_step = done[later].astype(int)
            now = at[later] + from_step
            few_then = few and few.take(later)
            configs_then = configs[later]
            other_us, _ = self._at(configs_then, these, few_then, now)
            for row, step, value in zip(later, from_step, other_us, strict=True):
                us[row, step:] = value
            changed = regimes.take(later)
            left = changed.left(now)
            done[later] += left
        return us, call_us

    def _usual(self, configs: Array, rows: Array, regime: Array) -> Array:
        """The mean step (m,) us in one ``regime`` (m,) of each job, in fair weather."""
        n = len(rows)
        weather = np.ones(n)
        weight = np.zeros(n)
        fair = Moment(weather, weight, regime)
        moving = self._with_congestion(rows)
        jobs = rows[moving]
        extras = self.sites.extras.take(jobs)
        first, second = extras.usual_weights()
        fair.weight[moving] = first
        us, _ = self._truth(configs, rows, fair)
        if len(moving):
            other = fair.take(moving)
            other.weight = second
            theirs = configs[moving]
            other_us, _ = self._truth(theirs, jobs, other)
            us[moving] = (us[moving] + other_us) / 2
        usual = self._with_stragglers(us, configs, rows)
        return np.asarray(usual)

    def _followed(self, tables: Array, rows: Array) -> Array:
        """The mean step (m,) us, with a table for each regime, (m, MOST_REGIMES, S)."""
        regimes = self.regimes.take(rows)
        weights = regimes.weights
        pace = np.zeros(len(rows))
        for k in range(MOST_REGIMES):
            there = np.flatnonzero(k < regimes.count)
            regime = np.full(len(there), k)
            configs = tables[there, k]
            jobs = rows[there]
            us = self._usual(configs, jobs, regime)
            weight = weights[there, k]
            default_us = regimes.default_us[there, k]
            pace[there] += weight * us / default_us
        weighted = weights * regimes.default_us
        usual_default_us = weighted.sum(axis=1)
        return np.asarray(pace * usual_default_us)

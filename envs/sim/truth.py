"""Whole jobs, many at once: what a step takes under any configs, and what is measured of it.

A job is a cluster and the slots of a real training step on it. The truth is the event-by-event schedule of :mod:`.step`
over streams of real models, and what :mod:`.worlds` adds to it; alone on the fabric a call takes what :mod:`.fabric`
says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from ...traces.fingerprint import Fingerprint
from ...traces.spaces import pair_of
from ..nccl_model.columns import Columns, taken
from .mixes import Few, FirstUse, Moment, Turns
from .noise import Noise, RandomNumbers
from .regimes import MOST_REGIMES, Regimes
from .sites import SampledClusters
from .step import Calls
from .workloads import N_BESIDE, WorkloadArrays

Array = np.ndarray[Any, Any]
#: Of PAIRS the last of a ring; each after it is an algorithm of its own.
LAST_RING = 2


class Slots(Columns, Fingerprint):
    """What the slots of jobs look like, as many rows a job; places without a slot hold copies of the job's first."""


@dataclass
class Jobs(Columns):
    """``n`` jobs of up to S slots, ordered by the bytes they move; arrays begin with (n,) but the fingerprint's.

    S is ``width``: SLOTS, or MANY_SLOTS where one of the jobs has many. Configs are indices into ``spaces``'
    N_CONFIGS, 0 is the default (AUTO).
    """

    n_slots: Array
    fingerprint: Slots
    mask: Array  # (n, S, N_CONFIGS) bool: one config an arm, AUTO always; places without a slot only AUTO
    default_us: Array  # true time of the default step, see usual_us
    exposed: Array  # (n, S) part of a slot's time, under the default, with no compute beside it: hidden
    calls: Array  # (n, S) a step
    works: WorkloadArrays
    which: Array  # of works
    tables: Calls  # (n, S, N_CONFIGS) float32: what a call is under every config
    beside: Array  # (n, N_BESIDE, N_CALL) calls that are not tuned
    scale: Array  # of compute
    carry: Array  # part of a table's effect that the next step still shows
    noise: Noise
    first_use: FirstUse
    regimes: Regimes
    sites: SampledClusters

    @property
    def swing(self) -> Array:
        """Of the network's pace, (n, 3): size, period in steps, phase."""
        return self.noise.swing

    @property
    def width(self) -> int:
        """Places for slots that every job has."""
        return int(self.mask.shape[1])

    def take(self, rows: Any) -> Self:
        """The jobs at ``rows`` (indices or flags), at the same time; they share only what never changes."""
        rows = np.arange(len(self))[rows]
        places = rows[:, None] * self.width + np.arange(self.width)
        found = {}
        for name, value in vars(self).items():
            part = places.ravel() if name == "fingerprint" else rows
            found[name] = taken(value, part)
        return type(self)(**found)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """All jobs of ``parts``, as wide as the widest."""
        width = max(part.width for part in parts)
        return super().join([part.widened(width) for part in parts])

    def widened(self, width: int) -> Self:
        """The same jobs with places for ``width`` slots."""
        more = width - self.width
        if not more:
            return self
        # A place without a slot holds what another of the kind holds, the job's first: nothing of it is used.
        none = np.zeros(more, int)
        first = np.append(np.arange(self.width), none)
        begin = np.arange(len(self)) * self.width
        rows = (begin[:, None] + first).ravel()
        mask = self.mask[:, first].copy()
        mask[:, self.width :, 1:] = False
        calls = self.calls[:, first].copy()
        calls[:, self.width :] = 0.0
        return replace(
            self,
            fingerprint=self.fingerprint.take(rows),
            mask=mask,
            exposed=self.exposed[:, first],
            calls=calls,
            tables=self.tables.take((slice(None), first)),
            regimes=replace(self.regimes, growth=self.regimes.growth[:, first]),
        )

    def step_us(
        self, configs: Array, rows: Array | None = None, few: Few | None = None
    ) -> tuple[Array, Array]:
        """The truth now under ``configs`` (m, S) of the jobs at ``rows`` (all), of some at ``few`` calls.

        Returns the step's us (m,), what stragglers cost in the mean counted, and the mean call's (m, S): what a
        profiler would see, with what runs beside it. Places without a slot are NaN. Raises ValueError for a config that
        is masked.
        """
        rows, configs = self._asked(configs, rows)
        now = self.noise.at[rows]
        total, call_us = self._at(configs, rows, few, now)
        often, size = self._late(configs, rows)
        return total * (1 + often * size), call_us

    def usual_us(self, configs: Array, rows: Array | None = None) -> Array:
        """The mean step (m,) us over a long job, arguments as of :meth:`step_us`; the network's pace at its best.

        Where regimes alternate, each step counts in default steps of its regime, for that is how time lost is told.
        """
        rows, configs = self._asked(configs, rows)
        first = np.zeros(len(rows), int)
        us = self._usual(configs, rows, first)
        changing = self._changing(rows)
        if len(changing):
            tables = np.repeat(configs[changing, None], MOST_REGIMES, axis=1)
            us[changing] = self._followed(tables, rows[changing])
        return us

    def regime_us(self, configs: Array, regime: Array) -> Array:
        """As :meth:`usual_us`, in one ``regime`` (n,) of each job."""
        rows, configs = self._asked(configs, None)
        return self._usual(configs, rows, regime)

    def followed_us(self, tables: Array) -> Array:
        """As :meth:`usual_us`, where in each regime a table of its own is in force: ``tables`` (n, MOST_REGIMES, S)."""
        us = self.usual_us(tables[:, 0])
        changing = np.flatnonzero(self.regimes.count > 1)
        if len(changing):
            us[changing] = self._followed(tables[changing], changing)
        return us

    def window(
        self,
        configs: Array,
        n_steps: Array | int,
        rng: RandomNumbers,
        few: Few | None = None,
        turns: Turns | None = None,
    ) -> tuple[Array, Array]:
        """Run ``n_steps`` (n,) or a number of steps under ``configs`` (n, S), of some in ``turns`` with the current
        table, and measure; time goes on.

        Returns step times (n, most) us, NaN beyond a job's own number, and mean durations of the calls (n, S) us,
        NaN where no step's kernels were sampled. A job with 0 steps does not run. With turns one quad is sampled.
        """
        n = len(self)
        n_steps = np.broadcast_to(np.asarray(n_steps, int), n)
        most = int(n_steps.max(initial=0))
        rows = np.flatnonzero(n_steps > 0)
        rows, configs = self._asked(np.asarray(configs)[rows], rows)
        us = np.zeros((n, most))
        call_us = np.full((n, self.width), np.nan)
        late = np.zeros((2, n, most))
        at_few = few and few.take(rows)
        counts = n_steps[rows]
        us[rows], call_us[rows] = self._through(configs, rows, at_few, counts)
        straggles = np.stack(self._late(configs, rows))
        late[:, rows] = straggles[:, :, None]
        first = np.zeros(len(rows), int)  # step with the first use
        sampled = n_steps
        if turns is not None and turns.steps[rows].any():
            here = np.flatnonzero(turns.steps[rows])
            at = rows[here]
            length = turns.steps[at]
            of_these = turns.take(at)
            self._take_turns(of_these, at, n_steps[at], us, late)
            first[here] = length
            sampled = n_steps.copy()
            sampled[at] = 2 * length
        steps = self.noise.steps(us, n_steps, rng, (late[0], late[1]))
        steps[rows, first] += self._connect(configs, rows)
        is_every = sampled < n_steps
        if few is not None:
            is_every |= few.part < 1
        seen_us = self.noise.calls(call_us, sampled, rng, is_every)
        return steps, seen_us

    def _take_turns(self, turns: Turns, rows: Array, n_steps: Array, us: Array, late: Array) -> None:
        """Put the steps of the current tables (m, S) into those of the jobs at ``rows`` (m,): the truth ``us``
        (n, most) and stragglers ``late`` (2, n, most). A part of each table's effect carries over into the next
        step."""
        most = us.shape[1]
        is_own = turns.arms(most) == 1
        rows, others = self._asked(turns.others, rows)
        other_us, _ = self._through(others, rows, None, n_steps)
        us[rows] = turns.mixed(us[rows], other_us, self.carry[rows])
        straggles = np.stack(self._late(others, rows))
        other_late = straggles[:, :, None]
        own_late = late[:, rows]
        late[:, rows] = np.where(is_own, own_late, other_late)

    def _connect(self, configs: Array, rows: Array) -> Array:
        """What the first use of algorithms costs now, us (m,)."""
        is_rs = self.fingerprint.is_reduce_scatter.reshape(-1, self.width)
        func = is_rs[rows].astype(int)
        pair = self._pair(configs, rows)
        algo = np.maximum(pair - LAST_RING, 0)
        used = self._used(rows)
        return self.first_use.of(rows, func, algo, used)

    def advance(self, n_steps: Array | int) -> None:
        """Let ``n_steps`` pass unmeasured."""
        self.noise.at = self.noise.at + np.asarray(n_steps, int)

    def settled(self, which: Array) -> Self:
        """The same jobs, in their regime ``which`` (n,) for good."""
        settled = replace(self, regimes=self.regimes.settled(which))
        default = np.zeros((len(self), self.width), int)
        settled.default_us = settled.usual_us(default)
        return settled

    def run(self, configs: Array, rows: Array, moment: Moment | None = None) -> tuple[Array, Array, Array]:
        """As :meth:`step.Steps.run`, of the jobs at ``rows``; at no ``moment``: in fair weather, in their first regime,
        with no congestion. Kinds of call are those that are not tuned, then the slots."""
        place = rows[:, None], np.arange(self.width), configs
        slots = self.tables.take(place).rows()
        beside = self.beside[rows].copy()
        scale = self.scale[rows]
        if moment is not None:
            slots[:, :, 0] *= self._stretch(configs, rows, moment)
            beside[:, :, 0] *= moment.weather[:, None]
            scale = scale * self.regimes.batch[rows, moment.regime]
        calls = np.concatenate([beside, slots], axis=1)
        law = self.sites.law.take(rows)
        which = self.which[rows]
        return self.works.steps.run(which, calls, scale, law)

    def _changing(self, rows: Array) -> Array:
        """Places among ``rows`` of the jobs that change their regime."""
        return np.flatnonzero(self.regimes.count[rows] > 1)

    def _with_congestion(self, rows: Array) -> Array:
        """Places among ``rows`` of the jobs whose congestion moves."""
        return np.flatnonzero(self.sites.extras.moves[rows])

    def _asked(self, configs: Array, rows: Array | None) -> tuple[Array, Array]:
        if rows is None:
            rows = np.arange(len(self))
        rows = np.asarray(rows)
        configs = np.asarray(configs)
        shape = len(rows), self.width
        place = rows[:, None], np.arange(self.width)[None], configs
        if configs.shape != shape or not self.mask[place].all():
            raise ValueError(f"configs are {shape} and within the mask, not {configs.shape}")
        return rows, configs

    def _used(self, rows: Array) -> Array:
        return np.arange(self.width) < self.n_slots[rows, None]

    def _pair(self, configs: Array, rows: Array) -> Array:
        """Indices into PAIRS of what runs, (m, S)."""
        own = np.asarray(self.fingerprint.own_pair)
        own = own.reshape(-1, self.width)[rows]
        return pair_of(configs, own)

    def _late(self, configs: Array, rows: Array) -> tuple[Array, Array]:
        """Probability that a step straggles, and by how many steps, (m,)."""
        extras = self.sites.extras
        if not extras.straggle[rows].any():
            return np.zeros(len(rows)), np.zeros(len(rows))
        return extras.take(rows).late(configs, self._used(rows))

    def _at(self, configs: Array, rows: Array, few: Few | None, at: Array) -> tuple[Array, Array]:
        """Step us without stragglers, and mean calls' us, at step ``at`` (m,). At a part of the calls a table costs its
        part."""
        moment = self._moment(rows, at)
        total, spent = self._truth(configs, rows, moment)
        if few is not None and (some := np.flatnonzero(few.part < 1)).size:
            then = moment.take(some)
            configs_there = few.others[some]
            others, _ = self._truth(configs_there, rows[some], then)
            more = total[some] - others
            total[some] = others + few.part[some] * more
        calls = self.calls[rows]
        with np.errstate(invalid="ignore"):
            call_us = np.where(calls > 0, spent / calls, np.nan)
        return total, call_us

    def _through(self, configs: Array, rows: Array, few: Few | None, n_steps: Array) -> tuple[Array, Array]:
        """As :meth:`_at`, of each of the next ``n_steps`` (m,): step us (m, most). Calls are those of the first."""
        at = self.noise.at[rows]
        begun, call_us = self._at(configs, rows, few, at)
        most = int(n_steps.max(initial=0))
        column = begun[:, None]
        us = np.repeat(column, most, axis=1)
        if not self._changing(rows).size:
            return us, call_us
        done = self.regimes.take(rows).left(at)
        while (later := np.flatnonzero(done < n_steps)).size:
            these = rows[later]
            from_step = done[later].astype(int)
            now = at[later] + from_step
            few_then = few and few.take(later)
            configs_then = configs[later]
            other, _ = self._at(configs_then, these, few_then, now)
            for row, step, value in zip(later, from_step, other, strict=True):
                us[row, step:] = value
            left = self.regimes.take(these).left(now)
            done[later] += left
        return us, call_us

    def _moment(self, rows: Array, at: Array) -> Moment:
        """Of the jobs at ``rows`` at step ``at`` (m,)."""
        size, period, phase = self.swing[rows].T
        turn = at / period + phase
        wave = 0.5 + 0.5 * np.sin(2 * np.pi * turn)
        over_nodes = self.sites.fleet.n_nodes[rows] > 1
        weather = 1.0 + size * wave * np.where(over_nodes, 1.0, 0.2)
        weight = np.zeros(len(rows))
        regime = np.zeros(len(rows), int)
        if self.sites.extras.moves[rows].any():
            weight = self.sites.extras.take(rows).weight(at)
        if self._changing(rows).size:
            regime = self.regimes.take(rows).at(at)
        return Moment(weather, weight, regime)

    def _stretch(self, configs: Array, rows: Array, moment: Moment) -> Array:
        """How many times as long the slots' calls take then, (m, S)."""
        weather = moment.weather[:, None]
        stretch = np.repeat(weather, self.width, axis=1)
        moving = self._with_congestion(rows)
        if len(moving):
            some = self.sites.extras.take(rows[moving])
            pair = self._pair(configs[moving], rows[moving])
            weight = moment.weight[moving]
            log = some.congestion(configs[moving], pair, weight)
            stretch[moving] *= np.exp(log)
        octaves = self.regimes.octaves[rows, moment.regime]
        sized = np.flatnonzero(octaves)
        if len(sized):
            slots = np.arange(self.width)
            place = rows[sized, None], slots, configs[sized]
            log = octaves[sized, None] * self.regimes.growth[place]
            stretch[sized] *= np.exp2(log)
        return stretch

    def _truth(self, configs: Array, rows: Array, moment: Moment) -> tuple[Array, Array]:
        """Step us, and what the calls of each slot take together, (m, S)."""
        total, spent, _ = self.run(configs, rows, moment)
        joint = np.flatnonzero(self.sites.extras.joint[rows])
        if len(joint):
            pair = self._pair(configs[joint], rows[joint])
            some = self.sites.extras.take(rows[joint])
            log = some.together(configs[joint], pair)
            total[joint] *= np.exp(log)
        return total, spent[:, N_BESIDE:]

    def _usual(self, configs: Array, rows: Array, regime: Array) -> Array:
        """The mean step (m,) us in one ``regime`` (m,) of each job, in fair weather."""
        n = len(rows)
        fair = Moment(np.ones(n), np.zeros(n), regime)
        moving = self._with_congestion(rows)
        extras = self.sites.extras.take(rows[moving])
        first, second = extras.usual_weights()
        fair.weight[moving] = first
        us, _ = self._truth(configs, rows, fair)
        if len(moving):
            other = replace(fair.take(moving), weight=second)
            theirs = configs[moving]
            then, _ = self._truth(theirs, rows[moving], other)
            us[moving] = (us[moving] + then) / 2
        often, size = self._late(configs, rows)
        return np.asarray(us * (1 + often * size))

    def _followed(self, tables: Array, rows: Array) -> Array:
        """The mean step (m,) us, with a table for each regime, (m, MOST_REGIMES, S)."""
        regimes = self.regimes.take(rows)
        weights = regimes.weights
        pace = np.zeros(len(rows))
        for k in range(MOST_REGIMES):
            there = np.flatnonzero(k < regimes.count)
            regime = np.full(len(there), k)
            configs = tables[there, k]
            us = self._usual(configs, rows[there], regime)
            weight = weights[there, k]
            default_us = regimes.default_us[there, k]
            pace[there] += weight * us / default_us
        usual = weights * regimes.default_us
        return np.asarray(pace * usual.sum(axis=1))

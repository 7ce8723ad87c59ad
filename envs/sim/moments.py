"""Whole jobs, many at once, at a moment: what a step takes then under any configs. :mod:`.truth` lets time pass.

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
from .mixes import FirstUse, Moment
from .noise import Noise
from .regimes import Regimes
from .step import Calls
from .workloads import N_BESIDE, WorkloadArrays
from .worlds import SampledClusters

Array = np.ndarray[Any, Any]
#: Two arrays. Where nothing else is said: of a step (m,) us, and of the calls of each slot (m, S) us.
Pair = tuple[Array, Array]


class Slots(Columns, Fingerprint):
    """What the slots of jobs look like, as many rows a job; places without a slot hold copies of the job's first."""


@dataclass
class JobsAtMoment(Columns):
    """``n`` jobs of up to S slots, ordered by the bytes they move; arrays begin with (n,) but the fingerprint's.

    S is ``width``: SLOTS, or MANY_SLOTS where one of the jobs has many. Configs are indices into ``spaces``'
    N_CONFIGS, 0 is the default (AUTO).
    """

    n_slots: Array
    fingerprint: Slots
    mask: Array  # (n, S, N_CONFIGS) bool: one config an arm, AUTO always; places without a slot only AUTO
    default_us: Array  # true time of the default step, see Jobs.usual_us
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
        every = np.arange(len(self))
        rows = every[rows]
        begin = rows[:, None] * self.width
        places = begin + np.arange(self.width)
        found = {}
        for name, value in vars(self).items():
            part = places.ravel() if name == "fingerprint" else rows
            found[name] = taken(value, part)
        return type(self)(**found)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """All jobs of ``parts``, as wide as the widest."""
        width = max(part.width for part in parts)
        widened = [part.widened(width) for part in parts]
        return super().join(widened)

    def widened(self, width: int) -> Self:
        """The same jobs with places for ``width`` slots."""
        more = width - self.width
        if not more:
            return self
        # A place without a slot holds what another of the kind holds, the job's first: nothing of it is used.
        own = np.arange(self.width)
        none = np.zeros(more, int)
        first = np.append(own, none)
        begin = np.arange(len(self)) * self.width
        rows = begin[:, None] + first
        mask = self.mask[:, first].copy()
        mask[:, self.width :, 1:] = False
        calls = self.calls[:, first].copy()
        calls[:, self.width :] = 0.0
        growth = self.regimes.growth[:, first]
        return replace(
            self,
            fingerprint=self.fingerprint.take(rows.ravel()),
            mask=mask,
            exposed=self.exposed[:, first],
            calls=calls,
            tables=self.tables.take((slice(None), first)),
            regimes=replace(self.regimes, growth=growth),
        )

    def run(
        self,
        configs: Array,  # (m, S)
        rows: Array,  # (m,) indices of jobs
        moment: Moment | None = None,
    ) -> tuple[Array, Array, Array]:
        """As :meth:`step.Steps.run`, of the jobs at ``rows``; at no ``moment``: in fair weather, in their first regime,
        with no congestion. Kinds of call are those that are not tuned, then the slots."""
        slot = np.arange(self.width)
        place = rows[:, None], slot, configs
        tables = self.tables.take(place)
        slots = tables.rows()
        beside = self.beside[rows].copy()
        scale = self.scale[rows]
        if moment is not None:
            stretch = self._stretch(configs, rows, moment)
            slots[:, :, 0] *= stretch
            beside[:, :, 0] *= moment.weather[:, None]
            batch = self.regimes.batch[rows, moment.regime]
            scale = scale * batch
        calls = np.concatenate([beside, slots], axis=1)
        law = self.sites.law.take(rows)
        which = self.which[rows]
        return self.works.steps.run(which, calls, scale, law)

    def _truth(self, configs: Array, rows: Array, moment: Moment) -> Pair:
        """Step us, and what the calls of each slot take together, (m, S)."""
        total, spent, _ = self.run(configs, rows, moment)
        extras = self.sites.extras
        joint = np.flatnonzero(extras.joint[rows])
        if len(joint):
            jobs = rows[joint]
            theirs = configs[joint]
            pair = self._pair(theirs, jobs)
            some = extras.take(jobs)
            log = some.together(theirs, pair)
            total[joint] *= np.exp(log)
        return total, spent[:, N_BESIDE:]

    def _stretch(self, configs: Array, rows: Array, moment: Moment) -> Array:
        """How many times as long the slots' calls take then, (m, S)."""
        weather = moment.weather[:, None]
        stretch = np.repeat(weather, self.width, axis=1)
        moving = self._with_congestion(rows)
        if len(moving):
            jobs = rows[moving]
            theirs = configs[moving]
            some = self.sites.extras.take(jobs)
            pair = self._pair(theirs, jobs)
            weight = moment.weight[moving]
            log = some.congestion(theirs, pair, weight)
            stretch[moving] *= np.exp(log)
        octaves = self.regimes.octaves[rows, moment.regime]
        sized = np.flatnonzero(octaves)
        if len(sized):
            jobs = rows[sized]
            slots = np.arange(self.width)
            place = jobs[:, None], slots, configs[sized]
            growth = self.regimes.growth[place]
            log = octaves[sized, None] * growth
            stretch[sized] *= np.exp2(log)
        return stretch

    def _moment(self, rows: Array, at: Array) -> Moment:
        """Of the jobs at ``rows`` at step ``at`` (m,)."""
        size, period, phase = self.swing[rows].T
        turn = at / period + phase
        wave = 0.5 + 0.5 * np.sin(2 * np.pi * turn)
        over_nodes = self.sites.fleet.n_nodes[rows] > 1
        felt = np.where(over_nodes, 1.0, 0.2)
        weather = 1.0 + size * wave * felt
        n = len(rows)
        weight = np.zeros(n)
        regime = np.zeros(n, int)
        extras = self.sites.extras
        if extras.moves[rows].any():
            some = extras.take(rows)
            weight = some.weight(at)
        if self._changing(rows).size:
            regimes = self.regimes.take(rows)
            regime = regimes.at(at)
        return Moment(weather, weight, regime)

    def _late(self, configs: Array, rows: Array) -> Pair:
        """Probability that a step straggles, and by how many steps, (m,)."""
        extras = self.sites.extras
        if not extras.straggle[rows].any():
            never = np.zeros(len(rows))
            return never, never.copy()
        some = extras.take(rows)
        used = self._used(rows)
        return some.late(configs, used)

    def _changing(self, rows: Array) -> Array:
        """Places among ``rows`` of the jobs that change their regime."""
        count = self.regimes.count[rows]
        return np.flatnonzero(count > 1)

    def _with_congestion(self, rows: Array) -> Array:
        """Places among ``rows`` of the jobs whose congestion moves."""
        moves = self.sites.extras.moves[rows]
        return np.flatnonzero(moves)

    def _used(self, rows: Array) -> Array:
        """Places that hold a slot, (m, S) bool."""
        n_slots = self.n_slots[rows, None]
        return np.arange(self.width) < n_slots

    def _pair(self, configs: Array, rows: Array) -> Array:
        """Indices into PAIRS of what runs, (m, S)."""
        of_slots = np.asarray(self.fingerprint.own_pair)
        by_job = of_slots.reshape(-1, self.width)
        return pair_of(configs, by_job[rows])

"""Whole jobs, many at once: what a step takes under any configs, and what is measured of it.

A job is a cluster and the slots of a real training step on it. The truth is the event-by-event schedule of :mod:`.step`
over streams of real models, and what :mod:`.worlds` adds to it; alone on the fabric a call takes what :mod:`.fabric`
says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ...traces.fingerprint import Fingerprint
from ...traces.spaces import pair_of
from ..nccl_model.clusters import ClusterArrays
from ..nccl_model.columns import Columns
from .fabric import FabricParams
from .noise import Noise, NoiseStream
from .step import Calls, Law
from .workloads import SLOTS, WorkloadArrays
from .worlds import Extras

Array = np.ndarray[Any, Any]
#: Of PAIRS the last of a ring; each after it is an algorithm of its own.
LAST_RING = 2
#: The two usual states of what moves, see Extras.usual_weights.
FIRST, SECOND = 0, 1


@dataclass
class SampledClusters(Columns):
    """Where ``n`` jobs run: what another job on the same clusters has in common with them. Arrays (n, ...)."""

    fleet: ClusterArrays
    truth: FabricParams
    other: (
        Array  # (n, 2, 6, N_COUNTS) what the formulas miss, far in message size from where truth.effect holds
    )
    turn: Array  # pi / 2 / octaves of message size from the one to the other
    touch: Array  # calls slow the compute so many times as much as the fabric says
    law: Law
    world: Array  # index into WORLDS
    extras: Extras


class Slots(Columns, Fingerprint):
    """What the slots of jobs look like, SLOTS rows a job; places without a slot hold copies of the job's first."""

    def take(self, rows: Array) -> Self:
        """The slots of the jobs at ``rows``, indices."""
        return super().take((rows[:, None] * SLOTS + np.arange(SLOTS)).ravel())


@dataclass
class FirstUse(Columns):
    """What the first use of an algorithm costs each job: NCCL connects it then. A communicator for each collective."""

    us: Array  # (n,) each
    connected: Array  # (n, 2, N_ALGOS) bool
    spent_us: Array  # (n,) so far

    def of(self, rows: Array, is_rs: Array, algo: Array, used: Array) -> Array:
        """Connect what the jobs at ``rows`` use now, arrays (m, SLOTS); us (m,) that it takes."""
        need = np.zeros((len(rows), *self.connected.shape[1:]), bool)
        place, slot = np.nonzero(used)
        need[place, is_rs[place, slot], algo[place, slot]] = True
        us = (need & ~self.connected[rows]).sum(axis=(1, 2)) * self.us[rows]
        self.connected[rows] |= need
        self.spent_us[rows] += us
        return np.asarray(us)


@dataclass
class Few(Columns):
    """Tables of ``m`` jobs hold at ``part`` (m,) of the calls, 1: at all; at the rest the ``others`` (m, SLOTS) do."""

    part: Array
    others: Array


@dataclass
class Jobs(Columns):
    """``n`` jobs of up to SLOTS slots, ordered by the bytes they move; arrays begin with (n,) but the fingerprint's.

    Configs are indices into ``spaces``' N_CONFIGS, 0 is the default (AUTO).
    """

    n_slots: Array
    fingerprint: Slots
    mask: Array  # (n, SLOTS, N_CONFIGS) bool: one config an arm, AUTO always; places without a slot only AUTO
    default_us: Array  # true time of the default step, see usual_us
    exposed: Array  # (n, SLOTS) part of a slot's time, under the default, with no compute beside it: hidden
    calls: Array  # (n, SLOTS) a step
    works: WorkloadArrays
    which: Array  # of works
    tables: Calls  # (n, SLOTS, N_CONFIGS) float32: what a call is under every config
    beside: Array  # (n, 2, N_CALL) calls that are not tuned
    scale: Array  # of compute
    noise: Noise
    swing: Array  # (n, 3): size, period in steps, phase
    first_use: FirstUse
    sites: SampledClusters

    def take(self, rows: Any) -> Self:
        """The jobs at ``rows`` (indices or flags), at the same time; they share only what never changes."""
        return super().take(np.arange(len(self))[rows])

    def step_us(
        self, configs: Array, rows: Array | None = None, few: Few | None = None
    ) -> tuple[Array, Array]:
        """The truth now under ``configs`` (m, SLOTS) of the jobs at ``rows`` (all), of some at ``few`` calls.

        Returns the step's us (m,), what stragglers cost in the mean counted, and the mean call's (m, SLOTS): what a
        profiler would see, with what runs beside it. Places without a slot are NaN. Raises ValueError for a config that
        is masked.
        """
        rows, configs = self._asked(configs, rows)
        total, call_us = self._now(configs, rows, few)
        often, size = self._late(configs, rows)
        return total * (1 + often * size), call_us

    def usual_us(self, configs: Array, rows: Array | None = None) -> Array:
        """The mean step (m,) us over a long job, arguments as of :meth:`step_us`; the network's pace at its best."""
        rows, configs = self._asked(configs, rows)
        us = self._truth(configs, rows, 1.0, FIRST)[0]
        moving = np.flatnonzero(self.sites.extras.moves[rows])
        if len(moving):
            us[moving] = (us[moving] + self._truth(configs[moving], rows[moving], 1.0, SECOND)[0]) / 2
        often, size = self._late(configs, rows)
        return us * (1 + often * size)

    def window(
        self,
        configs: Array,
        n_steps: Array | int,
        rng: np.random.Generator | NoiseStream,
        few: Few | None = None,
    ) -> tuple[Array, Array]:
        """Run ``n_steps`` (n,) or a number of steps under ``configs`` (n, SLOTS), and measure; time goes on.

        Returns step times (n, most) us, NaN beyond a job's own number, and mean durations of the calls (n, SLOTS) us,
        NaN where no step's kernels were sampled. A job with 0 steps does not run.
        """
        n_steps = np.broadcast_to(np.asarray(n_steps, int), len(self))
        rows = np.flatnonzero(n_steps > 0)
        us, call_us, late = np.zeros(len(self)), np.full((len(self), SLOTS), np.nan), np.zeros((2, len(self)))
        rows, configs = self._asked(np.asarray(configs)[rows], rows)
        us[rows], call_us[rows] = self._now(configs, rows, few and few.take(rows))
        late[:, rows] = self._late(configs, rows)
        steps = self.noise.steps(us, n_steps, rng, (late[0], late[1]))
        is_rs = self.fingerprint.is_reduce_scatter.reshape(-1, SLOTS)[rows].astype(int)
        algo = np.maximum(self._pair(configs, rows) - LAST_RING, 0)
        steps[rows, 0] += self.first_use.of(rows, is_rs, algo, self._used(rows))
        return steps, self.noise.calls(call_us, n_steps, rng, few and few.part < 1)

    def advance(self, n_steps: Array | int) -> None:
        """Let ``n_steps`` pass unmeasured."""
        self.noise.at = self.noise.at + np.asarray(n_steps, int)

    def run(self, configs: Array, rows: Array, weather: Array | float = 1.0) -> tuple[Array, Array, Array]:
        """As :meth:`step.Steps.run`, of the jobs at ``rows``; ``weather``, a number or (m, calls), stretches the
        calls."""
        place = rows[:, None], np.arange(SLOTS), configs
        calls = np.concatenate([self.tables.take(place).rows(), self.beside[rows]], axis=1)
        calls[:, :, 0] *= weather
        return self.works.steps.run(self.which[rows], calls, self.scale[rows], self.sites.law.take(rows))

    def _asked(self, configs: Array, rows: Array | None) -> tuple[Array, Array]:
        rows = np.arange(len(self)) if rows is None else np.asarray(rows)
        configs = np.asarray(configs)
        place = rows[:, None], np.arange(SLOTS)[None], configs
        if configs.shape != (len(rows), SLOTS) or not self.mask[place].all():
            raise ValueError(f"configs are ({len(rows)}, {SLOTS}) and within the mask, not {configs.shape}")
        return rows, configs

    def _used(self, rows: Array) -> Array:
        return np.arange(SLOTS) < self.n_slots[rows, None]

    def _pair(self, configs: Array, rows: Array) -> Array:
        """Indices into PAIRS of what runs, (m, SLOTS)."""
        own = np.asarray(self.fingerprint.own_pair).reshape(-1, SLOTS)[rows]
        return pair_of(configs, own)

    def _late(self, configs: Array, rows: Array) -> tuple[Array, Array]:
        """Probability that a step straggles, and by how many steps, (m,)."""
        extras = self.sites.extras
        if not extras.straggle[rows].any():
            return np.zeros(len(rows)), np.zeros(len(rows))
        return extras.take(rows).late(configs, self._used(rows))

    def _now(self, configs: Array, rows: Array, few: Few | None) -> tuple[Array, Array]:
        """Step us without stragglers, and mean calls' us. At a part of the calls a table costs its part."""
        total, spent = self._truth(configs, rows, self._weather(rows))
        if few is not None and (at := np.flatnonzero(few.part < 1)).size:
            others = self._truth(few.others[at], rows[at], self._weather(rows[at]))[0]
            total[at] = others + few.part[at] * (total[at] - others)
        with np.errstate(invalid="ignore"):
            return total, np.where(self.calls[rows] > 0, spent[:, :SLOTS] / self.calls[rows], np.nan)

    def _truth(
        self, configs: Array, rows: Array, weather: Array | float, usual: int | None = None
    ) -> tuple[Array, Array]:
        """Step us and what calls take together, (m, calls), at that weather, and now or at one of the usual states of
        what moves."""
        extras, stretch = self.sites.extras, np.reshape(weather, (-1, 1))
        moving, joint = np.flatnonzero(extras.moves[rows]), np.flatnonzero(extras.joint[rows])
        if len(moving):
            these, some = rows[moving], extras.take(rows[moving])
            weight = some.weight(self.noise.at[these]) if usual is None else some.usual_weights()[usual]
            stretch = np.tile(stretch, (len(rows) // len(stretch), SLOTS + self.beside.shape[1]))
            pair = self._pair(configs[moving], these)
            stretch[moving, :SLOTS] *= np.exp(some.congestion(configs[moving], pair, weight))
        total, spent, _ = self.run(configs, rows, stretch)
        if len(joint):
            pair = self._pair(configs[joint], rows[joint])
            total[joint] *= np.exp(extras.take(rows[joint]).together(configs[joint], pair))
        return total, spent

    def _weather(self, rows: Array) -> Array:
        size, period, phase = self.swing[rows].T
        wave = 0.5 + 0.5 * np.sin(2 * np.pi * (self.noise.at[rows] / period + phase))
        return np.asarray(1.0 + size * wave * np.where(self.sites.fleet.n_nodes[rows] > 1, 1.0, 0.2))

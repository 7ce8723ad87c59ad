"""Random whole jobs, many at once: what a step takes under any configs, what is measured of it, and the best there is.

A job is a cluster and the slots of a real training step on it. The truth is the event-by-event schedule of :mod:`.step`
over streams of real models; alone on the fabric a call takes what :mod:`.fabric` says. Which figures are public is said
where they stand (:mod:`.fabric`, :mod:`.noise`, :mod:`.cost_model`); everything else, and all that a family's ranges
say, is drawn to be wider than any one cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from ...traces.fingerprint import Fingerprint
from ...traces.records import CHANNELS, PAIRS
from ...traces.spaces import N_CONFIGS, N_PAIRS
from ..nccl_model import cost_model
from ..nccl_model.arms import distinct
from ..nccl_model.clusters import ClusterArrays
from ..nccl_model.columns import Columns
from .fabric import Fabric, FabricParams, unmodelled
from .family import HELD_OUT, STANDARD, JobFamily, draw_fleet
from .noise import Noise, NoiseStream, log_uniform
from .step import Calls, Law
from .workloads import SLOTS, WorkloadArrays, works_of

Array = np.ndarray[Any, Any]
__all__ = ["HELD_OUT", "SLOTS", "STANDARD", "JobFamily", "Jobs", "SampledClusters", "draw_jobs", "oracle"]


@dataclass
class SampledClusters(Columns):
    """Where ``n`` jobs run: what another job on the same clusters has in common with them. Arrays (n, ...)."""

    fleet: ClusterArrays
    truth: FabricParams
    other: Array  # (n, 2, 6, N_COUNTS) what the formulas miss, far in message size from where truth.effect holds
    turn: Array  # pi / 2 / octaves of message size from the one to the other
    touch: Array  # calls slow the compute so many times as much as the fabric says
    law: Law


class Slots(Columns, Fingerprint):
    """What the slots of jobs look like, SLOTS rows a job; places without a slot hold copies of the job's first."""

    def take(self, rows: Array) -> Self:
        """The slots of the jobs at ``rows``, indices."""
        return super().take((rows[:, None] * SLOTS + np.arange(SLOTS)).ravel())


@dataclass
class Jobs(Columns):
    """``n`` jobs of up to SLOTS slots, ordered by the bytes they move; arrays begin with (n,) but the fingerprint's.

    Configs are indices into ``spaces``' N_CONFIGS, 0 is the default (AUTO).
    """

    label: Array  # str: cluster and workload
    n_slots: Array
    fingerprint: Slots
    mask: Array  # (n, SLOTS, N_CONFIGS) bool: one config an arm, AUTO always; places without a slot only AUTO
    default_us: Array  # true time of the default step in fair weather
    exposed: Array  # (n, SLOTS) part of a slot's time, under the default, with no compute beside it: hidden
    calls: Array  # (n, SLOTS) a step
    works: WorkloadArrays
    which: Array  # of works
    tables: Calls  # (n, SLOTS, N_CONFIGS) float32: what a call is under every config
    beside: Array  # (n, 2, 5) calls that are not tuned
    scale: Array  # of compute
    noise: Noise
    swing: Array  # (n, 3): size, period in steps, phase
    sites: SampledClusters

    @property
    def at(self) -> Array:
        """Steps that each job has run, (n,)."""
        return self.noise.at

    def take(self, rows: Any) -> Self:
        """The jobs at ``rows`` (indices or flags), at the same time; they share only what never changes."""
        return super().take(np.arange(len(self))[rows])

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """One batch of several of the same family. Raises ValueError when their steps are not the same."""
        if not parts or any(part.works is not parts[0].works for part in parts):
            raise ValueError("only jobs of one family can be joined, and at least one batch")
        return super().join(parts)

    def step_us(self, configs: Array, rows: Array | None = None) -> tuple[Array, Array]:
        """The truth now under ``configs`` (m, SLOTS) of the jobs at ``rows`` (all).

        Returns the step's us (m,) and the mean call's (m, SLOTS): what a profiler would see, with what runs beside it.
        Places without a slot are NaN. Raises ValueError for a config that is masked.
        """
        rows = np.arange(len(self)) if rows is None else np.asarray(rows)
        configs = np.asarray(configs)
        place = rows[:, None], np.arange(SLOTS)[None], configs
        if configs.shape != (len(rows), SLOTS) or not self.mask[place].all():
            raise ValueError(f"configs are ({len(rows)}, {SLOTS}) and within the mask, not {configs.shape}")
        total, spent, _ = self.run(configs, rows, self._weather(rows))
        with np.errstate(invalid="ignore"):
            return total, np.where(self.calls[rows] > 0, spent[:, :SLOTS] / self.calls[rows], np.nan)

    def window(
        self, configs: Array, n_steps: Array | int, rng: np.random.Generator | NoiseStream
    ) -> tuple[Array, Array]:
        """Run ``n_steps`` (n,) or a number of steps under ``configs`` (n, SLOTS), and measure; time goes on.

        Returns step times (n, most) us, NaN beyond a job's own number, and mean durations of the calls (n, SLOTS) us,
        NaN where no step's kernels were sampled. A job with 0 steps does not run.
        """
        n_steps = np.broadcast_to(np.asarray(n_steps, int), len(self))
        rows = np.flatnonzero(n_steps > 0)
        us, call_us = np.zeros(len(self)), np.full((len(self), SLOTS), np.nan)
        us[rows], call_us[rows] = self.step_us(np.asarray(configs)[rows], rows)
        steps = self.noise.steps(us, n_steps, rng)
        return steps, self.noise.calls(call_us, n_steps, rng)

    def advance(self, n_steps: Array | int) -> None:
        """Let ``n_steps`` pass unmeasured."""
        self.noise.at = self.noise.at + np.asarray(n_steps, int)

    def run(self, configs: Array, rows: Array, weather: Array | float = 1.0) -> tuple[Array, Array, Array]:
        """As :meth:`step.Steps.run`, of the jobs at ``rows``; ``weather`` stretches the calls that can be tuned."""
        place = rows[:, None], np.arange(SLOTS), configs
        calls = np.concatenate([self.tables.take(place).rows(), self.beside[rows]], axis=1)
        calls[:, :, 0] *= np.reshape(weather, (-1, 1))
        return self.works.steps.run(self.which[rows], calls, self.scale[rows], self.sites.law.take(rows))

    def _weather(self, rows: Array) -> Array:
        size, period, phase = self.swing[rows].T
        wave = 0.5 + 0.5 * np.sin(2 * np.pi * (self.at[rows] / period + phase))
        return np.asarray(1.0 + size * wave * np.where(self.sites.fleet.n_nodes[rows] > 1, 1.0, 0.2))


def draw_jobs(kind: JobFamily, rng: np.random.Generator, n: int) -> Jobs:
    """``n`` jobs of a family, each at its first steps."""
    works = works_of(kind.works)
    fleet = draw_fleet(kind.clusters, rng, n)
    replicated = (fleet.n_nodes == 1) & (fleet.gpus_per_node == 8) & (rng.random(n) < kind.replicated)
    one = rng.random(n) < kind.one_communicator
    pick = rng.random(n)
    is_one = np.array(["one communicator" in name for name in works.names])
    which = np.zeros(n, int)
    for a in (False, True):
        for b in (False, True):
            fit = np.flatnonzero((works.replicated == a) & (is_one == b))
            mine = (replicated == a) & (one == b)
            which[mine] = fit[(pick[mine] * len(fit)).astype(int)]
    truth = Fabric.random(fleet, rng, kind.clusters.width, sigma := log_uniform(rng, kind.effects, n)).truth
    other = sigma[:, None, None, None] * unmodelled(rng, n)
    turn = np.pi / 2 / rng.uniform(*kind.octaves, n)
    exposed, touch = log_uniform(rng, kind.exposed, n), log_uniform(rng, kind.touch, n)
    law = Law(*(rng.uniform(*bounds, n) for bounds in (kind.crowd, kind.power, kind.saturation, kind.drag)))
    return assemble(works, which, SampledClusters(fleet, truth, other, turn, touch, law), exposed, kind, rng)


def assemble(
    works: WorkloadArrays,
    which: Array,
    sites: SampledClusters,
    exposed: Array,
    kind: JobFamily,
    rng: np.random.Generator,
) -> Jobs:
    """One job on each of ``sites``: ``which`` (n,) names its workload, ``exposed`` (n,) is the part of its default step
    that waits for communication, which its compute is scaled to."""
    n, fleet = len(which), sites.fleet
    rng.random((3, n))  # of what jobs no longer have: drawn, here and at the end, for the sake of the jobs on file
    rows = np.repeat(np.arange(n), SLOTS)
    slots = fleet.take(rows)
    used = np.arange(SLOTS) < works.n_slots[which][:, None]
    place = which[:, None], np.where(used, np.arange(SLOTS), 0)
    is_rs, calls = works.is_reduce_scatter[place].ravel(), np.where(used, works.calls[place], 0.0)
    unit = slots.n_ranks * 16  # shards are whole 16-byte words
    n_bytes = np.maximum(-(-works.n_bytes[place].ravel() // unit), 1) * unit
    cost = cost_model.pair_cost_rows(slots, n_bytes)
    own = np.where(cost >= 0, cost, np.inf).argmin(axis=1)
    fabric = Fabric(slots, _truth_at(sites, rows, n_bytes))
    tables, ran = _call_tables(fabric, is_rs, n_bytes, own, kind.crowd_by_channels, sites.touch[rows])
    fingerprint = Slots(
        is_reduce_scatter=is_rs.astype(float),
        n_bytes=n_bytes.astype(float),
        calls=calls.ravel(),
        n_ranks=slots.n_ranks.astype(float),
        n_nodes=slots.n_nodes.astype(float),
        cost_us=cost,
        own_pair=own,
        own_channels=ran[:, 0],
        comm_channels=slots.comm_channels.astype(float),
        share=np.zeros(n * SLOTS),
        memory_pressure=np.repeat(np.where(rng.random(n) < 0.5, rng.uniform(0.2, 1.0, n), 0.0), SLOTS),
    )
    mask = distinct(fingerprint, slots.release).reshape(n, SLOTS, N_CONFIGS)
    mask[~used] = False
    mask[:, :, 0] = True
    shapes = zip(fleet.n_nodes, fleet.gpus_per_node, which, strict=True)
    jobs = Jobs(
        label=np.array([f"{nodes} x {gpus} {works.names[w]}" for nodes, gpus, w in shapes]),
        n_slots=works.n_slots[which],
        fingerprint=fingerprint,
        mask=mask,
        default_us=np.zeros(n),
        exposed=np.zeros((n, SLOTS)),
        calls=calls,
        works=works,
        which=which,
        tables=tables,
        beside=_beside(works, which, fleet, rng),
        scale=np.ones(n),
        noise=Noise.draw(kind.noise, rng, n),
        swing=_swing(kind, rng, n),
        sites=sites,
    )
    rng.random((3, n))
    _expose(jobs, exposed)
    return jobs


def _truth_at(sites: SampledClusters, rows: Array, n_bytes: Array) -> FabricParams:
    """The fabrics at ``rows``, with what the formulas miss of messages of ``n_bytes`` there."""
    truth = sites.truth.take(rows)
    shard = np.log2(n_bytes / sites.fleet.n_ranks[rows])
    angle = (sites.turn[rows] * (shard - 20.0))[:, None, None, None]
    return replace(truth, effect=np.cos(angle) * truth.effect + np.sin(angle) * sites.other[rows])


def _call_tables(
    fabric: Fabric, is_rs: Array, n_bytes: Array, own: Array, crowd_by_channels: bool, touch: Array
) -> tuple[Calls, Array]:
    """Calls of every config of slots, and the channels that run, (slots, N_CONFIGS).

    The calls of a slot slow the compute ``touch`` times as much as the fabric says.
    """
    columns = fabric.fleet.take((slice(None), None))
    pairs = np.concatenate([own[:, None], np.tile(np.arange(len(PAIRS)), (len(own), 1))], axis=1)
    pair, asked = np.repeat(pairs, len(CHANNELS), 1), np.tile(np.array(CHANNELS), N_PAIRS)[None, :]
    limit, _ = cost_model.heuristic_channels(columns, n_bytes[:, None], pair)
    lowered = np.where(columns.release >= 23100, np.minimum(asked, limit), asked)  # from 2.31 a tuner only lowers
    ran = cost_model.planned_channels(columns, n_bytes[:, None], pair, np.where(asked == 0, limit, lowered))
    us = fabric.times_on_us(is_rs, n_bytes, pair, ran)
    slow, near, far = fabric.overlap(is_rs, n_bytes, pair, ran, us)
    crowd = ran / 16 if crowd_by_channels else np.ones_like(us)
    parts = us, slow * touch[:, None], near, far, crowd
    return Calls(*(part.reshape(-1, SLOTS, N_CONFIGS).astype(np.float32) for part in parts)), ran


def _beside(works: WorkloadArrays, which: Array, fleet: ClusterArrays, rng: np.random.Generator) -> Array:
    """Calls that no tuner reaches, (n, 2, 5): all_reduces of shards over the network, and slots beyond SLOTS."""
    n = len(which)
    port = fleet.n_nics * fleet.nic_gbs / fleet.gpus_per_node * rng.uniform(0.6, 0.95, n)
    nodes = np.exp2(rng.integers(1, 7, n))
    out = np.zeros((n, 2, 5))
    out[:, 0, 0] = 30.0 + 6.0 * np.log2(nodes) + 2 * (nodes - 1) / nodes * works.other_bytes[which] / (port * 1e3)
    out[:, 0, 1:] = 0.12, 0.3, 0.8, 1.0
    out[:, 1] = 60.0, 0.1, 0.3, 0.0, 1.0
    return out


def _swing(kind: JobFamily, rng: np.random.Generator, n: int) -> Array:
    size = np.where(rng.random(n) < kind.swing, log_uniform(rng, kind.swing_size, n), 0.0)
    return np.stack([size, log_uniform(rng, kind.swing_steps, n), rng.random(n)], axis=1)


def _expose(jobs: Jobs, wanted: Array) -> None:
    """Scale the compute of each job until that part of its default step waits; then note what the default is like."""
    n, none = len(jobs), np.zeros((len(jobs), SLOTS), int)
    low, high = np.full(n, 1e-5), np.full(n, 1e5)
    for _ in range(26):
        jobs.scale = np.sqrt(low * high)
        total, _, bare = jobs.run(none, np.arange(n))
        more = bare.sum(axis=1) > wanted * total
        low, high = np.where(more, jobs.scale, low), np.where(more, high, jobs.scale)
    computing(jobs, high)


def computing(jobs: Jobs, scale: Array) -> None:
    """Scale the compute of each job (n,), and note what its default is like in fair weather."""
    n, jobs.scale = len(jobs), scale.copy()
    jobs.default_us, spent, bare = jobs.run(np.zeros((n, SLOTS), int), np.arange(n))
    share = spent[:, :SLOTS] / jobs.default_us[:, None]
    jobs.fingerprint.share = np.where(jobs.calls > 0, share, share[:, :1]).ravel()
    jobs.exposed = bare[:, :SLOTS] / np.maximum(spent[:, :SLOTS], 1e-9)


def oracle(jobs: Jobs, passes: int = 4) -> tuple[Array, Array]:
    """The best joint configs now: (n, SLOTS), and the step's us (n,) under them.

    Every config of a slot in turn, until no slot helps; begun from the default and from each slot's quickest call,
    whatever that does to the rest of the step.
    """
    n = len(jobs)
    alone = np.where(jobs.mask, jobs.tables.us, np.inf).argmin(axis=2)
    found: list[tuple[Array, Array]] = []
    for start in (np.zeros((n, SLOTS), int), alone):
        best, chosen = jobs.step_us(start)[0], start.copy()
        active = np.ones(n, bool)
        for _ in range(passes):
            before = best.copy()
            for s in range(SLOTS):
                for config in range(N_CONFIGS):
                    rows = np.flatnonzero(active & jobs.mask[:, s, config] & (s < jobs.n_slots))
                    rows = rows[chosen[rows, s] != config]
                    if not len(rows):
                        continue
                    trial = chosen[rows].copy()
                    trial[:, s] = config
                    us, _ = jobs.step_us(trial, rows)
                    better = us < best[rows] * (1 - 1e-6)
                    best[rows[better]], chosen[rows[better], s] = us[better], config
            active = best < before * (1 - 1e-4)
        found.append((chosen, best))
    (a, a_us), (b, b_us) = found
    return np.where((b_us < a_us)[:, None], b, a), np.minimum(a_us, b_us)

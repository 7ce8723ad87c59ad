"""Random whole jobs: a cluster, the slots of a real training step on it, and the step's time under any configs.

The truth is the event-by-event schedule of :mod:`.step` over streams of real models; alone on the fabric a call takes
what :mod:`.fabric` says. Which figures are public is said where they stand (:mod:`.fabric`, :mod:`.noise`,
:mod:`.cost_model`); everything else, and all that a family's ranges say, is drawn to be wider than any one cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ...traces.fingerprint import Fingerprint
from ...traces.records import CHANNELS, PAIRS
from ..arms import distinct
from ..spaces import N_CONFIGS, N_PAIRS
from . import cost_model, family
from .clusters import Fleet
from .fabric import Fabric, Truth, congested, unmodelled
from .job_family import HELD_OUT, STANDARD, JobFamily
from .noise import Noise, even
from .step import Calls, Law
from .works import SLOTS, Works, works_of

Array = np.ndarray[Any, Any]
NEVER = 2**62
__all__ = ["HELD_OUT", "SLOTS", "STANDARD", "JobFamily", "Jobs", "draw_jobs", "oracle"]


@dataclass
class Tables:
    """What a call takes under every config, (rows, SLOTS, N_CONFIGS) float32; rows are jobs, some of them twice."""

    us: Array
    slow: Array
    near: Array
    far: Array
    crowd: Array

    def at(self, rows: Array, configs: Array) -> list[Array]:
        """The five of Calls for jobs at ``rows`` (n,) under ``configs`` (n, SLOTS)."""
        place = rows[:, None], np.arange(SLOTS)[None], configs
        return [table[place].astype(float) for table in (self.us, self.slow, self.near, self.far, self.crowd)]


@dataclass
class Jobs:
    """``n`` jobs of up to SLOTS slots, ordered by the bytes they move; arrays begin with (n,) but the fingerprint's.

    Configs are indices into ``spaces``' N_CONFIGS, 0 is the default (AUTO). ``fingerprint`` has arrays (n * SLOTS,),
    of which places without a slot hold copies of the job's first.
    """

    label: Array  # str: cluster and workload
    n_slots: Array
    fingerprint: Fingerprint
    release: Array  # of NCCL, 22809 for 2.28.9
    mask: Array  # (n, SLOTS, N_CONFIGS) bool: one config an arm, AUTO always; places without a slot only AUTO
    default_us: Array  # true time of the default step in fair weather, before any change
    exposed: Array  # (n, SLOTS) part of a slot's time, under the default, with no compute beside it: hidden
    connect_us: Array  # what the first use of an algorithm on a communicator costs, once
    calls: Array  # (n, SLOTS) a step
    works: Works
    tables: Tables
    which: Array  # of works
    beside: Array  # (n, 2, 5) calls that are not tuned
    scale: Array  # of compute
    law: Array  # (n, 4)
    noise: Noise
    swing: Array  # (n, 3): size, period in steps, phase
    on_network: Array  # bool: a slot goes over the network
    change_at: Array  # step; NEVER
    change_row: Array  # of tables, from then on
    change_scale: Array  # of compute, from then on

    def __len__(self) -> int:
        return len(self.n_slots)

    @property
    def at(self) -> Array:
        """Steps that each job has run, (n,)."""
        return self.noise.at

    def take(self, rows: Any) -> Jobs:
        """The jobs at ``rows`` (indices or flags), at the same time; they share only what never changes."""
        rows = np.arange(len(self))[rows]
        parts: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in parts.items():
            if isinstance(value, np.ndarray):
                parts[name] = value[rows].copy()
        slots = (rows[:, None] * SLOTS + np.arange(SLOTS)).ravel()
        seen = {f.name: getattr(self.fingerprint, f.name)[slots] for f in fields(Fingerprint)}
        at = np.concatenate([rows, np.where(self.change_row != np.arange(len(self)), self.change_row, 0)[rows]])
        parts["tables"] = Tables(**{f.name: getattr(self.tables, f.name)[at] for f in fields(Tables)})
        changes = self.change_row[rows] != rows
        parts["change_row"] = np.where(changes, len(rows) + np.arange(len(rows)), np.arange(len(rows)))
        return Jobs(**parts | {"fingerprint": Fingerprint(**seen), "noise": self.noise.take(rows)})

    @classmethod
    def join(cls, parts: Sequence[Jobs]) -> Jobs:
        """One batch of several of the same family. Raises ValueError when their steps are not the same."""
        if not parts or any(part.works is not parts[0].works for part in parts):
            raise ValueError("only jobs of one family can be joined, and at least one batch")
        sizes = np.array([len(part) for part in parts])
        # The later tables of all come after the first tables of all.
        firsts, out = np.cumsum([0, *sizes[:-1]]), dict[str, Any]()
        extra = np.cumsum([sizes.sum(), *(len(part.tables.us) - len(part) for part in parts[:-1])])
        for f in fields(cls):
            values = [getattr(part, f.name) for part in parts]
            if isinstance(values[0], np.ndarray):
                out[f.name] = np.concatenate(values)
        out["change_row"] = np.concatenate(
            [
                np.where(p.change_row < len(p), p.change_row + a, p.change_row - len(p) + b)
                for p, a, b in zip(parts, firsts, extra, strict=True)
            ]
        )
        for name, kind in (("fingerprint", Fingerprint), ("noise", Noise)):
            members = [getattr(part, name) for part in parts]
            out[name] = kind(**{g.name: np.concatenate([getattr(m, g.name) for m in members]) for g in fields(kind)})
        tables = {
            g.name: np.concatenate(
                [getattr(p.tables, g.name)[: len(p)] for p in parts]
                + [getattr(p.tables, g.name)[len(p) :] for p in parts]
            )
            for g in fields(Tables)
        }
        return cls(**out, works=parts[0].works, tables=Tables(**tables))

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
        total, spent, _ = self._run(configs, rows, self._weather(rows))
        with np.errstate(invalid="ignore"):
            return total, np.where(self.calls[rows] > 0, spent[:, :SLOTS] / self.calls[rows], np.nan)

    def window(self, configs: Array, n_steps: Array | int, rng: np.random.Generator) -> tuple[Array, Array]:
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

    def _weather(self, rows: Array) -> Array:
        size, period, phase = self.swing[rows].T
        wave = 0.5 + 0.5 * np.sin(2 * np.pi * (self.at[rows] / period + phase))
        return np.asarray(1.0 + size * wave * np.where(self.on_network[rows], 1.0, 0.2))

    def _run(self, configs: Array, rows: Array, weather: Array) -> tuple[Array, Array, Array]:
        changed = self.at[rows] >= self.change_at[rows]
        parts = self.tables.at(np.where(changed, self.change_row[rows], rows), configs)
        five = [np.concatenate([part, self.beside[rows, :, k]], axis=1) for k, part in enumerate(parts)]
        five[0] = five[0] * weather[:, None]
        scale = self.scale[rows] * np.where(changed, self.change_scale[rows], 1.0)
        return self.works.steps.run(self.which[rows], Calls(*five), scale, Law(*self.law[rows].T))


def draw_jobs(kind: JobFamily, rng: np.random.Generator, n: int) -> Jobs:
    """``n`` jobs of a family, each at its first steps."""
    works = works_of(kind.works)
    fleet = family.draw_fleet(kind.clusters, rng, n)
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
    truth = Fabric.random(fleet, rng, kind.clusters.width, sigma := even(rng, kind.effects, n)).truth
    other = sigma[:, None, None, None] * unmodelled(rng, n)
    turn = np.pi / 2 / rng.uniform(*kind.octaves, n)
    exposed = even(rng, kind.exposed, n)
    jobs = assemble(works, which, fleet, truth, other, turn, exposed, kind, rng)
    return jobs


def assemble(
    works: Works,
    which: Array,
    fleet: Fleet,
    truth: Truth,
    other: Array,
    turn: Array,
    exposed: Array,
    kind: JobFamily,
    rng: np.random.Generator,
) -> Jobs:
    """Jobs on given clusters and fabrics: ``n`` of each.

    ``which`` names the workload; ``other`` (n, 2, 6, N_COUNTS) is what the formulas miss ``pi / 2 / turn`` octaves of
    message size away from where ``truth.effect`` holds; ``exposed`` is the part of the default step that waits for
    communication, which the compute is scaled to.
    """
    n, rows = len(which), np.repeat(np.arange(len(which)), SLOTS)
    slot_fleet = fleet.take(rows)
    used = np.arange(SLOTS)[None] < works.n_slots[which][:, None]
    place = np.where(used, np.arange(SLOTS)[None], 0)
    is_rs = works.is_reduce_scatter[which[:, None], place].ravel()
    unit = slot_fleet.n_ranks * 16  # shards are whole 16-byte words
    n_bytes = np.maximum(-(-works.n_bytes[which[:, None], place].ravel() // unit), 1) * unit
    calls = np.where(used, works.calls[which[:, None], place], 0.0)
    shard = np.log2(n_bytes / slot_fleet.n_ranks)
    angle = (turn[rows] * (shard - 20.0))[:, None, None, None]
    mixed = np.cos(angle) * truth.effect[rows] + np.sin(angle) * other[rows]
    fabric = Fabric(slot_fleet, replace(truth.take(rows), effect=mixed))
    cost = cost_model.pair_cost_rows(slot_fleet, n_bytes)
    own = np.where(cost >= 0, cost, np.inf).argmin(axis=1)
    by_channels, touch = kind.crowd_by_channels, even(rng, kind.touch, n)[rows]
    tables, ran = call_tables(fabric, is_rs, n_bytes, own, by_channels, touch=touch)
    law = np.stack([rng.uniform(*bounds, n) for bounds in (kind.crowd, kind.power, kind.saturation, kind.drag)], axis=1)
    change = rng.random(n) < kind.change
    network = change & (rng.random(n) < 0.7)
    change_row, factor = np.arange(n), np.where(change & ~network, np.exp(rng.uniform(-0.7, 0.7, n)), 1.0)
    if network.any():
        worse = congested(truth, fleet, rng)
        later = np.flatnonzero(np.repeat(network, SLOTS))
        at = Fabric(slot_fleet.take(later), replace(worse.take(rows[later]), effect=mixed[later]))
        extra, _ = call_tables(at, is_rs[later], n_bytes[later], own[later], by_channels, touch=touch[later])
        for part in fields(Tables):
            setattr(tables, part.name, np.concatenate([getattr(tables, part.name), getattr(extra, part.name)]))
        change_row[network] = n + np.arange(network.sum())
    fingerprint = Fingerprint(
        is_reduce_scatter=is_rs.astype(float),
        n_bytes=n_bytes.astype(float),
        calls=calls.ravel(),
        n_ranks=slot_fleet.n_ranks.astype(float),
        n_nodes=slot_fleet.n_nodes.astype(float),
        cost_us=cost,
        own_pair=own,
        own_channels=ran[:, 0],
        comm_channels=slot_fleet.comm_channels.astype(float),
        share=np.zeros(n * SLOTS),
        exposed=np.full(n * SLOTS, np.nan),  # the host cannot see when a GPU computes
        memory_pressure=np.repeat(np.where(rng.random(n) < 0.5, rng.uniform(0.2, 1.0, n), 0.0), SLOTS),
    )
    mask = distinct(fingerprint, slot_fleet.release).reshape(n, SLOTS, N_CONFIGS)
    mask[~used] = False
    mask[:, :, 0] = True
    many = fleet.n_nodes > 1
    jobs = Jobs(
        label=np.array(
            [f"{a} x {b} {works.names[w]}" for a, b, w in zip(fleet.n_nodes, fleet.gpus_per_node, which, strict=True)]
        ),
        n_slots=works.n_slots[which],
        fingerprint=fingerprint,
        release=fleet.release.copy(),
        mask=mask,
        default_us=np.zeros(n),
        exposed=np.zeros((n, SLOTS)),
        connect_us=truth.connect_us.copy(),
        calls=calls,
        works=works,
        tables=tables,
        which=np.asarray(which),
        beside=_beside(works, which, fleet, rng),
        scale=np.ones(n),
        law=law,
        noise=Noise.draw(kind.noise, rng, n),
        swing=np.stack(
            [
                np.where(rng.random(n) < kind.swing, even(rng, kind.swing_size, n), 0.0),
                even(rng, kind.swing_steps, n),
                rng.random(n),
            ],
            axis=1,
        ),
        on_network=many,
        change_at=np.where(change, even(rng, kind.change_at, n).astype(np.int64), NEVER),
        change_row=change_row,
        change_scale=factor,
    )
    _expose(jobs, exposed)
    return jobs


def call_tables(
    fabric: Fabric,
    is_rs: Array,
    n_bytes: Array,
    own: Array,
    crowd_by_channels: bool,
    n_slots: int = SLOTS,
    touch: Array | float = 1.0,
) -> tuple[Tables, Array]:
    """Calls of every config of ``m * n_slots`` slots, and the channels that run, (m * n_slots, N_CONFIGS).

    They slow the compute ``touch`` times as much as the fabric says, a number or one a slot.
    """
    fleet, m = fabric.fleet, len(own)
    columns = fleet.take((slice(None), None))
    pair = np.repeat(np.concatenate([own[:, None], np.tile(np.arange(len(PAIRS)), (m, 1))], axis=1), len(CHANNELS), 1)
    asked = np.tile(np.array(CHANNELS), N_PAIRS)[None, :]
    limit, _ = cost_model.heuristic_channels(columns, n_bytes[:, None], pair)
    lowered = np.where(columns.release >= 23100, np.minimum(asked, limit), asked)  # from 2.31 a tuner only lowers
    ran = cost_model.planned_channels(columns, n_bytes[:, None], pair, np.where(asked == 0, limit, lowered))
    us = fabric.times_on_us(is_rs, n_bytes, pair, ran)
    slow, near, far = fabric.overlap(is_rs, n_bytes, pair, ran, us)
    slow = slow * np.reshape(touch, (-1, 1))
    crowd = ran / 16 if crowd_by_channels else np.ones_like(us)
    shape = -1, n_slots, N_CONFIGS
    return Tables(*(part.reshape(shape).astype(np.float32) for part in (us, slow, near, far, crowd))), ran


def _beside(works: Works, which: Array, fleet: Fleet, rng: np.random.Generator) -> Array:
    """Calls that no tuner reaches, (n, 2, 5): all_reduces of shards over the network, and slots beyond SLOTS."""
    n = len(which)
    port = fleet.n_nics * fleet.nic_gbs / fleet.gpus_per_node * rng.uniform(0.6, 0.95, n)
    nodes = np.exp2(rng.integers(1, 7, n))
    us = 30.0 + 6.0 * np.log2(nodes) + 2 * (nodes - 1) / nodes * works.other_bytes[which] / (port * 1e3)
    out = np.zeros((n, 2, 5))
    out[:, 0] = np.stack([us, np.full(n, 0.12), np.full(n, 0.3), np.full(n, 0.8), np.ones(n)], axis=1)
    out[:, 1] = np.stack([np.full(n, 60.0), np.full(n, 0.1), np.full(n, 0.3), np.zeros(n), np.ones(n)], axis=1)
    return out


def _expose(jobs: Jobs, wanted: Array) -> None:
    """Scale the compute of each job until that part of its default step waits; then note what the default is like."""
    n, none = len(jobs), np.zeros((len(jobs), SLOTS), int)
    rows, fair = np.arange(n), np.ones(n)
    before, jobs.change_at = jobs.change_at, np.full(n, NEVER)
    low, high = np.full(n, 1e-5), np.full(n, 1e5)
    for _ in range(26):
        jobs.scale = np.sqrt(low * high)
        total, _, bare = jobs._run(none, rows, fair)
        more = bare.sum(axis=1) > wanted * total
        low, high = np.where(more, jobs.scale, low), np.where(more, high, jobs.scale)
    jobs.scale = high
    total, spent, bare = jobs._run(none, rows, fair)
    jobs.default_us, jobs.change_at = total, before
    share = spent[:, :SLOTS] / total[:, None]
    jobs.fingerprint.share = np.where(jobs.calls > 0, share, share[:, :1]).ravel()
    jobs.exposed = bare[:, :SLOTS] / np.maximum(spent[:, :SLOTS], 1e-9)


def oracle(jobs: Jobs, passes: int = 4) -> tuple[Array, Array]:
    """The best joint configs now: (n, SLOTS), and the step's us (n,) under them.

    Every config of a slot in turn, until no slot helps; begun from the default and from each slot's quickest call,
    whatever that does to the rest of the step.
    """
    n = len(jobs)
    alone = np.where(jobs.mask, jobs.tables.us[:n], np.inf).argmin(axis=2)
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

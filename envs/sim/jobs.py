"""Random whole jobs: a cluster, the slots of a real training step on it, and the step's time under any configs.

The truth is the event-by-event schedule of :mod:`.step` over streams of real models; alone on the fabric a call takes
what :mod:`.fabric` says. Which figures are public is said where they stand (:mod:`.fabric`, :mod:`.noise`,
:mod:`.cost_model`); everything else, and all that a family's ranges say, is drawn to be wider than any one cluster.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from ...traces.fingerprint import Fingerprint
from ...traces.records import CHANNELS, PAIRS
from ...traces.spaces import N_CONFIGS, N_PAIRS
from . import cost_model, family
from .arms import distinct
from .batch import NEVER, Jobs, Sites, Tables, oracle
from .clusters import Fleet
from .fabric import Fabric, unmodelled
from .job_family import HELD_OUT, STANDARD, JobFamily
from .noise import Noise, even
from .works import SLOTS, Works, works_of

Array = np.ndarray[Any, Any]
__all__ = ["HELD_OUT", "SLOTS", "STANDARD", "JobFamily", "Jobs", "Sites", "call_tables", "draw_jobs", "oracle"]


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
    exposed, touch = even(rng, kind.exposed, n), even(rng, kind.touch, n)
    law = np.stack([rng.uniform(*bounds, n) for bounds in (kind.crowd, kind.power, kind.saturation, kind.drag)], axis=1)
    return assemble(works, which, Sites(fleet, truth, other, turn, touch, law), exposed, kind, rng)


def assemble(
    works: Works, which: Array, sites: Sites, exposed: Array, kind: JobFamily, rng: np.random.Generator
) -> Jobs:
    """One job on each of ``sites``: ``which`` (n,) names its workload, ``exposed`` (n,) is the part of its default step
    that waits for communication, which its compute is scaled to."""
    fleet, truth = sites.fleet, sites.truth
    n, rows = len(which), np.repeat(np.arange(len(which)), SLOTS)
    slot_fleet = fleet.take(rows)
    used = np.arange(SLOTS)[None] < works.n_slots[which][:, None]
    place = np.where(used, np.arange(SLOTS)[None], 0)
    is_rs = works.is_reduce_scatter[which[:, None], place].ravel()
    unit = slot_fleet.n_ranks * 16  # shards are whole 16-byte words
    n_bytes = np.maximum(-(-works.n_bytes[which[:, None], place].ravel() // unit), 1) * unit
    calls = np.where(used, works.calls[which[:, None], place], 0.0)
    shard = np.log2(n_bytes / slot_fleet.n_ranks)
    angle = (sites.turn[rows] * (shard - 20.0))[:, None, None, None]
    mixed = np.cos(angle) * truth.effect[rows] + np.sin(angle) * sites.other[rows]
    fabric = Fabric(slot_fleet, replace(truth.take(rows), effect=mixed))
    cost = cost_model.pair_cost_rows(slot_fleet, n_bytes)
    own = np.where(cost >= 0, cost, np.inf).argmin(axis=1)
    by_channels, touch = kind.crowd_by_channels, sites.touch[rows]
    tables, ran = call_tables(fabric, is_rs, n_bytes, own, by_channels, touch=touch)
    change = rng.random(n) < kind.change
    network = change & (rng.random(n) < 0.7)
    change_row, factor = np.arange(n), np.where(change & ~network, np.exp(rng.uniform(-0.7, 0.7, n)), 1.0)
    if network.any():
        worse = sites.worsened(rng).truth
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
        law=sites.law.copy(),
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
        sites=sites,
        change_at=np.where(change, even(rng, kind.change_at, n).astype(np.int64), NEVER),
        change_until=np.full(n, NEVER),
        change_row=change_row,
        change_scale=factor,
    )
    passing = change & (rng.random(n) < kind.passing)
    jobs.change_until[passing] = jobs.change_at[passing] + even(rng, kind.change_for, n).astype(np.int64)[passing]
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
    jobs.change_at = before
    computing(jobs, high)


def computing(jobs: Jobs, scale: Array) -> None:
    """Scale the compute of each job (n,), and note what its default is like in fair weather, before any change."""
    n = len(jobs)
    before, jobs.change_at, jobs.scale = jobs.change_at, np.full(n, NEVER), scale.copy()
    total, spent, bare = jobs._run(np.zeros((n, SLOTS), int), np.arange(n), np.ones(n))
    jobs.default_us, jobs.change_at = total, before
    share = spent[:, :SLOTS] / total[:, None]
    jobs.fingerprint.share = np.where(jobs.calls > 0, share, share[:, :1]).ravel()
    jobs.exposed = bare[:, :SLOTS] / np.maximum(spent[:, :SLOTS], 1e-9)

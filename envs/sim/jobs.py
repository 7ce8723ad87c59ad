"""Random whole jobs, drawn on random clusters over the steps of real models; :mod:`.family` says what is public."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ...traces.records import CHANNELS, PAIRS
from ...traces.spaces import N_CONFIGS, N_PAIRS, pair_of
from ..nccl_model import cost_model
from ..nccl_model.arms import distinct
from ..nccl_model.channels import heuristic_channels, planned_channels
from ..nccl_model.clusters import ClusterArrays
from .fabric import Fabric, FabricParams, unmodelled
from .family import HELD_OUT, STANDARD, WORLDS, JobFamily, World, draw_fleet
from .noise import Noise, log_uniform
from .step import N_CALL, N_PORTS, Calls, Law
from .truth import LAST_RING, FirstUse, Jobs, SampledClusters, Slots
from .workloads import SLOTS, WorkloadArrays, all_works
from .worlds import Extras

Array = np.ndarray[Any, Any]
__all__ = ["HELD_OUT", "SLOTS", "STANDARD", "JobFamily", "Jobs", "SampledClusters", "draw_jobs"]


def draw_jobs(kind: JobFamily, rng: np.random.Generator, n: int) -> Jobs:
    """``n`` jobs of a family, each at its first steps; ``kind.only(world)`` draws those of one world."""
    which = rng.integers(0, len(kind.parts), n)
    counts = np.bincount(which, minlength=len(kind.parts)).tolist()
    found = [_draw(part, rng, count) for part, count in zip(kind.parts, counts, strict=True) if count]
    order = np.argsort(which, kind="stable")
    return Jobs.join(found).take(np.argsort(order))


def _draw(kind: World, rng: np.random.Generator, n: int) -> Jobs:
    works = all_works()
    fleet = draw_fleet(kind.clusters, rng, n)
    replicated = (fleet.n_nodes == 1) & (fleet.gpus_per_node == 8) & (rng.random(n) < kind.replicated)
    one = rng.random(n) < kind.one_communicator
    pick = rng.random(n)
    is_one = np.array(["one communicator" in name for name in works.names])
    known = np.array([name.startswith(kind.works) for name in works.names])
    which = np.zeros(n, int)
    for a in (False, True):
        for b in (False, True):
            fit = np.flatnonzero((works.replicated == a) & (is_one == b) & known)
            mine = (replicated == a) & (one == b)
            which[mine] = fit[(pick[mine] * len(fit)).astype(int)]
    truth = Fabric.random(fleet, rng, kind.clusters.width, sigma := log_uniform(rng, kind.effects, n)).truth
    other = sigma[:, None, None, None] * unmodelled(rng, n)
    turn = np.pi / 2 / rng.uniform(*kind.octaves, n)
    exposed, touch = log_uniform(rng, kind.exposed, n), log_uniform(rng, kind.touch, n)
    c, most = kind.contention, 2 * fleet.comm_channels
    bounds = kind.crowd, kind.power, kind.saturation, kind.drag
    crowd, power, saturation, drag = (rng.uniform(low, high, n) for low, high in bounds)
    law = Law(
        crowd,
        power,
        saturation,
        drag,
        budget=np.where(rng.random(n) < c.budget, rng.uniform(*c.limit, n) * most, 0.0),
        squeeze=log_uniform(rng, c.squeeze, n),
        serial=np.where(rng.random(n) < c.serial, rng.uniform(*c.limit, n) * most, 0.0),
        port=np.where(rng.random(n) < c.port, log_uniform(rng, c.port_size, n), 0.0),
        **{name: np.zeros(n) for name in ("knee", "steep")},
    )
    extras = Extras.draw(kind.extra, works.n_slots[which], rng)
    world = np.full(n, WORLDS.index(kind.name))
    sites = SampledClusters(fleet, truth, other, turn, touch, law, world, extras)
    return assemble(works, which, sites, exposed, kind, rng)


def assemble(
    works: WorkloadArrays,
    which: Array,
    sites: SampledClusters,
    exposed: Array,
    kind: World,
    rng: np.random.Generator,
) -> Jobs:
    """One job on each of ``sites``: ``which`` (n,) names its workload, ``exposed`` (n,) is the part of its default step
    that waits for communication, which its compute is scaled to."""
    n, fleet = len(which), sites.fleet
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
    ports = _ports(kind, rng, n)[rows, is_rs.astype(int)]
    tables, ran = _call_tables(fabric, is_rs, n_bytes, own, kind.crowd_by_channels, sites.touch[rows], ports)
    _roughen(tables, kind, rng)
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
    connected = np.zeros((n, 2, len(PAIRS) - LAST_RING), bool)
    connected[rows, is_rs.astype(int), np.maximum(own - LAST_RING, 0)] = True
    first_us = sites.truth.connect_us * log_uniform(rng, kind.connect, n)
    jobs = Jobs(
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
        first_use=FirstUse(first_us, connected, np.zeros(n)),
        sites=sites,
    )
    if kind.hook is not None:
        kind.hook(jobs, rng)
    _expose(jobs, exposed)
    return jobs


def _truth_at(sites: SampledClusters, rows: Array, n_bytes: Array) -> FabricParams:
    """The fabrics at ``rows``, with what the formulas miss of messages of ``n_bytes`` there."""
    truth = sites.truth.take(rows)
    shard = np.log2(n_bytes / sites.fleet.n_ranks[rows])
    angle = (sites.turn[rows] * (shard - 20.0))[:, None, None, None]
    return replace(truth, effect=np.cos(angle) * truth.effect + np.sin(angle) * sites.other[rows])


def _call_tables(
    fabric: Fabric,
    is_rs: Array,
    n_bytes: Array,
    own: Array,
    crowd_by_channels: bool,
    touch: Array,
    ports: Array,
) -> tuple[Calls, Array]:
    """Calls of every config of slots, and the channels that run, (slots, N_CONFIGS).

    The calls of a slot slow the compute ``touch`` times as much as the fabric says; ``ports`` (slots, pairs).
    """
    columns = fabric.fleet.take((slice(None), None))
    pair = pair_of(np.arange(N_CONFIGS), own[:, None])
    asked = np.tile(CHANNELS, N_PAIRS)
    limit, _ = heuristic_channels(columns, n_bytes[:, None], pair)
    lowered = np.where(
        columns.release >= 23100, np.minimum(asked, limit), asked
    )  # from 2.31 a tuner only lowers
    ran = planned_channels(columns, n_bytes[:, None], pair, np.where(asked == 0, limit, lowered))
    us = fabric.times_on_us(is_rs, n_bytes, pair, ran)
    slow, near, far = fabric.overlap(is_rs, n_bytes, pair, ran, us)
    crowd = ran / 16 if crowd_by_channels else np.ones_like(us)
    port = np.take_along_axis(ports, pair, axis=1)
    parts = us, slow * touch[:, None], near, far, crowd, ran, port
    return Calls(*(part.reshape(-1, SLOTS, N_CONFIGS).astype(np.float32) for part in parts)), ran


def _ports(kind: World, rng: np.random.Generator, n: int) -> Array:
    """The port at which calls of each collective and pair meet others, (n, 2, pairs)."""
    port = rng.integers(0, N_PORTS, (n, 2, len(PAIRS)))
    return port if kind.contention.port_by_func else np.repeat(port[:, :1], 2, axis=1)


def _roughen(tables: Calls, kind: World, rng: np.random.Generator) -> None:
    """Give each channel count of a slot something of its own, and let calls that gain take from compute."""
    n = len(tables)
    jag, steal = (rng.uniform(*bounds, (n, 1, 1)) for bounds in (kind.jagged, kind.steal))
    tables.us *= np.exp(jag * rng.normal(0.0, 1.0, tables.us.shape)).astype(np.float32)
    tables.slow += (steal * np.maximum(tables.us[:, :, :1] / tables.us - 1, 0.0)).astype(np.float32)


def _beside(works: WorkloadArrays, which: Array, fleet: ClusterArrays, rng: np.random.Generator) -> Array:
    """Calls that no tuner reaches, (n, 2, 5): all_reduces of shards over the network, and slots beyond SLOTS."""
    n = len(which)
    port = fleet.n_nics * fleet.nic_gbs / fleet.gpus_per_node * rng.uniform(0.6, 0.95, n)
    nodes = np.exp2(rng.integers(1, 7, n))
    out = np.zeros((n, 2, N_CALL))
    out[:, 0, 0] = (
        30.0 + 6.0 * np.log2(nodes) + 2 * (nodes - 1) / nodes * works.other_bytes[which] / (port * 1e3)
    )
    out[:, 0, 1:] = 0.12, 0.3, 0.8, 1.0, 4.0, 0.0
    out[:, 1] = 60.0, 0.1, 0.3, 0.0, 1.0, 2.0, 0.0
    return out


def _swing(kind: World, rng: np.random.Generator, n: int) -> Array:
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
    none = np.zeros((n, SLOTS), int)
    jobs.default_us = jobs.usual_us(none)
    total, spent, bare = jobs.run(none, np.arange(n))
    share = spent[:, :SLOTS] / total[:, None]
    jobs.fingerprint.share = np.where(jobs.calls > 0, share, share[:, :1]).ravel()
    jobs.exposed = bare[:, :SLOTS] / np.maximum(spent[:, :SLOTS], 1e-9)

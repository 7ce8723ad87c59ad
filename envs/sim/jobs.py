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
from .regimes import MOST_REGIMES, Regimes
from .step import N_CALL, N_PORTS, Calls, Law
from .truth import LAST_RING, FirstUse, Jobs, SampledClusters, Slots
from .workloads import MANY_SLOTS, N_BESIDE, SLOTS, WorkloadArrays, all_works
from .worlds import Extras

Array = np.ndarray[Any, Any]
#: Memory used of all memory, where it is known; and by how much chance moves it where it tells of the batch.
PRESSURE, CHANCE = (0.2, 1.0), 0.3
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
    many = np.array(["many slots" in name for name in works.names])
    known = np.array([name.startswith(kind.works) for name in works.names]) & (many == kind.many)
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
    n, fleet, width = len(which), sites.fleet, MANY_SLOTS if kind.many else SLOTS
    rows = np.repeat(np.arange(n), width)
    slots = fleet.take(rows)
    used = np.arange(width) < works.n_slots[which][:, None]
    place = which[:, None], np.where(used, np.arange(width), 0)
    is_rs, calls = works.is_reduce_scatter[place].ravel(), np.where(used, works.calls[place], 0.0)
    unit = slots.n_ranks * 16  # shards are whole 16-byte words
    n_bytes = np.maximum(-(-works.n_bytes[place].ravel() // unit), 1) * unit
    cost = cost_model.pair_cost_rows(slots, n_bytes)
    own = np.where(cost >= 0, cost, np.inf).argmin(axis=1)
    fabric = Fabric(slots, _truth_at(sites, rows, n_bytes))
    ports = _ports(kind, rng, n)[rows, is_rs.astype(int)]
    ran = _channels(fabric, n_bytes, own)
    tables = _call_tables(fabric, is_rs, n_bytes, own, ran, kind.crowd_by_channels, sites.touch[rows], ports)
    tables = Calls(**{name: by_job(part, width) for name, part in vars(tables).items()})
    _roughen(tables, kind, rng)
    is_known, pressure = rng.random(n) < 0.5, rng.uniform(*PRESSURE, n)
    pressure = np.where(is_known, _crammed(pressure, exposed, kind) if kind.crammed else pressure, 0.0)
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
        share=np.zeros(n * width),
        memory_pressure=np.repeat(pressure, width),
    )
    mask = distinct(fingerprint, slots.release).reshape(n, width, N_CONFIGS)
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
        exposed=np.zeros((n, width)),
        calls=calls,
        works=works,
        which=which,
        tables=tables,
        growth=by_job(_growth(fabric, is_rs, n_bytes, own, ran), width),
        beside=_beside(works, which, fleet, rng),
        scale=np.ones(n),
        noise=Noise.draw(kind.noise, rng, n),
        swing=_swing(kind, rng, n),
        first_use=FirstUse(first_us, connected, np.zeros(n)),
        regimes=Regimes.draw(kind.regimes, rng, n),
        sites=sites,
    )
    if kind.hook is not None:
        kind.hook(jobs, rng)
    _expose(jobs, exposed)
    pressures = jobs.regimes.pressure(pressure)[np.arange(n), jobs.regimes.at(jobs.noise.at)]
    jobs.fingerprint.memory_pressure = np.repeat(np.where(jobs.regimes.count > 1, pressures, pressure), width)
    return jobs


def _truth_at(sites: SampledClusters, rows: Array, n_bytes: Array) -> FabricParams:
    """The fabrics at ``rows``, with what the formulas miss of messages of ``n_bytes`` there."""
    truth = sites.truth.take(rows)
    shard = np.log2(n_bytes / sites.fleet.n_ranks[rows])
    angle = (sites.turn[rows] * (shard - 20.0))[:, None, None, None]
    return replace(truth, effect=np.cos(angle) * truth.effect + np.sin(angle) * sites.other[rows])


def _channels(fabric: Fabric, n_bytes: Array, own: Array) -> Array:
    """Channels that run under every config of slots, (slots, N_CONFIGS)."""
    columns = fabric.fleet.take((slice(None), None))
    pair = pair_of(np.arange(N_CONFIGS), own[:, None])
    asked = np.tile(CHANNELS, N_PAIRS)
    limit, _ = heuristic_channels(columns, n_bytes[:, None], pair)
    # From 2.31 a tuner only lowers.
    lowered = np.where(columns.release >= 23100, np.minimum(asked, limit), asked)
    return planned_channels(columns, n_bytes[:, None], pair, np.where(asked == 0, limit, lowered))


def _call_tables(
    fabric: Fabric,
    is_rs: Array,
    n_bytes: Array,
    own: Array,
    ran: Array,
    crowd_by_channels: bool,
    touch: Array,
    ports: Array,
) -> Calls:
    """Calls of every config of slots, (slots, N_CONFIGS), on the channels that ``ran``.

    The calls of a slot slow the compute ``touch`` times as much as the fabric says; ``ports`` (slots, pairs).
    """
    pair = pair_of(np.arange(N_CONFIGS), own[:, None])
    us = fabric.times_on_us(is_rs, n_bytes, pair, ran)
    slow, near, far = fabric.overlap(is_rs, n_bytes, pair, ran, us)
    crowd = ran / 16 if crowd_by_channels else np.ones_like(us)
    port = np.take_along_axis(ports, pair, axis=1)
    return Calls(us, slow * touch[:, None], near, far, crowd, ran, port)


def _growth(fabric: Fabric, is_rs: Array, n_bytes: Array, own: Array, ran: Array) -> Array:
    """Log of the time of every config's call over the log of its size, between half and twice the size, (slots,
    N_CONFIGS)."""
    pair = pair_of(np.arange(N_CONFIGS), own[:, None])
    half, twice = (fabric.times_on_us(is_rs, n_bytes * size, pair, ran) for size in (0.5, 2.0))
    return np.asarray(np.log2(twice / half) / 2)


def by_job(values: Array, width: int) -> Array:
    """Of slots (slots, N_CONFIGS), as the jobs have them: (n, width, N_CONFIGS) float32."""
    return values.reshape(-1, width, N_CONFIGS).astype(np.float32)


def _crammed(drawn: Array, exposed: Array, kind: World) -> Array:
    """Memory pressure (n,) that tells of the batch: the less of a step waits, the larger it is. ``drawn`` is chance."""
    low, high = np.log(kind.exposed)
    batch = 1.0 - (np.log(exposed) - low) / (high - low)
    least, most = PRESSURE
    by_chance = (drawn - least) / (most - least) - 0.5
    return np.clip(least + (most - least) * batch + CHANCE * by_chance, 0.05, 1.0)


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
    """Calls that no tuner reaches, (n, N_BESIDE, N_CALL): all_reduces of shards over the network, and slots beyond
    SLOTS."""
    n = len(which)
    port = fleet.n_nics * fleet.nic_gbs / fleet.gpus_per_node * rng.uniform(0.6, 0.95, n)
    nodes = np.exp2(rng.integers(1, 7, n))
    moved = 2 * (nodes - 1) / nodes * works.other_bytes[which]
    out = np.zeros((n, N_BESIDE, N_CALL))
    out[:, 0, 0] = 30.0 + 6.0 * np.log2(nodes) + moved / (port * 1e3)
    out[:, 0, 1:] = 0.12, 0.3, 0.8, 1.0, 4.0, 0.0
    out[:, 1] = 60.0, 0.1, 0.3, 0.0, 1.0, 2.0, 0.0
    return out


def _swing(kind: World, rng: np.random.Generator, n: int) -> Array:
    size = np.where(rng.random(n) < kind.swing, log_uniform(rng, kind.swing_size, n), 0.0)
    return np.stack([size, log_uniform(rng, kind.swing_steps, n), rng.random(n)], axis=1)


def _expose(jobs: Jobs, wanted: Array) -> None:
    """Scale the compute of each job until that part of its default step waits; then note what the default is like."""
    n, none = len(jobs), np.zeros((len(jobs), jobs.width), int)
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
    none = np.zeros((n, jobs.width), int)
    for k in range(MOST_REGIMES if (jobs.regimes.count > 1).any() else 0):
        jobs.regimes.default_us[:, k] = jobs.regime_us(none, np.full(n, k))
    jobs.default_us = jobs.usual_us(none)
    total, spent, bare = jobs.run(none, np.arange(n))
    spent, bare = spent[:, N_BESIDE:], bare[:, N_BESIDE:]
    share = spent / total[:, None]
    jobs.fingerprint.share = np.where(jobs.calls > 0, share, share[:, :1]).ravel()
    jobs.exposed = bare / np.maximum(spent, 1e-9)

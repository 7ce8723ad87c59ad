"""Random whole jobs, drawn on random clusters over the steps of real models; :mod:`.family` says what is public."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ...traces.records import CHANNELS, PAIRS
from ...traces.spaces import N_CONFIGS, N_PAIRS, pair_of
from ..nccl_model import cost_model
from ..nccl_model.arms import distinct
from ..nccl_model.channels import heuristic_channels, planned_channels
from ..nccl_model.clusters import ClusterArrays
from .fabric.fabric import Fabric
from .fabric.params import N_PRODUCTS, FabricParams, unmodelled
from .family import HELD_OUT, STANDARD, WORLDS, JobFamily, World, draw_fleet
from .mixes import FirstUse
from .noise import Noise, log_uniform
from .regimes import MOST_REGIMES, Regimes
from .sites import SampledClusters
from .step import N_CALL, N_PORTS, Calls, Law
from .truth import LAST_RING, Jobs, Slots
from .workloads import MANY_SLOTS, N_BESIDE, SLOTS, WorkloadArrays, all_works
from .worlds import Extras

Array = np.ndarray[Any, Any]
#: Memory used of all memory, where it is known; and by how much chance moves it where it tells of the batch.
PRESSURE, CHANCE = (0.2, 1.0), 0.3
__all__ = ["HELD_OUT", "SLOTS", "STANDARD", "JobFamily", "Jobs", "SampledClusters", "draw_jobs"]


def draw_jobs(kind: JobFamily, rng: np.random.Generator, n: int) -> Jobs:
    """``n`` jobs of a family, each at its first steps; ``kind.only(world)`` draws those of one world."""
    which = rng.integers(0, len(kind.parts), n)
    found = []
    for k, part in enumerate(kind.parts):
        count = int((which == k).sum())
        if count:
            found.append(_draw(part, rng, count))
    order = np.argsort(which, kind="stable")
    return Jobs.join(found).take(np.argsort(order))


def _draw(kind: World, rng: np.random.Generator, n: int) -> Jobs:
    fleet = draw_fleet(kind.clusters, rng, n)
    which = _steps_of(kind, fleet, rng)
    sigma = log_uniform(rng, kind.effects, n)
    fabric = Fabric.random(fleet, rng, kind.clusters.width, sigma)
    other = sigma[:, None, None, None] * unmodelled(rng, n)
    octaves = rng.uniform(*kind.octaves, n)
    exposed = log_uniform(rng, kind.exposed, n)
    touch = log_uniform(rng, kind.touch, n)
    law = _law(kind, fleet, rng)
    works = all_works()
    extras = Extras.draw(kind.extra, works.n_slots[which], rng)
    truth = fabric.truth
    if kind.waves[1] > 0:
        waves = log_uniform(rng, kind.waves, n * N_PRODUCTS)
        tiles = waves.reshape(n, N_PRODUCTS) * fleet.n_sms[:, None]
        truth = replace(truth, tiles=np.ceil(tiles))
    sites = SampledClusters(
        fleet=fleet,
        truth=truth,
        other=other,
        turn=np.pi / 2 / octaves,
        touch=touch,
        law=law,
        world=np.full(n, WORLDS.index(kind.name)),
        extras=extras,
    )
    return assemble(works, which, sites, exposed, kind, rng)


def _steps_of(kind: World, fleet: ClusterArrays, rng: np.random.Generator) -> Array:
    """Which of all steps each job takes, (n,)."""
    works, n = all_works(), len(fleet)
    one_full_node = (fleet.n_nodes == 1) & (fleet.gpus_per_node == 8)
    replicated = one_full_node & (rng.random(n) < kind.replicated)
    one = rng.random(n) < kind.one_communicator
    pick = rng.random(n)
    is_one = np.array(["one communicator" in name for name in works.names])
    many = np.array(["many slots" in name for name in works.names])
    known = np.array([name.startswith(kind.works) for name in works.names])
    known &= many == kind.many
    which = np.zeros(n, int)
    for a in (False, True):
        for b in (False, True):
            alike = (works.replicated == a) & (is_one == b)
            fit = np.flatnonzero(alike & known)
            mine = (replicated == a) & (one == b)
            place = (pick[mine] * len(fit)).astype(int)
            which[mine] = fit[place]
    return which


def _law(kind: World, fleet: ClusterArrays, rng: np.random.Generator) -> Law:
    """How the calls of each job disturb each other."""
    n, c = len(fleet), kind.contention
    most = 2 * fleet.comm_channels

    def some(share: float, value: Callable[[], Array]) -> Array:
        has = rng.random(n) < share
        return np.where(has, value(), 0.0)

    def limit() -> Array:
        return rng.uniform(*c.limit, n) * most

    return Law(
        crowd=rng.uniform(*kind.crowd, n),
        power=rng.uniform(*kind.power, n),
        saturation=rng.uniform(*kind.saturation, n),
        drag=rng.uniform(*kind.drag, n),
        budget=some(c.budget, limit),
        squeeze=log_uniform(rng, c.squeeze, n),
        serial=some(c.serial, limit),
        port=some(c.port, lambda: log_uniform(rng, c.port_size, n)),
        knee=np.zeros(n),
        steep=np.zeros(n),
    )


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
    width = MANY_SLOTS if kind.many else SLOTS
    rows = np.repeat(np.arange(n), width)
    slots = fleet.take(rows)
    used = np.arange(width) < works.n_slots[which][:, None]
    place = which[:, None], np.where(used, np.arange(width), 0)
    is_rs = works.is_reduce_scatter[place].ravel()
    func = is_rs.astype(int)
    calls = np.where(used, works.calls[place], 0.0)
    n_bytes = _whole_words(works.n_bytes[place].ravel(), slots.n_ranks)
    cost = cost_model.pair_cost_rows(slots, n_bytes)
    own = np.where(cost >= 0, cost, np.inf).argmin(axis=1)
    fabric = Fabric(slots, _truth_at(sites, rows, n_bytes))
    ports = _ports(kind, rng, n)[rows, func]
    ran = _channels(fabric, n_bytes, own)
    asked = fabric, is_rs, n_bytes, own, ran
    tables = _call_tables(*asked, kind.crowd_by_channels, sites.touch[rows], ports)
    tables = Calls(**{name: by_job(part, width) for name, part in vars(tables).items()})
    _roughen(tables, kind, rng)
    pressure = _pressure(kind, exposed, rng)
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
    mask = distinct(fingerprint, slots.release)
    mask = mask.reshape(n, width, N_CONFIGS)
    mask[~used] = False
    mask[:, :, 0] = True
    connected = np.zeros((n, 2, len(PAIRS) - LAST_RING), bool)
    own_algo = np.maximum(own - LAST_RING, 0)
    connected[rows, func, own_algo] = True
    first_us = sites.truth.connect_us * log_uniform(rng, kind.connect, n)
    beside = _beside(works, which, fleet, rng)
    noise = Noise.draw(kind.noise, rng, n)
    noise.swing = _swing(kind, rng, n)
    carry = _carry(kind, rng, n)
    growth = by_job(_growth(*asked), width)
    regimes = Regimes.draw(kind.regimes, rng, growth)
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
        beside=beside,
        scale=np.ones(n),
        carry=carry,
        noise=noise,
        first_use=FirstUse(first_us, connected, np.zeros(n)),
        regimes=regimes,
        sites=sites,
    )
    if kind.hook is not None:
        kind.hook(jobs, rng)
    _expose(jobs, exposed)
    now = jobs.regimes.at(jobs.noise.at)
    by_regime = jobs.regimes.pressure(pressure)[np.arange(n), now]
    pressure = np.where(jobs.regimes.count > 1, by_regime, pressure)
    jobs.fingerprint.memory_pressure = np.repeat(pressure, width)
    return jobs


def _carry(kind: World, rng: np.random.Generator, n: int) -> Array:
    """Part of a table's effect that the next step still shows, (n,). Drawn from a stream of its own, so that all other
    numbers are what they were without it."""
    own = rng.spawn(1)[0]
    part = own.uniform(*kind.carry_over, n)
    return np.where(own.random(n) < kind.carries, part, 0.0)


def _whole_words(n_bytes: Array, n_ranks: Array) -> Array:
    """Sizes whose shards are whole 16-byte words."""
    unit = n_ranks * 16
    words = -(-n_bytes // unit)
    return np.asarray(np.maximum(words, 1) * unit)


def _pressure(kind: World, exposed: Array, rng: np.random.Generator) -> Array:
    """Memory in use, (n,) of all of it; 0: unknown."""
    n = len(exposed)
    is_known = rng.random(n) < 0.5
    pressure = rng.uniform(*PRESSURE, n)
    if kind.crammed:
        pressure = _crammed(pressure, exposed, kind)
    return np.where(is_known, pressure, 0.0)


def _truth_at(sites: SampledClusters, rows: Array, n_bytes: Array) -> FabricParams:
    """The fabrics at ``rows``, with what the formulas miss of messages of ``n_bytes`` there."""
    truth = sites.truth.take(rows)
    shard = np.log2(n_bytes / sites.fleet.n_ranks[rows])
    turned = sites.turn[rows] * (shard - 20.0)
    angle = turned[:, None, None, None]
    here = np.cos(angle) * truth.effect
    elsewhere = np.sin(angle) * sites.other[rows]
    return replace(truth, effect=here + elsewhere)


def _channels(fabric: Fabric, n_bytes: Array, own: Array) -> Array:
    """Channels that run under every config of slots, (slots, N_CONFIGS)."""
    columns = fabric.fleet.take((slice(None), None))
    size = n_bytes[:, None]
    pair = pair_of(np.arange(N_CONFIGS), own[:, None])
    asked = np.tile(CHANNELS, N_PAIRS)
    limit, _ = heuristic_channels(columns, size, pair)
    only_lowers = columns.release >= 23100  # from 2.31 on
    allowed = np.where(only_lowers, np.minimum(asked, limit), asked)
    wanted = np.where(asked == 0, limit, allowed)
    return planned_channels(columns, size, pair, wanted)


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
    slow = slow * touch[:, None]
    crowd = ran / 16 if crowd_by_channels else np.ones_like(us)
    port = np.take_along_axis(ports, pair, axis=1)
    return Calls(us, slow, near, far, crowd, ran, port)


def _growth(fabric: Fabric, is_rs: Array, n_bytes: Array, own: Array, ran: Array) -> Array:
    """Log of the time of every config's call over the log of its size, between half and twice the size, (slots,
    N_CONFIGS)."""
    pair = pair_of(np.arange(N_CONFIGS), own[:, None])
    half = fabric.times_on_us(is_rs, n_bytes * 0.5, pair, ran)
    twice = fabric.times_on_us(is_rs, n_bytes * 2.0, pair, ran)
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
    pressure = least + (most - least) * batch
    return np.clip(pressure + CHANCE * by_chance, 0.05, 1.0)


def _ports(kind: World, rng: np.random.Generator, n: int) -> Array:
    """The port at which calls of each collective and pair meet others, (n, 2, pairs)."""
    port = rng.integers(0, N_PORTS, (n, 2, len(PAIRS)))
    if kind.contention.port_by_func:
        return port
    return np.repeat(port[:, :1], 2, axis=1)


def _roughen(tables: Calls, kind: World, rng: np.random.Generator) -> None:
    """Give each channel count of a slot something of its own, and let calls that gain take from compute."""
    n = len(tables)
    jag = rng.uniform(*kind.jagged, (n, 1, 1))
    steal = rng.uniform(*kind.steal, (n, 1, 1))
    rough = jag * rng.normal(0.0, 1.0, tables.us.shape)
    tables.us *= np.exp(rough).astype(np.float32)
    default = tables.us[:, :, :1]
    gained = np.maximum(default / tables.us - 1, 0.0)
    tables.slow += (steal * gained).astype(np.float32)


def _beside(works: WorkloadArrays, which: Array, fleet: ClusterArrays, rng: np.random.Generator) -> Array:
    """Calls that no tuner reaches, (n, N_BESIDE, N_CALL): all_reduces of shards over the network, and slots beyond
    SLOTS."""
    n = len(which)
    port = fleet.n_nics * fleet.nic_gbs / fleet.gpus_per_node
    port = port * rng.uniform(0.6, 0.95, n)
    nodes = np.exp2(rng.integers(1, 7, n))
    moved = 2 * (nodes - 1) / nodes * works.other_bytes[which]
    out = np.zeros((n, N_BESIDE, N_CALL))
    out[:, 0, 0] = 30.0 + 6.0 * np.log2(nodes) + moved / (port * 1e3)
    out[:, 0, 1:] = 0.12, 0.3, 0.8, 1.0, 4.0, 0.0
    out[:, 1] = 60.0, 0.1, 0.3, 0.0, 1.0, 2.0, 0.0
    return out


def _swing(kind: World, rng: np.random.Generator, n: int) -> Array:
    swings = rng.random(n) < kind.swing
    size = log_uniform(rng, kind.swing_size, n)
    period = log_uniform(rng, kind.swing_steps, n)
    phase = rng.random(n)
    return np.stack([np.where(swings, size, 0.0), period, phase], axis=1)


def _expose(jobs: Jobs, wanted: Array) -> None:
    """Scale the compute of each job until that part of its default step waits; then note what the default is like."""
    n = len(jobs)
    every = np.arange(n)
    none = np.zeros((n, jobs.width), int)
    low = np.full(n, 1e-5)
    high = np.full(n, 1e5)
    for _ in range(26):
        jobs.scale = np.sqrt(low * high)
        total, _, bare = jobs.run(none, every)
        more = bare.sum(axis=1) > wanted * total
        low = np.where(more, jobs.scale, low)
        high = np.where(more, high, jobs.scale)
    computing(jobs, high)


def computing(jobs: Jobs, scale: Array) -> None:
    """Scale the compute of each job (n,), and note what its default is like in fair weather."""
    n = len(jobs)
    jobs.scale = scale.copy()
    none = np.zeros((n, jobs.width), int)
    if (jobs.regimes.count > 1).any():
        for k in range(MOST_REGIMES):
            jobs.regimes.default_us[:, k] = jobs.regime_us(none, np.full(n, k))
    jobs.default_us = jobs.usual_us(none)
    total, spent, bare = jobs.run(none, np.arange(n))
    spent, bare = spent[:, N_BESIDE:], bare[:, N_BESIDE:]
    share = spent / total[:, None]
    share = np.where(jobs.calls > 0, share, share[:, :1])
    jobs.fingerprint.share = share.ravel()
    jobs.exposed = bare / np.maximum(spent, 1e-9)

"""Random whole jobs, drawn on random clusters over the steps of real models; :mod:`.family` says what is public."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.random import Generator

from ...traces.names import ALL_REDUCE, TUNABLE_FUNCS
from ...traces.records import PAIRS
from ...traces.spaces import N_CONFIGS
from ..nccl_model import cost_model
from ..nccl_model.arms import distinct
from ..nccl_model.clusters import ClusterArrays
from ..nccl_model.prices import price_of_sums
from .fabric.configs import channels_of_configs, growth_of_configs, pairs_of_configs, whole_words
from .fabric.fabric import Fabric
from .fabric.params import N_PRODUCTS, unmodelled
from .family import HELD_OUT, STANDARD, WORLDS, JobFamily, World, draw_fleet, draw_law
from .mixes import FirstUse, default_tables
from .moments import Slots
from .noise import Noise, log_uniform
from .regimes import MOST_REGIMES, Regimes
from .step import N_CALL, N_PORTS, Calls
from .truth import LAST_RING, Jobs
from .workloads import MANY_SLOTS, N_BESIDE, SLOTS, WorkloadArrays, all_works, is_summed, steps_of
from .worlds import Extras, SampledClusters

Array = np.ndarray[Any, Any]
#: Memory used of all memory, where it is known; and by how much chance moves it where it tells of the batch.
PRESSURE, CHANCE = (0.2, 1.0), 0.3
_SUM = TUNABLE_FUNCS.index(ALL_REDUCE)
__all__ = ["HELD_OUT", "SLOTS", "STANDARD", "JobFamily", "Jobs", "SampledClusters", "draw_jobs"]


def draw_jobs(kind: JobFamily, rng: Generator, n: int) -> Jobs:
    """``n`` jobs of a family, each at its first steps; ``kind.only(world)`` draws those of one world."""
    n_parts = len(kind.parts)
    which = rng.integers(0, n_parts, n)
    found = []
    for number, part in enumerate(kind.parts):
        is_of_part = which == number
        count = int(is_of_part.sum())
        if count:
            jobs = _draw(part, rng, count)
            found.append(jobs)
    by_part = np.argsort(which, kind="stable")
    as_drawn = np.argsort(by_part)
    together = Jobs.join(found)
    return together.take(as_drawn)


def _draw(kind: World, rng: Generator, n: int) -> Jobs:
    fleet = draw_fleet(kind.clusters, rng, n)
    which = steps_of(kind, fleet, rng)
    sigma = log_uniform(rng, kind.effects, n)
    width = kind.clusters.width
    fabric = Fabric.random(fleet, rng, width, sigma)
    unknown = unmodelled(rng, n)
    other = sigma[:, None, None, None] * unknown
    octaves = rng.uniform(*kind.octaves, n)
    turn = np.pi / 2 / octaves
    exposed = log_uniform(rng, kind.exposed, n)
    touch = log_uniform(rng, kind.touch, n)
    law = draw_law(kind, fleet, rng)
    works = all_works()
    n_slots = works.n_slots[which]
    extras = Extras.draw(kind.extra, n_slots, rng)
    truth = fabric.truth
    _, most_waves = kind.waves
    if most_waves > 0:
        n_products = n * N_PRODUCTS
        drawn = log_uniform(rng, kind.waves, n_products)
        waves = drawn.reshape(n, N_PRODUCTS)
        tiles = waves * fleet.n_sms[:, None]
        whole_tiles = np.ceil(tiles)
        truth = replace(truth, tiles=whole_tiles)
    world = WORLDS.index(kind.name)
    sites = SampledClusters(
        fleet=fleet,
        truth=truth,
        other=other,
        turn=turn,
        touch=touch,
        law=law,
        world=np.full(n, world),
        extras=extras,
    )
    return assemble(works, which, sites, exposed, kind, rng)


def assemble(
    works: WorkloadArrays,
    which: Array,  # (n,) of works
    sites: SampledClusters,
    exposed: Array,  # (n,) part of the default step
    kind: World,
    rng: Generator,
) -> Jobs:
    """One job on each of ``sites``: ``which`` (n,) names its workload, ``exposed`` (n,) is the part of its default step
    that waits for communication, which its compute is scaled to."""
    n = len(which)
    fleet = sites.fleet
    width = MANY_SLOTS if kind.many else SLOTS
    every = np.arange(n)
    rows = np.repeat(every, width)
    slots = fleet.take(rows)
    numbers = np.arange(width)
    n_slots = works.n_slots[which]
    used = numbers < n_slots[:, None]
    number = np.where(used, numbers, 0)  # a place without a slot holds what the first one does
    place = which[:, None], number
    is_reduce_scatter = works.is_reduce_scatter[place]
    sums = is_summed(works.names)[which]
    func = np.where(sums[:, None], _SUM, is_reduce_scatter).ravel()
    half = np.minimum(func, 1)  # ports and algorithms of an all_reduce are those of a reduce_scatter
    recorded_calls = works.calls[place]
    calls = np.where(used, recorded_calls, 0.0)
    recorded_bytes = works.n_bytes[place]
    n_bytes = whole_words(recorded_bytes.ravel(), slots.n_ranks)
    cost = cost_model.pair_cost_rows(slots, n_bytes)
    if sums.any():
        of_sums = price_of_sums(slots, n_bytes)
        of_sums[:, LAST_RING + 1 :] = -1.0  # the fabric has no law for trees
        cost = np.where(func[:, None] == _SUM, of_sums, cost)
    is_offered = cost >= 0
    offered = np.where(is_offered, cost, np.inf)
    own = offered.argmin(axis=1)
    truth = sites.truth_at(rows, n_bytes)
    fabric = Fabric(slots, truth)
    all_ports = _ports(kind, rng, n)
    ports = all_ports[rows, half]
    pair = pairs_of_configs(own)
    ran = channels_of_configs(fabric, func, n_bytes, pair)
    asked = func, n_bytes, pair, ran
    touch = sites.touch[rows]
    by_channels = kind.crowd_by_channels
    of_slots = _call_tables(fabric, asked, by_channels, touch, ports)
    tables = _by_job(of_slots, width)
    _roughen(tables, kind, rng)
    pressure = _pressure(kind, exposed, rng)
    fingerprint = Slots(
        func=func,
        n_bytes=n_bytes.astype(float),
        calls=calls.ravel(),
        n_ranks=slots.n_ranks.astype(float),
        n_nodes=slots.n_nodes.astype(float),
        cost_us=cost,
        own_pair=own,
        own_channels=ran[:, 0],
        comm_channels=slots.comm_channels.astype(float),
        share=np.zeros(len(rows)),
        memory_pressure=np.repeat(pressure, width),
    )
    mask = distinct(fingerprint, slots.release)
    mask = mask.reshape(n, width, N_CONFIGS)
    mask[~used] = False
    mask[:, :, 0] = True
    n_algos = len(PAIRS) - LAST_RING
    connected = np.zeros((n, 2, n_algos), bool)
    own_algo = np.maximum(own - LAST_RING, 0)
    connected[rows, half, own_algo] = True
    times = log_uniform(rng, kind.connect, n)
    first_us = sites.truth.connect_us * times
    nothing_spent = np.zeros(n)
    first_use = FirstUse(first_us, connected, nothing_spent)
    beside = _beside(works, which, fleet, rng)
    noise = Noise.draw(kind.noise, rng, n)
    noise.swing = _swing(kind, rng, n)
    carry = _carry(kind, rng, n)
    growth = growth_of_configs(fabric, *asked)
    growth = by_job(growth, width)
    regimes = Regimes.draw(kind.regimes, rng, growth)
    jobs = Jobs(
        n_slots=n_slots,
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
        first_use=first_use,
        regimes=regimes,
        sites=sites,
    )
    if kind.hook is not None:
        kind.hook(jobs, rng)
    _expose(jobs, exposed)
    regimes = jobs.regimes
    now = regimes.at(jobs.noise.at)
    by_regime = regimes.pressure(pressure)
    pressure_now = by_regime[every, now]
    is_changing = regimes.count > 1
    pressure = np.where(is_changing, pressure_now, pressure)
    fingerprint = jobs.fingerprint
    fingerprint.memory_pressure = np.repeat(pressure, width)
    return jobs


def _carry(kind: World, rng: Generator, n: int) -> Array:
    """Part of a table's effect that the next step still shows, (n,). Drawn from a stream of its own, so that all other
    numbers are what they were without it."""
    (own,) = rng.spawn(1)
    part = own.uniform(*kind.carry_over, n)
    carries = own.random(n) < kind.carries
    return np.where(carries, part, 0.0)


def _pressure(kind: World, exposed: Array, rng: Generator) -> Array:
    """Memory in use, (n,) of all of it; 0: unknown."""
    n = len(exposed)
    is_known = rng.random(n) < 0.5
    pressure = rng.uniform(*PRESSURE, n)
    if kind.crammed:
        pressure = _crammed(pressure, exposed, kind)
    return np.where(is_known, pressure, 0.0)


def _call_tables(
    fabric: Fabric,
    asked: tuple[Array, Array, Array, Array],
    crowd_by_channels: bool,
    touch: Array,
    ports: Array,
) -> Calls:
    """Calls of every config of slots, (slots, N_CONFIGS); ``asked``: what :meth:`Fabric.times_on_us` takes.

    The calls of a slot slow the compute ``touch`` times as much as the fabric says; ``ports`` (slots, pairs).
    """
    _, _, pair, ran = asked
    us = fabric.times_on_us(*asked)
    slow, near, far = fabric.overlap(*asked, us)
    slow = slow * touch[:, None]
    crowd = ran / 16 if crowd_by_channels else np.ones_like(us)
    port = np.take_along_axis(ports, pair, axis=1)
    return Calls(us=us, slow=slow, near=near, far=far, crowd=crowd, channels=ran, port=port)


def _by_job(calls: Calls, width: int) -> Calls:
    """Calls of slots (slots, N_CONFIGS) as :func:`by_job` has them."""
    found = {}
    for name, values in vars(calls).items():
        found[name] = by_job(values, width)
    return Calls(**found)


def by_job(values: Array, width: int) -> Array:
    """Of slots (slots, N_CONFIGS), as the jobs have them: (n, width, N_CONFIGS) float32."""
    shaped = values.reshape(-1, width, N_CONFIGS)
    return shaped.astype(np.float32)


def _crammed(drawn: Array, exposed: Array, kind: World) -> Array:
    """Memory pressure (n,) that tells of the batch: the less of a step waits, the larger it is. ``drawn`` is chance."""
    low, high = np.log(kind.exposed)
    above = np.log(exposed) - low
    waiting = above / (high - low)
    batch = 1.0 - waiting
    least, most = PRESSURE
    span = most - least
    by_chance = (drawn - least) / span - 0.5
    pressure = least + span * batch
    pressure = pressure + CHANCE * by_chance
    return np.clip(pressure, 0.05, 1.0)


def _ports(kind: World, rng: Generator, n: int) -> Array:
    """The port at which calls of each collective and pair meet others, (n, 2, pairs)."""
    shape = n, 2, len(PAIRS)
    port = rng.integers(0, N_PORTS, shape)
    if kind.contention.port_by_func:
        return port
    of_gathers = port[:, :1]
    return np.repeat(of_gathers, 2, axis=1)


def _roughen(tables: Calls, kind: World, rng: Generator) -> None:
    """Give each channel count of a slot something of its own, and let calls that gain take from compute."""
    shape = len(tables), 1, 1
    us = tables.us
    jag = rng.uniform(*kind.jagged, shape)
    steal = rng.uniform(*kind.steal, shape)
    normal = rng.normal(0.0, 1.0, us.shape)
    rough = jag * normal
    factor = np.exp(rough)
    us *= factor.astype(np.float32)
    default = us[:, :, :1]
    faster = default / us - 1
    gained = np.maximum(faster, 0.0)
    stolen = steal * gained
    tables.slow += stolen.astype(np.float32)


def _beside(works: WorkloadArrays, which: Array, fleet: ClusterArrays, rng: Generator) -> Array:
    """Calls that no tuner reaches, (n, N_BESIDE, N_CALL): all_reduces of shards over the network, and slots beyond
    SLOTS."""
    n = len(which)
    node_gbs = fleet.n_nics * fleet.nic_gbs
    port = node_gbs / fleet.gpus_per_node
    reached = rng.uniform(0.6, 0.95, n)
    port = port * reached
    octaves = rng.integers(1, 7, n)
    nodes = np.exp2(octaves)
    n_bytes = works.other_bytes[which]
    moved = 2 * (nodes - 1) / nodes * n_bytes
    moving = moved / (port * 1e3)
    latency = 30.0 + 6.0 * np.log2(nodes)
    out = np.zeros((n, N_BESIDE, N_CALL))
    out[:, 0, 0] = latency + moving
    out[:, 0, 1:] = 0.12, 0.3, 0.8, 1.0, 4.0, 0.0
    out[:, 1] = 60.0, 0.1, 0.3, 0.0, 1.0, 2.0, 0.0
    return out


def _swing(kind: World, rng: Generator, n: int) -> Array:
    """Of the network's pace, (n, 3): size, 0 where it does not swing, period in steps, phase."""
    swings = rng.random(n) < kind.swing
    size = log_uniform(rng, kind.swing_size, n)
    period = log_uniform(rng, kind.swing_steps, n)
    phase = rng.random(n)
    size = np.where(swings, size, 0.0)
    return np.stack([size, period, phase], axis=1)


def _expose(jobs: Jobs, wanted: Array) -> None:
    """Scale the compute of each job until that part of its default step waits; then note what the default is like."""
    n = len(jobs)
    every = np.arange(n)
    default = default_tables(jobs)
    low = np.full(n, 1e-5)
    high = np.full(n, 1e5)
    for _ in range(26):
        scale = np.sqrt(low * high)
        jobs.scale = scale
        total, _, bare = jobs.run(default, every)
        waiting = bare.sum(axis=1)
        more = waiting > wanted * total
        low = np.where(more, scale, low)
        high = np.where(more, high, scale)
    computing(jobs, high)


def computing(jobs: Jobs, scale: Array) -> None:
    """Scale the compute of each job (n,), and note what its default is like in fair weather."""
    n = len(jobs)
    jobs.scale = scale.copy()
    default = default_tables(jobs)
    regimes = jobs.regimes
    if (regimes.count > 1).any():
        for k in range(MOST_REGIMES):
            regime = np.full(n, k)
            us = jobs.regime_us(default, regime)
            regimes.default_us[:, k] = us
    jobs.default_us = jobs.usual_us(default)
    every = np.arange(n)
    total, spent, bare = jobs.run(default, every)
    spent = spent[:, N_BESIDE:]
    bare = bare[:, N_BESIDE:]
    share = spent / total[:, None]
    of_first = share[:, :1]
    is_used = jobs.calls > 0
    share = np.where(is_used, share, of_first)
    jobs.fingerprint.share = share.ravel()
    not_zero = np.maximum(spent, 1e-9)
    jobs.exposed = bare / not_zero

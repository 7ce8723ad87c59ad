"""Random tasks for training: a cluster, a job's slot on it, and the truth about every config, thousands at a time.

The family is meant to be far wider than any one cluster (2 to 2048 ranks, four GPU generations, message sizes of
4 KiB to 2 GiB, crossovers moved by factors, effects per config that no model has), so that a policy learns to search
rather than to know. All of it is drawn; nothing here is a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ...traces.fingerprint import Fingerprint
from ...traces.records import CHANNELS, PAIRS
from .. import spaces
from . import cost_model
from .clusters import Fleet
from .fabric import Fabric, congested
from .streams import streams

Array = np.ndarray[Any, Any]
_COUNTS = np.array(CHANNELS)


@dataclass(frozen=True)
class Family:
    """What tasks are drawn from; ranges are (low, high), drawn evenly on a log scale unless said otherwise."""

    name: str = "standard"
    generations: tuple[float, ...] = (0.08, 0.3, 0.47, 0.15)  # weights of V, A, H, B
    per_node: tuple[tuple[int, float], ...] = ((1, 0.12), (2, 0.04), (4, 0.14), (8, 0.7))
    one_node: float = 0.3  # probability
    n_nodes: tuple[float, float] = (2, 256)
    releases: tuple[int, ...] = (22707, 22809, 22907, 23007, 23203)
    n_bytes: tuple[float, float] = (2**12, 2**31)
    large: float = 0.7  # probability of a message above 256 KiB
    calls: tuple[float, float] = (1, 200)
    share: tuple[float, float] = (0.02, 0.7)
    noise: tuple[float, float] = (0.003, 0.04)  # of one window, relative to the step time
    sigma: tuple[float, float] = (0.05, 0.35)  # log size of un-modelled effects per (algo, proto) and channel class
    width: float = 1.0  # of the fabric's parameters around the nominal ones, see fabric.spread
    streams: float = 0.5  # part of the tasks that are slots of real training steps, see streams.py
    drift: float = 0.0  # probability that the network changes for good in mid-episode ...
    drift_at: tuple[int, int] = (3, spaces.HORIZON - 3)  # ... before this window, evenly drawn
    known_exposure: float = 0.25  # probability that the fingerprint knows the exposed part


STANDARD = Family()
#: Outside of the training family: more Blackwell and Volta, more nodes and few-GPU nodes, wilder fabrics, effects that
#: dominate the model.
HELD_OUT = Family(
    name="held-out",
    generations=(0.25, 0.1, 0.2, 0.45),
    per_node=((1, 0.2), (2, 0.15), (4, 0.25), (8, 0.4)),
    n_nodes=(2, 512),
    noise=(0.005, 0.05),
    sigma=(0.25, 0.5),
    width=1.4,
    drift=0.25,
    drift_at=(16, 48),
)


#: The arrays of :class:`Tasks` beside the fingerprint.
ARRAYS = ("features", "mask", "truth", "share", "noise", "later", "drift_at", "alone")
NEVER = 10**6


@dataclass
class Tasks:
    """``n`` tasks: what may be seen (features, mask), and the truth."""

    fingerprint: Fingerprint
    features: Array  # (n, N_FEATURES)
    mask: Array  # (n, N_MASK) bool
    truth: Array  # (n, N_CONFIGS) expected scaled saving, -inf where masked
    share: Array  # (n,)
    noise: Array  # (n,) standard deviation of one window's relative step time
    later: Array  # (n, N_CONFIGS) the truth after the network changed, against the default of that time
    drift_at: Array  # (n,) windows before it does; NEVER = it does not
    alone: Array  # (n,) the config under which the collective itself is fastest, with nothing beside it

    def __len__(self) -> int:
        return len(self.share)

    def put(self, rows: Array, other: Tasks, source: Array) -> None:
        """Replace the tasks at ``rows`` by those of ``other`` at ``source`` (the fingerprint too)."""
        for part in fields(Fingerprint):
            getattr(self.fingerprint, part.name)[rows] = getattr(other.fingerprint, part.name)[source]
        for name in ARRAYS:
            getattr(self, name)[rows] = getattr(other, name)[source]


def draw_fleet(family: Family, rng: np.random.Generator, n: int) -> Fleet:
    """``n`` clusters with graphs such as NCCL's search finds (2.30.7 src/graph/search.cc: speed ladders)."""
    gen = rng.choice(4, n, p=np.array(family.generations) / sum(family.generations))
    sizes, weights = zip(*family.per_node, strict=True)
    per_node = rng.choice(np.array(sizes), n, p=np.array(weights) / sum(weights))
    nodes = np.where(rng.random(n) < family.one_node, 1, _even(rng, family.n_nodes, n).round().astype(int))
    nodes = np.where((nodes == 1) & (per_node == 1), rng.choice([2, 4, 8], n), nodes)
    nodes = np.minimum(nodes, 2048 // per_node)
    many = nodes > 1
    nvlink = (per_node > 1) & (rng.random(n) < np.where(per_node == 8, 0.92, 0.6))
    socket = (per_node == 1) & (rng.random(n) < 0.25)

    # Within a node: NVLink as the generation has it, or PCIe.
    link_channels = np.maximum(np.array([12, 12, 12, 16])[gen] * np.minimum(per_node, 8) // 8, 2)
    link_gbs = np.array([20.0, 20.0, 30.0, 45.0])[gen]
    pci_channels, pci_gbs = rng.choice([2, 4], n), rng.choice([6.0, 9.0, 12.0, 24.0], n)
    # Between nodes: one channel a port (two where there is one port), at the port's speed.
    n_nics = np.minimum(rng.choice([1, 2, 4, 8], n, p=[0.15, 0.15, 0.2, 0.5]), per_node)
    nic = np.array([[12.5, 25.0], [12.5, 25.0], [25.0, 50.0], [50.0, 100.0]])[gen, rng.integers(0, 2, n)]
    nic = np.where(socket, rng.choice([0.12, 1.25], n), nic)
    net_channels = np.where(n_nics == 1, 2, n_nics)
    net_gbs = n_nics * nic * 0.96 / net_channels
    channels = np.where(many, net_channels, np.where(nvlink, link_channels, pci_channels))
    gbs = np.where(many, np.where(nvlink | (per_node == 1), net_gbs, np.minimum(net_gbs, pci_gbs)), 0.0)
    gbs = np.where(many, gbs, np.where(nvlink, link_gbs, pci_gbs))
    comm = np.clip(np.where(many | nvlink, 2 * channels, channels), 2, 32)
    comm = np.where(rng.random(n) < 0.2, np.minimum(comm * 2, 32), comm)  # jobs with a raised minimum of CTAs
    latency = np.where(many & (rng.random(n) < 0.3), rng.uniform(0, 20, n), 0.0)
    switch = nvlink & (per_node == 8) & (gen >= 2) & ~many & (rng.random(n) < 0.85)
    nvls_channels = np.where(gen == 3, 24, 16)
    release = rng.choice(np.array(family.releases), n)
    return Fleet(
        n_nodes=nodes,
        gpus_per_node=per_node,
        generation=gen,
        release=release,
        amd=rng.random(n) < 0.4,
        ring_channels=channels,
        ring_bw_intra=gbs,
        ring_bw_inter=gbs.copy(),
        ring_nvl=nvlink,
        ring_latency=latency,
        tree_channels=channels.copy(),
        tree_bw_intra=gbs.copy(),
        tree_bw_inter=gbs.copy(),
        tree_nvl=nvlink.copy(),
        tree_latency=latency.copy(),
        nvls_graph_channels=np.where(gen == 3, 16, 8),
        nvls_bw_intra=np.where(gen == 3, 45.0, 40.0),
        nvls_bw_inter=np.where(gen == 3, 45.0, 40.0),
        nvls_latency=np.zeros(n),
        comm_channels=comm,
        nvls_channels=np.where(switch, nvls_channels, 0),
        ll128=(nvlink | (per_node == 1)) & ~socket & (rng.random(n) < 0.88),
        nvls=switch,
        pat=(per_node == 1) & (rng.random(n) < 0.9),
        collnet=np.zeros(n, bool),
        n_sms=np.array([80, 108, 132, 148])[gen],
        n_nics=n_nics,
        nic_gbs=nic,
    )


def draw(family: Family, rng: np.random.Generator, n: int) -> Tasks:
    """``n`` tasks of the family."""
    fleet = draw_fleet(family, rng, n)
    fabric = Fabric.random(fleet, rng, family.width, _even(rng, family.sigma, n))
    is_rs, n_bytes, calls, share = _slots(family, fleet, rng)
    kind = rng.random(n)
    exposed = np.where(kind < 0.15, 0.0, np.where(kind < 0.3, 1.0, rng.random(n)))
    slack = np.where(kind < 0.15, rng.uniform(1.0, 2.0, n), 1.0 - exposed)  # compute to hide in, per call
    cost = cost_model.pair_cost_rows(fleet, n_bytes)
    own = np.where(cost >= 0, cost, np.inf).argmin(axis=1)
    saving, own_channels, times_us = savings(fabric, is_rs, n_bytes, own, slack)
    noisy = np.clip(exposed + rng.normal(0.0, 0.05, n), 0.0, 1.0)
    fingerprint = Fingerprint(
        is_reduce_scatter=is_rs.astype(float),
        n_bytes=n_bytes,
        calls=calls,
        n_ranks=fleet.n_ranks,
        n_nodes=fleet.n_nodes,
        cost_us=cost,
        own_pair=own,
        own_channels=own_channels,
        comm_channels=fleet.comm_channels,
        share=share,
        exposed=np.where(rng.random(n) < family.known_exposure, noisy, np.nan),
        memory_pressure=np.where(rng.random(n) < 0.5, rng.uniform(0.2, 1.0, n), 0.0),
    )
    mask = spaces.action_mask(fingerprint)
    allowed = spaces.config_mask(mask)
    truth = np.where(allowed, np.clip(saving, *spaces.SAVING_RANGE), -np.inf)
    noise, later, drift_at = _even(rng, family.noise, n), truth, np.full(n, NEVER)
    if family.drift > 0:
        after = Fabric(fleet, congested(fabric.truth, fleet, rng))
        default_us = times_us[:, 0]
        late, _, late_times_us = savings(after, is_rs, n_bytes, own, slack, slack * default_us)
        late_us = late_times_us[:, 0]
        # Against the default of that time, in units of the share that was seen before.
        late *= (late_us / default_us / (1.0 + share * (late_us / default_us - 1.0)))[:, None]
        later = np.where(allowed, np.clip(late, *spaces.SAVING_RANGE), -np.inf)
        drift_at = np.where(rng.random(n) < family.drift, rng.integers(*family.drift_at, n), NEVER)
    alone = np.where(allowed, times_us, np.inf).argmin(axis=1)
    return Tasks(fingerprint, fingerprint.vector(), mask, truth, share, noise, later, drift_at, alone)


def _slots(family: Family, fleet: Fleet, rng: np.random.Generator) -> tuple[Array, Array, Array, Array]:
    """A slot for each cluster: reduce_scatter or not, bytes, calls a step, share of the step; all (n,).

    Some are drawn freely from the family's ranges, some (``family.streams``) are slots of real training steps: the
    step spends a drawn part of its time on collectives, which its slots divide by NCCL's own prices.
    """
    n = len(fleet)
    is_rs = rng.random(n) < 0.42
    low, high = family.n_bytes
    threshold = min(max(2.0**18, low), high)
    large = rng.random(n) < family.large
    n_bytes = np.where(large, _even(rng, (threshold, high), n), _even(rng, (low, threshold), n))
    share, calls = _even(rng, family.share, n), _even(rng, family.calls, n).round()
    real = streams()
    job = rng.integers(0, len(real.names), n)
    lat, bw = cost_model.terms(fleet)
    with np.errstate(divide="ignore"):
        prices = lat[:, None, :] + real.n_bytes[job][:, :, None] / (1000.0 * bw[:, None, :])
    spent = real.calls[job] * prices.min(axis=2)
    part = spent / spent.sum(axis=1, keepdims=True) * rng.uniform(0.1, 0.9, (n, 1))
    # The larger slots more often: a tuner begins with them.
    weight = np.sqrt(part) * (part >= family.share[0])
    pick = (np.cumsum(weight, axis=1) > rng.random((n, 1)) * weight.sum(axis=1, keepdims=True)).argmax(axis=1)
    rows = np.arange(n)
    use = (rng.random(n) < family.streams) & (weight.sum(axis=1) > 0)
    is_rs = np.where(use, real.is_reduce_scatter[job, pick], is_rs)
    n_bytes = np.where(use, real.n_bytes[job, pick], n_bytes).astype(np.int64)
    calls = np.where(use, real.calls[job, pick], calls)
    share = np.where(use, np.minimum(part[rows, pick], family.share[1]), share)
    unit = fleet.n_ranks * 16  # shards are whole 16-byte words
    return is_rs, np.maximum(-(-n_bytes // unit), 1) * unit, calls, share


def savings(
    fabric: Fabric, is_rs: Array, n_bytes: Array, own: Array, slack: Array, beside_us: Array | None = None
) -> tuple[Array, Array, Array]:
    """Expected saving of every config in units of the slot's default time, (n, N_CONFIGS).

    Also NCCL's channels (n,) and the time of one call alone under every config (n, N_CONFIGS) us; 0 is the default.

    A call of time ``t`` beside ``c = slack * t_default`` of compute makes the step ``max(0, t - c)`` longer by waiting
    and ``min(t, c) * slowdown(channels)`` longer by taking SMs and memory bandwidth from the compute. ``own`` (n,) is
    NCCL's own pair, ``slack`` (n,); ``beside_us`` (n,) gives ``c`` itself.
    """
    fleet, n = fabric.fleet, len(own)
    columns = fleet.take((slice(None), None))
    pair = np.repeat(
        np.concatenate([own[:, None], np.tile(np.arange(len(PAIRS)), (n, 1))], axis=1), len(_COUNTS), axis=1
    )
    asked = np.tile(_COUNTS, spaces.N_PAIRS)[None, :]
    limit, _ = cost_model.heuristic_channels(columns, n_bytes[:, None], pair)
    lowered = np.where(columns.release >= 23100, np.minimum(asked, limit), asked)  # from 2.31 a tuner only lowers
    wanted = np.where(asked == 0, limit, lowered)
    ran = cost_model.planned_channels(columns, n_bytes[:, None], pair, wanted)
    t = fabric.times_on_us(is_rs, n_bytes, pair, ran)
    default = t[:, :1]
    beside = slack[:, None] * default if beside_us is None else beside_us[:, None]
    charge = np.maximum(t - beside, 0.0) + np.minimum(t, beside) * fabric.slowdowns(ran)
    return (charge[:, :1] - charge) / default, ran[:, 0], t


def _even(rng: np.random.Generator, bounds: tuple[float, float], n: int) -> Array:
    """``n`` numbers within ``bounds``, even on a log scale."""
    return np.exp(rng.uniform(np.log(bounds[0]), np.log(bounds[1]), n))


def narrowed(family: Family, **changes: Any) -> Family:
    """``family`` with other values of some fields."""
    return replace(family, **changes)

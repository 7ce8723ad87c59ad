"""The parameters of fabrics: the middle that public sources describe, presets, and what is drawn around them.

:mod:`.fabric` has the formulas that they belong to, and the sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ....traces.records import PAIRS
from ...nccl_model.clusters import ClusterArrays
from ...nccl_model.columns import Columns
from ...nccl_model.prices import terms
from .measured import measured

Array = np.ndarray[Any, Any]

LL, LL128, SIMPLE = range(3)
_NVLS = PAIRS.index(("nvls", "simple"))
CHUNK = 2**20  # bytes of a channel's piece at which SIMPLE fills a chunk: 2 of 8 steps of a buffer of 4 MiB
N_COUNTS = 7  # classes of channel counts with an un-modelled effect of their own: 1, 2, 3-4, 5-8, ... 33-64


#: Matrix products of a step that differ in their tiles, all as long.
N_PRODUCTS = 3
#: What a channel takes of the SMs, in its share of them: the middle of the family. Drawn.
SM_COST = 1.2
#: Part of the staircase that is seen.
SEEN = measured("staircase_seen")


@dataclass
class FabricParams(Columns):
    """Parameters of ``n`` fabrics: shape (n,) unless the comment says more. Times in us, rates in GB/s."""

    launch_us: Array  # kernel launch and rendezvous, once a collective
    hop_us: Array  # (n, 3) a step within a node, by protocol
    net_us: Array  # (n, 3) a step between nodes
    ramp_bytes: Array  # (n, 2, 3): all_gather / reduce_scatter, protocol
    stall_bytes: Array  # what SIMPLE's smallest pieces cost over nodes beyond the ramp, below CHUNK
    channel_gbs: Array  # (n, 2, 3)
    bus_gbs: Array  # what the ring's links carry together
    efficiency: Array  # (n, 2, 3) share of bus_gbs that a protocol reaches
    congestion: Array  # share of the bus lost a channel beyond one a network port; 0 on one node
    knee: Array  # sharpness of the soft minimum
    nvls_us: Array
    nvls_gbs: Array  # (n, 2) algorithm bandwidth with enough channels
    nvls_channels: Array  # channels that reach half of it
    pat_us: Array  # a round
    pat_share: Array  # of the ring's bus bandwidth
    sm_cost: Array  # slowdown of overlapped compute: this times channels / SMs ...
    tiles: Array  # (n, N_PRODUCTS) ... or, by the tiles of its matrix products, the staircase; 0: none known
    memory_cost: Array  # and this times channels / 16, for memory bandwidth and caches
    sm_weight: Array  # (n, 6) what a channel of each pair takes of an SM, a ring's with SIMPLE being 1
    connect_us: Array  # first use of an algorithm on a communicator
    noise: Array  # log-normal sigma of one collective
    tail: Array  # probability of a straggling collective
    effect: (
        Array  # (n, 2, 6, N_COUNTS) log of what the formula misses, per collective, pair and channel class
    )


#: Memory traffic beside compute, in units of a ring's all_gather with SIMPLE (a read and a write), (2, 6) over
#: all_gather / reduce_scatter and PAIRS. LL sends four bytes of flag with four of data, LL128 eight with 120 (NVIDIA,
#: NCCL's documentation of NCCL_PROTO); a reduce_scatter reads both summands; with NVLS the switch copies and adds
#: (NVIDIA, NVLink SHARP). The exact ratios follow from counting bytes, the shares of NVLS and CollNet are drawn.
TRAFFIC = np.array([[2.0, 1.07, 1.0, 0.6, 0.6, 1.0], [3.0, 1.6, 1.5, 0.6, 0.6, 1.5]])
#: What a channel takes of an SM, by PAIRS: LL128 keeps all its warps busy, NVLS and CollNet leave work to the switch.
_SM_WEIGHT = np.array([0.9, 1.1, 1.0, 0.7, 0.8, 0.9])


#: Deviations from the nominal fabric of a preset. Sources: AWS's tuner regions for h200-efa (crossovers); for
#: dgx-h100-2x8 the ramp of SIMPLE in SimAI's two-node NIC column (150-160 us beyond the transfer at 64-128 MB).
#: Drawn, to stand for a routed Ethernet without adaptive routing, where more flows than ports collide: its congestion
#: (the bus gives 29 % less on 16 channels than on 8), and the difference between copying and adding channels.
PRESETS: dict[str, dict[str, Any]] = {
    "dgx-h100-2x8": {
        "ramp_bytes": ((512, 6144, 131072), (512, 8192, 196608)),
        "congestion": 0.036,
        "efficiency": ((0.1, 0.87, 0.99), (0.1, 0.94, 0.99)),
        "channel_gbs": ((6.0, 48.0, 52.0), (5.0, 40.0, 36.0)),
        "knee": 6.0,
        "sm_cost": 1.3,
        "memory_cost": 0.09,
    },
    "h200-efa": {
        "hop_us": (0.8, 1.75, 3.4),
        "net_us": (13.0, 16.0, 24.0),
        "ramp_bytes": (512, 8192, 65536),
        "efficiency": ((0.12, 0.905, 0.99), (0.12, 0.91, 0.99)),
        "congestion": 0.002,
        "pat_share": 0.57,
    },
}


def nominal(fleet: ClusterArrays) -> FabricParams:
    """The middle of the family for each cluster: the fabric that the sources above describe."""
    n = len(fleet)
    generation = fleet.generation
    many = fleet.n_nodes > 1
    has_links = fleet.ring.nvlink | (fleet.gpus_per_node == 1)
    by_generation = np.array([1.6, 1.2, 1.0, 0.9])[generation]
    slow = by_generation * np.where(has_links, 1.0, 1.8)
    # A loopback socket or TCP network answers an order of magnitude later than an RDMA one.
    is_socket = fleet.nic_gbs < 2.0
    net = np.where(is_socket, 5.0, 1.0) * np.array([1.3, 1.1, 1.0, 1.0])[generation]
    channel = np.array([0.55, 0.75, 1.0, 1.25])[generation]
    link_gbs = np.where(many, fleet.ring.bw_inter, fleet.ring.bw_intra)
    bus = fleet.ring.channels * link_gbs
    efficiency = np.empty((n, 2, 3))
    efficiency[:, :, LL] = _ll_share(fleet, bus)[:, None]
    efficiency[:, :, LL128] = 0.92
    efficiency[:, :, SIMPLE] = 0.99
    efficiency[:, 1, LL128] = 0.925
    ramp = np.where(many[:, None], (512.0, 8192.0, 65536.0), (256.0, 2048.0, 16384.0))
    _, price = terms(fleet)
    nvls = np.maximum(price[:, _NVLS], 1.0)
    rates = np.array([[6.0, 30.0, 34.0], [5.0, 26.0, 26.0]])
    fills_chunks_late = many & (fleet.gpus_per_node >= 8)
    return FabricParams(
        launch_us=np.full(n, 6.0),
        hop_us=slow[:, None] * np.array([0.9, 1.6, 3.2]),
        net_us=net[:, None] * np.array([8.0, 10.0, 16.0]),
        ramp_bytes=ramp[:, None, :] * np.array([[1.0], [1.15]]),
        stall_bytes=np.where(fills_chunks_late, 230e3, 0.0),
        channel_gbs=channel[:, None, None] * rates,
        bus_gbs=bus * 0.98,
        efficiency=efficiency,
        congestion=np.where(many, 0.005, 0.0),
        knee=np.full(n, 4.0),
        nvls_us=np.full(n, 20.0),
        nvls_gbs=nvls[:, None] * np.array([1.5, 1.35]),
        nvls_channels=np.full(n, 4.0),
        pat_us=np.where(many, 9.0, 4.0) * net,
        pat_share=np.full(n, 0.7),
        sm_cost=np.full(n, SM_COST),
        tiles=np.zeros((n, N_PRODUCTS)),
        memory_cost=np.full(n, 0.06),
        sm_weight=np.tile(_SM_WEIGHT, (n, 1)),
        connect_us=np.full(n, 6000.0) + 200.0 * fleet.n_ranks,
        noise=np.where(many, 0.012, 0.003),
        # Of a collective; of a step, which has a dozen, as noise.py draws it.
        tail=np.where(many, 0.0005, 0.0002),
        effect=np.zeros((n, 2, len(PAIRS), N_COUNTS)),
    )


def _ll_share(fleet: ClusterArrays, bus: Array) -> Array:
    """Share of the bus that LL reaches, (n,)."""
    most = np.array([[39.0, 39.0, 30.0], [87.7, 30.0, 28.0], [141.0, 45.0, 42.0], [282.0, 90.0, 70.0]])
    by_cpu = fleet.amd.astype(int)
    row = np.where(fleet.n_nodes > 1, by_cpu, fleet.generation)
    column = np.minimum(fleet.n_nodes, 3) - 1
    return np.asarray(np.minimum(most[row, column] / bus, 0.45))


def spread(
    truth: FabricParams, rng: np.random.Generator, width: float = 1.0, sigma: Array | float = 0.15
) -> FabricParams:
    """``truth`` with every parameter drawn anew around it.

    ``width`` scales the log-normal spread (1 = the training family: crossovers move by a factor of three either
    way); ``sigma`` (scalar or (n,)) is the size of what the formula misses, per collective, pair and channel class.
    """
    n = len(truth.launch_us)

    def normal(size: float, shape: Any) -> Array:
        return rng.normal(0.0, width * size, shape)

    def draw(value: Array, size: float) -> Array:
        return np.asarray(value * np.exp(normal(size, np.shape(value))))

    # A whole fabric is slow or quick, and each protocol on it again. (The order of draws is the order of jobs.)
    shared = np.exp(normal(0.35, (n, 1)))
    sigmas = np.broadcast_to(sigma, (n,))
    effect = unmodelled(rng, n)
    launch = draw(truth.launch_us, 0.4)
    hop = draw(truth.hop_us * shared, 0.35)
    net = draw(truth.net_us * shared, 0.4)
    ramp = draw(truth.ramp_bytes, 0.7)
    channel = draw(truth.channel_gbs, 0.2)
    channel = channel * np.exp(normal(0.2, (n, 1, 1)))
    narrowed = 1.0 - np.abs(normal(0.15, n))
    loss = draw(1.0 - truth.efficiency, 0.5)
    congestion = _crowding(truth.congestion, draw, rng)
    return replace(
        truth,
        launch_us=launch,
        hop_us=hop,
        net_us=net,
        ramp_bytes=ramp,
        channel_gbs=channel,
        bus_gbs=truth.bus_gbs * np.clip(narrowed, 0.3, 1.0),
        efficiency=np.clip(1.0 - loss, 0.02, 1.0),
        congestion=congestion,
        knee=np.clip(draw(truth.knee, 0.3), 2.0, 12.0),
        nvls_us=draw(truth.nvls_us, 0.4),
        nvls_gbs=draw(truth.nvls_gbs, 0.25),
        nvls_channels=draw(truth.nvls_channels, 0.4),
        pat_us=draw(truth.pat_us, 0.5),
        pat_share=np.clip(draw(truth.pat_share, 0.3), 0.2, 1.0),
        sm_cost=draw(truth.sm_cost, 0.3),
        memory_cost=draw(truth.memory_cost, 0.6),
        connect_us=draw(truth.connect_us, 0.5),
        noise=draw(truth.noise, 0.6),
        tail=draw(truth.tail, 0.8),
        effect=truth.effect + sigmas[:, None, None, None] * effect,
        sm_weight=draw(truth.sm_weight, 0.2),
        # Longer messages take longer.
        stall_bytes=np.minimum(draw(truth.stall_bytes, 0.5), 0.9 * CHUNK),
    )


def _crowding(usual: Array, draw: Callable[[Array, float], Array], rng: np.random.Generator) -> Array:
    """Congestion (n,): one fabric in four suffers from more flows than ports, as the two-node preset does."""
    n = len(usual)
    crowded = usual > 0
    much = crowded & (rng.random(n) < 0.25)
    sized = rng.uniform(0.01, 0.04, n)
    little = np.minimum(draw(np.maximum(usual, 0.004), 0.9), 0.05)
    return np.where(much, sized, np.where(crowded, little, 0.0))


def unmodelled(rng: np.random.Generator, n: int) -> Array:
    """What the formula misses, (n, 2, 6, N_COUNTS), of unit variance: mostly a pair's own, partly a count's."""
    shape = n, 2, len(PAIRS), N_COUNTS
    by_pair = rng.normal(0.0, 1.0, (*shape[:3], 1))
    by_count = rng.normal(0.0, 1.0, shape)
    return np.asarray(by_pair * 0.8 + by_count * 0.6)


def with_values(truth: FabricParams, values: Mapping[str, Any]) -> FabricParams:
    """``truth`` with these fields set, each broadcast to its shape."""
    known = {f.name for f in fields(FabricParams)}
    assert known >= set(values), f"no such parameter of a fabric: {set(values) - known}"
    shaped = {}
    for name, value in values.items():
        shape = getattr(truth, name).shape
        shaped[name] = np.broadcast_to(np.asarray(value, float), shape).copy()
    return replace(truth, **shaped)

"""The ground truth of the emulation: what a collective takes on a cluster, whatever NCCL believes.

One collective alone on the network takes, over a ring of ``n`` ranks with ``C`` channels and shards of ``s`` bytes,

    t = launch + (n - n_nodes) * hop + (n_nodes - 1) * net + (n - 1) * C * (s / C + ramp) / rate
    rate = soft minimum of  C * channel_gbs  and  efficiency * bus_gbs * (1 - congestion * channels beyond a NIC's)

``hop`` and ``net`` are latencies of a step, ``ramp`` the bytes that each step of a channel costs on top (a channel
runs at half speed on pieces of that size), per protocol; ``channel_gbs`` differs between all_gather (copies) and
reduce_scatter (adds). Over full nodes of eight SIMPLE has a further ramp of ``stall * (1 - s / C / CHUNK)`` below
CHUNK: there NCCL's own choice, where it leaves LL128, loses 1.4 to 1.8 times at 4 MiB a rank, little at 8, nothing at
16, and nothing on smaller nodes (meta-pytorch/autoparallel, H100 over RoCE; that SIMPLE is the cause is inferred).
NVLS and PAT have terms of their own. The shape gives the crossovers that were measured:
about constant in bytes per rank, LL -> LL128 at 32-106 KB and LL128 -> SIMPLE at 15-19 MB (aws-ofi-nccl, tuner
regions of p5en and p6), where NCCL's model has the latter near 3 MB. Channel saturation follows the channel sweep
of eunomia-bpf/nccl-eBPF on 8 x B300; the latency of SIMPLE over many nodes, 4-6 us a step, the bus bandwidth tables
of aliyun/SimAI. What has no public source is drawn, and says so. No figure from here is a GPU's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ...traces.records import PAIRS, PROTOS, TUNED_FUNCS
from ..nccl_model.channels import planned_channels
from ..nccl_model.clusters import Cluster, ClusterArrays
from ..nccl_model.columns import Columns
from ..nccl_model.prices import terms

Array = np.ndarray[Any, Any]

LL, LL128, SIMPLE = range(3)
_PAIR_PROTO = np.array([PROTOS.index(p) for _, p in PAIRS])
_NVLS, _COLLNET, _PAT = PAIRS.index(("nvls", "simple")), PAIRS.index(("collnet_direct", "simple")), 5
CHUNK = 2**20  # bytes of a channel's piece at which SIMPLE fills a chunk: 2 of 8 steps of a buffer of 4 MiB
N_COUNTS = 7  # classes of channel counts with an un-modelled effect of their own: 1, 2, 3-4, 5-8, ... 33-64


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
    sm_cost: Array  # slowdown of overlapped compute: this times channels / SMs
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
    n, gen, many = len(fleet), fleet.generation, fleet.n_nodes > 1
    slow = np.array([1.6, 1.2, 1.0, 0.9])[gen] * np.where(
        fleet.ring.nvlink | (fleet.gpus_per_node == 1), 1.0, 1.8
    )
    # A loopback socket or TCP network answers an order of magnitude later than an RDMA one.
    net = np.where(fleet.nic_gbs < 2.0, 5.0, 1.0) * np.array([1.3, 1.1, 1.0, 1.0])[gen]
    channel = np.array([0.55, 0.75, 1.0, 1.25])[gen]
    bus = fleet.ring.channels * np.where(fleet.n_nodes > 1, fleet.ring.bw_inter, fleet.ring.bw_intra)
    row = np.where(many, fleet.amd.astype(int), gen)
    ll_max = np.array([[39.0, 39.0, 30.0], [87.7, 30.0, 28.0], [141.0, 45.0, 42.0], [282.0, 90.0, 70.0]])
    ll_share = np.minimum(ll_max[row, np.minimum(fleet.n_nodes, 3) - 1] / bus, 0.45)
    efficiency = np.empty((n, 2, 3))
    efficiency[:, :, LL], efficiency[:, :, LL128], efficiency[:, :, SIMPLE] = ll_share[:, None], 0.92, 0.99
    efficiency[:, 1, LL128] = 0.925
    ramp = np.where(many[:, None], (512.0, 8192.0, 65536.0), (256.0, 2048.0, 16384.0))
    _, price = terms(fleet)
    nvls = np.maximum(price[:, _NVLS], 1.0)
    rates = np.array([[6.0, 30.0, 34.0], [5.0, 26.0, 26.0]])
    return FabricParams(
        launch_us=np.full(n, 6.0),
        hop_us=slow[:, None] * np.array([0.9, 1.6, 3.2]),
        net_us=net[:, None] * np.array([8.0, 10.0, 16.0]),
        ramp_bytes=ramp[:, None, :] * np.array([[1.0], [1.15]]),
        stall_bytes=np.where(many & (fleet.gpus_per_node >= 8), 230e3, 0.0),
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
        sm_cost=np.full(n, 1.2),
        memory_cost=np.full(n, 0.06),
        sm_weight=np.tile(_SM_WEIGHT, (n, 1)),
        connect_us=np.full(n, 6000.0) + 200.0 * fleet.n_ranks,
        noise=np.where(many, 0.012, 0.003),
        tail=np.where(
            many, 0.0005, 0.0002
        ),  # of a collective; of a step, which has a dozen, as noise.py draws it
        effect=np.zeros((n, 2, len(PAIRS), N_COUNTS)),
    )


def spread(
    truth: FabricParams, rng: np.random.Generator, width: float = 1.0, sigma: Array | float = 0.15
) -> FabricParams:
    """``truth`` with every parameter drawn anew around it.

    ``width`` scales the log-normal spread (1 = the training family: crossovers move by a factor of three either
    way); ``sigma`` (scalar or (n,)) is the size of what the formula misses, per collective, pair and channel class.
    """
    n = len(truth.launch_us)

    def draw(value: Array, size: float) -> Array:
        return np.asarray(value * np.exp(rng.normal(0.0, width * size, np.shape(value))))

    # A whole fabric is slow or quick, and each protocol on it again.
    shared = np.exp(rng.normal(0.0, width * 0.35, (n, 1)))
    loss = 1.0 - truth.efficiency
    sigmas = np.broadcast_to(sigma, (n,))
    effect = unmodelled(rng, n)
    crowded = truth.congestion > 0
    return replace(
        truth,
        launch_us=draw(truth.launch_us, 0.4),
        hop_us=draw(truth.hop_us * shared, 0.35),
        net_us=draw(truth.net_us * shared, 0.4),
        ramp_bytes=draw(truth.ramp_bytes, 0.7),
        channel_gbs=draw(truth.channel_gbs, 0.2) * np.exp(rng.normal(0.0, width * 0.2, (n, 1, 1))),
        bus_gbs=truth.bus_gbs * np.clip(1.0 - np.abs(rng.normal(0.0, width * 0.15, n)), 0.3, 1.0),
        efficiency=np.clip(1.0 - draw(loss, 0.5), 0.02, 1.0),
        # One fabric in four suffers from more flows than ports, as the two-node preset does.
        congestion=np.where(
            crowded & (rng.random(n) < 0.25),
            rng.uniform(0.01, 0.04, n),
            np.where(crowded, np.minimum(draw(np.maximum(truth.congestion, 0.004), 0.9), 0.05), 0.0),
        ),
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
        stall_bytes=np.minimum(draw(truth.stall_bytes, 0.5), 0.9 * CHUNK),  # longer messages take longer
    )


def unmodelled(rng: np.random.Generator, n: int) -> Array:
    """What the formula misses, (n, 2, 6, N_COUNTS), of unit variance: mostly a pair's own, partly a count's."""
    shape = n, 2, len(PAIRS), N_COUNTS
    return np.asarray(rng.normal(0.0, 1.0, (*shape[:3], 1)) * 0.8 + rng.normal(0.0, 1.0, shape) * 0.6)


class Fabric:
    """What really happens on ``n`` clusters (the functions on one message need ``n = 1``)."""

    def __init__(self, fleet: ClusterArrays, truth: FabricParams) -> None:
        self.fleet, self.truth = fleet, truth
        # A running job asks for few calls, and for these again and again.
        self.time_us, self.beside = lru_cache(100_000)(self._time_us), lru_cache(100_000)(self._beside)

    @classmethod
    def of(cls, cluster: Cluster, seed: int | None = None) -> Fabric:
        """The fabric of one cluster: the documented one for ``seed`` 0 or None, else one drawn around it."""
        fleet = ClusterArrays.of([cluster])
        truth = nominal(fleet)
        name = cluster.name.partition("[")[0]
        for key in (name.rpartition("-")[0], name):
            truth = _with(truth, PRESETS.get(key, {}))
        return cls(fleet, spread(truth, np.random.default_rng(seed)) if seed else truth)

    @classmethod
    def random(
        cls, fleet: ClusterArrays, rng: np.random.Generator, width: float = 1.0, sigma: Array | float = 0.15
    ) -> Fabric:
        """One drawn fabric for each cluster of ``fleet``; see :func:`spread`."""
        return cls(fleet, spread(nominal(fleet), rng, width, sigma))

    def times_us(self, is_reduce_scatter: Array, n_bytes: Array, pair: Array, n_channels: Array) -> Array:
        """Microseconds of all_gather or reduce_scatter, alone on the fabric and without noise, (n, k).

        ``is_reduce_scatter`` and ``n_bytes`` are (n,), ``pair`` (index into PAIRS) and ``n_channels`` broadcast to
        (n, k). Channels beyond what the size fills do nothing: NCCL's scheduler is applied first.
        """
        columns, size = self.fleet.take((slice(None), None)), np.asarray(n_bytes, np.int64)[:, None]
        ran = planned_channels(columns, size, pair, n_channels)
        return self.times_on_us(is_reduce_scatter, n_bytes, pair, ran)

    def times_on_us(self, is_reduce_scatter: Array, n_bytes: Array, pair: Array, ran: Array) -> Array:
        """As :meth:`times_us`, on the channels that really ran."""
        f, t = self.fleet, self.truth
        rows, func = np.arange(len(f))[:, None], np.asarray(is_reduce_scatter).astype(int)[:, None]
        shape = np.broadcast_shapes((len(f), 1), np.shape(pair), np.shape(ran))
        pair, c = np.broadcast_to(pair, shape), np.broadcast_to(ran, shape).astype(float)
        columns, size = f.take((slice(None), None)), np.asarray(n_bytes, float)[:, None]
        proto, n, nodes = _PAIR_PROTO[pair], columns.n_ranks, columns.n_nodes
        shard = size / n
        beyond = np.maximum(c - np.maximum(columns.n_nics, columns.ring.channels), 0.0)
        bus = t.bus_gbs[:, None] * np.maximum(1.0 - t.congestion[:, None] * beyond, 0.25)
        knee = t.knee[:, None]
        rate = (
            soft_min(c * t.channel_gbs[rows, func, proto], bus * t.efficiency[rows, func, proto], knee) * 1e3
        )
        steps = (n - nodes) * t.hop_us[rows, proto] + (nodes - 1) * t.net_us[rows, proto]
        short = np.maximum(1.0 - shard / c / CHUNK, 0.0) * (proto == SIMPLE)
        piece = shard / c + t.ramp_bytes[rows, func, proto] + t.stall_bytes[:, None] * short
        us = steps + (n - 1) * c * piece / rate
        if f.offers_nvls.any():
            full = t.nvls_gbs[rows, func] * 1e3 * c / (c + t.nvls_channels[:, None])
            us = np.where(pair == _NVLS, t.nvls_us[:, None] + size / full, us)
        if f.collnet.any():
            lat, gbs = terms(f)
            full = np.maximum(gbs[:, _COLLNET, None], 1.0) * 1e3 * c / (c + 2.0)
            us = np.where(pair == _COLLNET, lat[:, _COLLNET, None] + size / full, us)
        if f.offers_pat.any():
            rounds = np.ceil(np.log2(np.maximum(n, 2)))
            rate = soft_min(c * t.channel_gbs[rows, func, proto], bus * t.pat_share[:, None], knee) * 1e3
            tree = rounds * t.pat_us[:, None] + (n - 1) * shard / rate
            us = np.where(pair == _PAT, tree + rounds * t.ramp_bytes[rows, func, SIMPLE] * c / rate, us)
        count_class = np.ceil(np.log2(np.maximum(c, 1.0))).astype(int)
        return np.asarray((t.launch_us[:, None] + us) * np.exp(t.effect[rows, func, pair, count_class]))

    def overlap(
        self, is_reduce_scatter: Array, n_bytes: Array, pair: Array, ran: Array, us: Array
    ) -> tuple[Array, Array, Array]:
        """What calls that take ``us`` (n, k) do to what runs beside them; arguments as of :meth:`times_on_us`.

        Returns, each (n, k): the share by which compute slows, and the shares of the links within a node and of the
        network that a call takes. Compute loses the SMs that channels hold, by pair (public: matrix products beside
        NCCL's kernels run 30-40 % slower, pytorch#179937), and memory bandwidth by the bytes that really move.
        """
        t, rs, many = self.truth, np.asarray(is_reduce_scatter).astype(int), self.fleet.n_nodes[:, None] > 1
        rows = np.arange(len(self.fleet))[:, None]
        pair = np.broadcast_to(pair, us.shape)
        n = self.fleet.n_ranks[:, None]
        whole = np.asarray(n_bytes, float)[:, None]
        rate = np.where(
            pair == _NVLS, t.nvls_gbs[rows, rs[:, None]], t.bus_gbs[:, None] * n / np.maximum(n - 1, 1)
        )
        use = np.minimum(whole / (np.maximum(rate, 1e-3) * 1e3) / us, 1.0)
        sms = (
            t.sm_cost[:, None] * t.sm_weight[rows, pair] * np.asarray(ran, float) / self.fleet.n_sms[:, None]
        )
        memory = 1.5 * t.memory_cost[:, None] * TRAFFIC[rs[:, None], pair] * use
        # A ring over many nodes fills its network ports; the links within the nodes carry as much and have more.
        return sms + memory, np.where(many, 0.3 * use, use), np.where(many, use, 0.0)

    def _time_us(self, func: str, n_bytes: int, algo: str, proto: str, n_channels: int) -> float:
        """Microseconds of one collective alone, without noise. Raises ValueError for an unknown pair."""
        if func == "all_reduce":  # never tuned: a ring adds, and then copies
            halves = sum(self.time_us(half, n_bytes, algo, proto, n_channels) for half in TUNED_FUNCS)
            return halves - float(self.truth.launch_us[0])
        if func not in TUNED_FUNCS or (algo, proto) not in PAIRS:
            raise ValueError(f"no {algo}/{proto} for {func}")
        is_rs, pair = np.array([func == "reduce_scatter"]), np.array([[PAIRS.index((algo, proto))]])
        return float(self.times_us(is_rs, np.array([n_bytes]), pair, np.array([[n_channels]]))[0, 0])

    def _beside(
        self, func: str, n_bytes: int, algo: str, proto: str, n_channels: int
    ) -> tuple[float, float, float]:
        """What one collective does to what runs beside it, see :meth:`overlap`; of an all_reduce, as its ring would."""
        us = np.array([[self.time_us(func, n_bytes, algo, proto, n_channels)]])
        pair = PAIRS.index((algo, proto))
        moved = n_bytes * 2 if func == "all_reduce" else n_bytes
        is_rs, size, ran = np.array([func != "all_gather"]), np.array([moved]), np.array([[n_channels]])
        slow, near, far = self.overlap(is_rs, size, np.array([[pair]]), ran, us)
        return float(slow[0, 0]), float(near[0, 0]), float(far[0, 0])

    def slowdown(self, n_channels: int) -> float:
        """Share by which compute slows that overlaps one collective on that many channels."""
        sm_cost, memory_cost = self.truth.sm_cost[0], self.truth.memory_cost[0]
        return float(sm_cost * n_channels / self.fleet.n_sms[0] + memory_cost * min(n_channels, 32) / 16)

    def noise(self, rng: np.random.Generator) -> float:
        """A factor on the time of one collective: log-normal, and now and then a straggler of up to 5 x."""
        factor = float(np.exp(rng.normal(0.0, float(self.truth.noise[0]))))
        is_late = rng.random() < float(self.truth.tail[0])
        return factor * (1.1 + min(rng.pareto(1.5), 3.9)) if is_late else factor


def soft_min(a: Array, b: Array, knee: Array) -> Array:
    """The smaller of two rates, rounded off where they meet: ``(a**-k + b**-k)**(-1/k)``."""
    low, high = np.minimum(a, b), np.maximum(a, b)
    return np.asarray(low * (1.0 + (low / high) ** knee) ** (-1.0 / knee))


def _with(truth: FabricParams, values: Mapping[str, Any]) -> FabricParams:
    known = {f.name for f in fields(FabricParams)}
    assert known >= set(values), f"no such parameter of a fabric: {set(values) - known}"
    shaped = {
        k: np.broadcast_to(np.asarray(v, float), getattr(truth, k).shape).copy() for k, v in values.items()
    }
    return replace(truth, **shaped)

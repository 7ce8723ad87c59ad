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

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ....traces.records import PAIRS, PROTOS, TUNED_FUNCS
from ...nccl_model.channels import planned_channels
from ...nccl_model.clusters import Cluster, ClusterArrays
from ...nccl_model.prices import terms
from .params import CHUNK, PRESETS, SEEN, SIMPLE, SM_COST, TRAFFIC, FabricParams, nominal, spread, with_values

Array = np.ndarray[Any, Any]

_PAIR_PROTO = np.array([PROTOS.index(proto) for _, proto in PAIRS])
_NVLS = PAIRS.index(("nvls", "simple"))
_COLLNET = PAIRS.index(("collnet_direct", "simple"))
_PAT = PAIRS.index(("pat", "simple"))


@dataclass(frozen=True)
class _Asked:
    """Calls whose times are asked for: arrays that broadcast to (n, k)."""

    rows: Array
    func: Array  # 0: all_gather, 1: reduce_scatter
    size: Array  # bytes
    pair: Array
    proto: Array
    channels: Array
    columns: ClusterArrays


class Fabric:
    """What really happens on ``n`` clusters (the functions on one message need ``n = 1``)."""

    def __init__(self, fleet: ClusterArrays, truth: FabricParams) -> None:
        self.fleet, self.truth = fleet, truth
        # A running job asks for few calls, and for these again and again.
        self.time_us = lru_cache(100_000)(self._time_us)
        self.beside = lru_cache(100_000)(self._beside)

    @classmethod
    def of(cls, cluster: Cluster, seed: int | None = None) -> Fabric:
        """The fabric of one cluster: the documented one for ``seed`` 0 or None, else one drawn around it."""
        fleet = ClusterArrays.of([cluster])
        truth = nominal(fleet)
        name = cluster.name.partition("[")[0]
        for key in (name.rpartition("-")[0], name):
            truth = with_values(truth, PRESETS.get(key, {}))
        if seed:
            truth = spread(truth, np.random.default_rng(seed))
        return cls(fleet, truth)

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
        columns = self.fleet.take((slice(None), None))
        size = np.asarray(n_bytes, np.int64)[:, None]
        ran = planned_channels(columns, size, pair, n_channels)
        return self.times_on_us(is_reduce_scatter, n_bytes, pair, ran)

    def times_on_us(self, is_reduce_scatter: Array, n_bytes: Array, pair: Array, ran: Array) -> Array:
        """As :meth:`times_us`, on the channels that really ran."""
        call = self._call(is_reduce_scatter, n_bytes, pair, ran)
        us = self._ring_us(call)
        if self.fleet.offers_nvls.any():
            us = np.where(call.pair == _NVLS, self._nvls_us(call), us)
        if self.fleet.collnet.any():
            us = np.where(call.pair == _COLLNET, self._collnet_us(call), us)
        if self.fleet.offers_pat.any():
            us = np.where(call.pair == _PAT, self._pat_us(call), us)
        channels = np.maximum(call.channels, 1.0)
        count_class = np.ceil(np.log2(channels)).astype(int)
        effect = self.truth.effect[call.rows, call.func, call.pair, count_class]
        alone = self.truth.launch_us[:, None] + us
        return np.asarray(alone * np.exp(effect))

    def _call(self, is_reduce_scatter: Array, n_bytes: Array, pair: Array, ran: Array) -> _Asked:
        n = len(self.fleet)
        shape = np.broadcast_shapes((n, 1), np.shape(pair), np.shape(ran))
        pair = np.broadcast_to(pair, shape)
        channels = np.broadcast_to(ran, shape).astype(float)
        func = np.asarray(is_reduce_scatter).astype(int)
        size = np.asarray(n_bytes, float)[:, None]
        columns = self.fleet.take((slice(None), None))
        rows = np.arange(n)[:, None]
        return _Asked(rows, func[:, None], size, pair, _PAIR_PROTO[pair], channels, columns)

    def _bus_gbs(self, call: _Asked) -> Array:
        """What the links carry beside so many channels."""
        ports = np.maximum(call.columns.n_nics, call.columns.ring.channels)
        beyond = np.maximum(call.channels - ports, 0.0)
        left = 1.0 - self.truth.congestion[:, None] * beyond
        return np.asarray(self.truth.bus_gbs[:, None] * np.maximum(left, 0.25))

    def _channel_gbs(self, call: _Asked) -> Array:
        """What the channels carry together."""
        each = self.truth.channel_gbs[call.rows, call.func, call.proto]
        return np.asarray(call.channels * each)

    def _ring_us(self, call: _Asked) -> Array:
        t, c, proto = self.truth, call.channels, call.proto
        n, nodes = call.columns.n_ranks, call.columns.n_nodes
        shard = call.size / n
        carried = self._bus_gbs(call) * t.efficiency[call.rows, call.func, proto]
        rate = soft_min(self._channel_gbs(call), carried, t.knee[:, None]) * 1e3
        within = (n - nodes) * t.hop_us[call.rows, proto]
        between = (nodes - 1) * t.net_us[call.rows, proto]
        short = np.maximum(1.0 - shard / c / CHUNK, 0.0) * (proto == SIMPLE)
        ramp = t.ramp_bytes[call.rows, call.func, proto]
        piece = shard / c + ramp + t.stall_bytes[:, None] * short
        return np.asarray(within + between + (n - 1) * c * piece / rate)

    def _nvls_us(self, call: _Asked) -> Array:
        t, c = self.truth, call.channels
        gbs = t.nvls_gbs[call.rows, call.func]
        full = gbs * 1e3 * c / (c + t.nvls_channels[:, None])
        return np.asarray(t.nvls_us[:, None] + call.size / full)

    def _collnet_us(self, call: _Asked) -> Array:
        lat, gbs = terms(self.fleet)
        most = np.maximum(gbs[:, _COLLNET, None], 1.0)
        full = most * 1e3 * call.channels / (call.channels + 2.0)
        return np.asarray(lat[:, _COLLNET, None] + call.size / full)

    def _pat_us(self, call: _Asked) -> Array:
        t, n = self.truth, call.columns.n_ranks
        shard = call.size / n
        rounds = np.ceil(np.log2(np.maximum(n, 2)))
        carried = self._bus_gbs(call) * t.pat_share[:, None]
        rate = soft_min(self._channel_gbs(call), carried, t.knee[:, None]) * 1e3
        tree = rounds * t.pat_us[:, None] + (n - 1) * shard / rate
        ramp = t.ramp_bytes[call.rows, call.func, SIMPLE]
        return np.asarray(tree + rounds * ramp * call.channels / rate)

    def overlap(
        self, is_reduce_scatter: Array, n_bytes: Array, pair: Array, ran: Array, us: Array
    ) -> tuple[Array, Array, Array]:
        """What calls that take ``us`` (n, k) do to what runs beside them; arguments as of :meth:`times_on_us`.

        Returns, each (n, k): the share by which compute slows, and the shares of the links within a node and of the
        network that a call takes. Compute loses the SMs that channels hold, by pair (public: matrix products beside
        NCCL's kernels run 30-40 % slower, pytorch#179937), and memory bandwidth by the bytes that really move.
        """
        t = self.truth
        func = np.asarray(is_reduce_scatter).astype(int)[:, None]
        many = self.fleet.n_nodes[:, None] > 1
        rows = np.arange(len(self.fleet))[:, None]
        pair = np.broadcast_to(pair, us.shape)
        n = self.fleet.n_ranks[:, None]
        size = np.asarray(n_bytes, float)[:, None]
        ring_gbs = t.bus_gbs[:, None] * n / np.maximum(n - 1, 1)
        rate = np.where(pair == _NVLS, t.nvls_gbs[rows, func], ring_gbs)
        quickest = size / (np.maximum(rate, 1e-3) * 1e3)
        use = np.minimum(quickest / us, 1.0)
        channels = np.asarray(ran, float)
        sms = self._loss_of_sms(t.sm_weight[rows, pair] * channels)
        memory = 1.5 * t.memory_cost[:, None] * TRAFFIC[func, pair] * use
        # A ring over many nodes fills its network ports; the links within the nodes carry as much and have more.
        near = np.where(many, 0.3 * use, use)
        far = np.where(many, use, 0.0)
        return sms + memory, near, far

    def _loss_of_sms(self, taken: Array) -> Array:
        """By which part compute slows that has ``taken`` (n, k) SMs less."""
        tiles = self.truth.tiles
        sms = self.fleet.n_sms[:, None]
        own = self.truth.sm_cost[:, None] / SM_COST
        linear = SM_COST * taken / sms
        if not tiles.any():
            return np.asarray(own * linear)
        each = staircase(tiles[:, None], sms[:, :, None], taken[:, :, None])
        steps = SEEN * each.mean(axis=2)
        known = np.asarray(tiles.any(axis=1))[:, None]
        return np.asarray(own * np.where(known, steps, linear))

    def _time_us(self, func: str, n_bytes: int, algo: str, proto: str, n_channels: int) -> float:
        """Microseconds of one collective alone, without noise. Raises ValueError for an unknown pair."""
        if func == "all_reduce":  # never tuned: a ring adds, and then copies
            config = algo, proto, n_channels
            halves = sum(self.time_us(half, n_bytes, *config) for half in TUNED_FUNCS)
            return halves - float(self.truth.launch_us[0])
        if func not in TUNED_FUNCS or (algo, proto) not in PAIRS:
            raise ValueError(f"no {algo}/{proto} for {func}")
        is_rs = np.array([func == "reduce_scatter"])
        size = np.array([n_bytes])
        pair = np.array([[PAIRS.index((algo, proto))]])
        us = self.times_us(is_rs, size, pair, np.array([[n_channels]]))
        return float(us[0, 0])

    def _beside(
        self, func: str, n_bytes: int, algo: str, proto: str, n_channels: int
    ) -> tuple[float, float, float]:
        """What one collective does to what runs beside it, see :meth:`overlap`; of an all_reduce, as its ring would."""
        took = self.time_us(func, n_bytes, algo, proto, n_channels)
        pair = np.array([[PAIRS.index((algo, proto))]])
        moved = n_bytes * 2 if func == "all_reduce" else n_bytes
        is_rs = np.array([func != "all_gather"])
        size = np.array([moved])
        ran = np.array([[n_channels]])
        slow, near, far = self.overlap(is_rs, size, pair, ran, np.array([[took]]))
        return float(slow[0, 0]), float(near[0, 0]), float(far[0, 0])

    def slowdown(self, n_channels: int) -> float:
        """Share by which compute slows that overlaps one collective on that many channels."""
        by_sms = self._loss_of_sms(np.array([[float(n_channels)]]))[0, 0]
        return float(by_sms + self.truth.memory_cost[0] * min(n_channels, 32) / 16)

    def noise(self, rng: np.random.Generator) -> float:
        """A factor on the time of one collective: log-normal, and now and then a straggler of up to 5 x."""
        sigma, tail = float(self.truth.noise[0]), float(self.truth.tail[0])
        factor = float(np.exp(rng.normal(0.0, sigma)))
        is_late = rng.random() < tail
        return factor * (1.1 + min(rng.pareto(1.5), 3.9)) if is_late else factor


def staircase(tiles: Array, sms: Array, taken: Array) -> Array:
    """By which part a matrix product of ``tiles`` tiles takes longer, of whose ``sms`` SMs ``taken`` are.

    A kernel of NCCL's holds the SM that a channel runs on (NVIDIA/nccl#689), and the tiles run in waves over the SMs
    that are left. 132 tiles beside 24 channels on an H100: two waves for one (NVIDIA's forum, 337991).
    """
    left = np.maximum(sms - taken, 1.0)
    waves = np.ceil(tiles / left)
    alone = np.maximum(np.ceil(tiles / sms), 1.0)
    return np.asarray(waves / alone - 1.0)


def soft_min(a: Array, b: Array, knee: Array) -> Array:
    """The smaller of two rates, rounded off where they meet: ``(a**-k + b**-k)**(-1/k)``."""
    low = np.minimum(a, b)
    high = np.maximum(a, b)
    return np.asarray(low * (1.0 + (low / high) ** knee) ** (-1.0 / knee))

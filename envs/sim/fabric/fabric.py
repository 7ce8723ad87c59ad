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
from numpy import arange, array, asarray, broadcast_to, ceil, exp, log2, maximum, minimum, ones_like, where

from ....traces.names import ALL_REDUCE, TUNABLE_FUNCS
from ....traces.records import PAIRS, PROTOS, TUNED_FUNCS
from ...nccl_model.channels import planned_channels
from ...nccl_model.clusters import Cluster, ClusterArrays
from ...nccl_model.prices import terms
from .params import CHUNK, PRESETS, SEEN, SIMPLE, SM_COST, TRAFFIC, FabricParams, nominal, spread, with_values

Array = np.ndarray[Any, Any]

_PAIR_PROTO = array([PROTOS.index(proto) for _, proto in PAIRS])
_NVLS = PAIRS.index(("nvls", "simple"))
_COLLNET = PAIRS.index(("collnet_direct", "simple"))
_PAT = PAIRS.index(("pat", "simple"))
_SUM = TUNABLE_FUNCS.index(ALL_REDUCE)


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
        self.fleet = fleet
        self.truth = truth
        # A running job asks for few calls, and for these again and again.
        self.time_us = lru_cache(100_000)(self._time_us)
        self.beside = lru_cache(100_000)(self._beside)

    @classmethod
    def of(cls, cluster: Cluster, seed: int | None = None) -> Fabric:
        """The fabric of one cluster: the documented one for ``seed`` 0 or None, else one drawn around it."""
        fleet = ClusterArrays.of([cluster])
        truth = nominal(fleet)
        name, _, _ = cluster.name.partition("[")
        kind, _, _ = name.rpartition("-")
        for key in (kind, name):
            known = PRESETS.get(key, {})
            truth = with_values(truth, known)
        if seed:
            rng = np.random.default_rng(seed)
            truth = spread(truth, rng)
        return cls(fleet, truth)

    @classmethod
    def random(
        cls, fleet: ClusterArrays, rng: np.random.Generator, width: float = 1.0, sigma: Array | float = 0.15
    ) -> Fabric:
        """One drawn fabric for each cluster of ``fleet``; see :func:`spread`."""
        documented = nominal(fleet)
        truth = spread(documented, rng, width, sigma)
        return cls(fleet, truth)

    def times_us(self, func: Array, n_bytes: Array, pair: Array, n_channels: Array) -> Array:
        """Microseconds of collectives, alone on the fabric and without noise, (n, k).

        ``func`` (into TUNABLE_FUNCS) and ``n_bytes`` are (n,), ``pair`` (into PAIRS) and ``n_channels`` broadcast to
        (n, k). Channels beyond what the size fills do nothing: NCCL's scheduler is applied first.
        """
        columns = self.fleet.take((slice(None), None))
        size = asarray(n_bytes, np.int64)
        size = size[:, None]
        row = asarray(func, int)[:, None]
        ran = planned_channels(columns, size, pair, n_channels, row)
        return self.times_on_us(func, n_bytes, pair, ran)

    def times_on_us(self, func: Array, n_bytes: Array, pair: Array, ran: Array) -> Array:
        """As :meth:`times_us`, on the channels that really ran. A ring's all_reduce adds and then copies."""
        func = asarray(func, int)
        is_sum = func == _SUM
        if not is_sum.any():
            return self._halves_us(func, n_bytes, pair, ran)
        first = self._halves_us(where(is_sum, 0, func), n_bytes, pair, ran)
        second = self._halves_us(ones_like(func), n_bytes, pair, ran)
        both = first + second - self.truth.launch_us[:, None]
        return where(is_sum[:, None], both, first)

    def _halves_us(self, func: Array, n_bytes: Array, pair: Array, ran: Array) -> Array:
        """Of all_gathers (0) and reduce_scatters (1)."""
        call = self._call(func, n_bytes, pair, ran)
        fleet = self.fleet
        truth = self.truth
        us = self._ring_us(call)
        if fleet.offers_nvls.any():
            nvls_us = self._nvls_us(call)
            is_nvls = call.pair == _NVLS
            us = where(is_nvls, nvls_us, us)
        if fleet.collnet.any():
            collnet_us = self._collnet_us(call)
            is_collnet = call.pair == _COLLNET
            us = where(is_collnet, collnet_us, us)
        if fleet.offers_pat.any():
            pat_us = self._pat_us(call)
            is_pat = call.pair == _PAT
            us = where(is_pat, pat_us, us)

        channels = maximum(call.channels, 1.0)
        octave = ceil(log2(channels))
        count_class = octave.astype(int)
        place = call.rows, call.func, call.pair, count_class
        effect = truth.effect[place]
        alone = truth.launch_us[:, None] + us
        factor = exp(effect)
        return asarray(alone * factor)

    def _call(self, func: Array, n_bytes: Array, pair: Array, ran: Array) -> _Asked:
        n = len(self.fleet)
        of_pair = np.shape(pair)
        of_channels = np.shape(ran)
        shape = np.broadcast_shapes((n, 1), of_pair, of_channels)
        pair = broadcast_to(pair, shape)
        channels = broadcast_to(ran, shape)
        size = asarray(n_bytes, float)
        columns = self.fleet.take((slice(None), None))
        rows = arange(n)
        return _Asked(
            rows=rows[:, None],
            func=func[:, None],
            size=size[:, None],
            pair=pair,
            proto=_PAIR_PROTO[pair],
            channels=channels.astype(float),
            columns=columns,
        )

    def _bus_gbs(self, call: _Asked) -> Array:
        """What the links carry beside so many channels."""
        t = self.truth
        columns = call.columns
        ports = maximum(columns.n_nics, columns.ring.channels)
        beyond = call.channels - ports
        beyond = maximum(beyond, 0.0)
        lost = t.congestion[:, None] * beyond
        left = maximum(1.0 - lost, 0.25)
        bus_gbs = t.bus_gbs[:, None]
        return asarray(bus_gbs * left)

    def _channel_gbs(self, call: _Asked) -> Array:
        """What the channels carry together."""
        place = call.rows, call.func, call.proto
        each = self.truth.channel_gbs[place]
        return asarray(call.channels * each)

    def _rate(self, call: _Asked, carried: Array) -> Array:
        """Bytes a us (n, k), where the links carry ``carried`` GB/s (n, k)."""
        sent = self._channel_gbs(call)
        knee = self.truth.knee[:, None]
        gbs = soft_min(sent, carried, knee)
        return asarray(gbs * 1e3)

    def _ring_us(self, call: _Asked) -> Array:
        t = self.truth
        c = call.channels
        proto = call.proto
        place = call.rows, call.func, proto
        n = call.columns.n_ranks
        nodes = call.columns.n_nodes

        efficiency = t.efficiency[place]
        carried = self._bus_gbs(call) * efficiency
        rate = self._rate(call, carried)

        hop_us = t.hop_us[call.rows, proto]
        net_us = t.net_us[call.rows, proto]
        within = (n - nodes) * hop_us
        between = (nodes - 1) * net_us

        shard = call.size / n
        piece = shard / c
        missing = 1.0 - piece / CHUNK
        short = maximum(missing, 0.0)
        short = short * (proto == SIMPLE)
        ramp = t.ramp_bytes[place]
        stall = t.stall_bytes[:, None] * short
        piece = piece + ramp
        piece = piece + stall
        all_pieces = (n - 1) * c * piece
        moving = all_pieces / rate
        return asarray(within + between + moving)

    def _nvls_us(self, call: _Asked) -> Array:
        t = self.truth
        c = call.channels
        most = t.nvls_gbs[call.rows, call.func]
        most = most * 1e3  # bytes a us
        half = t.nvls_channels[:, None]
        rate = most * c / (c + half)
        us = call.size / rate
        return asarray(t.nvls_us[:, None] + us)

    def _collnet_us(self, call: _Asked) -> Array:
        c = call.channels
        latencies, rates = terms(self.fleet)
        gbs = rates[:, _COLLNET, None]
        most = maximum(gbs, 1.0)
        most = most * 1e3  # bytes a us
        rate = most * c / (c + 2.0)
        us = call.size / rate
        latency = latencies[:, _COLLNET, None]
        return asarray(latency + us)

    def _pat_us(self, call: _Asked) -> Array:
        t = self.truth
        n = call.columns.n_ranks
        share = t.pat_share[:, None]
        carried = self._bus_gbs(call) * share
        rate = self._rate(call, carried)

        at_least_two = maximum(n, 2)
        rounds = ceil(log2(at_least_two))
        shard = call.size / n
        moved = (n - 1) * shard
        latencies = rounds * t.pat_us[:, None]
        moving = moved / rate
        ramp = t.ramp_bytes[call.rows, call.func, SIMPLE]
        all_ramps = rounds * ramp * call.channels
        ramping = all_ramps / rate
        return asarray(latencies + moving + ramping)

    def overlap(
        self, func: Array, n_bytes: Array, pair: Array, ran: Array, us: Array
    ) -> tuple[Array, Array, Array]:
        """What calls that take ``us`` (n, k) do to what runs beside them; arguments as of :meth:`times_on_us`.

        Returns, each (n, k): the share by which compute slows, and the shares of the links within a node and of the
        network that a call takes. Compute loses the SMs that channels hold, by pair (public: matrix products beside
        NCCL's kernels run 30-40 % slower, pytorch#179937), and memory bandwidth by the bytes that really move.
        """
        t = self.truth
        fleet = self.fleet
        rows = arange(len(fleet))
        row = rows[:, None]
        func = asarray(func, int)[:, None]
        times = where(func == _SUM, 2.0, 1.0)  # an all_reduce moves its bytes twice
        func = minimum(func, 1)
        pair = broadcast_to(pair, us.shape)

        n = fleet.n_ranks[:, None]
        others = maximum(n - 1, 1)
        bus_gbs = t.bus_gbs[:, None]
        ring_gbs = bus_gbs * n / others
        nvls_gbs = t.nvls_gbs[row, func]
        is_nvls = pair == _NVLS
        gbs = where(is_nvls, nvls_gbs, ring_gbs)
        gbs = maximum(gbs, 1e-3)
        size = asarray(n_bytes, float)
        quickest_us = times * size[:, None] / (gbs * 1e3)
        part = quickest_us / us
        use = minimum(part, 1.0)

        channels = asarray(ran, float)
        weight = t.sm_weight[row, pair]
        taken = weight * channels
        sms = self._loss_of_sms(taken)
        cost = 1.5 * t.memory_cost[:, None]
        traffic = TRAFFIC[func, pair]
        memory = cost * traffic * use
        # A ring over many nodes fills its network ports; the links within the nodes carry as much and have more.
        many = fleet.n_nodes[:, None] > 1
        near = where(many, 0.3 * use, use)
        far = where(many, use, 0.0)
        return sms + memory, near, far

    def _loss_of_sms(self, taken: Array) -> Array:
        """By which part compute slows that has ``taken`` (n, k) SMs less."""
        truth = self.truth
        tiles = truth.tiles
        sms = self.fleet.n_sms[:, None]
        own = truth.sm_cost[:, None] / SM_COST
        linear = SM_COST * taken / sms
        if not tiles.any():
            return asarray(own * linear)
        of_products = tiles[:, None]
        all_sms = sms[:, :, None]
        taken_sms = taken[:, :, None]
        each = staircase(of_products, all_sms, taken_sms)
        steps = SEEN * each.mean(axis=2)
        known = asarray(tiles.any(axis=1))
        loss = where(known[:, None], steps, linear)
        return asarray(own * loss)

    def _time_us(self, func: str, n_bytes: int, algo: str, proto: str, n_channels: int) -> float:
        """Microseconds of one collective alone, without noise. Raises ValueError for an unknown pair."""
        number, pair = _numbers(func, algo, proto)
        size = array([n_bytes])
        count = array([[n_channels]])
        us = self.times_us(number, size, pair, count)
        return float(us[0, 0])

    def _beside(
        self, func: str, n_bytes: int, algo: str, proto: str, n_channels: int
    ) -> tuple[float, float, float]:
        """What one collective does to what runs beside it, see :meth:`overlap`."""
        took = self.time_us(func, n_bytes, algo, proto, n_channels)
        number, pair = _numbers(func, algo, proto)
        size = array([n_bytes])
        ran = array([[n_channels]])
        us = array([[took]])
        slow, near, far = self.overlap(number, size, pair, ran, us)
        return float(slow[0, 0]), float(near[0, 0]), float(far[0, 0])

    def slowdown(self, n_channels: int) -> float:
        """Share by which compute slows that overlaps one collective on that many channels."""
        taken = array([[float(n_channels)]])
        by_sms = self._loss_of_sms(taken)
        cost = self.truth.memory_cost[0]
        by_memory = cost * min(n_channels, 32) / 16
        return float(by_sms[0, 0] + by_memory)

    def noise(self, rng: np.random.Generator) -> float:
        """A factor on the time of one collective: log-normal, and now and then a straggler of up to 5 x."""
        truth = self.truth
        sigma = float(truth.noise[0])
        tail = float(truth.tail[0])
        log = rng.normal(0.0, sigma)
        factor = float(exp(log))
        is_late = rng.random() < tail
        if not is_late:
            return factor
        drawn = rng.pareto(1.5)
        beyond = min(drawn, 3.9)
        return factor * (1.1 + beyond)


def _numbers(func: str, algo: str, proto: str) -> tuple[Array, Array]:
    """The indices into TUNABLE_FUNCS, (1,), and into PAIRS, (1, 1). Raises ValueError for what has no law here."""
    has_law = func in TUNED_FUNCS or (func == ALL_REDUCE and algo == "ring")
    if not has_law or (algo, proto) not in PAIRS:
        raise ValueError(f"no {algo}/{proto} for {func}")
    return array([TUNABLE_FUNCS.index(func)]), array([[PAIRS.index((algo, proto))]])


def staircase(tiles: Array, sms: Array, taken: Array) -> Array:
    """By which part a matrix product of ``tiles`` tiles takes longer, of whose ``sms`` SMs ``taken`` are.

    A kernel of NCCL's holds the SM that a channel runs on (NVIDIA/nccl#689), and the tiles run in waves over the SMs
    that are left. 132 tiles beside 24 channels on an H100: two waves for one (NVIDIA's forum, 337991).
    """
    left = maximum(sms - taken, 1.0)
    waves = ceil(tiles / left)
    alone = ceil(tiles / sms)
    alone = maximum(alone, 1.0)
    return asarray(waves / alone - 1.0)


def soft_min(a: Array, b: Array, knee: Array) -> Array:
    """The smaller of two rates, rounded off where they meet: ``(a**-k + b**-k)**(-1/k)``."""
    low = minimum(a, b)
    high = maximum(a, b)
    ratio = low / high
    rounded = (1.0 + ratio**knee) ** (-1.0 / knee)
    return asarray(low * rounded)

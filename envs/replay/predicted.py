"""What a trace did not measure, predicted: times of single collectives, and what each config of a slot should save."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd

from ...traces import spaces
from ...traces.files import Trace
from ...traces.queries.skew import durations
from ...traces.queries.slots import SlotProfile
from ...traces.records import PAIRS_OF, Slot
from ..nccl_model import clusters, cost_model
from ..nccl_model.clusters import Cluster, ClusterArrays
from ..sim.fabric.fabric import Fabric
from ..sim.fabric.params import nominal
from .measured import Measured
from .recordings import cluster_in, of_size

Array = np.ndarray[Any, Any]

#: Algorithm and protocol.
Pair = tuple[str, str]
#: Ranks and nodes of a communicator.
Size = tuple[int, int]
#: A size, what is called, and the pair that ran it.
Key = tuple[int, int, str, str, str]

#: What part of a slot's time the step is taken to wait for, before anything was measured ...
_PRIOR_WAIT = 0.6
#: ... and how firmly.
_PRIOR_WEIGHT = 0.02
#: Largest part of it that is believed: calls may hold up a step for a little longer than they take.
_MOST_WAIT = 1.2


@dataclass(frozen=True)
class Network:
    """What the communicators of one size run through, fitted to nothing yet."""

    cluster: Cluster
    fabric: Fabric

    @classmethod
    def of(cls, trace: Trace, n_ranks: int, n_nodes: int) -> Network:
        """That of ``n_ranks`` on ``n_nodes`` of the trace's machine."""
        cluster = cluster_of(trace, n_ranks, n_nodes)
        fleet = ClusterArrays.of([cluster])
        # Deliberately without a preset's own parameters: a replay must not know what the trace did not see.
        parameters = nominal(fleet)
        return cls(cluster, Fabric(fleet, parameters))

    def logs(self, func: str, pair: Pair, n_bytes: Array, n_channels: Array) -> Array:
        """log us of points, by the fabric."""
        us = []
        for size, count in zip(n_bytes, n_channels, strict=True):
            channels = max(int(count), 1)
            one_us = self.fabric.time_us(func, int(size), *pair, channels)
            us.append(one_us)
        return np.log(us)


class Times:
    """Times of single collectives: sampled ones of the trace, and a nominal fabric fitted to them, for each size of
    communicator by itself: 2 ranks of a node and 64 of eight nodes are as quick only by chance."""

    def __init__(self, trace: Trace, events: pd.DataFrame, profiles: list[SlotProfile]) -> None:
        sizes = {_size_of(profile.slot) for profile in profiles}
        self._networks = {size: Network.of(trace, *size) for size in sizes}
        self._models: dict[tuple[Size, str, Pair], Measured] = {}
        misses: dict[tuple[Size, str], list[float]] = defaultdict(list)
        columns = ["n_ranks", "n_nodes", "func", "algo", "proto"]
        for key, group in _sampled(events).groupby(columns):
            n_ranks, n_nodes, func, algo, proto = cast(Key, key)
            size = n_ranks, n_nodes
            pair = algo, proto
            if size not in self._networks:
                continue
            if pair not in PAIRS_OF.get(func, ()):
                continue
            network = self._networks[size]
            formula = functools.partial(network.logs, func, pair)
            n_bytes = group["n_bytes"].to_numpy()
            n_channels = group["n_channels"].to_numpy()
            us = group["us"].to_numpy()
            model = Measured(n_bytes, n_channels, us, formula)
            self._models[size, func, pair] = model
            largest = float(model.misses[-1])  # that of the largest message
            misses[size, func].append(largest)
        self._shift = dict[tuple[Size, str], float]()
        for of_func, values in misses.items():
            median = np.median(values)
            self._shift[of_func] = float(median)

    def network(self, slot: Slot) -> Network:
        """What a profile's calls run through."""
        size = _size_of(slot)
        return self._networks[size]

    def us(self, slot: Slot, pair: Pair, n_bytes: int, n_channels: int) -> float:
        """Microseconds of one call of a slot on the trace's machine."""
        func = slot.func
        size = _size_of(slot)
        model = self._models.get((size, func, pair))
        if model is not None:
            return model.predict_us(n_bytes, n_channels)
        one_size = np.array([n_bytes])
        one_count = np.array([n_channels])
        network = self._networks[size]
        base = network.logs(func, pair, one_size, one_count)[0]
        shift = self._shift.get((size, func), 0.0)
        log_us = base + shift
        return float(np.exp(log_us))


def _size_of(slot: Slot) -> Size:
    return slot.n_ranks, slot.n_nodes


def _sampled(events: pd.DataFrame) -> pd.DataFrame:
    """The events whose kernels were timed, with their ``us``; without the wait for the last rank where that is known,
    as in a slot's profile."""
    found = durations(events)
    timed = events.join(found)
    is_timed = timed["us"] > 0
    return timed[is_timed]


def cluster_of(trace: Trace, n_ranks: int, n_nodes: int) -> Cluster:
    """The cluster that the header names in the size of a communicator, else an H100-like one of that shape."""
    named = cluster_in(trace.header)
    if named is not None:
        with contextlib.suppress(ValueError):
            return of_size(named, n_ranks, n_nodes)
    nodes = max(n_nodes, 1)
    per_node = max(n_ranks // nodes, 1)
    kind = f"dgx-h100-{'1' if n_nodes == 1 else '2'}x8"
    if per_node == 1:
        kind = "one-gpu-per-node-8x1"
    fewest = 2 if n_nodes <= 1 else 1
    like = {"like": kind, "n_nodes": nodes, "gpus_per_node": max(per_node, fewest)}
    return clusters.from_mapping("trace", like)


def predict(
    times: Times, profile: SlotProfile, allowed: Array, known: dict[int, float], step_us: float
) -> Array:
    """Relative step time that every allowed config of a slot should save, (N_CONFIGS,)."""
    fingerprint = profile.fingerprint
    slot = profile.slot
    n_bytes = profile.n_bytes
    calls = profile.calls
    network = times.network(slot)
    slowdown = network.fabric.slowdown
    own_pair = profile.algo, profile.proto
    own_channels = max(int(fingerprint.own_channels[0]), 1)
    default_us = times.us(slot, own_pair, n_bytes, own_channels)
    default_slows_us = default_us * slowdown(own_channels)
    waits = np.zeros(spaces.N_CONFIGS)
    slows = np.zeros(spaces.N_CONFIGS)
    configs = np.flatnonzero(allowed)
    for config in configs.tolist():
        decision = spaces.decision_of(config, slot.func)
        pair = own_pair
        if decision.algo:
            pair = decision.algo, str(decision.proto)
        wanted = decision.n_channels
        ran = own_channels
        if wanted or pair != own_pair:
            ran, _ = cost_model.channels(network.cluster, slot.func, n_bytes, *pair, wanted)
        us = times.us(slot, pair, n_bytes, ran)
        saved_us = default_us - us
        waits[config] = calls * saved_us / step_us
        slows_us = min(us, default_us) * slowdown(ran)
        hidden_us = default_slows_us - slows_us
        slows[config] = calls * hidden_us / step_us
    wait = _waited(waits, known)
    hides = 1.0 - min(wait, 1.0)
    return wait * waits + hides * slows


def _waited(waits: Array, known: dict[int, float]) -> float:
    """The part of a slot's time that the step waits for, from what was measured (config -> saving); the rest only slows
    compute. ``waits`` (N_CONFIGS,): savings if it waited for all of it."""
    wait = _PRIOR_WAIT
    expected = [waits[config] for config in known]
    measured = list(known.values())
    x = np.array(expected)
    y = np.array(measured)
    if len(x):
        product = _PRIOR_WEIGHT * _PRIOR_WAIT + x @ y
        wait = product / (_PRIOR_WEIGHT + x @ x)
    believed = np.clip(wait, 0.0, _MOST_WAIT)
    return float(believed)

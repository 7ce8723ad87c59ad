"""What a trace did not measure, predicted: times of single collectives, and what each config of a slot should save."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import numpy as np
import pandas as pd

from ...traces import spaces
from ...traces.files import Trace
from ...traces.queries.slots import SlotProfile
from ...traces.records import PAIRS
from ..nccl_model import clusters, cost_model
from ..nccl_model.clusters import Cluster, ClusterArrays
from ..sim.fabric.fabric import Fabric
from ..sim.fabric.params import nominal
from .measured import Measured

Array = np.ndarray[Any, Any]

#: Algorithm and protocol.
Pair = tuple[str, str]

#: What part of a slot's time the step is taken to wait for, before anything was measured ...
_PRIOR_WAIT = 0.6
#: ... and how firmly.
_PRIOR_WEIGHT = 0.02
#: Largest part of it that is believed: calls may hold up a step for a little longer than they take.
_MOST_WAIT = 1.2


class Times:
    """Times of single collectives: sampled ones of the trace, and a nominal fabric fitted to them."""

    def __init__(self, trace: Trace, events: pd.DataFrame, profiles: list[SlotProfile]) -> None:
        first = profiles[0].fingerprint
        n_ranks = int(first.n_ranks[0])
        n_nodes = int(first.n_nodes[0])
        cluster = cluster_of(trace, n_ranks, n_nodes)
        self.cluster = cluster
        fleet = ClusterArrays.of([cluster])
        # Deliberately without a preset's own parameters: a replay must not know what the trace did not see.
        parameters = nominal(fleet)
        self.fabric = Fabric(fleet, parameters)
        self._models: dict[tuple[str, Pair], Measured] = {}
        misses: dict[str, list[float]] = defaultdict(list)
        for key, group in _sampled(events).groupby(["func", "algo", "proto"]):
            func, algo, proto = map(str, key)
            pair = algo, proto
            if pair not in PAIRS:
                continue
            formula = functools.partial(self._formula, func, pair)
            n_bytes = group["n_bytes"].to_numpy()
            n_channels = group["n_channels"].to_numpy()
            us = group["us"].to_numpy()
            model = Measured(n_bytes, n_channels, us, formula)
            self._models[func, pair] = model
            largest = model.misses[-1]  # that of the largest message
            misses[func].append(float(largest))
        self._shift = dict[str, float]()
        for func, values in misses.items():
            self._shift[func] = float(np.median(values))

    def _formula(self, func: str, pair: Pair, n_bytes: Array, n_channels: Array) -> Array:
        """log us of points, by the fabric."""
        us = []
        for size, count in zip(n_bytes, n_channels, strict=True):
            channels = max(int(count), 1)
            one_us = self.fabric.time_us(func, int(size), *pair, channels)
            us.append(one_us)
        return np.log(us)

    def us(self, func: str, pair: Pair, n_bytes: int, n_channels: int) -> float:
        """Microseconds of one call on the trace's machine."""
        key = func, pair
        model = self._models.get(key)
        if model is not None:
            return model.predict_us(n_bytes, n_channels)
        size = np.array([n_bytes])
        count = np.array([n_channels])
        base = self._formula(func, pair, size, count)[0]
        shift = self._shift.get(func, 0.0)
        return float(np.exp(base + shift))


def _sampled(events: pd.DataFrame) -> pd.DataFrame:
    """The events whose kernels were timed, with their ``us``."""
    timed = events.dropna(subset=["start_ns", "end_ns"])
    took_ns = timed["end_ns"] - timed["start_ns"]
    us = took_ns.astype(float) / 1e3
    timed = timed.assign(us=us)
    return timed[us > 0]


def cluster_of(trace: Trace, n_ranks: int, n_nodes: int) -> Cluster:
    """The header's preset where it names one, else an H100-like cluster of that shape."""
    try:
        return clusters.cluster(str(trace.header["cluster"]))
    except (KeyError, ValueError):
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
    func = profile.slot.func
    n_bytes = profile.n_bytes
    calls = profile.calls
    cluster = times.cluster
    slowdown = times.fabric.slowdown
    own_pair = PAIRS[int(fingerprint.own_pair[0])]
    own_channels = max(int(fingerprint.own_channels[0]), 1)
    default_us = times.us(func, own_pair, n_bytes, own_channels)
    default_slows_us = default_us * slowdown(own_channels)
    waits = np.zeros(spaces.N_CONFIGS)
    slows = np.zeros(spaces.N_CONFIGS)
    configs = np.flatnonzero(allowed)
    for config in configs.tolist():
        decision = spaces.decision_of(config)
        pair = own_pair
        if decision.algo:
            pair = decision.algo, str(decision.proto)
        wanted = decision.n_channels
        ran = own_channels
        if wanted or pair != own_pair:
            ran, _ = cost_model.channels(cluster, func, n_bytes, *pair, wanted)
        us = times.us(func, pair, n_bytes, ran)
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

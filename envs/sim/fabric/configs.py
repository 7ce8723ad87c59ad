"""What calls of slots are under every config: the channels that run, and how their time grows with their size."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....traces.records import CHANNELS
from ....traces.spaces import N_CONFIGS, N_PAIRS, pair_of
from ...nccl_model.channels import heuristic_channels, planned_channels
from .fabric import Fabric

Array = np.ndarray[Any, Any]


def whole_words(n_bytes: Array, n_ranks: Array) -> Array:
    """Sizes in bytes whose shards are whole 16-byte words: ``n_bytes`` (slots,), or just above."""
    unit = n_ranks * 16
    words = -(-n_bytes // unit)
    at_least_one = np.maximum(words, 1)
    whole = at_least_one * unit
    return np.asarray(whole)


def pairs_of_configs(own: Array) -> Array:
    """Indices into PAIRS of what runs, (slots, N_CONFIGS), where ``own`` (slots,) is NCCL's own choice."""
    configs = np.arange(N_CONFIGS)
    own_pair = own[:, None]
    return pair_of(configs, own_pair)


def channels_of_configs(fabric: Fabric, func: Array, n_bytes: Array, pair: Array) -> Array:
    """Channels that run under every config of slots of ``func`` (into TUNABLE_FUNCS) and ``n_bytes`` (slots,), on every
    ``pair``: (slots, N_CONFIGS)."""
    fleet = fabric.fleet
    columns = fleet.take((slice(None), None))
    size = n_bytes[:, None]
    asked = np.tile(CHANNELS, N_PAIRS)
    is_default = asked == 0
    row = func[:, None]
    limit, _ = heuristic_channels(columns, size, pair, row)
    only_lowers = columns.release >= 23100  # from 2.31 on
    lowered = np.minimum(asked, limit)
    allowed = np.where(only_lowers, lowered, asked)
    wanted = np.where(is_default, limit, allowed)
    return planned_channels(columns, size, pair, wanted, row)


def growth_of_configs(
    fabric: Fabric,
    func: Array,  # (slots,) into TUNABLE_FUNCS
    n_bytes: Array,  # (slots,)
    pair: Array,  # (slots, N_CONFIGS) indices into PAIRS
    ran: Array,  # (slots, N_CONFIGS) channels
) -> Array:
    """Log of the time of every config's call over the log of its size, between half and twice the size, (slots,
    N_CONFIGS)."""
    half = n_bytes * 0.5
    twice = n_bytes * 2.0
    half_us = fabric.times_on_us(func, half, pair, ran)
    twice_us = fabric.times_on_us(func, twice, pair, ran)
    ratio = twice_us / half_us
    octaves = np.log2(ratio)
    return np.asarray(octaves / 2)

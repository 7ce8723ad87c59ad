"""Configs that are one and the same: folded once, in the mask, for every policy, live as in simulation.

An *arm* is what really runs: an (algo, proto) pair and a number of channels. Many configs name the same arm: AUTO with
k channels is NCCL's own pair with k, AUTO is that pair with NCCL's own count, and NCCL gives a message no more channels
than it can fill. :func:`distinct` leaves one config an arm, AUTO always.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy import arange, asarray, broadcast_to, concatenate, maximum, minimum, repeat, tile, where

from ...traces.fingerprint import Fingerprint
from ...traces.records import CHANNELS, PAIRS, PROTOS
from ...traces.spaces import N_CHANNELS, N_CONFIGS, N_PAIRS, action_mask
from .channels import planned_channels

Array = np.ndarray[Any, Any]
_NVLS = PAIRS.index(("nvls", "simple"))
_COLLNET = PAIRS.index(("collnet_direct", "simple"))
_PROTO = np.array([PROTOS.index(proto) for _, proto in PAIRS])
#: The release whose rule holds where none is known: cells of 32 KiB, as from 2.29 on.
RELEASE = 23007


def channels_of(fingerprint: Fingerprint, release: Array | int | None = None) -> Array:
    """Channels that would run under every config, (n, N_CONFIGS); 0 where it cannot be known beforehand.

    That is NCCL's own count of a small message on a pair that it did not choose itself. ``release`` (n,) is NCCL's,
    22809 for 2.28.9; up to 2.28 it cuts messages finer.
    """
    n = len(fingerprint.n_bytes)
    column = (slice(None), None, None)
    release = broadcast_to(RELEASE if release is None else release, n).astype(int)
    own = asarray(fingerprint.own_pair, int)
    own_count = asarray(fingerprint.own_channels, int)
    fleet = _fleet(fingerprint, release, own == _NVLS, own_count)
    n_bytes = asarray(fingerprint.n_bytes, np.int64)[column]
    pair = _pairs(own)[:, :, None]
    shape = n, N_PAIRS, N_CHANNELS
    asked = broadcast_to(np.array(CHANNELS), shape)
    # From 2.31 on a tuner can only lower NCCL's count, which is known of its own pair.
    mine = pair == own[column]
    only_lowers = mine & (release >= 23100)[column]
    lowered = minimum(asked, own_count[column])
    limit = where(only_lowers, lowered, asked)
    ran = planned_channels(fleet, n_bytes, broadcast_to(pair, shape), limit)  # type: ignore[arg-type]
    # Large messages get all that the communicator has (2.30.7 src/enqueue.cc, topoGetAlgoInfo), but for NVLS.
    of_ll = where(_PROTO[pair] == 0, 8 * fleet.n_ranks, 8)
    a_thread = where(_PROTO[pair] == 2, 64, of_ll)
    is_large = n_bytes >= 640 * a_thread * fleet.comm_channels
    everything = planned_channels(fleet, n_bytes, pair, fleet.comm_channels)  # type: ignore[arg-type]
    other = where(is_large & (pair != _NVLS), everything, 0)
    uncounted = where(mine, own_count[column], other)
    return asarray(where(asked == 0, uncounted, ran).reshape(n, N_CONFIGS))


def _pairs(own: Array) -> Array:
    """The pair that runs under AUTO and under each of PAIRS, (n, N_PAIRS); ``own`` (n,): AUTO's."""
    every = tile(arange(len(PAIRS)), (len(own), 1))
    return concatenate([own[:, None], every], axis=1)


def _fleet(fingerprint: Fingerprint, release: Array, own_is_nvls: Array, own_count: Array) -> SimpleNamespace:
    """What ``channels.planned_channels`` reads of a cluster, as far as a fingerprint tells it."""
    most = asarray(fingerprint.comm_channels, int)
    # What a switch's own channels are is only seen where NCCL chose them.
    nvls = where(own_is_nvls, maximum(most, own_count), 64)
    return SimpleNamespace(
        n_ranks=asarray(fingerprint.n_ranks, int)[:, None, None],
        release=release[:, None, None],
        comm_channels=most[:, None, None],
        nvls_channels=nvls[:, None, None],
    )


def distinct(fingerprint: Fingerprint, release: Array | int | None = None) -> Array:
    """What may be chosen, one config an arm, (n, N_CONFIGS) bool: offered pairs, counts up to the communicator's.

    Of the configs of one arm AUTO stays, else the one with the fewest channels asked for.
    """
    n = len(fingerprint.n_bytes)
    mask = action_mask(fingerprint)
    offered = repeat(mask[:, :N_PAIRS], N_CHANNELS, axis=1)
    counts = tile(mask[:, N_PAIRS:], (1, N_PAIRS))
    pair = _pairs(asarray(fingerprint.own_pair, int))
    # Where NCCL does not clip a count to what the algorithm has, the plugin sets none (tuner.c): those are no arms.
    over_nodes = asarray(fingerprint.n_nodes).reshape(n, 1) > 1
    unclipped = (pair == _COLLNET) | ((pair == _NVLS) & over_nodes)
    has_count = tile(CHANNELS, N_PAIRS) > 0
    fixed = repeat(unclipped, N_CHANNELS, axis=1) & has_count
    allowed = offered & counts & ~fixed
    arm = repeat(pair, N_CHANNELS, axis=1) * 256
    arm = arm + channels_of(fingerprint, release)
    order = arange(N_CONFIGS)
    # AUTO with a count is a name for a pair: the pair goes by its own.
    is_name = (order > 0) & (order < N_CHANNELS)
    order = where(is_name, order + N_CONFIGS, order)
    none = 3 * N_CONFIGS
    rank = where(allowed, order[None], none)
    first = np.full((n, N_CONFIGS), none)
    for config in range(N_CONFIGS):
        same = arm == arm[:, config : config + 1]
        first[:, config] = where(same, rank, none).min(axis=1)
    keep = allowed & (rank == first)
    keep[:, 0] = True
    return keep

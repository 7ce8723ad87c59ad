"""Configs that are one and the same: folded once, in the mask, for every policy, live as in simulation.

An *arm* is what really runs: an (algo, proto) pair and channels. AUTO is NCCL's own pair and count; NCCL gives a
message no more channels than it can fill. :func:`distinct` leaves one config an arm, AUTO always.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy import arange, asarray, broadcast_to, concatenate, maximum, minimum, repeat, tile, where

from ...traces.fingerprint import Fingerprint
from ...traces.records import CHANNELS, PAIRS
from ...traces.spaces import N_CHANNELS, N_CONFIGS, N_PAIRS, action_mask
from .channels import NVLS, PAIR_ALGOS, PAIR_PROTOS, RING, planned_channels

Array = np.ndarray[Any, Any]
_COLLNET = PAIRS.index(("collnet_direct", "simple"))
#: The release whose rule holds where none is known: cells of 32 KiB, as from 2.29 on.
RELEASE = 23007


def channels_of(fingerprint: Fingerprint, release: Array | int | None = None) -> Array:
    """Channels that would run under every config, (n, N_CONFIGS); 0 where it cannot be known beforehand.

    That is NCCL's own count of a small message on a pair that it did not choose itself. ``release`` (n,) is NCCL's,
    22809 for 2.28.9; up to 2.28 it cuts messages finer.
    """
    n = len(fingerprint.n_bytes)
    column = (slice(None), None, None)
    if release is None:
        release = RELEASE
    release = broadcast_to(release, n).astype(int)
    own = asarray(fingerprint.own_pair, int)
    own_count = asarray(fingerprint.own_channels, int)
    func = asarray(fingerprint.func, int)
    own_is_nvls = PAIR_ALGOS[func, own] == NVLS
    fleet = _fleet(fingerprint, release, own_is_nvls, own_count)
    n_bytes = asarray(fingerprint.n_bytes, np.int64)
    n_bytes = n_bytes[column]
    pair = _pairs(own)[:, :, None]
    shape = n, N_PAIRS, N_CHANNELS
    asked = broadcast_to(CHANNELS, shape)
    # From 2.31 on a tuner can only lower NCCL's count, which is known of its own pair.
    mine = pair == own[column]
    own_count = own_count[column]
    is_late = release >= 23100
    only_lowers = mine & is_late[column]
    lowered = minimum(asked, own_count)
    limit = where(only_lowers, lowered, asked)
    pairs = broadcast_to(pair, shape)
    row = func[column]
    ran = planned_channels(fleet, n_bytes, pairs, limit, row)
    # Large messages get all that the communicator has (2.30.7 src/enqueue.cc, topoGetAlgoInfo), but for NVLS.
    most = fleet.comm_channels
    proto = PAIR_PROTOS[row, pair]
    algo = PAIR_ALGOS[row, pair]
    of_ll = where((proto == 0) & (algo == RING), 8 * fleet.n_ranks, 8)
    a_thread = where(proto == 2, 64, of_ll)
    is_large = n_bytes >= 640 * a_thread * most
    everything = planned_channels(fleet, n_bytes, pair, most, row)
    gets_all = is_large & (algo != NVLS)
    other = where(gets_all, everything, 0)
    uncounted = where(mine, own_count, other)
    counts = where(asked == 0, uncounted, ran)
    return asarray(counts.reshape(n, N_CONFIGS))


def _pairs(own: Array) -> Array:
    """The pair that runs under AUTO and under each of PAIRS, (n, N_PAIRS); ``own`` (n,): AUTO's."""
    numbers = arange(len(PAIRS))
    every = tile(numbers, (len(own), 1))
    return concatenate([own[:, None], every], axis=1)


def _fleet(fingerprint: Fingerprint, release: Array, own_is_nvls: Array, own_count: Array) -> Any:
    """What ``channels.planned_channels`` reads of a cluster, as far as a fingerprint tells it."""
    most = asarray(fingerprint.comm_channels, int)
    # What a switch's own channels are is only seen where NCCL chose them.
    seen = maximum(most, own_count)
    nvls = where(own_is_nvls, seen, 64)
    n_ranks = asarray(fingerprint.n_ranks, int)
    return SimpleNamespace(
        n_ranks=n_ranks[:, None, None],
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
    pairs = mask[:, :N_PAIRS]
    counts = mask[:, N_PAIRS:]
    offered = repeat(pairs, N_CHANNELS, axis=1)
    counts = tile(counts, (1, N_PAIRS))
    own = asarray(fingerprint.own_pair, int)
    pair = _pairs(own)
    # Where NCCL does not clip a count to what the algorithm has, the plugin sets none (tuner.c): those are no arms.
    n_nodes = asarray(fingerprint.n_nodes)
    over_nodes = n_nodes.reshape(n, 1) > 1
    func = asarray(fingerprint.func, int)
    is_nvls = PAIR_ALGOS[func[:, None], pair] == NVLS
    # An observation has no place for counts of CollNet (envs/search/observation.py), so an all_reduce has none there.
    unclipped = (pair == _COLLNET) | (is_nvls & over_nodes)
    has_count = tile(CHANNELS, N_PAIRS) > 0
    fixed = repeat(unclipped, N_CHANNELS, axis=1)
    fixed = fixed & has_count
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
        ranks = where(same, rank, none)
        first[:, config] = ranks.min(axis=1)
    keep = allowed & (rank == first)
    keep[:, 0] = True
    return keep

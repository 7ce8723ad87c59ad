"""Configs that are one and the same: folded once, in the mask, for every policy, live as in simulation.

An *arm* is what really runs: an (algo, proto) pair and a number of channels. Many configs name the same arm: AUTO with
k channels is NCCL's own pair with k, AUTO is that pair with NCCL's own count, and NCCL gives a message no more channels
than it can fill. :func:`distinct` leaves one config an arm, AUTO always.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from ...traces.fingerprint import Fingerprint
from ...traces.records import CHANNELS, PAIRS, PROTOS
from ...traces.spaces import N_CHANNELS, N_CONFIGS, N_PAIRS, action_mask
from .channels import planned_channels

Array = np.ndarray[Any, Any]
_NVLS, _COLLNET = PAIRS.index(("nvls", "simple")), PAIRS.index(("collnet_direct", "simple"))
_PROTO = np.array([PROTOS.index(proto) for _, proto in PAIRS])
#: The release whose rule holds where none is known: cells of 32 KiB, as from 2.29 on.
RELEASE = 23007


def channels_of(fingerprint: Fingerprint, release: Array | int | None = None) -> Array:
    """Channels that would run under every config, (n, N_CONFIGS); 0 where it cannot be known beforehand.

    That is NCCL's own count of a small message on a pair that it did not choose itself. ``release`` (n,) is NCCL's,
    22809 for 2.28.9; up to 2.28 it cuts messages finer.
    """
    n = len(fingerprint.n_bytes)
    release = np.broadcast_to(RELEASE if release is None else release, n).astype(int)
    own, own_count = np.asarray(fingerprint.own_pair, int), np.asarray(fingerprint.own_channels, int)
    most = np.asarray(fingerprint.comm_channels, int)
    pair = np.concatenate([own[:, None], np.tile(np.arange(len(PAIRS)), (n, 1))], axis=1)[:, :, None]
    asked = np.broadcast_to(np.array(CHANNELS), (n, N_PAIRS, N_CHANNELS))
    # What a switch's own channels are is only seen where NCCL chose them.
    nvls = np.where(own == _NVLS, np.maximum(most, own_count), 64)
    column = {"n_ranks": np.asarray(fingerprint.n_ranks, int), "release": release}
    column |= {"comm_channels": most, "nvls_channels": nvls}
    fleet = SimpleNamespace(**{key: value[:, None, None] for key, value in column.items()})
    n_bytes = np.asarray(fingerprint.n_bytes, np.int64)[:, None, None]
    # From 2.31 on a tuner can only lower NCCL's count, which is known of its own pair.
    mine = pair == own[:, None, None]
    limit = np.where(
        mine & (release >= 23100)[:, None, None], np.minimum(asked, own_count[:, None, None]), asked
    )
    ran = planned_channels(fleet, n_bytes, np.broadcast_to(pair, asked.shape), limit)  # type: ignore[arg-type]
    # Large messages get all that the communicator has (2.30.7 src/enqueue.cc, topoGetAlgoInfo), but for NVLS.
    a_thread = np.where(_PROTO[pair] == 2, 64, np.where(_PROTO[pair] == 0, 8 * fleet.n_ranks, 8))
    full = (n_bytes >= 640 * a_thread * fleet.comm_channels) & (pair != _NVLS)
    everything = planned_channels(fleet, n_bytes, pair, fleet.comm_channels)  # type: ignore[arg-type]
    other = np.where(full, everything, 0)
    ran = np.where(asked == 0, np.where(mine, own_count[:, None, None], other), ran)
    return np.asarray(ran.reshape(n, N_CONFIGS))


def distinct(fingerprint: Fingerprint, release: Array | int | None = None) -> Array:
    """What may be chosen, one config an arm, (n, N_CONFIGS) bool: offered pairs, counts up to the communicator's.

    Of the configs of one arm AUTO stays, else the one with the fewest channels asked for.
    """
    n = len(fingerprint.n_bytes)
    mask = action_mask(fingerprint)
    offered = np.repeat(mask[:, :N_PAIRS], N_CHANNELS, axis=1)
    counts = np.tile(mask[:, N_PAIRS:], (1, N_PAIRS))
    pair = np.concatenate(
        [np.asarray(fingerprint.own_pair, int)[:, None], np.tile(np.arange(len(PAIRS)), (n, 1))], 1
    )
    # Where NCCL does not clip a count to what the algorithm has, the plugin sets none (tuner.c): those are no arms.
    over_nodes = np.asarray(fingerprint.n_nodes).reshape(n, 1) > 1
    fixed = (pair == _COLLNET) | ((pair == _NVLS) & over_nodes)
    fixed = np.repeat(fixed, N_CHANNELS, axis=1) & (np.tile(CHANNELS, N_PAIRS) > 0)
    allowed = offered & counts & ~fixed
    arm = np.repeat(pair, N_CHANNELS, axis=1) * 256 + channels_of(fingerprint, release)
    order = np.arange(N_CONFIGS)
    # AUTO with a count is a name for a pair: the pair goes by its own.
    order = np.where((order > 0) & (order < N_CHANNELS), order + N_CONFIGS, order)
    rank = np.where(allowed, order[None], 3 * N_CONFIGS)
    first = np.full((n, N_CONFIGS), 3 * N_CONFIGS)
    for config in range(N_CONFIGS):
        same = arm == arm[:, config : config + 1]
        first[:, config] = np.where(same, rank, 3 * N_CONFIGS).min(axis=1)
    keep = allowed & (rank == first)
    keep[:, 0] = True
    return keep

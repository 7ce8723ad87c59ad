"""What may be decided about one slot: an action ``[pair, channels]``, its config's number, its decision.

Functions work on a batch of ``n`` slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .fingerprint import Fingerprint
from .records import CHANNELS, PAIRS, Decision

Array = np.ndarray[Any, Any]

N_PAIRS = 1 + len(PAIRS)  # index 0: AUTO, NCCL picks the pair
N_CHANNELS = len(CHANNELS)  # index 0: NCCL picks the count
N_CONFIGS = N_PAIRS * N_CHANNELS
N_MASK = N_PAIRS + N_CHANNELS

#: Savings are divided by the slot's share of the step and clipped to this range.
SAVING_RANGE = (-3.0, 1.0)


def decision_of(config: int) -> Decision:
    """What a config's number stands for."""
    pair, channels = divmod(int(config), N_CHANNELS)
    algo, proto = PAIRS[pair - 1] if pair else (None, None)
    return Decision(algo, proto, CHANNELS[channels])


def config_of(decision: Decision) -> int:
    """Inverse of :func:`decision_of`. Raises ValueError for a decision outside the action space."""
    pair = 0 if decision.algo is None else 1 + PAIRS.index((decision.algo, str(decision.proto)))
    return pair * N_CHANNELS + CHANNELS.index(decision.n_channels)


def config_index(actions: Array) -> Array:
    """Actions ``[pair, channels, ...]`` -> index of the config in ``0 .. N_CONFIGS - 1``, shape (...)."""
    return np.asarray(actions)[..., 0] * N_CHANNELS + np.asarray(actions)[..., 1]


def pair_of(configs: Array, own: Array) -> Array:
    """Indices into PAIRS of what configs run, ``own`` where they leave the pair to NCCL; the shapes broadcast."""
    return np.where(configs < N_CHANNELS, own, configs // N_CHANNELS - 1)


def action_mask(fingerprint: Fingerprint) -> Array:
    """What may be chosen, (n, N_MASK) bool: AUTO and the offered pairs; channel counts up to the communicator's."""
    offered, most = fingerprint.offered, np.reshape(fingerprint.comm_channels, (-1, 1))
    return np.concatenate([np.ones((len(offered), 1), bool), offered, np.array(CHANNELS) <= most], axis=1)


def scale_saving(saving: Array, share: Array | float) -> Array:
    """Relative step time saved -> units of the slot's share of the step, clipped to SAVING_RANGE."""
    return np.clip(np.asarray(saving) / np.maximum(share, 0.01), *SAVING_RANGE)


def config_mask(mask: Array) -> Array:
    """Masks (n, N_MASK) as one flag per config, (n, N_CONFIGS) bool."""
    mask = np.asarray(mask) > 0.5
    return np.asarray((mask[:, :N_PAIRS, None] & mask[:, None, N_PAIRS:]).reshape(len(mask), N_CONFIGS))

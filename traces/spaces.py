"""What may be decided about one slot: a config's number, and the decision that it stands for.

Functions work on a batch of ``n`` slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .fingerprint import Fingerprint
from .records import CHANNELS, PAIRS, PAIRS_OF, TUNED_FUNCS, Decision

Array = np.ndarray[Any, Any]

N_PAIRS = 1 + len(PAIRS)  # index 0: AUTO, NCCL picks the pair
N_CHANNELS = len(CHANNELS)  # index 0: NCCL picks the count
N_CONFIGS = N_PAIRS * N_CHANNELS
N_MASK = N_PAIRS + N_CHANNELS

#: Savings are divided by the slot's share of the step and clipped to this range.
SAVING_RANGE = (-3.0, 1.0)


def decision_of(config: int, func: str = TUNED_FUNCS[0]) -> Decision:
    """What a config's number stands for in a slot of ``func``."""
    pair, channels = divmod(int(config), N_CHANNELS)
    n_channels = CHANNELS[channels]
    if pair == 0:
        return Decision(None, None, n_channels)
    algo, proto = PAIRS_OF[func][pair - 1]
    return Decision(algo, proto, n_channels)


def config_of(decision: Decision, func: str = TUNED_FUNCS[0]) -> int:
    """Inverse of :func:`decision_of`. Raises ValueError for a decision outside the action space."""
    pair = 0
    if decision.algo is not None:
        wanted = (decision.algo, str(decision.proto))
        pair = 1 + PAIRS_OF[func].index(wanted)
    channels = CHANNELS.index(decision.n_channels)
    return pair * N_CHANNELS + channels


def pair_of(configs: Array, own: Array) -> Array:
    """Indices into PAIRS of what configs run, ``own`` where they leave the pair to NCCL; the shapes broadcast."""
    chosen = configs // N_CHANNELS - 1
    is_left = configs < N_CHANNELS
    return np.where(is_left, own, chosen)


def action_mask(fingerprint: Fingerprint) -> Array:
    """What may be chosen, (n, N_MASK) bool: AUTO and the offered pairs; channel counts up to the communicator's."""
    offered = fingerprint.offered
    auto = np.ones((len(offered), 1), bool)
    most = np.reshape(fingerprint.comm_channels, (-1, 1))
    channels = np.array(CHANNELS) <= most
    return np.concatenate([auto, offered, channels], axis=1)


def scale_saving(saving: Array, share: Array | float) -> Array:
    """Relative step time saved -> units of the slot's share of the step, clipped to SAVING_RANGE."""
    least_share = np.maximum(share, 0.01)
    scaled = np.asarray(saving) / least_share
    return np.clip(scaled, *SAVING_RANGE)


def config_mask(mask: Array) -> Array:
    """Masks (n, N_MASK) as one flag per config, (n, N_CONFIGS) bool."""
    mask = np.asarray(mask) > 0.5
    pairs = mask[:, :N_PAIRS, None]
    channels = mask[:, None, N_PAIRS:]
    both = pairs & channels
    return np.asarray(both.reshape(len(mask), N_CONFIGS))

"""Action, observation and reward: the same for Sim, Replay and Live.

One env step is one *window*: the agent picks a decision for one slot, the job runs some steps, the step time is
compared with the job's own default. One episode is the search on one slot; it starts with AUTO known (saving 0).

Everything here works on a batch of ``n`` episodes; the live environment passes n = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from ..traces.fingerprint import N_FEATURES, Fingerprint
from ..traces.records import CHANNELS, PAIRS, Decision

Array = np.ndarray[Any, Any]

N_PAIRS = 1 + len(PAIRS)  # index 0: AUTO, NCCL picks the pair
N_CHANNELS = len(CHANNELS)  # index 0: NCCL picks the count
N_CONFIGS = N_PAIRS * N_CHANNELS
N_MASK = N_PAIRS + N_CHANNELS
N_OUTCOME = N_PAIRS + N_CHANNELS + 4
N_OBSERVATION = N_FEATURES + N_OUTCOME + 2 * N_CONFIGS + N_MASK

#: Trials per slot after which an episode is truncated.
HORIZON = 16
#: Price of a trial: weight of the saving of the config just run beside that of the best one so far.
TRIAL_PRICE = 0.05
#: Savings are divided by the slot's share of the step and clipped to this range.
SAVING_RANGE = (-3.0, 1.0)
#: Once a step takes GIVE_UP times the default's, the window runs on without the config. By then a part CANARY of its
#: steps is gone: of 20, the one that was measured, and three until all ranks are back.
GIVE_UP, CANARY = 1.5, 0.2


def action_space() -> gym.spaces.MultiDiscrete:
    """``[pair, channels]``: indices into AUTO + PAIRS and into CHANNELS."""
    return gym.spaces.MultiDiscrete([N_PAIRS, N_CHANNELS])


def observation_space() -> gym.spaces.Box:
    """Fingerprint, last outcome, statistics per config, and in the last ``N_MASK`` entries the action mask (0 / 1)."""
    return gym.spaces.Box(-4.0, 4.0, (N_OBSERVATION,), np.float32)


def decision_of(action: Any) -> Decision:
    """Action ``[pair, channels]`` -> Decision."""
    pair, channels = int(action[0]), int(action[1])
    if pair == 0:
        return Decision(None, None, CHANNELS[channels])
    algo, proto = PAIRS[pair - 1]
    return Decision(algo, proto, CHANNELS[channels])


def action_of(decision: Decision) -> Array:
    """Inverse of :func:`decision_of`. Raises ValueError for a decision outside the action space."""
    pair = 0 if decision.algo is None else 1 + PAIRS.index((decision.algo, str(decision.proto)))
    return np.array([pair, CHANNELS.index(decision.n_channels)], np.int64)


def config_index(actions: Array) -> Array:
    """Actions ``(n, 2)`` -> index of the config in ``0 .. N_CONFIGS - 1``, shape (n,)."""
    return np.asarray(actions)[:, 0] * N_CHANNELS + np.asarray(actions)[:, 1]


def action_mask(fingerprint: Fingerprint) -> Array:
    """What may be chosen, (n, N_MASK) bool: AUTO and the offered pairs; channel counts up to the communicator's."""
    offered = fingerprint.offered
    n = len(offered)
    most = np.asarray(fingerprint.comm_channels).reshape(n, 1)
    channels = np.asarray(CHANNELS).reshape(1, -1) <= most
    return np.concatenate([np.ones((n, 1), bool), offered, channels], axis=1)


@dataclass
class Trials:
    """What has been tried in each of ``n`` running episodes: statistics per config beside the policy's memory.

    ``total`` sums the measured savings of a config (relative step time saved against AUTO, in units of the slot's
    share of the step), ``count`` the windows. AUTO starts with one window of saving 0.
    """

    count: Array  # (n, N_CONFIGS)
    total: Array  # (n, N_CONFIGS)
    n_trials: Array  # (n,)
    last_config: Array  # (n,) index, -1 before the first trial
    last_saving: Array  # (n,)

    @classmethod
    def start(cls, n: int) -> Trials:
        """``n`` fresh episodes."""
        trials = cls(
            np.zeros((n, N_CONFIGS)),
            np.zeros((n, N_CONFIGS)),
            np.zeros(n, np.int64),
            np.full(n, -1),
            np.zeros(n),
        )
        trials.count[:, 0] = 1
        return trials

    def restart(self, which: Array) -> None:
        """Begin new episodes where ``which`` (n,) is True."""
        self.count[which], self.total[which] = 0, 0
        self.count[which, 0] = 1
        self.n_trials[which], self.last_config[which], self.last_saving[which] = 0, -1, 0

    def record(self, configs: Array, savings: Array) -> None:
        """Add one measured window per episode."""
        rows = np.arange(len(configs))
        self.count[rows, configs] += 1
        self.total[rows, configs] += savings
        self.n_trials += 1
        self.last_config, self.last_saving = np.array(configs), np.array(savings)

    def means(self) -> Array:
        """Mean saving per config, (n, N_CONFIGS); untried configs are -inf."""
        return np.where(self.count > 0, self.total / np.maximum(self.count, 1), -np.inf)

    def best(self) -> Array:
        """Config with the best mean so far, (n,): what a stop now would commit."""
        return np.asarray(self.means().argmax(axis=1))


def scale_saving(saving: Array, share: Array | float) -> Array:
    """Relative step time saved -> units of the slot's share of the step, clipped to SAVING_RANGE."""
    return np.clip(np.asarray(saving) / np.maximum(share, 0.01), *SAVING_RANGE)


def given_up(saving: Array, share: Array | float) -> Array:
    """Whether a window under configs of these (scaled) savings ends with its canary."""
    return np.asarray(1.0 - np.asarray(saving) * share > GIVE_UP)


def in_window(saving: Array, share: Array | float) -> Array:
    """(Scaled) saving over a whole window, of whose steps a config that is given up only runs the canary."""
    return np.where(given_up(saving, share), CANARY * np.asarray(saving), saving)


def noise_factor(saving: Array, share: Array | float) -> Array:
    """By how much the noise of a measurement exceeds a whole window's: a canary has fewer steps."""
    return np.where(given_up(saving, share), CANARY**-0.5, 1.0)


def reward(best_saving: Array, trial_saving: Array) -> Array:
    """Saving of the best config measured so far plus a small weight on the one just run (both scaled).

    The first term keeps the search alive (with the reward of the action alone a recurrent policy collapses to one
    constant config), the second makes trials of bad configs cost what they cost the job.
    """
    return np.asarray(best_saving + TRIAL_PRICE * trial_saving, np.float64)


def observe(features: Array, mask: Array, trials: Trials) -> Array:
    """Observation, (n, N_OBSERVATION) float32, from fingerprint features (n, N_FEATURES), mask and trials."""
    n = len(features)
    tried = trials.last_config >= 0
    rows = np.flatnonzero(tried)
    means = trials.means()
    best = means.max(axis=1)
    # Filled part by part: this runs in every step of training.
    out = np.zeros((n, N_OBSERVATION), np.float32)
    ends = np.cumsum([N_FEATURES, N_PAIRS, N_CHANNELS, 4, N_CONFIGS, N_CONFIGS, N_MASK])
    all_features, pairs, channels, outcome, count, gap, all_mask = np.split(out, ends[:-1], axis=1)
    all_features[:], all_mask[:] = features, mask
    pairs[rows, trials.last_config[rows] // N_CHANNELS] = 1
    channels[rows, trials.last_config[rows] % N_CHANNELS] = 1
    outcome[:, 0], outcome[:, 1] = tried, trials.last_saving
    outcome[:, 2], outcome[:, 3] = best, trials.n_trials / HORIZON
    np.multiply(np.minimum(trials.count, 4), 0.25, out=count, casting="same_kind")
    np.subtract(means, best[:, None], out=gap, where=trials.count > 0, casting="same_kind")
    return np.clip(out, -4, 4, out=out)


@dataclass
class Seen:
    """What an observation says of the search so far, for policies that are not a network: ``n`` episodes."""

    configs: Array  # (n, N_CONFIGS) bool: may be chosen
    count: Array  # (n, N_CONFIGS) windows measured, at most 4
    mean: Array  # (n, N_CONFIGS) mean saving of a config, -inf = not tried
    last_config: Array  # (n,) config of the last window, -1 = none yet
    last_saving: Array  # (n,) its saving
    n_trials: Array  # (n,) trials so far, at most 4 * HORIZON

    @property
    def best(self) -> Array:
        """Config with the best mean so far, (n,): as :meth:`Trials.best`."""
        return np.asarray(self.mean.argmax(axis=1))


def config_mask(observations: Array) -> Array:
    """The mask in observations (n, N_OBSERVATION) as one flag per config, (n, N_CONFIGS) bool."""
    mask = np.asarray(observations)[:, -N_MASK:] > 0.5
    return np.asarray((mask[:, :N_PAIRS, None] & mask[:, None, N_PAIRS:]).reshape(len(mask), N_CONFIGS))


def statistics(observations: Array) -> tuple[Array, Array]:
    """Per-config entries of observations (n, N_OBSERVATION): count / 4 and gap to the best, each (n, N_CONFIGS)."""
    start = N_FEATURES + N_OUTCOME
    return observations[:, start : start + N_CONFIGS], observations[:, start + N_CONFIGS : start + 2 * N_CONFIGS]


def seen(observations: Array) -> Seen:
    """Inverse of :func:`observe`, as far as policies need it. ``observations`` is (n, N_OBSERVATION)."""
    observations = np.asarray(observations, np.float64)
    parts = np.split(observations, np.cumsum([N_FEATURES, N_PAIRS, N_CHANNELS, 4, N_CONFIGS, N_CONFIGS]), axis=1)
    _, pairs, channels, outcome, count, gap, _ = parts
    count = np.rint(4 * count)
    last = pairs.argmax(axis=1) * N_CHANNELS + channels.argmax(axis=1)
    return Seen(
        configs=config_mask(observations),
        count=count,
        mean=np.where(count > 0, outcome[:, 2:3] + gap, -np.inf),
        last_config=np.where(outcome[:, 0] > 0.5, last, -1),
        last_saving=outcome[:, 1],
        n_trials=np.rint(outcome[:, 3] * HORIZON).astype(np.int64),
    )


def actions_of(configs: Array) -> Array:
    """Inverse of :func:`config_index`: indices (n,) -> actions (n, 2) int64."""
    return np.stack(np.divmod(np.asarray(configs, np.int64), N_CHANNELS), axis=1)

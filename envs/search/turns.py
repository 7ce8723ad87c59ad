"""Observation and action of one turn in the search over a job: the same for Sim, Replay and Live.

A turn is the decision for one slot, and what comes next. Effects are parts of the job's step time; the belief's figures
are scaled so that 5 % of the step is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from ...traces.fingerprint import N_FEATURES
from ...traces.spaces import N_CHANNELS, N_CONFIGS, N_PAIRS, config_index

Array = np.ndarray[Any, Any]

#: Effects in the observation are multiplied by this: 5 % of the step is 1.
SCALE = 20.0
#: What comes after a slot's config: the next slot's turn (after the last slot: the window); the window, at once; a
#: comparison with what is in force; the end of the search, or after the verdict of what is tried. Slots that had no
#: turn yet run what is believed best; after the verdict what is in force.
GO_ON, RUN, COMPARE, LEAVE = range(4)
N_WHAT = 4
#: Figures per config: mean against the best, what a window is expected to teach, its worth (ten times larger), windows
#: measured (quarters), whether it was chosen in the last round, whether it is in force when nothing is tried, and how
#: likely it is to make a step far too long (1: it made more than one, or lost its comparison).
N_PER_CONFIG = 7
#: ``promised``: what the table believed best saves beyond the one in force. ``exploring``: a slot before this one runs
#: something else than what is believed best. ``beaten``: the table believed best has lost its comparison. ``idle``:
#: windows running under one table; after the verdict turns running in which nothing was tried, by slots. ``spent``:
#: part of what the search may lose. ``last_call``: log time of the slot's calls in the last window over the default's;
#: ``last_long``: what its long steps cost, as a part of its time.
CONTEXT = (
    "share", "exposure", "exposure_sd", "noise", "last_saving", "best_saving", "best_sd", "round", "slots", "place",
    "confirmed", "comparisons", "wander", "off_step", "off_calls", "refining", "promised", "exploring", "beaten",
    "idle", "spent", "last_call", "last_long",
)  # fmt: skip
N_OBSERVATION = N_FEATURES + len(CONTEXT) + N_PER_CONFIG * N_CONFIGS + N_CONFIGS


def observation_space() -> gym.spaces.Box:
    """Fingerprint, context, figures per config, and in the last ``N_CONFIGS`` entries what may be chosen (0 / 1)."""
    return gym.spaces.Box(-4.0, 4.0, (N_OBSERVATION,), np.float32)


def action_space() -> gym.spaces.MultiDiscrete:
    """``[pair, channels, what]`` of one slot: indices into AUTO + PAIRS and into CHANNELS; one of GO_ON, RUN, COMPARE,
    LEAVE."""
    return gym.spaces.MultiDiscrete([N_PAIRS, N_CHANNELS, N_WHAT])


def actions_of(configs: Array, what: Array | int = GO_ON) -> Array:
    """Indices of configs (...) and what comes next, as actions (..., 3) int64."""
    pair, channels = np.divmod(np.asarray(configs, np.int64), N_CHANNELS)
    return np.stack(np.broadcast_arrays(pair, channels, np.asarray(what, np.int64)), axis=-1)


def choices_of(actions: Array) -> tuple[Array, Array]:
    """The inverse of :func:`actions_of`: indices of configs (...), what comes next (...)."""
    actions = np.asarray(actions)
    return config_index(actions), actions[..., 2]


def observe(features: Array, context: Array, figures: Array, open_: Array) -> Array:
    """One turn's observation (N_OBSERVATION,) float32 from its parts: (N_FEATURES,), (len(CONTEXT),), (N_PER_CONFIG,
    N_CONFIGS), (N_CONFIGS,) bool."""
    shown = np.where(open_, figures, 0.0)
    return np.clip(np.concatenate([features, context, shown.ravel(), open_]), -4, 4).astype(np.float32)


@dataclass
class Seen:
    """Observations (n, N_OBSERVATION) taken apart, for policies that are no network. Effects are parts of the step."""

    ahead: Array  # (n, N_CONFIGS) mean of what a config saves, against the best
    learned: Array  # (n, N_CONFIGS) what a window under it is expected to teach of that (standard deviation)
    worth: Array  # (n, N_CONFIGS) by how much the best mean is expected to rise for that window
    count: Array  # (n, N_CONFIGS) windows measured, at most 16
    last: Array  # (n, N_CONFIGS) bool: chosen in the last round
    in_force: Array  # (n, N_CONFIGS) bool
    risk: Array  # (n, N_CONFIGS) how likely it is to make a step far too long
    open: Array  # (n, N_CONFIGS) bool: may be chosen
    context: dict[str, Array]  # (n,) each, as they stand in the observation
    features: Array  # (n, N_FEATURES)


def seen(observations: Array) -> Seen:
    """What a policy is given, (n, N_OBSERVATION) or one of them, taken apart: the inverse of :func:`observe`."""
    x = np.atleast_2d(np.asarray(observations, np.float64))
    ends = np.cumsum([N_FEATURES, len(CONTEXT), N_PER_CONFIG * N_CONFIGS])
    features, context, figures, open_ = np.split(x, ends, axis=1)
    figures = np.moveaxis(figures.reshape(len(x), N_PER_CONFIG, N_CONFIGS), 1, 0)
    ahead, learned, worth, count, last, in_force, risk = figures
    effects = ahead / SCALE, learned / SCALE, worth / SCALE / 10
    told = dict(zip(CONTEXT, context.T, strict=True))
    return Seen(*effects, np.rint(4 * count), last > 0.5, in_force > 0.5, risk, open_ > 0.5, told, features)

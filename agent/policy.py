"""The trained LSTM policy at run time: numpy only, a few microseconds a step, one LSTM state per slot.

Training needs torch (``agent/recurrent.py``); what it learned is a file of weights that this module evaluates. The
two give the same actions (``tests/test_policy.py``).
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ..envs import spaces
from ..envs.spaces import N_CONFIGS, N_MASK, N_OBSERVATION, N_OUTCOME
from ..traces.fingerprint import N_FEATURES
from ..traces.records import PAIRS
from .belief import N_FIGURES, Belief

Array = np.ndarray[Any, Any]

#: Layout of the weights file; an older or newer file is refused.
FORMAT = 2


class LstmPolicy:
    """Masked LSTM policy: observation -> LSTM -> one hidden layer -> a score per config, made of what the network says
    and of what is measured and believed of the config, the same way for every config. Its twin in training is
    ``recurrent.MaskedLstmPolicy``.

    ``weights`` (float32): ``lstm_x`` (N_OBSERVATION, 4h), ``lstm_h`` (h, 4h), ``lstm_b`` (4h) in torch's gate order
    i, f, g, o; ``body_w`` (h + N_OBSERVATION, m), ``body_b`` (m); ``head_z`` (m, d), ``head_e`` (N_CONFIGS, d),
    ``head_s`` (2 + N_FIGURES, d), ``head_u`` (2 + N_FIGURES), ``head_v`` (d), ``skip_w`` (m, N_CONFIGS), ``skip_b``
    (N_CONFIGS), and those of :class:`belief.Belief`.
    """

    patience = 3  #: see ``stopping.StopRule``

    def __init__(self, weights: dict[str, Array], record: dict[str, Any] | None = None, seed: int = 0) -> None:
        """``record`` says how the weights were trained. Raises ValueError when shapes do not fit the observation."""
        self.weights, self.record = weights, record or {}
        self.rng = np.random.default_rng(seed)
        self.belief, self.without = Belief(weights), tuple(self.record.get("settings", {}).get("without", ()))
        w = weights
        self.hidden = len(w["lstm_h"])
        if w["lstm_x"].shape != (N_OBSERVATION, 4 * self.hidden) or w["head_e"].shape[0] != N_CONFIGS:
            raise ValueError(
                f"weights for observations of {len(w['lstm_x'])} and {len(w['head_e'])} configs; this version has "
                f"{N_OBSERVATION} and {N_CONFIGS}: train anew (dynamiccl lab train)"
            )
        # sigmoid(x) = (tanh(x / 2) + 1) / 2: with the halves inside the weights, one tanh does all four gates.
        half = np.repeat([0.5, 0.5, 1.0, 0.5], self.hidden).astype(np.float32)
        self._gates = np.concatenate([w["lstm_x"], w["lstm_h"]]) * half
        self._bias = w["lstm_b"] * half

    @classmethod
    def load(cls, path: str | Path | None = None, seed: int = 0) -> LstmPolicy:
        """The shipped policy, or the one in ``path``. Raises ValueError when it is none of this version."""
        source = Path(path) if path is not None else resources.files(__package__).joinpath("policy.npz")
        try:
            with source.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                weights = {key: arrays[key] for key in arrays.files}
            meta = json.loads(str(weights.pop("meta")))
            if meta["format"] != FORMAT:
                raise ValueError(f"format {meta['format']}, this version reads {FORMAT}")
            return cls(weights, meta, seed)
        except (OSError, KeyError, ValueError) as error:
            raise ValueError(f"cannot use {source} as policy weights: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the weights and the record to ``path`` (.npz)."""
        meta = json.dumps({**self.record, "format": FORMAT})
        with open(path, "wb") as file:
            np.savez_compressed(file, meta=np.array(meta), **self.weights)  # type: ignore[arg-type]

    def _fresh(self, n: int) -> tuple[Array, Array]:
        return (np.zeros((n, self.hidden), np.float32),) * 2

    def logits(self, observations: Array, state: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        """Scores (n, N_CONFIGS), -inf where masked, and the next LSTM state (h, c), each (n, hidden)."""
        w, k = self.weights, self.hidden
        observations, believed = actor_input(self.belief, observations, self.without)
        h, c = state
        gates = np.tanh(np.concatenate([observations, h], axis=1) @ self._gates + self._bias)
        i, f, o = (0.5 * gates[:, s] + 0.5 for s in (slice(k), slice(k, 2 * k), slice(3 * k, None)))
        c = f * c + i * gates[:, 2 * k : 3 * k]
        h = o * np.tanh(c)
        z = np.tanh(np.concatenate([h, observations], axis=1) @ w["body_w"] + w["body_b"])
        figures = np.concatenate([*spaces.statistics(observations), believed], axis=1).reshape(len(z), -1, N_CONFIGS)
        hidden = (z @ w["head_z"])[:, None, :] + w["head_e"] + figures.swapaxes(1, 2) @ w["head_s"]
        scores = np.maximum(hidden, 0) @ w["head_v"] + z @ w["skip_w"] + w["skip_b"] + w["head_u"] @ figures
        return np.where(spaces.config_mask(observations), scores, -np.inf), (h, c)

    def predict(
        self,
        observation: Array,
        state: tuple[Array, Array] | None = None,
        episode_start: Array | None = None,
        deterministic: bool = True,
    ) -> tuple[Array, tuple[Array, Array]]:
        """See :class:`Policy`; the state is a pair of arrays (n, hidden), never changed in place."""
        rows = np.atleast_2d(np.asarray(observation, np.float32))
        if state is None:
            state = self._fresh(len(rows))
        if episode_start is not None and np.any(episode_start):
            keep = 1 - np.atleast_1d(episode_start).astype(np.float32)[:, None]
            state = (state[0] * keep, state[1] * keep)
        scores, state = self.logits(rows, state)
        if not deterministic:  # the largest of score + Gumbel noise is a draw from the softmax
            scores = scores + self.rng.gumbel(size=scores.shape)
        chosen = scores.argmax(axis=1)
        if "masks" in self.without:  # what it must not ask for leaves the slot to NCCL
            chosen = np.where(spaces.config_mask(rows)[np.arange(len(rows)), chosen], chosen, 0)
        actions = spaces.actions_of(chosen)
        return (actions if np.ndim(observation) == 2 else actions[0]), state


#: Parts that a policy can be trained without, to see what each is worth.
PARTS = ("memory", "statistics", "belief", "costs", "masks")
_COSTS = [7, *range(N_FEATURES - 2 * len(PAIRS), N_FEATURES)]  # of NCCL's model: its best price, all prices, its choice
_STATISTICS = slice(N_FEATURES + N_OUTCOME, N_FEATURES + N_OUTCOME + 2 * N_CONFIGS)


def blinded(observations: Array, without: tuple[str, ...]) -> Array:
    """Observations (n, N_OBSERVATION), zero where an actor is to do ``without``; without masks all is open."""
    if not {"costs", "masks", "statistics"} & set(without):
        return observations
    observations = np.array(observations, np.float32)
    if "costs" in without:
        observations[:, _COSTS] = 0
    if "masks" in without:
        observations[:, -N_MASK:] = 1
    if "statistics" in without:
        observations[:, _STATISTICS] = 0
    return observations


def actor_input(belief: Belief, observations: Array, without: tuple[str, ...] = ()) -> tuple[Array, Array]:
    """What the actor sees: observations, and what is believed of each config, (n, N_FIGURES * N_CONFIGS)."""
    observations = blinded(observations, without)
    if {"belief", "statistics"} & set(without):
        return observations, np.zeros((len(observations), N_FIGURES * N_CONFIGS), np.float32)
    return observations, belief.features(observations)

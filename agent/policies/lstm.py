"""The trained LSTM policy at run time: numpy only, well under a millisecond a turn, one LSTM state for the whole job.

Training needs torch (``agent/train/recurrent.py``); what it learned is a file of weights that this module evaluates.
The two give the same actions (``tests/agent/policies/test_policy.py``).
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ...envs.search import turns
from ...envs.search.turns import N_PER_CONFIG, N_WHAT
from ...traces.fingerprint import N_FEATURES
from ...traces.spaces import N_CONFIGS
from .rule import ExpectedImprovement

Array = np.ndarray[Any, Any]

#: Layout of the weights file; an older or newer file is refused.
FORMAT = 6
#: Entries of an observation that say nothing of single configs.
N_CONTEXT = N_FEATURES + len(turns.CONTEXT)
#: What the LSTM reads: those, the figures of the config that was chosen last, and the most that any open config has.
N_READ = N_CONTEXT + 2 * N_PER_CONFIG
#: The figure that says which config was chosen in the last round.
LAST = 4
#: So much of the step is one unit of a score: with ten of them between two configs the lesser is hardly ever drawn.
TEMPER = 1e-3
#: Units by which what the rule would do next is ahead of all else.
SURE = 7.0
_RULE = ExpectedImprovement()


def rule_scores(observations: Array) -> Array:
    """What the rule makes of observations (n, N_OBSERVATION), as scores of a config and of what comes after it,
    (n, N_CONFIGS, N_WHAT); -inf where masked. The largest is what the rule does."""
    scores, what = _RULE.decide(turns.seen(observations))
    return np.asarray(
        scores[:, :, None] / TEMPER + SURE * (what[:, :, None] == np.arange(N_WHAT)), np.float32
    )


def figures_of(observations: Array) -> Array:
    """(n, N_OBSERVATION) -> (n, N_PER_CONFIG, N_CONFIGS)."""
    return np.asarray(observations[:, N_CONTEXT:-N_CONFIGS]).reshape(-1, N_PER_CONFIG, N_CONFIGS)


class LstmPolicy:
    """Masked LSTM policy over the turns of a job: observation -> LSTM -> one hidden layer -> what is added to the
    rule's scores, a number a config and one for each that may come next. Its twin in training is
    ``recurrent.MaskedLstmPolicy``.

    ``weights`` (float32): ``lstm_x`` (N_READ, 4h), ``lstm_h`` (h, 4h), ``lstm_b`` (4h) in torch's gate order i, f, g,
    o; ``body_w`` (h + N_CONTEXT, m), ``body_b`` (m); ``head_z`` (m, d), ``head_e`` (N_CONFIGS, d), ``head_s``
    (N_PER_CONFIG, d), ``head_u`` (N_PER_CONFIG), ``head_v`` (d), ``head_what`` (m, N_WHAT).
    """

    def __init__(
        self, weights: dict[str, Array], record: dict[str, Any] | None = None, seed: int = 0
    ) -> None:
        """``record`` says how the weights were trained. Raises ValueError when shapes do not fit the observation."""
        self.weights, self.record = weights, record or {}
        self.rng, w = np.random.default_rng(seed), weights
        self.hidden = len(w["lstm_h"])
        if len(w["lstm_x"]) != N_READ or w["head_e"].shape[0] != N_CONFIGS:
            raise ValueError(
                f"weights for observations of {len(w['lstm_x'])} and {len(w['head_e'])} configs; this version has "
                f"{N_READ} and {N_CONFIGS}: train anew (dynamiccl lab train)"
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

    def scores(self, observations: Array, state: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        """Scores (n, N_CONFIGS, N_WHAT), -inf where masked, and the next LSTM state (h, c), each (n, hidden)."""
        w, k = self.weights, self.hidden
        context, figures = observations[:, :N_CONTEXT], figures_of(observations)
        last = (figures * figures[:, LAST : LAST + 1]).sum(axis=2)
        h, c = state
        gates = np.tanh(
            np.concatenate([context, last, figures.max(axis=2), h], axis=1) @ self._gates + self._bias
        )
        i, f, o = (0.5 * gates[:, s] + 0.5 for s in (slice(k), slice(k, 2 * k), slice(3 * k, None)))
        c = f * c + i * gates[:, 2 * k : 3 * k]
        h = o * np.tanh(c)
        z = np.tanh(np.concatenate([h, context], axis=1) @ w["body_w"] + w["body_b"])
        hidden = (z @ w["head_z"])[:, None, :] + w["head_e"] + figures.swapaxes(1, 2) @ w["head_s"]
        learned = np.maximum(hidden, 0) @ w["head_v"] + w["head_u"] @ figures
        return rule_scores(observations) + learned[:, :, None] + (z @ w["head_what"])[:, None, :], (h, c)

    def predict(
        self,
        observation: Array,
        state: tuple[Array, Array] | None = None,
        episode_start: Array | None = None,
        deterministic: bool = True,
    ) -> tuple[Array, tuple[Array, Array]]:
        """SB3's ``predict`` on the observations of ``turns``; the state is a pair of arrays (n, hidden), never changed
        in place."""
        rows = np.atleast_2d(np.asarray(observation, np.float32))
        if state is None:
            state = (np.zeros((len(rows), self.hidden), np.float32),) * 2
        if episode_start is not None and np.any(episode_start):
            keep = 1 - np.atleast_1d(episode_start).astype(np.float32)[:, None]
            state = (state[0] * keep, state[1] * keep)
        scores, state = self.scores(rows, state)
        if not deterministic:  # the largest of score + Gumbel noise is a draw from the softmax
            scores = scores + self.rng.gumbel(size=scores.shape)
        actions = turns.actions_of(*np.divmod(scores.reshape(len(rows), -1).argmax(axis=1), N_WHAT))
        return (actions if np.ndim(observation) == 2 else actions[0]), state

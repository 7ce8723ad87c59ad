"""The trained LSTM policy at run time: numpy only, well under a millisecond a turn, one LSTM state for the whole job.

Training needs torch (``agent/train/recurrent.py``); what it learned is a file of weights that this module evaluates.
The
two give the same actions (``tests/test_policy.py``).
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ...envs.search import turns
from ...envs.search.turns import N_OBSERVATION, N_PER_CONFIG, SCALE
from ...traces import spaces
from ...traces.fingerprint import N_FEATURES
from ...traces.spaces import N_CONFIGS

Array = np.ndarray[Any, Any]

#: Layout of the weights file; an older or newer file is refused.
FORMAT = 5
#: The figures that say which config was chosen in the last round, and which is in force.
LAST, IN_FORCE = 4, 5
#: So much of the step is worth one unit of a score.
TEMPER = 1e-2
#: The weights that what was learned is proportional to, together.
LEARNED = ("head_u", "head_v")
_N_CONTEXT = N_FEATURES + len(turns.CONTEXT)
#: Where an observation says that the verdict is there.
LATER = N_FEATURES + turns.CONTEXT.index("refining")


def rule_scores(figures: Array, later: Array, rule: Array) -> Array:
    """What ``rules.ExpectedImprovement`` makes of figures (n, N_PER_CONFIG, N_CONFIGS), as scores (n, N_CONFIGS).

    ``later`` (n,) bool: after the verdict; ``rule`` is its foresight, least, risk and the foresight of then. The
    largest score is the config that the rule chooses.
    """
    soon, least, risk, far = (float(x) for x in rule)
    ahead, learned, worth = figures[:, 0] / SCALE, figures[:, 1] / SCALE, figures[:, 2] / SCALE / 10
    foresight = np.where(later, far, soon)[:, None]
    scores = foresight * worth + ahead - risk * learned
    scores = np.where(foresight * worth > soon * least, scores, scores - 2 * soon * least)
    then = np.where(figures[:, IN_FORCE] > 0.5, 0.0, scores * soon / far)  # of the size of those before
    now = np.where(ahead >= 0, np.maximum(scores, 0), scores)
    return np.asarray(np.where(later[:, None], then, now) / TEMPER)


class LstmPolicy:
    """Masked LSTM policy over the turns of a job: observation -> LSTM -> one hidden layer -> what is added to the
    rule's score of each config. Its twin in training is ``recurrent.MaskedLstmPolicy``.

    ``weights`` (float32): ``lstm_x`` (N_READ, 4h), ``lstm_h`` (h, 4h), ``lstm_b`` (4h) in torch's gate order i, f, g,
    o; ``body_w`` (h + context, m), ``body_b`` (m); ``head_z`` (m, d), ``head_e`` (N_CONFIGS, d), ``head_s``
    (N_PER_CONFIG, d), ``head_u`` (N_PER_CONFIG), ``head_v`` (d); ``rule`` (4).
    """

    def __init__(self, weights: dict[str, Array], record: dict[str, Any] | None = None, seed: int = 0) -> None:
        """``record`` says how the weights were trained. Raises ValueError when shapes do not fit the observation."""
        self.weights, self.record = weights, record or {}
        self.rng = np.random.default_rng(seed)
        self.without = tuple(self.record.get("settings", {}).get("without", ()))
        self.by_belief = "belief" not in self.without  # else it is done once it keeps to one table
        w = weights
        self.hidden = len(w["lstm_h"])
        if len(w["lstm_x"]) != _N_CONTEXT + 2 * N_PER_CONFIG or w["head_e"].shape[0] != N_CONFIGS:
            raise ValueError(
                f"weights for observations of {len(w['lstm_x'])} and {len(w['head_e'])} configs; this version has "
                f"{_N_CONTEXT + 2 * N_PER_CONFIG} and {N_CONFIGS}: train anew (dynamiccl lab train)"
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

    def scores(self, observations: Array, state: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        """Scores (n, N_CONFIGS), -inf where masked, and the next LSTM state (h, c), each (n, hidden)."""
        w, k = self.weights, self.hidden
        observations = ablate(observations, self.without)
        context = observations[:, :_N_CONTEXT]
        figures = observations[:, _N_CONTEXT:-N_CONFIGS].reshape(-1, N_PER_CONFIG, N_CONFIGS)
        last = (figures * figures[:, LAST : LAST + 1]).sum(axis=2)
        h, c = state
        gates = np.tanh(np.concatenate([context, last, figures.max(axis=2), h], axis=1) @ self._gates + self._bias)
        i, f, o = (0.5 * gates[:, s] + 0.5 for s in (slice(k), slice(k, 2 * k), slice(3 * k, None)))
        c = f * c + i * gates[:, 2 * k : 3 * k]
        h = o * np.tanh(c)
        z = np.tanh(np.concatenate([h, context], axis=1) @ w["body_w"] + w["body_b"])
        hidden = (z @ w["head_z"])[:, None, :] + w["head_e"] + figures.swapaxes(1, 2) @ w["head_s"]
        later = context[:, LATER] > 0.5  # what comes then was not trained on: the rule alone
        learned = np.where(later[:, None], 0.0, np.maximum(hidden, 0) @ w["head_v"] + w["head_u"] @ figures)
        open_ = observations[:, -N_CONFIGS:] > 0.5
        return np.where(open_, rule_scores(figures, later, w["rule"]) + learned, -np.inf), (h, c)

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
            state = self._fresh(len(rows))
        if episode_start is not None and np.any(episode_start):
            keep = 1 - np.atleast_1d(episode_start).astype(np.float32)[:, None]
            state = (state[0] * keep, state[1] * keep)
        scores, state = self.scores(rows, state)
        if not deterministic:  # the largest of score + Gumbel noise is a draw from the softmax
            scores = scores + self.rng.gumbel(size=scores.shape)
        chosen = scores.argmax(axis=1)
        return turns.actions_of(chosen if np.ndim(observation) == 2 else chosen[0]), state


#: Parts that a policy can be trained without, to see what each is worth. Without durations no kernel is ever sampled in
#: the jobs that train (``train.Settings.family``).
PARTS = ("memory", "siblings", "durations", "belief")
#: What an observation says of the other slots, and of how the last window came out.
_SIBLINGS = ("last_saving", "best_saving", "best_sd", "off_step")
#: What only the belief knows, beside its figures of each config.
_BELIEVED = ("exposure", "exposure_sd", "best_saving", "best_sd", "wander", "off_step", "off_calls")
_N_BELIEVED = 3  # of the figures: turns.believed


def ablate(observations: Array, without: tuple[str, ...]) -> Array:
    """Observations (n, N_OBSERVATION), zero where a policy is to do ``without``."""
    hidden = {*(_SIBLINGS if "siblings" in without else ()), *(_BELIEVED if "belief" in without else ())}
    if not hidden:
        return observations
    observations = np.array(observations, np.float32)
    observations[:, [N_FEATURES + turns.CONTEXT.index(name) for name in hidden]] = 0
    if "belief" in without:
        observations[:, _N_CONTEXT : _N_CONTEXT + _N_BELIEVED * N_CONFIGS] = 0
    return observations


assert _N_CONTEXT + N_PER_CONFIG * N_CONFIGS + N_CONFIGS == N_OBSERVATION

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

from ...envs.search.interfaces import LEAVE, WHAT, actions_of
from ...envs.search.observation import FIGURES, N_CONTEXT, N_PER_CONFIG, decode, expand
from ...traces.header import plain
from ...traces.outside import parse_json
from ...traces.spaces import N_CONFIGS
from .rule import ExpectedImprovement

Array = np.ndarray[Any, Any]

#: Layout of the weights file; an older or newer file is refused.
FORMAT = 7
#: What may come next of which the policy chooses: what the rule knows. The others are not learned yet.
N_NEXT = len(WHAT)
#: Inputs of the LSTM: those, the figures of the config that was chosen last, and the largest of any open config.
N_READ = N_CONTEXT + 2 * N_PER_CONFIG
#: Index of the figure that marks the config of the last round.
LAST = list(FIGURES).index("last")
#: This part of the step is one unit of a score: with ten of them between two configs the lesser is hardly ever drawn.
TEMPER = 1e-3
#: Units by which the rule's choice of what comes next leads, where the weights do not say it. If an untrained policy is
#: drawn from, another one comes once in about 60 turns.
SURE = 7.0
#: Units by which the end of the search lies behind all else unless the rule ends it: no later turn can take it back.
#: With as much as the others it ended three of four jobs of an untrained policy at random.
LEAVE_LAST = 5.0


def rule_scores(observations: Array, rule: ExpectedImprovement | None = None, sure: float = SURE) -> Array:
    """The rule's scores (n, N_CONFIGS, N_NEXT) of each config and of what comes after it, from observations
    (n, N_OBSERVATION); -inf if masked. The rule does what has the largest; its choice of what comes next leads by
    ``sure``, and the end of the search stays behind by LEAVE_LAST where the rule goes on."""
    rule = rule or ExpectedImprovement()
    scores, what = rule.decide(decode(observations))
    is_next = what[:, :, None] == np.arange(N_NEXT)
    units = scores / TEMPER
    is_end = np.arange(N_NEXT) == LEAVE
    lead = sure * is_next - LEAVE_LAST * (is_end & ~is_next)
    units = units[:, :, None] + lead
    return np.asarray(units, np.float32)


def figures_of(observations: Array) -> Array:
    """(n, N_OBSERVATION) -> (n, N_PER_CONFIG, N_CONFIGS)."""
    whole = expand(observations)
    figures = whole[:, N_CONTEXT:-N_CONFIGS]
    return figures.reshape(-1, N_PER_CONFIG, N_CONFIGS)


def _check(weights: dict[str, Array]) -> None:
    """Raise ValueError unless all weights are finite and of the shapes that :class:`LstmPolicy` names.

    Numpy would stretch some shapes silently, and meet the others at the first decision, beside the job.
    """
    h, m, d = (len(weights[name]) for name in ("lstm_h", "body_b", "head_v"))
    shapes = {
        "lstm_x": (N_READ, 4 * h),
        "lstm_h": (h, 4 * h),
        "lstm_b": (4 * h,),
        "body_w": (h + N_CONTEXT, m),
        "body_b": (m,),
        "head_z": (m, d),
        "head_e": (N_CONFIGS, d),
        "head_s": (N_PER_CONFIG, d),
        "head_u": (N_PER_CONFIG,),
        "head_v": (d,),
        "head_what": (m, N_NEXT),
    }
    for name, shape in shapes.items():
        if weights[name].shape != shape or not np.isfinite(weights[name]).all():
            raise ValueError(
                f"{name} is {weights[name].shape}, not {shape}, or not finite: train anew (dynamiccl lab train)"
            )


class LstmPolicy:
    """Masked LSTM policy over the turns of a job: observation -> LSTM -> one hidden layer -> what is added to the
    rule's scores, a number a config and one for each that may come next. Its twin in training is
    ``recurrent.MaskedLstmPolicy``.

    ``weights`` (float32): ``lstm_x`` (N_READ, 4h), ``lstm_h`` (h, 4h), ``lstm_b`` (4h) in torch's gate order i, f, g,
    o; ``body_w`` (h + N_CONTEXT, m), ``body_b`` (m); ``head_z`` (m, d), ``head_e`` (N_CONFIGS, d), ``head_s``
    (N_PER_CONFIG, d), ``head_u`` (N_PER_CONFIG), ``head_v`` (d), ``head_what`` (m, N_NEXT).
    """

    def __init__(
        self, weights: dict[str, Array], record: dict[str, Any] | None = None, seed: int = 0
    ) -> None:
        """``record`` says how the weights were trained. Raises ValueError when shapes do not fit the observation, or
        each other, and KeyError when weights are missing."""
        w = weights
        self.weights = weights
        self.record = record or {}
        self.rule = ExpectedImprovement()  # the policy adds to its scores
        settings = self.record.get("settings", {})
        self.sure = float(settings.get("sure", SURE))
        self.rng = np.random.default_rng(seed)
        self.hidden = len(w["lstm_h"])
        n_read = len(w["lstm_x"])
        n_configs = len(w["head_e"])
        if n_read != N_READ or n_configs != N_CONFIGS:
            raise ValueError(
                f"weights for observations of {n_read} and {n_configs} configs; this version has "
                f"{N_READ} and {N_CONFIGS}: train anew (dynamiccl lab train)"
            )
        _check(w)
        # sigmoid(x) = (tanh(x / 2) + 1) / 2: with the halves inside the weights, one tanh does all four gates.
        halves = np.array([0.5, 0.5, 1.0, 0.5], np.float32)
        half = np.repeat(halves, self.hidden)
        gates = np.concatenate([w["lstm_x"], w["lstm_h"]])
        self._gates = gates * half
        self._bias = w["lstm_b"] * half

    @classmethod
    def load(cls, path: str | Path | None = None, seed: int = 0) -> LstmPolicy:
        """The shipped policy, or the one in ``path``. Raises ValueError when it is none of this version, or damaged."""
        shipped = resources.files(__package__).joinpath("policy.npz")
        source = shipped if path is None else Path(path)
        try:
            with source.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                weights = {key: arrays[key] for key in arrays.files}
            meta = parse_json(str(weights.pop("meta")))
            if meta["format"] != FORMAT:
                raise ValueError(f"format {meta['format']}, this version reads {FORMAT}")
            return cls(weights, meta, seed)
        except Exception as error:  # a damaged file, or one of another program, may raise anything
            raise ValueError(
                f"cannot use {source} as policy weights ({type(error).__name__}: {error}): "
                "give a whole file of this version's `dynamiccl lab train`"
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the weights and the record to ``path`` (.npz)."""
        record = {**self.record, "format": FORMAT}
        meta = json.dumps(plain(record))  # a NaN among its figures would be no JSON
        arrays = {"meta": np.array(meta), **self.weights}
        with open(path, "wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    def scores(self, observations: Array, state: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        """Scores (n, N_CONFIGS, N_NEXT), -inf where masked, and the next LSTM state (h, c), each (n, hidden)."""
        w, k = self.weights, self.hidden
        context = observations[:, :N_CONTEXT]
        figures = figures_of(observations)
        is_last = figures[:, LAST : LAST + 1]
        last = (figures * is_last).sum(axis=2)
        largest = figures.max(axis=2)

        h, c = state
        x = np.concatenate([context, last, largest, h], axis=1)
        gates = np.tanh(x @ self._gates + self._bias)
        i = 0.5 * gates[:, :k] + 0.5
        f = 0.5 * gates[:, k : 2 * k] + 0.5
        g = gates[:, 2 * k : 3 * k]
        o = 0.5 * gates[:, 3 * k :] + 0.5
        c = f * c + i * g
        h = o * np.tanh(c)

        x = np.concatenate([h, context], axis=1)
        z = np.tanh(x @ w["body_w"] + w["body_b"])
        of_job = z @ w["head_z"]
        of_config = figures.swapaxes(1, 2) @ w["head_s"]
        hidden = of_job[:, None, :] + w["head_e"] + of_config
        hidden = np.maximum(hidden, 0)
        of_figures = w["head_u"] @ figures
        learned = hidden @ w["head_v"] + of_figures
        next_learned = z @ w["head_what"]
        scores = rule_scores(observations, self.rule, self.sure)
        scores = scores + learned[:, :, None] + next_learned[:, None, :]
        return scores, (h, c)

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
            none = np.zeros((len(rows), self.hidden), np.float32)
            state = none, none
        if episode_start is not None and np.any(episode_start):
            starts = np.atleast_1d(episode_start)
            keep = np.where(starts, 0, 1)[:, None]
            keep = keep.astype(np.float32)
            h, c = state
            state = (h * keep, c * keep)
        scores, state = self.scores(rows, state)
        if not deterministic:  # the largest of score + Gumbel noise is a draw from the softmax
            scores = scores + self.rng.gumbel(size=scores.shape)
        flat = scores.reshape(len(rows), -1)
        best = flat.argmax(axis=1)
        chosen, what = np.divmod(best, N_NEXT)
        actions = actions_of(chosen, what)
        if np.ndim(observation) != 2:
            actions = actions[0]
        return actions, state

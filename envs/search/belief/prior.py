"""The prior of the belief: a small network that has seen many simulated jobs (``tests/tools/fit_prior.py`` fits it)."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ....traces.fingerprint import N_FEATURES
from ....traces.spaces import N_CONFIGS

Array = np.ndarray[Any, Any]

#: Figures of a slot: log times (N_CONFIGS), residual effects (N_CONFIGS), exposure.
N_FIGURES = 2 * N_CONFIGS + 1
#: Range of the network's log variances, and the least variance: beyond, training does not converge.
LOG_VARIANCES, LEAST_VARIANCE = (-9.0, 3.0), 1e-5


class Prior:
    """The network: features and mask of a slot -> mean, own variance and loadings of its N_FIGURES figures.

    ``weights`` (float32): ``w0``, ``b0``, ``w1``, ``b1`` of two tanh layers, ``w2`` (m, N_FIGURES * (2 + k)), ``b2``;
    ``n_shared``: how many of the k factors all slots of a job share.
    """

    def __init__(self, weights: dict[str, Array]) -> None:
        self.weights = {k: np.asarray(v, np.float32) for k, v in weights.items() if k != "n_shared"}
        self.n_shared = int(weights["n_shared"])
        self.n_factors = len(self.weights["b2"]) // N_FIGURES - 2
        if len(self.weights["w0"]) != N_FEATURES + N_CONFIGS:
            raise ValueError(
                "the prior was fitted to other features: fit anew (python tests/tools/fit_prior.py)"
            )

    @classmethod
    def load(cls, path: str | Path | None = None) -> Prior:
        """The shipped prior, or the one in ``path``. Raises ValueError when it is none of this version."""
        source = Path(path) if path is not None else resources.files(__package__).joinpath("prior.npz")
        try:
            with source.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return cls({key: arrays[key] for key in arrays.files})
        except (OSError, KeyError) as error:
            raise ValueError(f"{source} holds no prior: {error}") from error

    def __call__(self, features: Array, mask: Array) -> tuple[Array, Array, Array]:
        """``features`` (s, N_FEATURES), ``mask`` (s, N_CONFIGS) -> mean (s, N_FIGURES), own variance (s, N_FIGURES),
        loadings (s, N_FIGURES, k)."""
        w = self.weights
        x = np.concatenate([features, mask], axis=1).astype(np.float32)
        for layer in "01":
            x = np.tanh(x @ w["w" + layer] + w["b" + layer])
        out = (x @ w["w2"] + w["b2"]).astype(np.float64)
        mean, own, loadings = np.split(out, [N_FIGURES, 2 * N_FIGURES], axis=1)
        own = np.exp(np.clip(own, *LOG_VARIANCES)) + LEAST_VARIANCE
        return mean, own, loadings.reshape(len(out), N_FIGURES, self.n_factors)

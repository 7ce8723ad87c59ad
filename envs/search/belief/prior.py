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
        self.weights: dict[str, Array] = {}
        for name, values in weights.items():
            if name != "n_shared":
                self.weights[name] = np.asarray(values, np.float32)
        self.n_shared = int(weights["n_shared"])
        self.n_factors = len(self.weights["b2"]) // N_FIGURES - 2
        n_inputs = len(self.weights["w0"])
        if n_inputs != N_FEATURES + N_CONFIGS:
            raise ValueError(
                "the prior was fitted to other features: fit anew (python tests/tools/fit_prior.py)"
            )

    @classmethod
    def load(cls, path: str | Path | None = None) -> Prior:
        """The shipped prior, or the one in ``path``. Raises ValueError when it is none of this version."""
        shipped = resources.files(__package__).joinpath("prior.npz")
        source = shipped if path is None else Path(path)
        try:
            with source.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                weights = {key: arrays[key] for key in arrays.files}
            return cls(weights)
        except (OSError, KeyError) as error:
            raise ValueError(f"{source} holds no prior: {error}") from error

    def __call__(self, features: Array, mask: Array) -> tuple[Array, Array, Array]:
        """``features`` (s, N_FEATURES), ``mask`` (s, N_CONFIGS) -> mean (s, N_FIGURES), own variance (s, N_FIGURES),
        loadings (s, N_FIGURES, k)."""
        w = self.weights
        x = np.concatenate([features, mask], axis=1)
        x = x.astype(np.float32)
        x = np.tanh(x @ w["w0"] + w["b0"])
        x = np.tanh(x @ w["w1"] + w["b1"])
        out = x @ w["w2"] + w["b2"]
        out = out.astype(np.float64)

        mean = out[:, :N_FIGURES]
        log_own = out[:, N_FIGURES : 2 * N_FIGURES]
        own = np.exp(np.clip(log_own, *LOG_VARIANCES))
        own = own + LEAST_VARIANCE
        loadings = out[:, 2 * N_FIGURES :]
        loadings = loadings.reshape(len(out), N_FIGURES, self.n_factors)
        return mean, own, loadings

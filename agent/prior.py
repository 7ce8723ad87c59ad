"""Trains the prior of ``belief.py``: what a slot's fingerprint tells of all configs' times, before any is tried.

Only training needs this module (and torch).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from ..envs import spaces
from ..envs.spaces import N_CONFIGS, N_MASK
from ..traces.fingerprint import N_FEATURES
from .belief import fingerprint_and_mask
from .policy import blinded

Array = np.ndarray[Any, Any]
Tensor = torch.Tensor


class Prior(nn.Module):
    """Fingerprint and mask -> mean, loadings and own variance of log slot times. See :class:`belief.Belief`."""

    def __init__(self, width: int = 128, n_factors: int = 8) -> None:
        super().__init__()
        self.n_factors = n_factors
        self.layers = nn.ModuleList([nn.Linear(N_FEATURES + N_MASK, width), nn.Linear(width, width)])
        self.out = nn.Linear(width, N_CONFIGS * (2 + n_factors))
        with torch.no_grad():
            self.out.weight[2 * N_CONFIGS :] *= 0.3
            self.out.bias[N_CONFIGS : 2 * N_CONFIGS] = -3.0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(n, N_FEATURES + N_MASK) -> (n, N_CONFIGS), (n, N_CONFIGS, k), (n, N_CONFIGS)."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        mean, own, loadings = self.out(x).split([N_CONFIGS, N_CONFIGS, N_CONFIGS * self.n_factors], dim=1)
        return mean, loadings.unflatten(1, (N_CONFIGS, -1)), torch.exp(own.clamp(-9.0, 3.0)) + 1e-4

    def export(self) -> dict[str, Array]:
        """Weights as ``belief.Belief`` wants them (float32)."""
        arrays = {}
        for i, layer in enumerate([*self.layers, self.out]):
            linear = cast(nn.Linear, layer)
            arrays[f"prior_w{i}"] = np.ascontiguousarray(linear.weight.detach().numpy().T, np.float32)
            arrays[f"prior_b{i}"] = linear.bias.detach().numpy().astype(np.float32)
        return arrays


def log_loss(mean: Tensor, loadings: Tensor, own: Tensor, times: Tensor, known: Tensor) -> Tensor:
    """Negative log likelihood, per known entry, of log times (n, N_CONFIGS) where ``known``; constants left out.

    By the matrix inversion and determinant lemmas on covariance L L' + D.
    """
    weight = known / own
    miss = (times - mean) * known
    weighed = loadings * weight[..., None]
    root = torch.linalg.cholesky(torch.eye(loadings.shape[2]) + weighed.transpose(1, 2) @ loadings)
    pulled = (weighed * miss[..., None]).sum(dim=1)
    solved = torch.cholesky_solve(pulled[..., None], root)[..., 0]
    square = (weight * miss**2).sum(dim=1) - (pulled * solved).sum(dim=1)
    volume = (known * torch.log(own)).sum(dim=1) + 2 * torch.log(torch.diagonal(root, dim1=1, dim2=2)).sum(dim=1)
    return 0.5 * ((square + volume) / known.sum(dim=1).clamp(min=1)).mean()


def fit(
    prior: Prior,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    rounds: int,
    rate: Callable[[float], float],
    without: tuple[str, ...] = (),
) -> float:
    """``rounds`` steps of gradient descent, each on fresh tasks of ``batch``; the mean loss of the last quarter.

    ``rate`` gives the learning rate at a part (0 .. 1) of the rounds; ``without``: see ``policy.blinded``.
    """
    losses = []
    for k in range(rounds):
        for group in optimizer.param_groups:
            group["lr"] = rate(k / rounds)
        obs = batch.reset()
        known = spaces.config_mask(obs)
        times = np.log(np.maximum(1 - np.where(known, batch.truth, 0.0), 0.05))
        known[:, 0] = False  # AUTO: 0 by definition
        inputs = (torch.as_tensor(np.asarray(a, np.float32)) for a in (times, known))
        told = torch.as_tensor(fingerprint_and_mask(blinded(obs, without)))
        loss = log_loss(*prior(told), *inputs)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(prior.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return float(np.mean(losses[-max(1, rounds // 4) :]))

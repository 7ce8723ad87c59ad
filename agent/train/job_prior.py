"""Trains the prior of ``envs/search/belief/`` on simulated jobs: what its slots' fingerprints tell of all configs.

Only training (``tests/tools/fit_prior.py``) needs this module, and torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from ...envs.search.belief.belief import LOG_RANGE
from ...envs.search.belief.prior import N_FIGURES
from ...envs.sim.jobs import Jobs
from ...traces.fingerprint import N_FEATURES
from ...traces.spaces import N_CONFIGS

Array = np.ndarray[Any, Any]
Tensor = torch.Tensor

#: How firmly exposure is drawn to the middle where a slot's configs hardly differ in time.
_PULL, _MIDDLE = 0.02, 0.5


class JobPrior(nn.Module):
    """Features and mask of a slot -> mean, own variance, loadings of its figures; see ``envs.search.belief.Prior``."""

    def __init__(self, width: int = 128, n_shared: int = 6, n_own: int = 8) -> None:
        super().__init__()
        self.n_shared, self.n_factors = n_shared, n_shared + n_own
        self.layers = nn.ModuleList([nn.Linear(N_FEATURES + N_CONFIGS, width), nn.Linear(width, width)])
        self.out = nn.Linear(width, N_FIGURES * (2 + self.n_factors))
        with torch.no_grad():
            self.out.weight[2 * N_FIGURES :] *= 0.3
            self.out.bias[N_FIGURES : 2 * N_FIGURES] = -3.0
            self.out.bias[2 * N_CONFIGS] = _MIDDLE

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(..., N_FEATURES + N_CONFIGS) -> (..., N_FIGURES), (..., N_FIGURES), (..., N_FIGURES, k)."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        mean, own, loadings = self.out(x).split([N_FIGURES, N_FIGURES, N_FIGURES * self.n_factors], dim=-1)
        return mean, torch.exp(own.clamp(-9.0, 3.0)) + 1e-5, loadings.unflatten(-1, (N_FIGURES, -1))

    def export(self) -> dict[str, Array]:
        """Weights as ``envs.search.belief.Prior`` wants them (float32)."""
        arrays: dict[str, Array] = {"n_shared": np.array(self.n_shared)}
        for i, layer in enumerate([*self.layers, self.out]):
            linear = cast(nn.Linear, layer)
            arrays[f"w{i}"] = np.ascontiguousarray(linear.weight.detach().numpy().T, np.float32)
            arrays[f"b{i}"] = linear.bias.detach().numpy().astype(np.float32)
        return arrays


def figures_of(log_times: Array, savings: Array, mask: Array) -> tuple[Array, Array]:
    """The figures of slots, and which of them are known, (..., N_FIGURES): what the prior is fitted to.

    ``log_times`` (..., N_CONFIGS): log of a call's time over the default's; ``savings``: what a config alone saves, in
    units of the slot's share of the step; ``mask``: which configs are meant. Exposure is the slope of the second over
    the time saved, by least squares; what it leaves is the residual.
    """
    known = mask.copy()
    known[..., 0] = False
    saved = np.where(known, 1 - np.exp(np.clip(log_times, *LOG_RANGE)), 0.0)
    felt = np.where(known, np.clip(savings, -3, 1), 0.0)
    slope = ((saved * felt).sum(-1) + _PULL * _MIDDLE) / ((saved**2).sum(-1) + _PULL)
    slope = np.clip(slope, 0.0, 1.3)
    rest = np.where(known, felt - slope[..., None] * saved, 0.0)
    logs = np.where(known, np.clip(log_times, *LOG_RANGE), 0.0)
    figures = np.concatenate([logs, rest, slope[..., None]], axis=-1)
    return figures, np.concatenate([known, known, known.any(-1, keepdims=True)], axis=-1)


def log_loss(out: tuple[Tensor, Tensor, Tensor], n_shared: int, figures: Tensor, known: Tensor) -> Tensor:
    """Negative log likelihood a figure of whole jobs, (jobs, slots, N_FIGURES) where ``known``; constants left out.

    Covariance: own variances, loadings of each slot, loadings that the slots of a job share; by the matrix
    inversion and determinant lemmas, slots first.
    """
    mean, own, loadings = out
    weight = known / own
    shared, alone = loadings[..., :n_shared], loadings[..., n_shared:]
    told = torch.cat([((figures - mean) * known)[..., None], shared * known[..., None]], dim=-1)
    weighed = alone * weight[..., None]
    root = torch.linalg.cholesky(torch.eye(alone.shape[-1]) + weighed.transpose(-1, -2) @ alone)
    pulled = torch.linalg.solve_triangular(root, weighed.transpose(-1, -2) @ told, upper=False)
    gram = (told.transpose(-1, -2) @ (weight[..., None] * told) - pulled.transpose(-1, -2) @ pulled).sum(
        dim=1
    )
    outer = torch.linalg.cholesky(torch.eye(n_shared) + gram[:, 1:, 1:])
    seen = torch.linalg.solve_triangular(outer, gram[:, 1:, :1], upper=False)[..., 0]
    square = gram[:, 0, 0] - (seen**2).sum(dim=-1)
    volume = (known * torch.log(own)).sum(dim=(1, 2))
    volume = volume + 2 * torch.log(torch.diagonal(root, dim1=-2, dim2=-1)).sum(dim=(1, 2))
    volume = volume + 2 * torch.log(torch.diagonal(outer, dim1=-2, dim2=-1)).sum(dim=-1)
    return 0.5 * ((square + volume) / known.sum(dim=(1, 2)).clamp(min=1)).mean()


def truths(jobs: Jobs) -> tuple[Array, Array]:
    """What every config of every slot does alone, the other slots left to NCCL, now: logs of call times over the
    default's and savings in units of the slot's share of the step, both (n, width, N_CONFIGS), 0 where masked."""
    mask = jobs.mask & (np.arange(jobs.width)[None, :, None] < jobs.n_slots[:, None, None])
    mask[:, :, 0] = False
    job, slot, config = np.nonzero(mask)
    configs = np.zeros((len(job), jobs.width), np.int64)
    configs[np.arange(len(job)), slot] = config
    base_us, base_calls = jobs.step_us(np.zeros((len(jobs), jobs.width), np.int64))
    step_us, call_us = jobs.step_us(configs, job)
    logs, savings = np.zeros(mask.shape), np.zeros(mask.shape)
    logs[job, slot, config] = np.log(call_us[np.arange(len(job)), slot] / base_calls[job, slot])
    share = jobs.fingerprint.share.reshape(-1, jobs.width)[job, slot]
    savings[job, slot, config] = (1 - step_us / base_us[job]) / np.maximum(share, 1e-3)
    return logs, savings


def training_arrays(jobs: Jobs) -> tuple[Tensor, Tensor, Tensor]:
    """What the prior reads of jobs, (n, slots, N_FEATURES + N_CONFIGS), the figures that it is fitted to, and which of
    them are known, both (n, slots, N_FIGURES)."""
    used = np.arange(jobs.width)[None] < jobs.n_slots[:, None]
    figures, known = figures_of(*truths(jobs), jobs.mask & used[..., None])
    features = jobs.fingerprint.vector().reshape(len(jobs), jobs.width, -1)
    most = int(jobs.n_slots.max())
    parts = (np.concatenate([features, jobs.mask], axis=2), figures, known)
    x, y, z = (torch.as_tensor(np.asarray(part[:, :most], np.float32)) for part in parts)
    return x, y, z


def judge(prior: JobPrior, jobs: Jobs) -> float:
    """Mean negative log likelihood a figure of jobs (constants left out): the less, the better is the prior."""
    x, figures, known = training_arrays(jobs)
    with torch.no_grad():
        return float(log_loss(prior(x), prior.n_shared, figures, known))


def fit(
    prior: JobPrior,
    draw: Callable[[int], Jobs],
    rounds: int,
    batch: int,
    rate: float = 2e-3,
    progress: Callable[[int, float], object] = lambda done, loss: None,
) -> None:
    """``rounds`` steps of gradient descent (Adam), each on ``batch`` fresh jobs of ``draw``. The learning rate begins
    with ``rate`` and falls along half a cosine."""
    optimizer = torch.optim.Adam(prior.parameters(), lr=rate)
    for k in range(rounds):
        for group in optimizer.param_groups:
            group["lr"] = rate * (0.01 + 0.99 * 0.5 * (1 + float(np.cos(np.pi * k / rounds))))
        x, figures, known = training_arrays(draw(batch))
        loss = log_loss(prior(x), prior.n_shared, figures, known)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(prior.parameters(), 1.0)
        optimizer.step()
        progress(k + 1, float(loss.detach()))

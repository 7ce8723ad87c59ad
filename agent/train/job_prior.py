"""Trains the prior of ``envs/search/belief/`` on simulated jobs: what its slots' fingerprints tell of all configs.

Only training (``tests/tools/fit_prior.py``) needs this module, and torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from numpy import arange, asarray, clip, concatenate, exp, float32, int64, log, maximum, nonzero, where, zeros
from torch import nn
from torch.linalg import cholesky, solve_triangular
from torch.nn import Linear

from ...envs.search.belief.effects import LOG_RANGE
from ...envs.search.belief.prior import N_FIGURES
from ...envs.sim.jobs import Jobs
from ...traces.fingerprint import N_FEATURES
from ...traces.spaces import N_CONFIGS

Array = np.ndarray[Any, Any]
Tensor = torch.Tensor
Tensors = tuple[Tensor, Tensor, Tensor]

#: How firmly exposure is drawn to the middle where a slot's configs hardly differ in time.
_PULL, _MIDDLE = 0.02, 0.5


class JobPrior(nn.Module):
    """Features and mask of a slot -> mean, own variance, loadings of its figures; see ``envs.search.belief.Prior``."""

    def __init__(self, width: int = 128, n_shared: int = 6, n_own: int = 8) -> None:
        super().__init__()
        self.n_shared = n_shared
        self.n_factors = n_shared + n_own
        n_inputs = N_FEATURES + N_CONFIGS
        first = Linear(n_inputs, width)
        second = Linear(width, width)
        self.layers = nn.ModuleList([first, second])
        n_outputs = N_FIGURES * (2 + self.n_factors)
        self.out = Linear(width, n_outputs)
        with torch.no_grad():
            weight = self.out.weight
            bias = self.out.bias
            weight[2 * N_FIGURES :] *= 0.3  # loadings
            bias[N_FIGURES : 2 * N_FIGURES] = -3.0  # log of own variances
            bias[2 * N_CONFIGS] = _MIDDLE  # mean of the exposure

    def forward(self, x: Tensor) -> Tensors:
        """(..., N_FEATURES + N_CONFIGS) -> (..., N_FIGURES), (..., N_FIGURES), (..., N_FIGURES, k)."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        sizes = [N_FIGURES, N_FIGURES, N_FIGURES * self.n_factors]
        out = self.out(x)
        mean, log_own, loadings = out.split(sizes, dim=-1)
        log_own = log_own.clamp(-9.0, 3.0)
        own = torch.exp(log_own) + 1e-5
        loadings = loadings.unflatten(-1, (N_FIGURES, -1))
        return mean, own, loadings

    def export(self) -> dict[str, Array]:
        """Weights as ``envs.search.belief.Prior`` wants them (float32)."""
        arrays: dict[str, Array] = {"n_shared": np.array(self.n_shared)}
        layers = [*self.layers, self.out]
        for i, layer in enumerate(layers):
            linear = cast(Linear, layer)
            weight = linear.weight.detach().numpy()
            bias = linear.bias.detach().numpy()
            transposed = weight.T
            arrays[f"w{i}"] = np.ascontiguousarray(transposed, float32)
            arrays[f"b{i}"] = bias.astype(float32)
        return arrays


def figures_of(log_times: Array, savings: Array, mask: Array) -> tuple[Array, Array]:
    """The figures of slots, and which of them are known, (..., N_FIGURES): what the prior is fitted to.

    ``log_times`` (..., N_CONFIGS): log of a call's time over the default's; ``savings``: what a config alone saves, in
    units of the slot's share of the step; ``mask``: which configs are meant. Exposure is the slope of the second over
    the time saved, by least squares; what it leaves is the residual.
    """
    known = mask.copy()
    known[..., 0] = False
    log_times = clip(log_times, *LOG_RANGE)
    saved = 1 - exp(log_times)
    saved = where(known, saved, 0.0)
    felt = clip(savings, -3, 1)
    felt = where(known, felt, 0.0)

    products = (saved * felt).sum(-1)
    squares = (saved**2).sum(-1)
    products = products + _PULL * _MIDDLE
    squares = squares + _PULL
    slope = products / squares
    slope = clip(slope, 0.0, 1.3)
    slope = slope[..., None]

    rest = felt - slope * saved
    rest = where(known, rest, 0.0)
    logs = where(known, log_times, 0.0)
    figures = concatenate([logs, rest, slope], axis=-1)
    has_any = known.any(-1, keepdims=True)
    are_known = concatenate([known, known, has_any], axis=-1)
    return figures, are_known


def log_loss(out: Tensors, n_shared: int, figures: Tensor, known: Tensor) -> Tensor:
    """Negative log likelihood a figure of whole jobs, (jobs, slots, N_FIGURES) where ``known``; constants left out.

    Covariance: own variances, loadings of each slot, loadings that the slots of a job share; by the matrix
    inversion and determinant lemmas, slots first.
    """
    mean, own, loadings = out
    weight = known / own
    shared = loadings[..., :n_shared]
    alone = loadings[..., n_shared:]

    # What the slot's own loadings explain is taken out, slot by slot.
    off = (figures - mean) * known
    shared = shared * known[..., None]
    told = torch.cat([off[..., None], shared], dim=-1)
    weighed = (alone * weight[..., None]).transpose(-1, -2)
    n_own = alone.shape[-1]
    inner = weighed @ alone
    root = cholesky(torch.eye(n_own) + inner)
    moved = weighed @ told
    pulled = solve_triangular(root, moved, upper=False)
    weighed_told = weight[..., None] * told
    gram = told.transpose(-1, -2) @ weighed_told
    gram = gram - pulled.transpose(-1, -2) @ pulled
    gram = gram.sum(dim=1)  # over the slots of a job

    # Then what the shared loadings explain, job by job.
    of_shared = gram[:, 1:, 1:]
    outer = cholesky(torch.eye(n_shared) + of_shared)
    seen = solve_triangular(outer, gram[:, 1:, :1], upper=False)
    seen = seen[..., 0]
    square = gram[:, 0, 0] - (seen**2).sum(dim=-1)

    by_slot = (1, 2)
    logs = known * torch.log(own)
    volume = logs.sum(dim=by_slot)
    of_own = _log_diagonal(root)
    volume = volume + 2 * of_own.sum(dim=by_slot)
    of_shared = _log_diagonal(outer)
    volume = volume + 2 * of_shared.sum(dim=-1)
    count = known.sum(dim=by_slot)
    count = count.clamp(min=1)
    each = (square + volume) / count
    return 0.5 * each.mean()


def _log_diagonal(matrix: Tensor) -> Tensor:
    """(..., k, k) -> logs of the diagonal, (..., k)."""
    diagonal = torch.diagonal(matrix, dim1=-2, dim2=-1)
    return torch.log(diagonal)


def truths(jobs: Jobs) -> tuple[Array, Array]:
    """What every config of every slot does alone, the other slots left to NCCL, now: logs of call times over the
    default's and savings in units of the slot's share of the step, both (n, width, N_CONFIGS), 0 where masked."""
    mask = jobs.mask & _used(jobs)[:, :, None]
    mask[:, :, 0] = False
    job, slot, config = nonzero(mask)
    n = len(job)
    row = arange(n)

    width = jobs.width
    n_jobs = len(jobs)
    default = zeros((n_jobs, width), int64)
    base_us, base_calls = jobs.step_us(default)
    configs = zeros((n, width), int64)
    configs[row, slot] = config
    step_us, call_us = jobs.step_us(configs, job)

    mine = call_us[row, slot]
    ratio = mine / base_calls[job, slot]
    logs = zeros(mask.shape)
    logs[job, slot, config] = log(ratio)
    share = jobs.fingerprint.share.reshape(-1, width)
    share = maximum(share[job, slot], 1e-3)
    saved = 1 - step_us / base_us[job]
    savings = zeros(mask.shape)
    savings[job, slot, config] = saved / share
    return logs, savings


def _used(jobs: Jobs) -> Array:
    """Which places have a slot, (n, width)."""
    place = arange(jobs.width)
    return asarray(place < jobs.n_slots[:, None])


def training_arrays(jobs: Jobs) -> Tensors:
    """What the prior reads of jobs, (n, slots, N_FEATURES + N_CONFIGS), the figures that it is fitted to, and which of
    them are known, both (n, slots, N_FIGURES)."""
    mask = jobs.mask & _used(jobs)[..., None]
    logs, savings = truths(jobs)
    figures, known = figures_of(logs, savings, mask)
    features = jobs.fingerprint.vector()
    shape = len(jobs), jobs.width, -1
    features = features.reshape(shape)
    inputs = concatenate([features, jobs.mask], axis=2)
    most = int(jobs.n_slots.max())
    x = _tensor(inputs[:, :most])
    y = _tensor(figures[:, :most])
    z = _tensor(known[:, :most])
    return x, y, z


def _tensor(values: Array) -> Tensor:
    values = asarray(values, float32)
    return torch.as_tensor(values)


def judge(prior: JobPrior, jobs: Jobs) -> float:
    """Mean negative log likelihood a figure of jobs (constants left out): the less, the better is the prior."""
    x, figures, known = training_arrays(jobs)
    with torch.no_grad():
        out = prior(x)
        loss = log_loss(out, prior.n_shared, figures, known)
    return float(loss)


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
    weights = prior.parameters()
    optimizer = torch.optim.Adam(weights, lr=rate)
    for k in range(rounds):
        angle = np.pi * k / rounds
        height = 1 + float(np.cos(angle))
        lr = rate * (0.01 + 0.99 * 0.5 * height)
        for group in optimizer.param_groups:
            group["lr"] = lr
        jobs = draw(batch)
        x, figures, known = training_arrays(jobs)
        out = prior(x)
        loss = log_loss(out, prior.n_shared, figures, known)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(prior.parameters(), 1.0)
        optimizer.step()
        progress(k + 1, float(loss.detach()))

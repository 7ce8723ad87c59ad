"""Imitation of a planner that sees the truth: what the policy learns first.

Play whole jobs with the policy of now, and at every turn let it predict which config one who knows the truth would run
next, given only what it has seen so far. The minimiser of such a loss is the posterior over the best config (Lee et al.
2023, "Supervised pretraining can learn in-context reinforcement learning"). Each moment weighs as much as there is to
gain in it, or the likeliest config would be the safe one in most; what is learned then is the expected improvement of
each config, up to a factor. Episodes of earlier policies are kept for a while (Ross et al. 2011, DAgger).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...envs.search.belief import Prior
from ...envs.search.turns import N_OBSERVATION
from ...envs.search.watch import SearchConfig
from ...envs.sim.family import JobFamily
from ...envs.sim.jobs import draw_jobs
from ...traces.spaces import N_CONFIGS
from ..policies.lstm import LstmPolicy, ablate
from .batches import HORIZON, JobBlock
from .recurrent import MaskedLstmPolicy

Array = np.ndarray[Any, Any]

#: Turns of an episode that are learned from, at most.
LONGEST = 240


@dataclass
class Episode:
    """One job as it was played: what was seen at each turn, and what was true."""

    seen: Array  # (t, N_OBSERVATION) float16
    apart: Array  # (t, N_CONFIGS) float16: what a config truly saves beyond the best, in units of the job


def collect(
    weights: dict[str, Array],
    record: dict[str, Any],
    family: JobFamily,
    seed: tuple[int, ...],
    n: int,
    sharpness: float,
) -> list[Episode]:
    """Play ``n`` fresh jobs to their verdicts with a policy whose scores are multiplied by ``sharpness``."""
    rng = np.random.default_rng(seed)
    policy = LstmPolicy(weights, record, seed=int(rng.integers(2**31)))
    block = JobBlock(
        draw_jobs(family, rng, n), Prior.load(), rng, SearchConfig(trials=0, doubtful=0).of(policy), teach=True
    )
    searches = block.search.searches
    seen: list[list[Array]] = [[] for _ in range(n)]
    apart: list[list[Array]] = [[] for _ in range(n)]
    state = (np.zeros((n, policy.hidden), np.float32),) * 2
    obs = np.zeros((n, N_OBSERVATION), np.float32)
    while len(rows := np.array(block.search.waiting)):
        for i in rows:
            obs[i] = searches[i].observe()
            seen[i].append(obs[i].astype(np.float16))
            apart[i].append(block.apart[i, searches[i].turn] / block.unit[i] * HORIZON)
        scores, state = policy.scores(obs, state)
        noisy = sharpness * scores + policy.rng.gumbel(size=scores.shape)
        block.step(rows, noisy.argmax(axis=1)[rows])
    return [Episode(np.array(s), np.array(a, np.float16)) for s, a in zip(seen, apart, strict=True) if s]


def learn(
    policy: MaskedLstmPolicy,
    episodes: Sequence[Episode],
    temperature: float,
    stay: float,
    foresight: float,
    calm: float,
    without: tuple[str, ...] = (),
) -> float:
    """One step of gradient descent on whole episodes; the loss.

    The loss is the cross entropy to the softmax of what a trial is worth to one who knows the truth: ``foresight``
    windows of what it saves, and the window itself; ``calm`` more for the config that is best already. It is weighted
    by the largest saving plus ``stay``: the larger these two are, the surer the policy must be of a gain before it
    tries one config more.
    """
    length, n = min(max(len(e.seen) for e in episodes), LONGEST), len(episodes)
    seen, apart = np.zeros((n, length, N_OBSERVATION), np.float32), np.zeros((n, length, N_CONFIGS), np.float32)
    real = np.zeros((n, length), bool)
    for k, e in enumerate(episodes):
        t = min(len(e.seen), length)
        seen[k, :t], apart[k, :t], real[k, :t] = e.seen[:t], e.apart[:t], True
    begun = torch.zeros(n, length)
    begun[:, 0] = 1
    zero = torch.zeros(1, n, policy.lstm_actor.hidden_size)
    shown = torch.as_tensor(ablate(seen.reshape(n * length, -1), without))
    scores = policy.scores(shown, (zero, zero), begun.flatten())[0].unflatten(0, (n, -1))
    open_ = torch.as_tensor(seen[:, :, -N_CONFIGS:] > 0.5)
    told = torch.as_tensor(np.clip(apart, -2.0, 2.0))
    worth = foresight * told.clamp(min=0) + told + calm * (told == 0)
    wanted = torch.softmax((worth / temperature).masked_fill(~open_, -1e8), dim=2)
    chances = torch.log_softmax(scores, dim=2).masked_fill(~open_, 0.0)
    weight = (told * open_).amax(dim=2).clamp(min=0) + stay
    weight = weight * torch.as_tensor(real)
    loss = -(weight[..., None] * wanted * chances).sum() / weight.sum()
    policy.optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    policy.optimizer.step()
    return float(loss.detach())

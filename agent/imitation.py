"""Imitation of a planner that sees the truth: what the policy learns first.

Roll the policy out, and at every step let it predict which config one who knows the truth would run next, given only
what it has seen so far. The minimiser of such a loss is the posterior over the best config (Lee et al. 2023,
"Supervised pretraining can learn in-context reinforcement learning"): a searcher that adapts in context. Its likeliest
config would be the safe one, AUTO, in most slots, since no other is as likely to be the best; so each moment weighs as
much as there is to gain in it. What is learned then is the expected improvement of each config, up to a factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..envs import spaces
from ..envs.spaces import HORIZON
from .batches import Believing, revealed
from .recurrent import MaskedLstmPolicy

if TYPE_CHECKING:
    from .train import Settings

Array = np.ndarray[Any, Any]


def imitate(
    policy: MaskedLstmPolicy, batch: Believing, n: int, iterations: int, s: Settings, rate: Callable[[float], float]
) -> float:
    """``iterations`` rounds of rolling out ``n`` whole episodes and learning from them; returns the last loss.

    The loss is the cross entropy to the softmax of :func:`worth`, weighted by the largest worth (as a saving) plus
    ``stay``: the larger that is, the surer the policy must be of a gain before it tries one config more. ``rate`` gives
    the learning rate at a part (0 .. 1) of the rounds. The critic learns the returns on the side.
    """
    loss = torch.zeros(())
    obs = batch.reset()
    for k in range(iterations):
        for group in policy.optimizer.param_groups:
            group["lr"] = rate(k / iterations)
        truth, share, allowed = batch.truth.copy(), np.array(batch.share), torch.as_tensor(batch.open)
        seen, best, rewards, obs = _episodes(policy, batch, obs, n, s.hidden, s.tail)
        values = np.stack([worth(truth, best[t], s.foresight) for t in range(HORIZON)], axis=1)
        returns = np.zeros_like(rewards)
        running = np.zeros(n, np.float32)
        for t in reversed(range(HORIZON)):
            returns[t] = running = rewards[t] + s.gamma * running
        for part in np.array_split(np.arange(n), max(1, n * HORIZON // s.batch // 2)):
            x = torch.as_tensor(seen[:, part].swapaxes(0, 1).reshape(len(part) * HORIZON, -1))
            begun = torch.zeros(len(part), HORIZON)
            begun[:, 0] = 1
            zero = torch.zeros(1, len(part), s.hidden)
            scores = policy.scores(x, (zero, zero), begun.flatten())[0].reshape(len(part), HORIZON, -1)
            worths, open_ = torch.as_tensor(values[part]), allowed[part][:, None]
            wanted = torch.softmax((worths / s.temperature).masked_fill(~open_, -torch.inf), dim=2)
            weight = worths.max(dim=2).values / (s.foresight + 1) + s.stay
            chances = torch.log_softmax(scores, dim=2).masked_fill(~open_, 0.0)
            loss = -(weight[..., None] * wanted * chances).sum() / weight.sum()
            known = np.stack([revealed(truth[part], best[t, part], share[part]) for t in range(HORIZON)], 1)
            value = policy.predict_values(torch.cat([x, torch.as_tensor(known).flatten(0, 1)], dim=1)).flatten()
            miss = torch.nn.functional.mse_loss(value, torch.as_tensor(returns[:, part].T.flatten()))
            policy.optimizer.zero_grad()
            (loss + 0.01 * miss).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            policy.optimizer.step()
    return float(loss.detach())


def worth(truth: Array, best: Array, foresight: float) -> Array:
    """What running each config next is worth to one who knows the truth, (n, N_CONFIGS) float32, 0 where masked.

    ``foresight`` windows under it if it truly is better than what would be committed now, ``best`` (n,), and the trial
    itself: what it saves or costs against running the best so far once more (which is worth 0).
    """
    known = np.where(np.isfinite(truth), truth, 0.0)
    apart = np.clip(known - known[np.arange(len(best)), best][:, None], -1.5, 1.5)
    return np.where(np.isfinite(truth), foresight * np.maximum(apart, 0) + apart, 0.0).astype(np.float32)


def _episodes(
    policy: MaskedLstmPolicy, batch: Believing, obs: Array, n: int, hidden: int, tail: float
) -> tuple[Array, Array, Array, Array]:
    """One sampled episode each: inputs (HORIZON, n, N_INPUT), the best config before each trial (HORIZON, n), rewards
    (HORIZON, n), and the first inputs of the next."""
    seen, rewards = np.zeros((HORIZON, *obs.shape), np.float32), np.zeros((HORIZON, n), np.float32)
    best = np.zeros((HORIZON, n), np.int64)
    state, starts = (torch.zeros(1, n, hidden), torch.zeros(1, n, hidden)), torch.zeros(n)
    for t in range(HORIZON):
        seen[t], best[t] = obs, batch.trials.best()
        with torch.no_grad():
            distribution, state = policy.get_distribution(torch.as_tensor(obs), state, starts)
            actions = distribution.sample().numpy()
        obs, rewards[t], terminated, truncated, info = batch.step(actions)
        oracle, trial = info["oracle_saving"], info["expected_saving"]
        rewards[t] -= spaces.reward(oracle, oracle)  # as BatchVecEnv does
    rewards[-1] += tail * (rewards[-1] - spaces.TRIAL_PRICE * (trial - oracle))
    if not np.all(np.logical_or(terminated, truncated)):
        raise ValueError(f"episodes of a training batch must all last {HORIZON} trials")
    return seen, best, rewards, obs

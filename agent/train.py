"""Meta-training: across random clusters in the simulator, imitation of a planner that sees the truth, then PPO.

Imitation. Roll the policy out, and at every step let it predict which config one who knows the truth would run next,
given only what it has seen so far. The minimiser of such a loss is the posterior over the best config (Lee et al. 2023,
"Supervised pretraining can learn in-context reinforcement learning"): a searcher that adapts in context. Its likeliest
config would be the safe one, AUTO, in most slots, since no other is as likely to be the best; so each moment weighs as
much as there is to gain in it. What is learned then is the expected improvement of each config, up to a factor. PPO
goes on from there on ``spaces.reward`` itself, which also knows what a trial costs and what noise does.

Work is cut into chunks, each seeded by (seed, chunk) alone and followed by a checkpoint, so that a run resumed after a
kill ends with the same weights as one that was not.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.utils import set_random_seed

from ..envs import spaces
from ..envs.arena import Arena, Suite, play
from ..envs.leaderboard import summary
from ..envs.spaces import HORIZON
from .baselines import BASELINES, make_policy
from .policy import LstmPolicy, Policy, Stopping
from .recurrent import BatchVecEnv, MaskedLstmPolicy, revealed

Array = np.ndarray[Any, Any]

#: Called after each chunk with (steps done, steps in all, newest row of the learning curve).
Progress = Callable[[int, int, dict[str, Any]], None]


class Batch(Protocol):
    """What training needs of an environment (``envs.sim_env.BatchSim``): ``n`` episodes stepped at once, in step."""

    trials: spaces.Trials

    @property
    def truth(self) -> Array:
        """Expected scaled saving of every config in the running episodes, (n, N_CONFIGS), -inf where masked."""
        ...

    @property
    def share(self) -> Array:
        """Of their slots in the step, (n,)."""
        ...

    def reset(self) -> Array:
        """First observations, (n, N_OBSERVATION)."""
        ...

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """One window in each episode."""
        ...


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that shapes the weights, beside the simulator itself."""

    steps: int = 5_505_024  #: env steps in all
    imitation: float = 0.6  #: part of them spent on imitation
    seed: int = 0
    n_envs: int = 512
    chunk: int = 262_144  #: env steps between checkpoints
    hidden: int = 64
    head_width: int = 64
    head_depth: int = 24
    memory: bool = True  #: False cuts the LSTM off (ablation)
    temperature: float = 0.3  #: of the imitated choice, in units of ``worth``
    stay: float = 0.015  #: weight of moments in which nothing is left to gain beside the gain (see ``imitate``)
    foresight: float = 20.0  #: windows that a found improvement is credited with, see ``worth``
    sharpness: float = 12.0  #: by which the scores are multiplied between the two phases
    imitation_rate: float = 2e-3
    ppo_rate: float = 3e-4
    gamma: float = 0.97
    risk: float = 3.0  #: price of step time above 1.3 defaults in PPO
    tail: float = 4.0  #: windows that count for what the search found, after its end
    gae_lambda: float = 0.95
    entropy: float = 0.0
    epochs: int = 3
    batch: int = 2048


def make_model(settings: Settings, env: BatchVecEnv) -> RecurrentPPO:
    """Fresh model. One rollout is one whole episode of every environment."""
    return RecurrentPPO(
        MaskedLstmPolicy,
        env,
        learning_rate=settings.ppo_rate,
        n_steps=HORIZON,
        batch_size=settings.batch,
        n_epochs=settings.epochs,
        gamma=settings.gamma,
        gae_lambda=settings.gae_lambda,
        ent_coef=settings.entropy,
        policy_kwargs={
            "lstm_hidden_size": settings.hidden,
            "head_width": settings.head_width,
            "head_depth": settings.head_depth,
            "memory": settings.memory,
        },
        seed=settings.seed,
        device="cpu",
    )


def imitate(
    policy: MaskedLstmPolicy, batch: Batch, n: int, iterations: int, s: Settings, rate: Callable[[float], float]
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
        truth, share, allowed = batch.truth.copy(), np.array(batch.share), torch.as_tensor(spaces.config_mask(obs))
        seen, rewards, obs = _episodes(policy, batch, obs, n, s.hidden, s.tail)
        values = np.stack([worth(truth, seen[t], s.foresight) for t in range(HORIZON)], axis=1)
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
            known = np.stack(
                [revealed(truth[part], spaces.seen(seen[t][part]).best, share[part]) for t in range(HORIZON)], 1
            )
            value = policy.predict_values(torch.cat([x, torch.as_tensor(known).flatten(0, 1)], dim=1)).flatten()
            miss = torch.nn.functional.mse_loss(value, torch.as_tensor(returns[:, part].T.flatten()))
            policy.optimizer.zero_grad()
            (loss + 0.01 * miss).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            policy.optimizer.step()
    return float(loss.detach())


def worth(truth: Array, obs: Array, foresight: float) -> Array:
    """What running each config next is worth to one who knows the truth, (n, N_CONFIGS) float32, 0 where masked.

    ``foresight`` windows under it if it truly is better than what would be committed now, and the trial itself: what
    it saves or costs against running the best so far once more (which is worth 0).
    """
    known = np.where(np.isfinite(truth), truth, 0.0)
    best = known[np.arange(len(obs)), spaces.seen(obs).best][:, None]
    apart = np.clip(known - best, -1.5, 1.5)
    return np.where(np.isfinite(truth), foresight * np.maximum(apart, 0) + apart, 0.0).astype(np.float32)


def _episodes(
    policy: MaskedLstmPolicy, batch: Batch, obs: Array, n: int, hidden: int, tail: float
) -> tuple[Array, Array, Array]:
    """One sampled episode each: observations (HORIZON, n, N_OBSERVATION), rewards (HORIZON, n), first of the next."""
    seen, rewards = np.zeros((HORIZON, *obs.shape), np.float32), np.zeros((HORIZON, n), np.float32)
    state, starts = (torch.zeros(1, n, hidden), torch.zeros(1, n, hidden)), torch.zeros(n)
    for t in range(HORIZON):
        seen[t] = obs
        with torch.no_grad():
            distribution, state = policy.get_distribution(torch.as_tensor(obs), state, starts)
            actions = distribution.sample().numpy()
        obs, rewards[t], terminated, truncated, info = batch.step(actions)
        oracle, trial = info["oracle_saving"], info["expected_saving"]
        rewards[t] -= spaces.reward(oracle, oracle)  # as BatchVecEnv does
    rewards[-1] += tail * (rewards[-1] - spaces.TRIAL_PRICE * (trial - oracle))
    if not np.all(np.logical_or(terminated, truncated)):
        raise ValueError(f"episodes of a training batch must all last {HORIZON} trials")
    return seen, rewards, obs


class Training:
    """One training run: chunk after chunk, with a checkpoint and a row of the learning curve after each.

    ``make_batch(n, seed)`` makes the environment, ``examine(policy)`` gives the figures of a row.
    """

    def __init__(
        self,
        settings: Settings,
        make_batch: Callable[[int, int], Batch],
        examine: Callable[[LstmPolicy], dict[str, Any]],
        checkpoint: Path,
    ) -> None:
        self.settings, self.make_batch, self.examine, self.checkpoint = settings, make_batch, examine, checkpoint
        self.done, self.seconds, self.curve = 0, 0.0, list[dict[str, Any]]()
        torch.set_num_threads(1)  # with two threads small matrices train slower, and erratically
        set_random_seed(settings.seed)
        self.model = make_model(settings, BatchVecEnv(make_batch(settings.n_envs, 0), settings.n_envs))

    @property
    def policy(self) -> MaskedLstmPolicy:
        """The policy in training."""
        return self.model.policy  # type: ignore[return-value]

    def resume(self) -> None:
        """Go on from the checkpoint. Raises ValueError when there is none, or one of other settings."""
        try:
            saved = torch.load(self.checkpoint, weights_only=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise ValueError(f"no checkpoint to resume in {self.checkpoint}: {error}") from error
        if saved["settings"] != dataclasses.asdict(self.settings):
            changed = [k for k, v in dataclasses.asdict(self.settings).items() if saved["settings"].get(k) != v]
            raise ValueError(
                f"{self.checkpoint} was made with other settings ({', '.join(changed)}); use the same or start anew"
            )
        self.policy.load_state_dict(saved["policy"])
        self.policy.optimizer.load_state_dict(saved["optimizer"])
        self.done, self.seconds, self.curve = saved["done"], saved["seconds"], saved["curve"]

    def save(self) -> None:
        """Write the checkpoint; a kill in the middle leaves the one before."""
        state = {
            "settings": dataclasses.asdict(self.settings),
            "policy": self.policy.state_dict(),
            "optimizer": self.policy.optimizer.state_dict(),
            "done": self.done,
            "seconds": self.seconds,
            "curve": self.curve,
        }
        part = self.checkpoint.with_suffix(".part")
        torch.save(state, part)
        part.replace(self.checkpoint)

    def light(self) -> LstmPolicy:
        """The policy as it is now, for the run time."""
        return LstmPolicy(self.policy.export(), seed=self.settings.seed)

    def run(self, progress: Progress = lambda done, total, row: None) -> None:
        """Train to the end."""
        s = self.settings
        while self.done < s.steps:
            begin = time.perf_counter()
            index = self.done // s.chunk
            size = min(s.chunk, s.steps - self.done)
            set_random_seed(s.seed * 100_003 + index)
            batch = self.make_batch(s.n_envs, s.seed * 100_003 + index)
            row: dict[str, Any] = {"phase": "imitation"}
            turn = s.imitation * s.steps
            if self.done < turn:
                first = self.done

                def rate(part: float, first: int = first, size: int = size, turn: float = turn) -> float:
                    return s.imitation_rate * _fade(min(1.0, (first + part * size) / turn))

                rounds = max(1, size // (s.n_envs * HORIZON))
                row["loss"] = round(imitate(self.policy, batch, s.n_envs, rounds, s, rate), 4)
            else:
                row["phase"] = "ppo"
                if not self.curve or self.curve[-1]["phase"] == "imitation":
                    # At run time the likeliest config is taken. PPO improves the policy that draws: make that one
                    # nearly the same, or it learns to make up for the draws.
                    self.policy.sharpen(s.sharpness)
                part = (self.done - turn) / max(1, s.steps - turn)
                self.model.lr_schedule = partial(_constant, s.ppo_rate * _fade(part))
                self.model.set_env(BatchVecEnv(batch, s.n_envs, s.tail, s.risk), force_reset=True)
                self.model.learn(size, reset_num_timesteps=True)
                returns = [e["r"] for e in self.model.ep_info_buffer or ()]
                row["return"] = round(float(np.mean(returns)), 4)
            self.done += size
            row |= {"steps": self.done, **self.examine(self.light())}
            self.seconds += time.perf_counter() - begin
            row["seconds"] = round(self.seconds, 1)
            self.curve.append(row)
            self.save()
            progress(self.done, s.steps, row)


def _constant(rate: float, remaining: float) -> float:
    """A learning rate that does not look at how much is left."""
    return rate


def _fade(part: float) -> float:
    """Learning rate over a phase: a cosine from 1 down to 0.05."""
    return 0.05 + 0.95 * 0.5 * (1 + float(np.cos(np.pi * part)))


def commit_of_checkout() -> str:
    """Commit that the code was at, with ``+`` when it had been changed since; '' outside a checkout."""

    def git(*args: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).resolve().parent), *args], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def record_of(training: Training, figures: dict[str, Any]) -> dict[str, Any]:
    """What the shipped weights carry: how they were made, and how good they were found to be."""
    return {
        "commit": commit_of_checkout(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seconds": round(training.seconds, 1),
        "settings": dataclasses.asdict(training.settings),
        "figures": figures,
        "curve": training.curve,
    }


def export(training: Training, out: Path, figures: dict[str, Any]) -> Path:
    """Write the weights to ``out`` (.npz) and the record beside them (.json), whose path is returned."""
    record = record_of(training, figures)
    light = training.light()
    light.record = {key: record[key] for key in ("commit", "date", "settings")}
    light.save(out)
    beside = out.with_suffix(".json")
    beside.write_text(json.dumps(record, indent=1) + "\n")
    return beside


def simulator(n: int, seed: int) -> Batch:
    """``n`` episodes of the training family."""
    from ..envs.sim_env import BatchSim

    batch: Batch = BatchSim(n, seed)
    return batch


#: Seeds from here on are never trained on.
HELD_OUT = 10**9


def held_out(n: int = 512) -> Suite:
    """``n`` tasks of the training family from seeds that training does not use."""
    batch = simulator(n, HELD_OUT)
    batch.reset()
    return Suite.of("unseen", batch)


def examine(policy: Policy, suite: Suite) -> dict[str, Any]:
    """The figures of a row of the learning curve."""
    figures = summary(play(Stopping(policy), Arena(suite)))
    return {key: figures[key] for key in ("share_of_gain", "trials_until_near", "regret", "slot_regret", "slower")}


def compare(policy: Policy, suite: Suite) -> dict[str, dict[str, Any]]:
    """The same figures, and more, of the policy and of every baseline, on the same noise."""
    entrants: dict[str, Policy] = {"lstm": Stopping(policy)}
    entrants |= {name: make_policy(name) for name in BASELINES}
    return {name: summary(play(entrant, Arena(suite))) for name, entrant in entrants.items()}

"""Training of the policy by sb3-contrib's RecurrentPPO on the environments that everyone has: whole jobs on random
clusters in the simulator, or recorded runs. It begins as the rule, and is paid in measured time alone.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from ...envs.replay_env import ReplayEnv
from ...envs.search.config import SearchConfig
from ...envs.search_env import SearchEnv
from ...envs.sim_env import SimEnv
from ...traces.header import git
from ..policies.lstm import LstmPolicy
from ..policies.rule import ExpectedImprovement
from .recurrent import MaskedLstmPolicy

Array = np.ndarray[Any, Any]

#: Called after each rollout with (turns done, turns in all, newest row of the learning curve).
Progress = Callable[[int, int, dict[str, Any]], None]
#: Hundreds of default steps that a job counts for at most in training: thousands in a few would drown all else.
MOST = 2.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that shapes the weights, beside the environment itself."""

    seed: int = 0
    turns: int = 240_000  #: of all environments together
    envs: int = 24  #: side by side
    rollout: int = 192  #: turns of each of them between two updates
    batch: int = 1024
    epochs: int = 4
    rate: float = 1e-3
    gamma: float = 0.999
    gae_lambda: float = 0.98
    target_kl: float = 0.03
    hidden: int = 64
    head_width: int = 64
    head_depth: int = 24


class AgainstRule(gym.Wrapper[Array, Array, Array, Array]):
    """An episode is paid what it earned beyond the rule's on the same job with the same noise.

    Jobs differ by hundreds of times more than policies do; what a policy changes is seen only beside another one on the
    same job (a baseline by roll-out, as in Kool et al. 2019). The rule is measured like the policy: no truth is told.
    It plays along turn by turn: environments in lock-step need not wait for whole episodes of it.
    """

    def __init__(self, env: SearchEnv, beside: SearchEnv, most: float = float("inf")) -> None:
        """``beside``: the same environment once more, for the rule; ``most``: that an episode is paid, or costs."""
        super().__init__(env)
        self.beside = beside
        self.most = most
        self.rule = ExpectedImprovement()
        self.rng = np.random.default_rng()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """The next job, for both."""
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        job = int(self.rng.integers(2**31))
        self.own = self.earned = 0.0
        self.is_over = False
        self.seen, _ = self.beside.reset(seed=job, options=options)
        return self.env.reset(seed=job, options=options)

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """A turn of both; the last one is paid less what the rule has earned."""
        observation, reward, ended, cut, info = self.env.step(action)
        before = self.own
        self.own += float(reward)
        self._play_along()
        now = self.own
        if ended or cut:
            while not self.is_over:
                self._play_along()
            beyond = max(self.own - self.earned, -self.most)
            now = min(beyond, self.most)
        return observation, now - before, ended, cut, info

    def _play_along(self) -> None:
        if self.is_over:
            return
        action, _ = self.rule.predict(self.seen)
        self.seen, reward, ended, cut, _ = self.beside.step(action)
        self.earned += float(reward)
        self.is_over = ended or cut


class Training:
    """One training run. ``folder`` holds the checkpoint: SB3's, with the state of the optimizer."""

    def __init__(self, settings: Settings, folder: Path, runs: tuple[Path, ...] = ()) -> None:
        """``runs``: recorded runs to train on, in place of simulated jobs; each environment has one of them."""
        self.settings = settings
        self.folder = folder
        self.runs = runs
        self.seconds = 0.0
        self.curve: list[dict[str, Any]] = []
        torch.set_num_threads(1)  # with two threads small matrices train slower, and erratically
        made = iter(range(settings.envs))
        config = SearchConfig()

        def one() -> gym.Env[Array, Array]:
            make = partial(ReplayEnv, runs[next(made) % len(runs)]) if runs else SimEnv
            env = make(config=config)
            beside = make(config=config)
            return AgainstRule(env, beside, MOST)

        s = settings
        # One process: beside two cores more of them wait for each other.
        jobs = make_vec_env(one, s.envs, s.seed)
        shape = {"lstm_hidden_size": s.hidden, "head_width": s.head_width, "head_depth": s.head_depth}
        self.model = RecurrentPPO(
            MaskedLstmPolicy,
            jobs,
            learning_rate=s.rate,
            n_steps=s.rollout,
            batch_size=s.batch,
            n_epochs=s.epochs,
            gamma=s.gamma,
            gae_lambda=s.gae_lambda,
            target_kl=s.target_kl,
            seed=s.seed,
            device="cpu",
            policy_kwargs=shape,
        )

    @property
    def policy(self) -> MaskedLstmPolicy:
        """What is trained."""
        return cast(MaskedLstmPolicy, self.model.policy)

    def resume(self) -> None:
        """Go on from the checkpoint. Raises ValueError when there is none, or one of other settings."""
        try:
            told = json.loads((self.folder / "record.json").read_text())
            if told["settings"] != dataclasses.asdict(self.settings):
                raise ValueError("it was made with other settings; use the same or start anew")
            self.model.set_parameters(str(self.folder / "checkpoint.zip"), device="cpu")
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"no checkpoint to resume in {self.folder}: {error}") from error
        self.seconds, self.curve = told["seconds"], told["curve"]
        self.model.num_timesteps = self.curve[-1]["turns"]

    def begin_with(self, weights: LstmPolicy) -> None:
        """Go on from weights that were trained before: those of the actor; the critic begins anew."""
        self.policy.take(weights.weights)

    def save(self) -> None:
        """Write the checkpoint; a kill in the middle leaves the one before."""
        self.folder.mkdir(parents=True, exist_ok=True)
        checkpoint = self.folder / "part-checkpoint.zip"
        record = self.folder / "part-record.json"
        self.model.save(checkpoint)
        record.write_text(json.dumps(self.record(), indent=1) + "\n")
        checkpoint.replace(self.folder / "checkpoint.zip")
        record.replace(self.folder / "record.json")

    def record(self) -> dict[str, Any]:
        """What made the weights."""
        return {
            "commit": commit_of_checkout(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "seconds": round(self.seconds, 1),
            "settings": dataclasses.asdict(self.settings),
            "runs": len(self.runs),
            "curve": self.curve,
        }

    def run(self, progress: Progress = lambda done, total, row: None) -> None:
        """Train to the end."""
        left = self.settings.turns - self.model.num_timesteps
        if left > 0:
            self.model.learn(left, callback=_AfterRollout(self, progress), reset_num_timesteps=False)
        self.save()


class _AfterRollout(BaseCallback):
    """A row of the learning curve after each rollout, and a checkpoint."""

    def __init__(self, training: Training, progress: Progress) -> None:
        super().__init__()
        self.training = training
        self.progress = progress
        self.began = time.perf_counter()

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        t, now = self.training, time.perf_counter()
        t.seconds = t.seconds + now - self.began
        self.began = now
        beyond = [100 * float(episode["r"]) for episode in self.model.ep_info_buffer or []]
        saved = error = None
        if beyond:
            saved = round(float(np.mean(beyond)), 2)
            deviation = np.std(beyond) / len(beyond) ** 0.5
            error = round(float(deviation), 2)
        row = {
            "turns": self.num_timesteps,
            "jobs": len(beyond),
            "saved": saved,  # default steps a job beyond the rule
            "error": error,
            "seconds": round(t.seconds, 1),
        }
        t.curve.append(row)
        t.save()
        self.progress(self.num_timesteps, t.settings.turns, row)


def gained(policy: LstmPolicy, runs: Sequence[Path], times: int = 3) -> float:
    """Default steps a job that a policy saves beyond the rule on recorded runs, each played so many times."""
    means = []
    for run in runs:
        job = make_vec_env(partial(_against_rule, run), seed=0)
        mean, _ = evaluate_policy(cast(Any, policy), job, times)
        means.append(mean)
    return 100 * float(np.mean(means))


def _against_rule(run: Path) -> AgainstRule:
    return AgainstRule(ReplayEnv(run), ReplayEnv(run))


def commit_of_checkout() -> str:
    """Commit that the code was at, with ``+`` when it had been changed since; '' outside a checkout."""
    head = git("rev-parse", "HEAD") or ""
    is_changed = head and git("status", "--porcelain", "--untracked-files=no")
    return f"{head}+" if is_changed else head


def export(training: Training, path: Path) -> Path:
    """Write the weights to ``path`` and what made them beside it (.json), which is returned."""
    record = training.record()
    LstmPolicy(training.policy.export(), record).save(path)
    beside = path.with_suffix(".json")
    beside.write_text(json.dumps(record, indent=1) + "\n")
    return beside

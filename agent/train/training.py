"""Training of the policy by sb3-contrib's RecurrentPPO on the environments that everyone has: whole jobs on random
clusters in the simulator, or recorded runs. It begins as the rule, and is paid in measured time alone.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
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
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from ...envs.replay_env import ReplayEnv
from ...envs.search.config import SearchConfig
from ...envs.sim_env import SimEnv
from ...traces.header import git
from ..policies.lstm import LstmPolicy
from .against import AgainstBaseline, WholeJobs
from .recurrent import MaskedLstmPolicy

#: Called after each rollout with (turns done, turns in all, newest row of the learning curve).
Progress = Callable[[int, int, dict[str, Any]], None]
#: Hundreds of default steps that a job counts for at most in training: thousands in a few would drown all else.
MOST = 2.0
#: File of the weights that a training began with, beside its checkpoint.
FIRST = "first.npz"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What shapes the weights, beside the environment and the recorded runs."""

    seed: int = 0
    turns: int = 92_160  #: of all environments together
    envs: int = 24  #: side by side
    rollout: int = 192  #: turns of each of them between two updates
    batch: int = 1024
    epochs: int = 4
    rate: float = 1e-3  #: of the first update; from there it falls in a line, by as much each time
    gamma: float = 1.0  #: an episode is paid at its end, whenever that is
    gae_lambda: float = 1.0
    target_kl: float = 0.03
    hidden: int = 64
    head_width: int = 64
    head_depth: int = 24
    recurrent_rate: float = 1.0  #: by what ``rate`` is multiplied for the LSTMs
    sure: float = (
        5.0  #: lead of the rule's choice of what comes next: another is drawn once in about 40 turns
    )
    epsilon: float = 1e-8  #: Adam's: gradients of the actor's LSTM are about 1e-6, far below SB3's 1e-5

    @property
    def of_update(self) -> int:
        """Turns between two updates."""
        return self.envs * self.rollout

    @property
    def updates(self) -> int:
        """Of the whole training."""
        return max(1, math.ceil(self.turns / self.of_update))

    @property
    def played(self) -> int:
        """Turns of the whole training: ``turns`` rounded up to whole updates."""
        return self.updates * self.of_update


class _TwoRates(RecurrentPPO):
    """RecurrentPPO with another learning rate for the LSTMs."""

    def _setup_model(self) -> None:
        super()._setup_model()
        policy = cast(MaskedLstmPolicy, self.policy)
        rate = self.lr_schedule(1.0)
        policy.optimizer = policy.optimizer_class(policy.rates(), lr=rate, **policy.optimizer_kwargs)  # type: ignore[call-arg]

    def _update_learning_rate(self, optimizers: Any) -> None:
        super()._update_learning_rate(optimizers)
        for group in self.policy.optimizer.param_groups:
            group["lr"] *= group["times"]


class Training:
    """One training run. ``folder`` holds the checkpoint: SB3's, with the state of the optimizer."""

    def __init__(
        self, settings: Settings, folder: Path, runs: tuple[Path, ...] = (), is_split: bool = False
    ) -> None:
        """``runs``: recorded runs to train on, in place of simulated jobs; each environment has one of them.
        ``is_split``: each environment has a process of its own; the weights come out the same."""
        self.settings = settings
        self.folder = folder
        self.runs = runs
        self.seconds = 0.0
        self.curve: list[dict[str, Any]] = []
        torch.set_num_threads(1)  # with two threads small matrices train slower, and erratically
        s = settings
        of_one: list[Callable[[], gym.Env[Any, Any]]] = [
            partial(_job, runs[i % len(runs)] if runs else None) for i in range(s.envs)
        ]
        # One process is the best on two cores: more of them wait for each other.
        jobs = SubprocVecEnv(of_one) if is_split else DummyVecEnv(of_one)
        part = 1 / s.updates  # stable-baselines3 counts the turns before it asks for the rate
        rate = LinearSchedule((1 + part) * s.rate, part * s.rate, 1.0)
        shape: dict[str, Any] = {"lstm_hidden_size": s.hidden, "optimizer_kwargs": {"eps": s.epsilon}}
        shape |= {name: getattr(s, name) for name in ("head_width", "head_depth", "recurrent_rate", "sure")}
        self.model = _TwoRates(
            MaskedLstmPolicy,
            jobs,
            learning_rate=rate,
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
        self._seed_jobs()
        self._first = self.policy.export()

    def _seed_jobs(self, done: int = 0) -> None:
        """Jobs that no other seed of a training has: stable-baselines3 gives its environments the seed and those after
        it. Other ones after so many turns that are ``done``."""
        both = np.random.SeedSequence([self.settings.seed, done])
        first = int(both.generate_state(1)[0]) // 2
        env = self.model.get_env()
        assert env is not None
        env.seed(first)

    @property
    def policy(self) -> MaskedLstmPolicy:
        """What is trained."""
        return cast(MaskedLstmPolicy, self.model.policy)

    @property
    def _paths(self) -> list[str]:
        """Where the recorded runs are; [] with simulated jobs."""
        return [str(run.resolve()) for run in self.runs]

    def resume(self) -> None:
        """Go on from the checkpoint. Raises ValueError when there is none, or one of other settings or runs."""
        try:
            told = json.loads((self.folder / "record.json").read_text())
            if told["settings"] != dataclasses.asdict(self.settings):
                raise ValueError("it was made with other settings; use the same or start anew")
            if told.get("paths", []) != self._paths:  # older checkpoints of simulated jobs have none
                raise ValueError("it was made with other --runs; give the same or start anew")
            with np.load(self.folder / FIRST) as first:
                self._first = dict(first)
            self.model.set_parameters(str(self.folder / "checkpoint.zip"), device="cpu")
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"no checkpoint to resume in {self.folder}: {error}") from error
        self.seconds, self.curve = told["seconds"], told["curve"]
        done = self.curve[-1]["turns"]
        self.model.num_timesteps = done
        # Other jobs and other draws than those that were learned from.
        self.model.set_random_seed(self.settings.seed + done)
        self._seed_jobs(done)

    def begin_with(self, weights: LstmPolicy) -> None:
        """Go on from weights that were trained before: those of the actor; the critic begins anew."""
        self.policy.take(weights.weights)
        self._first = self.policy.export()

    def save(self) -> None:
        """Write the checkpoint; a kill in the middle leaves the one before."""
        self.folder.mkdir(parents=True, exist_ok=True)
        checkpoint = self.folder / "part-checkpoint.zip"
        record = self.folder / "part-record.json"
        first = self.folder / f"part-{FIRST}"
        np.savez(first, **self._first)  # type: ignore[arg-type]
        self.model.save(checkpoint)
        record.write_text(json.dumps(self.record() | {"paths": self._paths}, indent=1) + "\n")
        checkpoint.replace(self.folder / "checkpoint.zip")
        record.replace(self.folder / "record.json")
        first.replace(self.folder / FIRST)

    def record(self) -> dict[str, Any]:
        """What made the weights."""
        return {
            "commit": commit_of_checkout(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "seconds": round(self.seconds, 1),
            "settings": dataclasses.asdict(self.settings),
            "runs": len(self.runs),
            "correlation with the first weights": self._moved(),
            "curve": self.curve,
        }

    def _moved(self) -> dict[str, float]:
        """By how much training moved the recurrent weights: their correlation with the first ones; 1: not at all."""
        now = self.policy.export()
        names = ("lstm_x", "lstm_h")
        both = {name: np.corrcoef(self._first[name].ravel(), now[name].ravel()) for name in names}
        return {name: round(float(matrix[0, 1]), 4) for name, matrix in both.items()}

    def run(self, progress: Progress = lambda done, total, row: None) -> None:
        """Train to the end."""
        left = self.settings.played - self.model.num_timesteps
        if left > 0:
            self.model.learn(left, callback=_AfterRollout(self, progress), reset_num_timesteps=False)
        self.save()


def _job(run: Path | None) -> gym.Env[Any, Any]:
    """An environment that pays beyond the rule: of a recorded run, else of simulated jobs."""
    make = partial(ReplayEnv, run) if run else SimEnv
    env = make(config=SearchConfig())
    beside = make(config=SearchConfig())
    return Monitor(WholeJobs(AgainstBaseline(env, beside, most=MOST)))


class _AfterRollout(BaseCallback):
    """A row of the learning curve after each rollout, and a checkpoint."""

    def __init__(self, training: Training, progress: Progress) -> None:
        super().__init__()
        self.training = training
        self.progress = progress
        self.began = time.perf_counter()

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        """The weights have learned from the rollout before: stable-baselines3 updates them between the two."""
        if self.training.curve:
            self.training.save()

    def _on_rollout_end(self) -> None:
        t, now = self.training, time.perf_counter()
        t.seconds = t.seconds + now - self.began
        self.began = now
        beyond = [100 * float(episode["r"]) for episode in self.model.ep_info_buffer or []]
        saved = error = None
        if beyond:
            saved = round(float(np.mean(beyond)), 2)
            if len(beyond) > 1:
                error = round(float(np.std(beyond, ddof=1) / len(beyond) ** 0.5), 2)
        row = {
            "turns": self.num_timesteps,
            "jobs": len(beyond),
            "saved": saved,  # default steps a job beyond the rule
            "error": error,
            "seconds": round(t.seconds, 1),
        }
        t.curve.append(row)
        self.progress(self.num_timesteps, t.settings.played, row)


def gained(policy: LstmPolicy, runs: Sequence[Path], times: int = 3) -> tuple[float, float]:
    """Default steps a job that a policy saves beyond the rule on recorded runs, each played so many times, and the
    standard error over the runs; NaN for one run, whose scatter is not known."""
    means = []
    for run in runs:
        job = make_vec_env(partial(_against_rule, run), seed=0)
        mean, _ = evaluate_policy(cast(Any, policy), job, times)
        means.append(100 * float(np.mean(mean)))
    error = np.std(means, ddof=1) / len(means) ** 0.5 if len(means) > 1 else math.nan
    return float(np.mean(means)), float(error)


def _against_rule(run: Path) -> AgainstBaseline:
    return AgainstBaseline(ReplayEnv(run), ReplayEnv(run))


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

"""Meta-training of the policy: whole jobs on random clusters in the simulator, imitation of a planner that sees the
truth, then, if asked for, PPO on the time lost itself.

Work is cut into chunks, each seeded by (seed, chunk) alone and followed by a checkpoint, so that a run resumed after a
kill ends with the same weights as one that was not.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.utils import set_random_seed

from ...envs.search.turns import N_OBSERVATION, action_space
from ...envs.search.watch import SearchConfig
from ...envs.sim.family import STANDARD, JobFamily
from ...traces.header import git
from ..policies.lstm import LEARNED, LstmPolicy
from .batches import N_REVEALED, JobBatch, JobVecEnv
from .imitation import Episode, collect, learn
from .recurrent import MaskedLstmPolicy

#: Called after each chunk with (chunks done, chunks in all, newest row of the learning curve).
Progress = Callable[[int, int, dict[str, Any]], None]


@dataclasses.dataclass(frozen=True)
class Stage:
    """Some chunks of imitation; what they mean is said where they are used (``imitation.learn``)."""

    chunks: int
    stay: float
    temperature: float
    calm: float


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that shapes the weights, beside the simulator itself."""

    seed: int = 0
    stages: tuple[Stage, ...] = (Stage(20, 0.1, 0.3, 0.0), Stage(39, 0.02, 0.3, 1.5), Stage(29, 0.004, 0.15, 0.3))
    foresight: float = 20.0  #: windows that a found improvement is credited with
    workers: int = 2  #: processes that play
    jobs: int = 64  #: that each of them plays in a chunk
    kept: int = 23  #: chunks of episodes that are learned from
    descents: int = 25  #: steps of gradient descent in a chunk ...
    batch: int = 32  #: ... on so many episodes each
    rate: float = 3e-3
    sharpness: float = 3.0  #: by which scores are multiplied while playing
    trust: float = 0.5  #: part of what was learned that is added to the rule's scores in the end
    ppo: int = 0  #: chunks of PPO after that ...
    ppo_turns: int = 16_384  #: ... of so many turns
    ppo_rate: float = 3e-4
    hidden: int = 64
    head_width: int = 64
    head_depth: int = 24
    without: tuple[str, ...] = ()  #: some of ``policy.PARTS`` (ablation)

    @property
    def chunks(self) -> int:
        """Of imitation and PPO together."""
        return sum(stage.chunks for stage in self.stages) + self.ppo

    @property
    def family(self) -> JobFamily:
        """The jobs that train."""
        if "durations" not in self.without:
            return STANDARD
        return STANDARD.unsampled()


def _sizes(s: Settings) -> dict[str, Any]:
    return {
        "lstm_hidden_size": s.hidden,
        "head_width": s.head_width,
        "head_depth": s.head_depth,
        "memory": "memory" not in s.without,
    }


def make_policy(s: Settings) -> MaskedLstmPolicy:
    """An untrained policy: the rule."""
    space = gym.spaces.Box(-4.0, 4.0, (N_OBSERVATION + N_REVEALED,), np.float32)
    return MaskedLstmPolicy(space, action_space(), lambda _: s.rate, **_sizes(s))


class Training:
    """One training run: chunk after chunk, with a checkpoint and a row of the learning curve after each.

    ``folder`` holds the checkpoint and the episodes that are still learned from.
    """

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.done, self.seconds, self.curve = 0, 0.0, list[dict[str, Any]]()
        torch.set_num_threads(1)  # with two threads small matrices train slower, and erratically
        set_random_seed(settings.seed)
        self.policy = make_policy(settings)
        self.episodes: dict[int, list[Episode]] = {}

    @property
    def _checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def resume(self) -> None:
        """Go on from the checkpoint. Raises ValueError when there is none, or one of other settings."""
        try:
            saved = torch.load(self._checkpoint, weights_only=True)
            if saved["settings"] != _told(self.settings):
                raise ValueError("it was made with other settings; use the same or start anew")
            for k in range(max(0, saved["done"] - self.settings.kept), saved["done"]):
                if self._file(k).exists():
                    parts = torch.load(self._file(k), weights_only=True)
                    self.episodes[k] = [Episode(a.numpy(), b.numpy()) for a, b in parts]
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise ValueError(f"no checkpoint to resume in {self.folder}: {error}") from error
        self.policy.load_state_dict(saved["policy"])
        self.policy.optimizer.load_state_dict(saved["optimizer"])
        self.done, self.seconds, self.curve = saved["done"], saved["seconds"], saved["curve"]

    def _file(self, chunk: int) -> Path:
        return self.folder / f"episodes-{chunk}.pt"

    def save(self) -> None:
        """Write the checkpoint; a kill in the middle leaves the one before."""
        self.folder.mkdir(parents=True, exist_ok=True)
        last = self.done - 1
        if last in self.episodes:
            torch.save(
                [(torch.as_tensor(e.seen), torch.as_tensor(e.apart)) for e in self.episodes[last]], self._file(last)
            )
        state = {
            "settings": _told(self.settings),
            "policy": self.policy.state_dict(),
            "optimizer": self.policy.optimizer.state_dict(),
            "done": self.done,
            "seconds": self.seconds,
            "curve": self.curve,
        }
        part = self._checkpoint.with_suffix(".part")
        torch.save(state, part)
        part.replace(self._checkpoint)
        self._file(last - self.settings.kept).unlink(missing_ok=True)

    def light(self) -> LstmPolicy:
        """The policy as it is now, for the run time."""
        return LstmPolicy(self.policy.export(), {"settings": _told(self.settings)}, self.settings.seed)

    def run(self, progress: Progress = lambda done, total, row: None) -> None:
        """Train to the end."""
        s = self.settings
        with get_context("spawn").Pool(s.workers) as pool:
            while self.done < s.chunks:
                begin = time.perf_counter()
                set_random_seed(s.seed * 100_003 + self.done)
                stage, part = self._stage()
                row = self._imitate(pool, stage, part) if stage is not None else self._ppo()
                self.done += 1
                self.seconds += time.perf_counter() - begin
                row |= {"chunk": self.done, "seconds": round(self.seconds, 1)}
                self.curve.append(row)
                self.save()
                progress(self.done, s.chunks, row)

    def _stage(self) -> tuple[Stage | None, float]:
        """The stage of the next chunk, and how much of that is done (0 .. 1); None: PPO."""
        left = self.done
        for stage in self.settings.stages:
            if left < stage.chunks:
                return stage, left / stage.chunks
            left -= stage.chunks
        return None, 0.0

    def _imitate(self, pool: Any, stage: Stage, part: float) -> dict[str, Any]:
        s = self.settings
        weights, record = self.policy.export(), {"settings": _told(s)}
        tasks = [(weights, record, s.family, (s.seed, self.done, w), s.jobs, s.sharpness) for w in range(s.workers)]
        fresh = [episode for found in pool.starmap(collect, tasks) for episode in found]
        self.episodes[self.done] = fresh
        self.episodes.pop(self.done - s.kept, None)
        known = [episode for chunk in sorted(self.episodes) for episode in self.episodes[chunk]]
        for group in self.policy.optimizer.param_groups:
            group["lr"] = s.rate * (0.05 + 0.95 * 0.5 * (1 + float(np.cos(np.pi * part))))
        losses, rng = [], np.random.default_rng([s.seed, self.done, 5])
        for _ in range(s.descents):
            pick = rng.choice(len(known), min(s.batch, len(known)), replace=False)
            told = [known[i] for i in pick]
            losses.append(learn(self.policy, told, stage.temperature, stage.stay, s.foresight, stage.calm, s.without))
        turns = float(np.mean([len(e.seen) for e in fresh]))
        return {"phase": "imitation", "loss": round(float(np.mean(losses)), 4), "turns": round(turns, 1)}

    def _ppo(self) -> dict[str, Any]:
        s = self.settings
        rules = SearchConfig(by_belief="belief" not in s.without)
        batch = JobBatch(64, s.seed * 100_003 + self.done, s.family, rules)
        model = RecurrentPPO(
            MaskedLstmPolicy, JobVecEnv(batch, s.without), learning_rate=s.ppo_rate, n_steps=64, batch_size=2048,
            n_epochs=4, gamma=0.99, gae_lambda=0.95, target_kl=0.03, seed=s.seed + self.done, device="cpu",
            policy_kwargs=_sizes(s),
        )  # fmt: skip
        model.policy.load_state_dict(self.policy.state_dict())
        model.learn(s.ppo_turns)
        self.policy.load_state_dict(model.policy.state_dict())
        lost = [e["lost"] for e in batch.finished]
        return {"phase": "ppo", "lost": round(float(np.mean(lost)), 2) if lost else None}


def _told(settings: Settings) -> dict[str, Any]:
    """Settings as JSON and torch keep them."""
    return cast(dict[str, Any], json.loads(json.dumps(dataclasses.asdict(settings))))


def commit_of_checkout() -> str:
    """Commit that the code was at, with ``+`` when it had been changed since; '' outside a checkout."""
    head = git("rev-parse", "HEAD") or ""
    return f"{head}+" if head and git("status", "--porcelain", "--untracked-files=no") else head


def export(training: Training, path: Path) -> Path:
    """Write the weights to ``path`` and what made them beside it (.json), which is returned."""
    record = {
        "commit": commit_of_checkout(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seconds": round(training.seconds, 1),
        "settings": _told(training.settings),
        "curve": training.curve,
    }
    weights, trust = training.policy.export(), np.float32(training.settings.trust)
    LstmPolicy(weights | {name: trust * weights[name] for name in LEARNED}, record).save(path)
    beside = path.with_suffix(".json")
    beside.write_text(json.dumps(record, indent=1) + "\n")
    return beside

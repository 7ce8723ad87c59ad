"""Meta-training: across random clusters in the simulator, imitation of a planner that sees the truth, then PPO.

``imitation.py`` gives a searcher that adapts in context. PPO goes on from there on ``spaces.reward`` itself, which also
knows what a trial costs and what noise does.

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
from typing import Any

import numpy as np
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.utils import set_random_seed

from ..envs.arena import Arena, Policy, Suite, play
from ..envs.leaderboard import summary
from ..envs.spaces import HORIZON
from .baselines import BASELINES, make_policy
from .batches import Batch, BatchVecEnv, Believing
from .belief import Belief
from .imitation import imitate
from .policy import LstmPolicy
from .prior import Prior, fit
from .recurrent import MaskedLstmPolicy
from .stopping import Stopping

Array = np.ndarray[Any, Any]

#: Called after each chunk with (steps done, steps in all, newest row of the learning curve).
Progress = Callable[[int, int, dict[str, Any]], None]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that shapes the weights, beside the simulator itself."""

    prior: int = 4_194_304  #: tasks that the prior of the belief is fitted to, before any step
    prior_batch: int = 1024
    prior_rate: float = 2e-3
    steps: int = 4_194_304  #: env steps in all
    imitation: float = 0.5  #: part of them spent on imitation
    seed: int = 0
    n_envs: int = 512
    chunk: int = 262_144  #: env steps between checkpoints
    hidden: int = 64
    head_width: int = 64
    head_depth: int = 24
    without: tuple[str, ...] = ()  #: some of ``policy.PARTS`` (ablation)
    one_cluster: bool = False  #: all tasks on 2 x 8 H100 (ablation)
    temperature: float = 0.3  #: of the imitated choice, in units of ``imitation.worth``
    stay: float = 0.015  #: weight of moments with nothing left to gain, beside the gain (see ``imitation.imitate``)
    foresight: float = 20.0  #: windows that a found improvement is credited with, see ``imitation.worth``
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
            "memory": "memory" not in settings.without,
        },
        seed=settings.seed,
        device="cpu",
    )


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
        self.prior = Prior()
        self.prior_optimizer = torch.optim.Adam(self.prior.parameters())
        self.model = make_model(settings, BatchVecEnv(self._believing(0), settings.n_envs))

    @property
    def policy(self) -> MaskedLstmPolicy:
        """The policy in training."""
        return self.model.policy  # type: ignore[return-value]

    def _believing(self, seed: int) -> Believing:
        """Fresh episodes, with what the prior of now makes of them."""
        s = self.settings
        return Believing(self.make_batch(s.n_envs, seed), Belief(self.prior.export()), s.without)

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
        self.prior.load_state_dict(saved["prior"])
        self.prior_optimizer.load_state_dict(saved["prior_optimizer"])
        self.policy.load_state_dict(saved["policy"])
        self.policy.optimizer.load_state_dict(saved["optimizer"])
        self.done, self.seconds, self.curve = saved["done"], saved["seconds"], saved["curve"]

    def save(self) -> None:
        """Write the checkpoint; a kill in the middle leaves the one before."""
        state = {
            "settings": dataclasses.asdict(self.settings),
            "prior": self.prior.state_dict(),
            "prior_optimizer": self.prior_optimizer.state_dict(),
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
        weights = self.policy.export() | self.prior.export()
        return LstmPolicy(weights, {"settings": dataclasses.asdict(self.settings)}, self.settings.seed)

    def run(self, progress: Progress = lambda done, total, row: None) -> None:
        """Train to the end: the prior, then imitation, then PPO."""
        s = self.settings
        total = s.prior + s.steps
        turn = s.prior + int(s.imitation * s.steps)
        phases = (
            ("prior", 0, s.prior, self._fit),
            ("imitation", s.prior, turn, self._imitate),
            ("ppo", turn, total, self._ppo),
        )
        while self.done < total:
            begin = time.perf_counter()
            name, first, last, work = next(phase for phase in phases if self.done < phase[2])
            size = min(s.chunk, last - self.done)
            seed = s.seed * 100_003 + len(self.curve)
            set_random_seed(seed)
            row: dict[str, Any] = {"phase": name}
            row |= work(seed, size, (self.done - first) / (last - first), (self.done - first + size) / (last - first))
            self.done += size
            row["steps"] = self.done
            if name != "prior":
                row |= self.examine(self.light())
            self.seconds += time.perf_counter() - begin
            row["seconds"] = round(self.seconds, 1)
            self.curve.append(row)
            self.save()
            progress(self.done, total, row)

    # A chunk of each phase: its seed, its size, and between which parts (0 .. 1) of the phase it lies.

    def _fit(self, seed: int, size: int, first: float, last: float) -> dict[str, Any]:
        s = self.settings
        batch = self.make_batch(s.prior_batch, seed)
        rounds = max(1, size // s.prior_batch)
        rate = partial(_rate, s.prior_rate, first, last)
        loss = fit(self.prior, self.prior_optimizer, batch, rounds, rate, s.without)
        return {"loss": round(loss, 4)}

    def _imitate(self, seed: int, size: int, first: float, last: float) -> dict[str, Any]:
        s = self.settings
        rounds = max(1, size // (s.n_envs * HORIZON))
        rate = partial(_rate, s.imitation_rate, first, last)
        return {"loss": round(imitate(self.policy, self._believing(seed), s.n_envs, rounds, s, rate), 4)}

    def _ppo(self, seed: int, size: int, first: float, last: float) -> dict[str, Any]:
        s = self.settings
        if first == 0:
            # At run time the likeliest config is taken. PPO improves the policy that draws: make that one nearly the
            # same, or it learns to make up for the draws.
            self.policy.sharpen(s.sharpness)
        self.model.lr_schedule = partial(_constant, _rate(s.ppo_rate, first, last, 0.0))
        self.model.set_env(BatchVecEnv(self._believing(seed), s.n_envs, s.tail, s.risk), force_reset=True)
        self.model.learn(size, reset_num_timesteps=True)
        returns = [e["r"] for e in self.model.ep_info_buffer or ()]
        return {"return": round(float(np.mean(returns)), 4)}


def _rate(top: float, first: float, last: float, part: float) -> float:
    """Learning rate at a part of a chunk that lies between ``first`` and ``last`` of a phase: a cosine from ``top``
    down to a twentieth of it."""
    return top * (0.05 + 0.95 * 0.5 * (1 + float(np.cos(np.pi * (first + part * (last - first))))))


def _constant(rate: float, remaining: float) -> float:
    """A learning rate that does not look at how much is left."""
    return rate


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


def simulator(settings: Settings) -> Callable[[int, int], Batch]:
    """Makes ``n`` episodes of the training family from a seed."""
    from ..envs.sim.family import STANDARD, narrowed
    from ..envs.sim_env import BatchSim

    family = STANDARD
    if settings.one_cluster:
        family = narrowed(
            STANDARD, generations=(0.0, 0.0, 1.0, 0.0), per_node=((8, 1.0),), one_node=0.0, n_nodes=(2, 2)
        )
    return lambda n, seed: BatchSim(n, seed, family)


#: Seeds from here on are never trained on.
HELD_OUT = 10**9


def held_out(n: int = 512) -> Suite:
    """``n`` tasks of the training family from seeds that training does not use."""
    batch: Any = simulator(Settings())(n, HELD_OUT)
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

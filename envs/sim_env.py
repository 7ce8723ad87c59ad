"""The simulated environment: a policy meets thousands of random slots on random clusters, noisy as real ones are.

:class:`BatchSim` steps ``n`` searches on single slots at once, for training; :class:`SimEnv` (``dynamiccl/Sim-v0``) is
the search over a whole job. The observation sees noisy measurements; the reward is computed from the noise-free truth.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import spaces
from .search_env import SearchEnv
from .sim import family as families
from .sim.family import Family, Tasks
from .sim.jobs import SLOTS, STANDARD, JobFamily, draw_jobs, oracle
from .sim_windows import OneJob, SimWindows
from .watch import Rules
from .windows import Windows

Array = np.ndarray[Any, Any]

#: Tasks drawn at once when few episodes run: drawing costs the same for one as for this many.
_POOL = 128


class BatchSim:
    """``n`` independent episodes, each the search on one random slot of one random job.

    An episode that ends begins anew at once with another task (SB3's VecEnv convention: the last observation is in
    ``info["final_observation"]``). Attributes of the running episodes: ``features`` (n, N_FEATURES), ``mask``
    (n, N_MASK), ``truth`` (n, N_CONFIGS) expected scaled savings (-inf where masked), ``share`` (n,), ``noise`` (n,).
    """

    def __init__(
        self, n: int, seed: int | None = None, family: Family = families.STANDARD, horizon: int = spaces.HORIZON
    ) -> None:
        """``horizon``: windows of an episode. Raises ValueError unless ``n`` and ``horizon`` are positive."""
        if n < 1 or horizon < 1:
            raise ValueError(f"n and horizon must be at least 1, not {n} and {horizon}")
        self.n, self.horizon, self.family = n, horizon, family
        self.observation_space, self.action_space = spaces.observation_space(), spaces.action_space()
        self._rows = np.arange(n)
        self.seed(seed)

    def seed(self, seed: int | None) -> None:
        """Begin the stream of tasks and noise anew; takes effect with the next :meth:`reset`."""
        self._rng = np.random.default_rng(seed)
        self._pool: Tasks | None = None

    @property
    def features(self) -> Array:
        """Fingerprint features of the running episodes, (n, N_FEATURES)."""
        return self.tasks.features

    @property
    def mask(self) -> Array:
        """Action masks, (n, N_MASK) bool."""
        return self.tasks.mask

    @property
    def truth(self) -> Array:
        """Expected scaled saving of every config in the next window, (n, N_CONFIGS), -inf where masked."""
        if self.family.drift == 0:
            return self.tasks.truth
        changed = self.trials.n_trials >= self.tasks.drift_at
        return np.where(changed[:, None], self.tasks.later, self.tasks.truth)

    @property
    def share(self) -> Array:
        """Share of the slot in the step, (n,)."""
        return self.tasks.share

    @property
    def noise(self) -> Array:
        """Standard deviation of one window's relative step time, (n,)."""
        return self.tasks.noise

    def reset(self) -> Array:
        """Fresh episodes everywhere; first observations (n, N_OBSERVATION) float32."""
        self.tasks = families.draw(self.family, self._rng, max(self.n, _POOL))
        if self.n < _POOL:
            self._pool, self._next = self.tasks, self.n
            self.tasks = _take(self._pool, np.arange(self.n))
        self.trials = spaces.Trials.start(self.n)
        return self._observe()

    def _observe(self) -> Array:
        return spaces.observe(self.tasks.features, self.tasks.mask, self.trials)

    def _renew(self, done: Array) -> None:
        """New tasks for the finished episodes."""
        rows = np.flatnonzero(done)
        if len(rows) == self.n >= _POOL:
            self.tasks = families.draw(self.family, self._rng, self.n)
        else:
            if self._pool is None or self._next + len(rows) > len(self._pool):
                self._pool, self._next = families.draw(self.family, self._rng, max(len(rows), _POOL)), 0
            self.tasks.put(rows, self._pool, np.arange(self._next, self._next + len(rows)))
            self._next += len(rows)
        self.trials.restart(done)

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """One window in every episode: ``actions`` (n, 2) -> observations, rewards, terminated, truncated, info.

        ``info`` holds arrays (n,): ``config``, ``expected_saving`` of the window, ``oracle_saving`` (both scaled, of
        the episode that was stepped) and, where episodes ended, ``final_observation``. Raises ValueError on a masked or
        impossible action.
        """
        actions = np.asarray(actions)
        if actions.shape != (self.n, 2) or (actions < 0).any() or (actions >= self.action_space.nvec).any():
            raise ValueError(f"actions must be (n, 2) within {self.action_space}, got shape {actions.shape}")
        configs = spaces.config_index(actions)
        expected = self.truth[self._rows, configs]
        if np.isneginf(expected).any():
            bad = int(np.flatnonzero(np.isneginf(expected))[0])
            raise ValueError(f"masked action {actions[bad].tolist()} in episode {bad}: respect the mask")
        return self._advance(configs, expected)

    def _advance(self, configs: Array, expected: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        truth, share = self.truth, self.tasks.share
        # Step times have a heavy tail: Student's t with 4 degrees of freedom, scaled to unit variance.
        noise = self._rng.standard_t(4, self.n) * (self.tasks.noise / np.sqrt(2.0))
        noise *= spaces.noise_factor(expected, share)
        self.trials.record(configs, spaces.scale_saving(expected * share + noise, share))
        spent = spaces.in_window(expected, share)
        reward = spaces.reward(truth[self._rows, self.trials.best()], spent)
        truncated = self.trials.n_trials >= self.horizon
        info: dict[str, Any] = {
            "config": configs,
            "expected_saving": spent,
            "oracle_saving": truth.max(axis=1),
        }
        obs = self._observe()
        if truncated.any():
            info["final_observation"] = obs
            self._renew(truncated)
            obs = self._observe()
        return obs, reward, np.zeros(self.n, bool), truncated, info


def _take(tasks: Tasks, index: Array) -> Tasks:
    parts = {name: getattr(tasks, name)[index] for name in families.ARRAYS}
    fingerprint = type(tasks.fingerprint)(**{k: np.array(v)[index] for k, v in vars(tasks.fingerprint).items()})
    return Tasks(fingerprint=fingerprint, **parts)


class SimEnv(SearchEnv):
    """Tune a simulated job (``dynamiccl/Sim-v0``), see :class:`search_env.SearchEnv`.

    ## Starting State
    A random job of the family, its first default steps behind it.

    ## Information
    Beside what all have, ``oracle_saving``: what the best table saves, as a part of the default step.

    ## Arguments
    ``family``: what jobs are drawn from; ``rules``: how the search is run.
    """

    def __init__(
        self, family: JobFamily = STANDARD, rules: Rules | None = None, render_mode: str | None = None
    ) -> None:
        super().__init__(rules, render_mode=render_mode)
        self.family = family

    def open(self, options: dict[str, Any]) -> Windows:
        """Windows of a new job."""
        jobs = draw_jobs(self.family, self.np_random, 1)
        best = float(oracle(jobs)[1][0] / jobs.step_us(np.zeros((1, SLOTS), np.int64))[0][0])
        self.oracle_saving = 1 - best
        return OneJob(SimWindows(jobs, self.np_random), self.rules.profile_steps)

    def _info(self, masked: bool) -> dict[str, Any]:
        return super()._info(masked) | {"oracle_saving": self.oracle_saving}

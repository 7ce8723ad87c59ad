"""The simulated environment: a policy meets thousands of random slots on random clusters, noisy as real ones are.

:class:`BatchSim` steps ``n`` episodes at once for training; :class:`SimEnv` (``dynamiccl/Sim-v0``) is the same with
one. The observation sees noisy measurements; the reward is computed from the noise-free truth.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from . import spaces
from .sim import family as families
from .sim.family import Family, Tasks

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


class SimEnv(gym.Env[Array, Array]):
    """Search for the best NCCL decision of one slot, in simulation (``dynamiccl/Sim-v0``).

    ## Action Space
    ``MultiDiscrete([pairs, channels])``: AUTO and the (algo, proto) pairs times channel counts, see
    :func:`dynamiccl.envs.spaces.decision_of`. The last ``N_MASK`` entries of the observation say what may be chosen;
    an action outside is refused (``info["refused"]``): NCCL would not take it either, so its own choice runs.

    ## Observation Space
    ``Box(-4, 4, (N_OBSERVATION,), float32)``: fingerprint of the slot, last outcome, statistics per config, mask.

    ## Rewards
    Expected saving of the config that is best by measurement so far, plus ``TRIAL_PRICE`` times that of the config
    just run, in units of the slot's share of the step.

    ## Starting State
    A random cluster, slot and truth; AUTO counts as measured once with saving 0.

    ## Episode End
    Truncated after ``horizon`` windows; never terminated.

    ## Arguments
    ``family``: what tasks are drawn from; ``horizon``: windows of an episode.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - gymnasium's own spelling

    def __init__(self, family: Family = families.STANDARD, horizon: int = spaces.HORIZON) -> None:
        self._batch = BatchSim(1, None, family, horizon)
        self.observation_space = spaces.observation_space()
        self.action_space = spaces.action_space()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """First observation of a new task; ``seed`` makes the tasks and the noise from here on repeatable."""
        super().reset(seed=seed)
        if seed is not None:
            self._batch.seed(seed)
        return self._batch.reset()[0], self._info()

    def _info(self) -> dict[str, Any]:
        return {"oracle_saving": float(self._batch.truth[0].max())}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """One window; see :meth:`BatchSim.step`."""
        actions = np.asarray(action, np.int64).reshape(1, 2)
        refused = not spaces.config_mask(self._batch.mask)[0, spaces.config_index(actions)[0]]
        obs, reward, terminated, truncated, info = self._batch.step(np.zeros_like(actions) if refused else actions)
        last = info.get("final_observation", obs)[0]
        single: dict[str, Any] = {"refused": refused, "config": int(info["config"][0])}
        single |= {key: float(info[key][0]) for key in ("expected_saving", "oracle_saving")}
        return last, float(reward[0]), bool(terminated[0]), bool(truncated[0]), single


gym.register("dynamiccl/Sim-v0", "dynamiccl.envs.sim_env:SimEnv")

"""The simulator as training sees it: what the actor is told, what the critic is told beside it, SB3's interface."""

from __future__ import annotations

from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from ..envs import spaces
from .belief import Belief
from .policy import actor_input
from .recurrent import N_INPUT

Array = np.ndarray[Any, Any]


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


class Believing:
    """A batch whose observations come with what is believed of each config: (n, N_INPUT), see ``policy.actor_input``.

    A masked action, which only an actor that is trained without masks takes, leaves the slot to NCCL.
    """

    def __init__(self, batch: Batch, belief: Belief, without: tuple[str, ...] = ()) -> None:
        self.batch, self.belief, self.without = batch, belief, without

    @property
    def trials(self) -> spaces.Trials:
        """Of the batch."""
        return self.batch.trials

    @property
    def truth(self) -> Array:
        """Of the batch."""
        return self.batch.truth

    @property
    def share(self) -> Array:
        """Of the batch."""
        return self.batch.share

    def _input(self, observations: Array) -> Array:
        self.open = spaces.config_mask(observations)
        return np.concatenate(actor_input(self.belief, observations, self.without), axis=1)

    def reset(self) -> Array:
        """First inputs, (n, N_INPUT)."""
        return self._input(self.batch.reset())

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """One window in each episode."""
        if "masks" in self.without:
            allowed = self.open[np.arange(len(actions)), spaces.config_index(actions)]
            actions = np.where(allowed[:, None], actions, 0)
        observations, *rest = self.batch.step(actions)
        return self._input(observations), *rest  # type: ignore[return-value]


#: Step time in default steps from which ``BatchVecEnv`` makes a window cost more than it loses.
HARSH = 1.3

#: Figures of the truth that the critic sees.
N_REVEALED = 5


def revealed(truth: Array, best: Array, share: Array) -> Array:
    """What the critic sees of the truth, (n, N_REVEALED) float32: what is left to gain over the best measured config,
    the oracle's saving, the slot's share, the mean saving of a config, and how much longer a step the worst makes.

    ``truth`` (n, N_CONFIGS), -inf where masked; ``best`` (n,) index; ``share`` (n,).
    """
    open_ = np.isfinite(truth)
    oracle = truth.max(axis=1)
    now = truth[np.arange(len(truth)), best]
    mean = np.where(open_, truth, 0).sum(axis=1) / open_.sum(axis=1)
    worst = -np.where(open_, truth, 0).min(axis=1) * share
    return np.stack([oracle - now, oracle, share, mean, worst], axis=1).astype(np.float32)


class BatchVecEnv(VecEnv):
    """SB3's interface over an environment that steps ``n`` episodes at once (``envs.sim_env.BatchSim``).

    An episode's end is a true end (no bootstrap): the observation says how many trials are left.
    """

    def __init__(self, batch: Any, n: int, tail: float = 0.0, risk: float = 0.0) -> None:
        """``batch`` has ``reset() -> inputs`` and ``step(actions) -> (inputs, reward, terminated, truncated, info)``.

        ``tail``: windows that the result of a search stays in force after it. ``risk``: price of a window's step time
        above HARSH default steps.
        """
        self.tail, self.risk = tail, risk
        self.batch = batch  # before SB3 asks for attributes of it
        space = gym.spaces.Box(-4.0, 4.0, (N_INPUT + N_REVEALED,), np.float32)
        super().__init__(n, space, spaces.action_space())
        self.returns, self.lengths = np.zeros(n), np.zeros(n, np.int64)
        self.actions = np.zeros((n, 2), np.int64)

    def reset(self) -> Array:  # type: ignore[override]
        """Inputs (n, N_INPUT + N_REVEALED) of fresh episodes."""
        self.returns[:], self.lengths[:] = 0, 0
        return self._reveal(self.batch.reset())

    def _reveal(self, obs: Array) -> Array:
        b = self.batch
        return np.concatenate([obs, revealed(b.truth, b.trials.best(), b.share)], axis=1)

    def step_async(self, actions: Array) -> None:
        """Keep the actions (n, 2)."""
        self.actions = actions

    def step_wait(self) -> tuple[Array, Array, Array, list[dict[str, Any]]]:  # type: ignore[override]
        """Step; infos carry SB3's ``episode`` statistics where one ended."""
        share = np.array(self.batch.share)  # of the running episodes; a step may begin others
        obs, reward, terminated, truncated, info = self.batch.step(self.actions)
        done = np.logical_or(terminated, truncated)
        # Against what the oracle would have got: the same optimum, and tasks with much to gain do not drown the rest.
        oracle, trial = info["oracle_saving"], info["expected_saving"]
        reward = reward - spaces.reward(oracle, oracle)
        # What the search found stays in force when it is over: that much more counts how good it is in the end.
        reward = reward + done * self.tail * (reward - spaces.TRIAL_PRICE * (trial - oracle))
        reward = reward - self.risk * np.maximum(-info["expected_saving"] * share - (HARSH - 1), 0)
        self.returns += reward
        self.lengths += 1
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for i in np.flatnonzero(done):
            infos[i]["episode"] = {"r": float(self.returns[i]), "l": int(self.lengths[i]), "t": 0.0}
        self.returns[done], self.lengths[done] = 0, 0
        return self._reveal(obs), np.asarray(reward, np.float32), done, infos

    def close(self) -> None:
        """Nothing to free."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """The same for all."""
        return [getattr(self.batch, attr_name, None)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """On the whole batch."""
        setattr(self.batch, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """Not offered: there are no single environments."""
        raise NotImplementedError("a batch has no single environments")

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """Never."""
        return [False] * len(list(self._get_indices(indices)))

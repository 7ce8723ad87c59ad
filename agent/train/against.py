"""The environment that pays the difference to a baseline: registered as ``dynamiccl/SimAgainstRule-v0``."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from ...envs.search.interfaces import Policy
from ...envs.search_env import SearchEnv
from ...envs.sim_env import SimEnv
from ..policies.rule import ExpectedImprovement

Array = np.ndarray[Any, Any]


class AgainstBaseline(gym.Wrapper[Array, np.int64, Array, np.int64]):
    """A turn is paid what it earned beyond the same turn of a baseline, on the same job with the same noise.

    Jobs differ by hundreds of times more than policies do; what a policy changes is seen only beside another one on the
    same job (a baseline by roll-out, as in Kool et al. 2019). The baseline is measured like the policy: no truth is
    told. It plays along turn by turn, so that as long as both decide alike each turn is paid 0.
    """

    def __init__(
        self, env: SearchEnv, beside: SearchEnv, baseline: Policy | None = None, most: float = float("inf")
    ) -> None:
        """``beside``: the same environment once more, for the ``baseline`` (None: the rule); ``most``: that an episode
        is paid, or costs, in the unit of the reward."""
        super().__init__(env)
        self.beside = beside
        self.baseline = baseline or ExpectedImprovement()
        self.most = most
        self.rng = np.random.default_rng()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """The next job, for both."""
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        job = int(self.rng.integers(2**31))
        self.own = 0.0
        self.earned = 0.0
        self._paid = 0.0
        self._state: Any = None
        self._is_over = False
        self._seen, _ = self.beside.reset(seed=job, options=options)
        return self.env.reset(seed=job, options=options)

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """A turn of both. With its last turn an episode is paid for all turns that the baseline has left."""
        observation, reward, ended, cut, info = self.env.step(action)
        self.own += float(reward)
        self._play_along()
        if ended or cut:
            while not self._is_over:
                self._play_along()
        before = self._paid
        beyond = self.own - self.earned
        at_least = max(beyond, -self.most)
        self._paid = min(at_least, self.most)
        paid = self._paid - before
        return observation, paid, ended, cut, info

    def action_masks(self) -> Array:
        """Those of the environment."""
        find = self.env.get_wrapper_attr("action_masks")
        masks: Array = find()
        return masks

    def _play_along(self) -> None:
        if self._is_over:
            return
        start = np.array([self._state is None])
        rows = self._seen[None]
        actions, self._state = self.baseline.predict(rows, self._state, start, True)
        action = np.reshape(actions, ())
        self._seen, reward, ended, cut, _ = self.beside.step(action)
        self.earned += float(reward)
        self._is_over = ended or cut


def sim_against_rule(**options: Any) -> AgainstBaseline:
    """``dynamiccl/Sim-v0`` (its options), paid beyond what the rule earns on the same job with the same noise."""
    env = SimEnv(**options)
    beside = SimEnv(**options)
    return AgainstBaseline(env, beside)

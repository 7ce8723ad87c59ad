"""The environment that pays the difference to a baseline: registered as ``dynamiccl/SimAgainstRule-v0``."""

from __future__ import annotations

from typing import Any, cast

import gymnasium as gym
import numpy as np

from ...envs.search.interfaces import Policy
from ...envs.search_env import SearchEnv
from ...envs.sim_env import SimEnv
from ..policies.rule import ExpectedImprovement

Array = np.ndarray[Any, Any]
#: Steps in which a job leaves its last trial, before both accounts are settled.
ROOM = 8


class AgainstBaseline(gym.Wrapper[Array, np.int64, Array, np.int64]):
    """An episode is paid, at its end, what it earned beyond a baseline's on the same job with the same noise.

    Jobs differ by hundreds of times more than policies do; what a policy changes is seen only beside another one on the
    same job (a baseline by roll-out, as in Kool et al. 2019). The baseline is measured like the policy: no truth is
    told. Both accounts are settled at the same step of the job, in the same noise: equal decisions are paid exactly 0.
    A recorded job has no noise of a step: it gives its record a window at a time. So equal tables that two policies
    found by different windows are paid by the scatter of the record too.
    Turns are not paid one by one: once the two have parted, the turn in which one of them gains says nothing about the
    other's.
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
        # What gymnasium.make puts around an environment knows no account.
        self.accounts = cast(SearchEnv, env.unwrapped), cast(SearchEnv, beside.unwrapped)
        for account in self.accounts:
            account.settles = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """The next job, for both."""
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        drawn = self.rng.integers(2**31)
        job = int(drawn)
        self.own = 0.0  # in the unit of the reward
        self.earned = 0.0  # by the baseline
        self._job = job, options
        return self.env.reset(seed=job, options=options)

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """A turn. With the last one the baseline plays its episode, and the difference is paid."""
        observation, reward, ended, cut, info = self.env.step(action)
        self.own += float(reward)
        paid = 0.0
        if ended or cut:
            steps = info["steps"]
            paid = self._paid(steps, ended)
        return observation, paid, ended, cut, info

    def _paid(self, steps: int, is_done: bool) -> float:
        """For an episode of the policy that has taken so many steps; ``is_done``: it is to be settled."""
        is_baseline_done, its_steps = self._baseline_plays()
        at = max(steps, its_steps) + ROOM
        own, beside = self.accounts
        if is_done:
            self.own += own.settle(at)
        if is_baseline_done:
            self.earned += beside.settle(at)
        beyond = self.own - self.earned
        at_least = max(beyond, -self.most)
        return min(at_least, self.most)

    def _baseline_plays(self) -> tuple[bool, int]:
        """The baseline's episode, until it is to be settled: whether it is, and its steps."""
        seed, options = self._job
        seen, info = self.beside.reset(seed=seed, options=options)
        state: Any = None
        ended = cut = False
        while not (ended or cut):
            start = np.array([state is None])
            rows = seen[None]
            actions, state = self.baseline.predict(rows, state, start, True)
            action = np.reshape(actions, ())
            seen, reward, ended, cut, info = self.beside.step(action)
            self.earned += float(reward)
        return ended, info["steps"]

    def action_masks(self) -> Array:
        """Those of the environment."""
        find = self.env.get_wrapper_attr("action_masks")
        masks: Array = find()
        return masks


def sim_against_rule(**options: Any) -> AgainstBaseline:
    """``dynamiccl/Sim-v0`` (its options), paid beyond what the rule earns on the same job with the same noise."""
    env = SimEnv(**options)
    beside = SimEnv(**options)
    return AgainstBaseline(env, beside)


class WholeJobs(gym.Wrapper[Any, Any, Any, Any]):
    """A job that is over has no later turns: PPO adds a value of them to an episode that was only cut."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """The same step, terminated where it was cut."""
        seen, reward, ended, cut, info = self.env.step(action)
        return seen, reward, ended or cut, False, info

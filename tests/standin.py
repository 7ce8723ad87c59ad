"""A small task with the interface of BatchSim: the offer says little, so that only trials tell which config is best."""

from __future__ import annotations

from typing import Any

import numpy as np
from dynamiccl.envs import spaces
from dynamiccl.traces.fingerprint import Fingerprint
from dynamiccl.traces.records import CHANNELS, PAIRS

Array = np.ndarray[Any, Any]


class HiddenKind:
    """``n`` episodes; a hidden kind of cluster decides which pair pays off, nothing but the outcomes shows it.

    Kind k makes pair k good, most so at ``CHANNELS[4]``; the other pairs lose.
    """

    def __init__(self, n: int, seed: int | None = None, noise: float = 0.03) -> None:
        self.horizon = spaces.HORIZON
        self.n, self.sigma, self.rng = n, noise, np.random.default_rng(seed)
        self.share = np.full(n, 0.2)
        self.noise = self.sigma * self.share

    def reset(self) -> Array:
        """First observations."""
        self.trials = spaces.Trials.start(self.n)
        self._draw(np.ones(self.n, bool))
        return self._observe()

    def _draw(self, which: Array) -> None:
        if which.all():
            self.kind = np.zeros(self.n, np.int64)
            self.truth = np.zeros((self.n, spaces.N_CONFIGS))
        self.kind[which] = self.rng.integers(0, 3, which.sum())
        truth = np.full((self.n, spaces.N_PAIRS, spaces.N_CHANNELS), -0.5)
        truth[:, 0] = 0.0
        truth[np.arange(self.n), 1 + self.kind] = 0.5 - 0.1 * np.abs(np.arange(spaces.N_CHANNELS) - 4)
        truth[np.arange(self.n), 1 + self.kind, 0] = 0.05
        self.truth[which] = truth.reshape(self.n, -1)[which]
        one = np.ones(self.n)
        cost = np.full((self.n, len(PAIRS)), -1.0)
        cost[:, :3] = 100.0
        self.fingerprint = Fingerprint(
            0 * one, 2**24 * one, 8 * one, 16 * one, 2 * one, cost, 0 * self.kind, 16 * one, 16 * one, self.share,
            0.5 * one, 0 * one,
        )  # fmt: skip
        self.mask = spaces.action_mask(self.fingerprint)
        self.features = self.fingerprint.vector()
        assert CHANNELS[4] == 8

    def _observe(self) -> Array:
        return spaces.observe(self.fingerprint.vector(), self.mask, self.trials)

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """One window in each episode; a finished one starts anew at once."""
        configs, rows = spaces.config_index(actions), np.arange(self.n)
        assert spaces.config_mask(self._observe())[rows, configs].all(), "a masked config was chosen"
        expected = self.truth[rows, configs]
        saving = expected + self.sigma * self.rng.standard_normal(self.n)
        self.trials.record(configs, saving)
        reward = spaces.reward(self.truth[rows, self.trials.best()], saving)
        done = self.trials.n_trials >= self.horizon
        final = self._observe()
        if done.any():
            self.trials.restart(done)
            self._draw(done)
        info = {
            "oracle_saving": self.truth.max(axis=1),
            "expected_saving": expected,
            "config": configs,
            "final_observation": final,
        }
        return self._observe(), reward, np.zeros(self.n, bool), done, info

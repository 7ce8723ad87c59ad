"""Searches over simulated jobs as training sees them: many side by side, one turn a step, and what the time was worth.

What an episode earns is time: the default steps that its search did not lose against the oracle's table over
``HORIZON`` steps of the job. A search shows its worth only at its end, so the reward of a turn is the change of what
would be lost if the table believed best stayed in force from now on (potential-based shaping, Ng et al. 1999): over an
episode it adds up to the same.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from ...envs.search import turns
from ...envs.search.belief import Prior
from ...envs.search.watch import SearchConfig
from ...envs.sim.jobs import SLOTS, STANDARD, JobFamily, Jobs, draw_jobs, oracle
from ...envs.sim.windows import SimSearch
from ...traces import spaces
from ...traces.spaces import N_CONFIGS
from ..policies.lstm import ablate

Array = np.ndarray[Any, Any]

#: Steps of a job over which the time lost counts.
HORIZON = 20_000
#: A job's loss is divided by HORIZON times this much and this part of what there is to gain: jobs with much to gain
#: count for more, but do not drown the rest.
UNIT = (0.01, 0.3)
#: Figures of the truth that the critic sees.
N_REVEALED = 4


class JobBlock:
    """Some jobs, their searches, and what is true of them."""

    def __init__(
        self, jobs: Jobs, prior: Prior, rng: np.random.Generator, rules: SearchConfig | None, teach: bool
    ) -> None:
        self.jobs, self.best = jobs, 1 - oracle(jobs, passes=1)[1] / jobs.default_us
        self.search = SimSearch(jobs, prior, rng, rules)
        n = len(jobs)
        self.unit = HORIZON * (UNIT[0] + UNIT[1] * self.best)
        self.gain, self.lost = np.zeros(n), np.zeros(n)
        self.teach, self.apart = teach, np.zeros((n, SLOTS, N_CONFIGS), np.float32)
        self.next = 0  # the first job that nobody works on
        self._look(np.arange(n))

    def _tables(self, rows: Array) -> Array:
        """What would stay in force now: what is believed best; once the search is over, what it confirmed."""
        out = np.zeros((len(rows), SLOTS), np.int64)
        for row, i in zip(out, rows, strict=True):
            search = self.search.searches[i]
            row[: search.n_slots] = search.confirmed if search.is_over else search.belief.best()
        return out

    def _saving(self, tables: Array, rows: Array) -> Array:
        return np.asarray(1 - self.jobs.usual_us(tables, rows) / self.jobs.default_us[rows])

    def _look(self, rows: Array) -> None:
        """Work out what the searches at ``rows`` have come to, in default steps lost over HORIZON."""
        tables = self._tables(rows)
        self.gain[rows] = self._saving(tables, rows)
        steps = np.array([self.search.searches[i].steps for i in rows], float)
        lost = np.array([self.search.searches[i].lost for i in rows])
        left = np.maximum(HORIZON - steps, 0)
        self.lost[rows] = lost + steps * self.best[rows] + left * (self.best[rows] - self.gain[rows])
        if self.teach:
            self._compare(rows, tables)

    def _compare(self, rows: Array, tables: Array) -> None:
        """What every config of every slot truly saves beyond the table believed best, the other slots as in it."""
        slots = np.arange(SLOTS)[None, :, None] < self.jobs.n_slots[rows][:, None, None]
        place, slot, config = np.nonzero(self.jobs.mask[rows] & slots)
        trial = tables[place]
        trial[np.arange(len(place)), slot] = config
        self.apart[rows] = 0
        saved = self._saving(trial, rows[place]) - self.gain[rows][place]
        self.apart[rows[place], slot, config] = saved

    def step(self, rows: Array, configs: Array) -> tuple[Array, Array]:
        """A turn of each of the searches at ``rows``: rewards, and which are over."""
        before, windows = self.lost[rows].copy(), self.search.n_windows[rows].copy()
        self.search.step(rows.tolist(), configs)
        over = np.array([self.search.searches[i].is_done for i in rows])
        moved = rows[over | (self.search.n_windows[rows] > windows)]
        if len(moved):
            self._look(moved)
        return (before - self.lost[rows]) / self.unit[rows], over


class JobBatch:
    """``n`` searches that are stepped at once; one that is over begins anew on a fresh job."""

    def __init__(
        self,
        n: int,
        seed: int,
        family: JobFamily = STANDARD,
        rules: SearchConfig | None = None,
        prior: Prior | None = None,
        teach: bool = False,
    ) -> None:
        """``teach``: work out :attr:`apart`."""
        self.n, self.family, self.rules, self.teach = n, family, rules, teach
        self.prior = prior or Prior.load()
        self.rng = np.random.default_rng([seed, 3])
        self.finished: list[dict[str, float]] = []  # of each episode that ended
        self._newest: JobBlock | None = None

    def _fresh(self) -> tuple[JobBlock, int]:
        if self._newest is None or self._newest.next == self.n:
            jobs = draw_jobs(self.family, self.rng, self.n)
            self._newest = JobBlock(jobs, self.prior, self.rng, self.rules, self.teach)
        block = self._newest
        block.next += 1
        return block, block.next - 1

    def reset(self) -> Array:
        """Fresh searches; observations (n, turns.N_OBSERVATION)."""
        self._newest = None
        self.at = [self._fresh() for _ in range(self.n)]
        self.finished.clear()
        return self._observe()

    def _observe(self) -> Array:
        return np.stack([block.search.searches[row].observe() for block, row in self.at])

    def _slot(self) -> Array:
        return np.array([block.search.searches[row].turn for block, row in self.at])

    def step(self, configs: Array) -> tuple[Array, Array, Array]:
        """A turn of each search, (n,) configs: observations, rewards (n,), which searches were done (n,)."""
        rewards, over = np.zeros(self.n), np.zeros(self.n, bool)
        for block in {id(block): block for block, _ in self.at}.values():
            mine = np.array([i for i, (other, _) in enumerate(self.at) if other is block])
            rows = np.array([self.at[i][1] for i in mine])
            rewards[mine], over[mine] = block.step(rows, configs[mine])
        for i in np.flatnonzero(over):
            block, row = self.at[i]
            search = block.search.searches[row]
            figures = {"lost": block.lost[row], "oracle": block.best[row], "gain": block.gain[row]}
            self.finished.append({**figures, "verdict": float(search.marks.verdict), "rounds": float(search.round)})
            self.at[i] = self._fresh()
        return self._observe(), rewards, over

    @property
    def revealed(self) -> Array:
        """What the critic sees of the truth, (n, N_REVEALED) float32: what there is to gain, what is left to gain over
        the table believed best and over the one in force, and steps so far."""
        told = [(b.best[r], b.gain[r], b.search.searches[r], b.unit[r]) for b, r in self.at]
        rows = [
            (20 * best, 0.5 * (best - gain) * HORIZON / unit, float(search.confirmed.any()), search.steps / 500)
            for best, gain, search, unit in told
        ]
        return np.clip(np.array(rows, np.float32), -4, 4)

    @property
    def apart(self) -> Array:
        """What every config of the slot whose turn it is truly saves beyond the table believed best, (n, N_CONFIGS)."""
        return np.stack([block.apart[row, block.search.searches[row].turn] for block, row in self.at])


class JobVecEnv(VecEnv):
    """SB3's interface over a :class:`JobBatch`."""

    def __init__(self, batch: JobBatch, without: tuple[str, ...] = ()) -> None:
        """``without``: what the policy is not shown, see ``policy.blinded``."""
        self.batch, self.without = batch, without
        space = gym.spaces.Box(-4.0, 4.0, (turns.N_OBSERVATION + N_REVEALED,), np.float32)
        super().__init__(batch.n, space, turns.action_space())
        self.returns, self.lengths = np.zeros(batch.n), np.zeros(batch.n, np.int64)
        self.actions = np.zeros((batch.n, 2), np.int64)

    def _with_truth(self, observations: Array) -> Array:
        return np.concatenate([ablate(observations, self.without), self.batch.revealed], axis=1)

    def reset(self) -> Array:  # type: ignore[override]
        """Observations of fresh searches, the critic's figures behind them."""
        self.returns[:], self.lengths[:] = 0, 0
        return self._with_truth(self.batch.reset())

    def step_async(self, actions: Array) -> None:
        """Keep the actions (n, 2)."""
        self.actions = actions

    def step_wait(self) -> tuple[Array, Array, Array, list[dict[str, Any]]]:  # type: ignore[override]
        """Step; infos carry SB3's ``episode`` statistics where one ended. The verdict is a true end."""
        observations, rewards, over = self.batch.step(spaces.config_index(self.actions))
        self.returns += rewards
        self.lengths += 1
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for i in np.flatnonzero(over):
            infos[i]["episode"] = {"r": float(self.returns[i]), "l": int(self.lengths[i]), "t": 0.0}
        self.returns[over], self.lengths[over] = 0, 0
        return self._with_truth(observations), rewards.astype(np.float32), over, infos

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

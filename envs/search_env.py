"""The search over a job as a Gymnasium environment; what differs is where the windows come from."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from ..traces.spaces import N_CHANNELS, N_PAIRS
from .live.job_ends import JobEnded, Stopped, Withdrawn
from .search import observation
from .search.belief.prior import Prior
from .search.config import DISCARD, HORIZON, REWARD_PAIRS, SearchConfig
from .search.interfaces import N_WHAT, WATCH, Plan, Windows, action_space, choices_of
from .search.search import Search
from .search.step_times import trimmed_mean
from .sim.workloads import MANY_SLOTS

Array = np.ndarray[Any, Any]


class SearchEnv(gym.Env[Array, Array]):
    """Base of the environments; a subclass has :meth:`open`.

    ## Description
    One episode is the search over a whole job, one step the decision for one slot and what comes next. In a window
    some optimizer steps run under all decisions at once; a comparison alternates a table with the current one until it
    is certain which is faster. After the verdict each turn may try another config of one slot against the current
    table.

    ## Action Space ``MultiDiscrete([pair, channels, what])``, see :mod:`dynamiccl.traces.spaces` and
    ``search.interfaces``: the last number says what comes next. 0: the next slot's turn, or the window after the
    last slot. 1: the window at once. 2: a comparison with the current table. 3: the end of the search. A masked
    config runs as AUTO (after the verdict: as the current table has it) and is reported in ``info["masked"]``.

    ## Observation Space ``Box(-4, 4, (observation.N_OBSERVATION,), float32)``: the slot's fingerprint, the
    quantities of the turn, the figures of each config, and the mask (the last ``N_CONFIGS`` entries).

    ## Rewards Default steps saved, divided by 100. Measured step times alone decide them. Up to the verdict a turn
    earns the time that its billed steps saved, compared with the job's default. After it the comparison is with the
    current table, so a trial that is slower costs and a trial that is equal earns nothing. The end pays what the
    current table saves from the verdict to the job's step :data:`HORIZON`. :data:`REWARD_PAIRS` more windows of it and
    of the default measure this. An early verdict earns more, and fruitless trials cost.

    ## Episode End
    Terminated if nothing is left to try after the verdict. Truncated if the job is over, or if its ranks change tables
    no more: then the table earns nothing for later steps, and ``info["ended"]`` says why. ``info["table"]`` holds the
    result (configs by slot, 0 beyond the job's slots), ``info["steps"]`` the steps that it took.
    """

    def __init__(self, config: SearchConfig | None = None, prior: Prior | None = None) -> None:
        self.config = config or SearchConfig()
        self.prior = prior or Prior.load()
        self.observation_space = observation.observation_space()
        self.action_space = action_space()
        self.search: Search | None = None
        self._is_over = True

    def open(self, options: dict[str, Any]) -> Windows:
        """Windows of the job of a new episode."""
        raise NotImplementedError

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Begin a search. Raises ValueError where the job has nothing to tune."""
        super().reset(seed=seed)
        self.windows = self.open(options or {})
        job, default = self.windows.begin()
        confirm = self.windows.confirm
        self.search = Search(job, default, self.prior, self.config, on_confirmed=confirm)
        self._is_over = False
        seen = self.search.observe()
        return seen, self._info(False)

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """One turn, and the windows that come of it. Raises ValueError before the first :meth:`reset`."""
        search = self.search
        if search is None or self._is_over:
            raise ValueError("the episode is over or has not begun: call reset()")
        numbers = np.asarray(action, np.int64)
        config, what = choices_of(numbers.reshape(3))
        masked = not search.decide(int(config), int(what))
        reward, ended = 0.0, dict[str, Any]()
        try:
            while not search.is_done and (plan := search.plan()) is not None:
                measured = self.windows.measure(plan)
                reward += search.record(plan, measured)
            if search.is_done:
                reward += worth(search, self.windows) / 100
        except JobEnded as error:
            ended = {"ended": str(error)}
            if isinstance(error, (Stopped, Withdrawn)):  # the job is to run as if nobody had tuned it
                search.withdraw()
        is_done = search.is_done
        self._is_over = is_done or bool(ended)
        seen = search.observe()
        info = self._info(masked) | ended
        return seen, reward, is_done, bool(ended), info

    def action_masks(self) -> Array:
        """Which entries of the three parts of an action may be chosen, as sb3-contrib's MaskablePPO asks.

        Returns a bool array of 7 + 8 + 4 entries. An entry is False if no open config has it. The parts are masked
        apart, so a pair and a channel count that are both open can still be closed together: such an action runs as a
        masked one. ``info["mask"]`` has the open configs themselves. Raises ValueError before the first :meth:`reset`.
        """
        if self.search is None:
            raise ValueError("no episode has begun: call reset()")
        slot = self.search.turn % self.search.n_slots
        is_open = self.search.open[slot].reshape(N_PAIRS, N_CHANNELS)
        pairs = is_open.any(axis=1)
        channels = is_open.any(axis=0)
        what = np.ones(N_WHAT, bool)
        return np.concatenate([pairs, channels, what])

    def _info(self, masked: bool) -> dict[str, Any]:
        assert self.search is not None
        s = self.search
        # As long for one job as for another: many run side by side.
        table = np.zeros(max(MANY_SLOTS, s.n_slots), np.int64)
        table[: s.n_slots] = s.confirmed
        slot = s.turn % s.n_slots
        return {
            "slot": slot,
            "masked": masked,
            "mask": s.open[slot],
            "steps": s.steps,
            "table": table,
            "lost": s.lost,
        }


def worth(search: Search, windows: Windows) -> float:
    """Default steps that the current table saves from the verdict to the job's step :data:`HORIZON`, by windows that
    decide nothing: those that confirmed it were lucky ones, and the lower bound of its gain can be bought with time."""
    if not search.confirmed.any():
        return 0.0
    n_steps = search.state.noise.window_steps
    none = np.zeros_like(search.confirmed)
    under_default = Plan(WATCH, none, n_steps, DISCARD)
    under_table = Plan(WATCH, search.confirmed, n_steps, DISCARD)
    default_ms = table_ms = 0.0
    for _ in range(REWARD_PAIRS):
        default = windows.measure(under_default)
        table = windows.measure(under_table)
        default_ms += trimmed_mean(default.step_ms)
        table_ms += trimmed_mean(table.step_ms)
    remaining = max(HORIZON - search.marks.verdict, 0)
    saved = float(1 - table_ms / default_ms)
    return remaining * saved

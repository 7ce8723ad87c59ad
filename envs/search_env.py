"""The search over a job as a Gymnasium environment; what differs is where the windows come from."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np

from ..traces.reasons import RunEnds
from ..traces.spaces import decision_of
from .live.fail_closed import Holds, row_of
from .live.job_ends import JobEnded
from .picture import picture
from .search import observation
from .search.belief.prior import Prior
from .search.config import CARRIED_TURN_STEPS, HORIZON, MASKED_PRICE, REWARD_QUADS, REWARD_UNIT, SearchConfig
from .search.interfaces import (
    GO_ON,
    LEAVE,
    N_ACTIONS,
    QUAD,
    WATCH,
    Plan,
    Windows,
    action_space,
    actions_of,
    choices_of,
)
from .search.search import Search
from .search.step_times import Quads, trimmed_mean
from .sim.workloads import MANY_SLOTS

Array = np.ndarray[Any, Any]
#: Steps of one window at most, in which a job runs on before its account is settled: as long as windows may be.
LONGEST_RUN = 200


class Reward:
    """What a search has earned, in hundreds of default steps: what the current table was counted for since it became
    that."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.saved = 0.0  # part of a default step, in each step
        self.steps = 0  # that were left of the job then
        self._configs = search.confirmed.copy()

    def of(self, saved: float) -> float:
        """Of a measurement that saved so many default steps beyond the current table. A change of the current table
        counts for all steps that are left."""
        current = self.search.state.current
        if not np.array_equal(self._configs, current.configs):
            left = self.search.steps_left
            saved += left * (current.saved - self.saved)
            self.saved = current.saved
            self.steps = left
            self._configs = current.configs.copy()
        return saved / REWARD_UNIT

    def cut(self) -> float:
        """Of the end of the job: steps were counted that will not come."""
        return -self.saved * self.search.steps_left / REWARD_UNIT

    def settled(self, windows: Windows, at: int = 0) -> float:
        """Settles the account at the end, by steps that decide nothing: those that confirmed the current table were
        lucky ones, and the lower bound of its gain can be bought with time. The job runs on until its step ``at``
        first."""
        table = self.search.confirmed
        if not table.any():
            return 0.0
        self._run_on(windows, table, at)
        measured = self._measured(windows, table)
        return self.steps * (measured - self.saved) / REWARD_UNIT

    def _run_on(self, windows: Windows, table: Array, at: int) -> None:
        """Let the job take steps under its table. The first window is short: it holds the switch, if there is one."""
        left = at - self.search.steps
        n_steps = 1
        while left > 0:
            plan = Plan(WATCH, table, n_steps)
            left -= windows.measure(plan).billed
            n_steps = min(left, LONGEST_RUN)

    def _measured(self, windows: Windows, table: Array) -> float:
        """Saving of a table, a part of the default's step. That the search counted, if no quad is whole."""
        default = np.zeros_like(table)
        n_steps = REWARD_QUADS * QUAD * CARRIED_TURN_STEPS
        plan = Plan(WATCH, default, n_steps, others=table, turns=CARRIED_TURN_STEPS)
        seen = windows.measure(plan)
        ratios = Quads.of(seen.step_ms, seen.arms, seen.turns).ratios
        return 1 - math.exp(trimmed_mean(ratios)) if len(ratios) else self.saved


class SearchEnv(gym.Env[Array, np.int64]):
    """Base of the environments; a subclass has :meth:`open`. ``docs/environments.md`` describes them.

    ## Action Space
    ``Discrete(392)``: config * 7 + what comes next, see ``search.interfaces.actions_of`` and
    :mod:`dynamiccl.traces.spaces`. :meth:`action_masks` says what may be chosen. A masked action keeps the slot's
    setting and costs 0.01.

    ## Observation Space
    ``Box(-4, 4, (observation.N_OBSERVATION,), float32)``; ``observation.decode`` gives names.

    ## Rewards
    Default steps saved / 100, by measured step times.

    ## Episode End
    Terminated if nothing is left to try. Truncated after :data:`HORIZON` steps, or by ``info["ended"]``.

    """

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 1}  # noqa: RUF012

    def __init__(
        self, config: SearchConfig | None = None, prior: Prior | None = None, render_mode: str | None = None
    ) -> None:
        self.config = config or SearchConfig()
        self.prior = prior or Prior.load()
        self.render_mode = render_mode
        self.observation_space = observation.observation_space()
        self.action_space = action_space()
        self.search: Search | None = None
        self.settles = True  #: at the end of an episode; False: who plays it calls :meth:`settle`
        self._is_over = True
        self._n_masked = 0

    def open(self) -> Windows:
        """Windows of the job of a new episode."""
        raise NotImplementedError

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Begin a search. Raises ValueError where the job has nothing to tune, and for any of ``options``: there are
        none."""
        if options:
            told = ", ".join(map(repr, options))
            raise ValueError(
                f"reset() knows no option {told}: what an episode is drawn from is an argument of gymnasium.make(), "
                "such as family=STANDARD.only('tails') of dynamiccl/Sim-v0"
            )
        super().reset(seed=seed)
        self.windows = self.open()
        job, default = self.windows.begin()
        confirm = self.windows.confirm
        self.search = Search(job, default, self.prior, self.config, on_confirmed=confirm)
        self.reward = Reward(self.search)
        self._is_over = False
        self._n_masked = 0
        self._seen = self.search.observe()
        return self._seen, self._info(False)

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """One turn, and the windows that come of it. Raises ValueError before :meth:`reset`, and for no action."""
        search = self.search
        if search is None or self._is_over:
            raise ValueError("the episode is over or has not begun: call reset()")
        masked = self._decide(search, *self._choices_of(action))
        self._n_masked += masked
        reward = -MASKED_PRICE if masked else 0.0
        ended = dict[str, Any]()
        try:
            while not search.is_done and (plan := search.plan()) is not None:
                if not search.steps_left:
                    raise JobEnded(RunEnds.ALL_STEPS(count=HORIZON))
                measured = self.windows.measure(plan)
                reward += self.reward.of(search.record(plan, measured))
            if search.is_done and self.settles:
                reward += self.settle()
        except JobEnded as error:
            ended = {"ended": str(error)}
            reward += self.reward.cut()
            if row_of(error.why).holds is Holds.DEFAULT:  # the job is to run as if nobody had tuned it
                search.withdraw()
        is_done = search.is_done
        self._is_over = is_done or bool(ended)
        self._seen = search.observe()
        info = self._info(masked) | ended
        return self._seen, reward, is_done, bool(ended), info

    def _decide(self, search: Search, config: int, what: int) -> bool:
        """Take in a choice. Whether it is masked: then the slot runs what the current table has, and the next slot has
        its turn."""
        if what == LEAVE and not self._may_leave():
            search.decide(int(search.confirmed[search.turn]), GO_ON)
            return True
        return not search.decide(config, what)

    @staticmethod
    def _choices_of(action: Any) -> tuple[int, int]:
        """The two choices of an action, a number in whatever form. Raises ValueError if there is no such action."""
        chosen = np.asarray(action).reshape(())
        if not 0 <= chosen < N_ACTIONS:
            raise ValueError(
                f"there is no action {chosen}: give one of 0 to {N_ACTIONS - 1}, see search.interfaces.actions_of"
            )
        config, what = choices_of(chosen)
        return int(config), int(what)

    def settle(self, at: int = 0) -> float:
        """The last part of the reward of an episode that has terminated, for a job that runs on until its step ``at``
        first. Raises JobEnded."""
        return self.reward.settled(self.windows, at)

    def action_masks(self) -> Array:
        """(N_ACTIONS,) bool: what may be chosen, as sb3-contrib's MaskablePPO asks. Raises ValueError before the first
        :meth:`reset`."""
        if self.search is None:
            raise ValueError("no episode has begun: call reset()")
        configs = np.flatnonzero(self.search.open[self.search.turn % self.search.n_slots])
        what = np.flatnonzero(self.search.what_open)
        masks = np.zeros(N_ACTIONS, bool)
        masks[actions_of(configs[:, None], what)] = True
        if not self._may_leave():
            masks[actions_of(configs, LEAVE)] = False
        return masks

    def _may_leave(self) -> bool:
        """Whether the search may end now, by what the policy sees."""
        return bool(observation.may_leave(observation.decode(self._seen).context).all())

    def render(self) -> Any:
        """A line about the search (``ansi``), or its :func:`picture.picture` (``rgb_array``)."""
        search = self.search
        if self.render_mode is None or search is None:
            return None
        if self.render_mode == "rgb_array":
            return picture(search)
        rows = [f"slot {i}: {decision_of(search.confirmed[i])}" for i in np.flatnonzero(search.confirmed)]
        table = ", ".join(rows) or "empty"
        where = "after the verdict" if search.is_over else "before the verdict"
        gain = 1 - float(np.exp(-search.gain[0]))
        return f"step {search.steps}, {where}: the current table saves {gain:.2%} of a step; it is {table}"

    def _info(self, masked: bool) -> dict[str, Any]:
        assert self.search is not None
        s = self.search
        # As long for one job as for another: many run side by side.
        table = np.zeros(max(MANY_SLOTS, s.n_slots), np.int64)
        table[: s.n_slots] = s.confirmed
        return {
            "slot": s.turn % s.n_slots,
            "masked": masked,
            "n_masked": self._n_masked,
            "action_mask": self.action_masks().astype(np.int8),  # as Discrete.sample() wants it
            "steps": s.steps,
            "table": table,
            "lost": s.lost,
        }

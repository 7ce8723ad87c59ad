"""The search over a job as a Gymnasium environment; what differs is where the windows come from."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from .bench.scores import HORIZON
from .live.job_ends import JobEnded, Stopped, Withdrawn
from .search import turns
from .search.belief import Prior
from .search.search import Search
from .search.sequential import middle
from .search.watch import SearchConfig
from .search.windows import DISCARD, WATCH, Plan, Windows
from .sim.workloads import MANY_SLOTS

Array = np.ndarray[Any, Any]

#: Pairs of windows, under the default and under the table in force, that end an episode.
PAIRS = 10


class SearchEnv(gym.Env[Array, Array]):
    """Base of the environments; a subclass has :meth:`open`.

    ## Description
    One episode is the search over a whole job, one step the decision for one slot and what comes next. In a window
    some optimizer steps run under all decisions at once; a comparison sets a table beside the one in force until it is
    sure which is faster. After the verdict each turn is a chance to try a slot otherwise, beside the table in force.
    Where that is declined for all slots in a row, two slots are changed at once, unless the search is ended (3).

    ## Action Space
    ``MultiDiscrete([pair, channels, what])``, see :mod:`dynamiccl.traces.spaces` and ``search.turns``: what comes next
    is 0, another slot's turn (after the last slot the window), 1, the window at once, 2, a comparison with what is in
    force, or 3, the end of the search. A masked config runs as AUTO (after the verdict: as what is in force) and is
    reported in ``info["masked"]``.

    ## Observation Space
    ``Box(-4, 4, (turns.N_OBSERVATION,), float32)``: the slot's fingerprint, context, what is believed of its configs,
    mask (the last ``N_CONFIGS`` entries).

    ## Rewards
    Default steps, divided by 100, by measured step times alone. Up to the verdict: what the steps billed since the turn
    before saved against the job's own default. After it: what they saved against the table in force, so that trials
    earn nothing by the gain that is there already, and cost what they are slower. At the end: what the table in force
    saves from the verdict to the job's step :data:`HORIZON`, by :data:`PAIRS` more windows of it and of the default. So
    the sooner a good table is confirmed the better, and who goes on trying for nothing loses.

    ## Episode End
    Terminated where nothing is left to try after the verdict. Truncated where the job is over, or its ranks change no
    table any more: then the table earns nothing for steps to come, and ``info["ended"]`` says why. What it came to:
    ``info["table"]`` (configs by slot, 0 beyond the job's slots), ``info["steps"]``.
    """

    def __init__(self, rules: SearchConfig | None = None, prior: Prior | None = None) -> None:
        self.rules, self.prior = rules or SearchConfig(), prior or Prior.load()
        self.observation_space, self.action_space = turns.observation_space(), turns.action_space()
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
        self.search = Search(job, default, self.prior, self.rules, on_confirmed=self.windows.confirm)
        self._is_over = False
        return self.search.observe(), self._info(False)

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """One turn, and the windows that come of it. Raises ValueError before the first :meth:`reset`."""
        search = self.search
        if search is None or self._is_over:
            raise ValueError("the episode is over or has not begun: call reset()")
        config, what = turns.choices_of(np.asarray(action, np.int64).reshape(3))
        masked = not search.decide(int(config), int(what))
        reward, ended = 0.0, dict[str, Any]()
        try:
            while not search.is_done and (plan := search.plan()) is not None:
                reward += search.record(plan, self.windows.measure(plan))
            if search.is_done:
                reward += worth(search, self.windows) / 100
        except JobEnded as error:
            ended = {"ended": str(error)}
            if isinstance(error, (Stopped, Withdrawn)):  # the job is to run as if nobody had tuned it
                search.confirm(np.zeros_like(search.confirmed))
        self._is_over = search.is_done or bool(ended)
        if self._is_over:
            search.turn = 0
        return search.observe(), reward, search.is_done, bool(ended), self._info(masked) | ended

    def _info(self, masked: bool) -> dict[str, Any]:
        assert self.search is not None
        s = self.search
        # As long for one job as for another: many run side by side.
        table = np.zeros(max(MANY_SLOTS, s.n_slots), np.int64)
        table[: s.n_slots] = s.confirmed
        return {
            "slot": s.turn,
            "masked": masked,
            "mask": s.open[s.turn] if s.turn < s.n_slots else s.open[0],
            "steps": s.steps,
            "table": table,
            "lost": s.lost,
        }


def worth(search: Search, windows: Windows) -> float:
    """Default steps that the table in force saves from the verdict to the job's step :data:`HORIZON`, by windows that
    decide nothing: those that confirmed it were lucky ones, and the lower bound of its gain can be bought with time."""
    if not search.confirmed.any():
        return 0.0
    plans = [
        Plan(WATCH, c, search.window_steps, DISCARD)
        for c in (np.zeros_like(search.confirmed), search.confirmed)
    ]
    default, table = np.sum(
        [[middle(windows.measure(p).step_ms) for p in plans] for _ in range(PAIRS)], axis=0
    )
    return max(HORIZON - search.marks.verdict, 0) * float(1 - table / default)

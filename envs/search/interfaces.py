"""What a search asks of a job and what it gets: plans, what they measured, where that comes from; and what it asks of a
policy: one action a turn."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import gymnasium as gym
import numpy as np

from ...traces.fingerprint import FEATURES
from ...traces.names import PAIRS_OF, TUNABLE_FUNCS
from ...traces.spaces import N_CHANNELS, N_CONFIGS

Array = np.ndarray[Any, Any]

#: What a plan is for: default steps; exploring; a comparison; a trial; monitoring.
PROFILE, SEARCH, TABLE, TRIAL, WATCH = "profile", "search", "table", "trial", "watch"
#: What a run's log calls a window of each kind.
PHASES = {PROFILE: "profile", SEARCH: "search", TABLE: "verify", TRIAL: "refine", WATCH: "watch"}
#: Windows after the verdict, of which no kernel times are asked: they are not worth what they cost a running job.
UNTIMED = (TRIAL, WATCH)
#: Which table runs in each turn of a quad: 0 the current one, 1 the plan's.
PATTERN = np.array([0, 1, 1, 0])
#: Turns of a quad.
QUAD = len(PATTERN)
#: What comes after a slot's config: the next slot's turn (after the last slot: the window); the window, at once; a
#: comparison with the current table; the end of the search, or after the verdict of all trials. Slots without a turn
#: run the config with the best posterior mean; after the verdict that of the current table.
GO_ON, RUN, COMPARE, LEAVE = range(4)
#: What may always come next.
WHAT = (GO_ON, RUN, COMPARE, LEAVE)
#: Three more, masked unless ``SearchConfig.more_choices``: the window at once, and longer; after the verdict a look at
#: the default, and a new search.
RUN_LONGER, LOOK, SEARCH_AGAIN = range(4, 7)
#: Their number.
N_WHAT = 7
#: Place of a slot's share among its features.
SHARE = list(FEATURES).index("share")
#: Actions of a policy: each config with each of what may come next.
N_ACTIONS = N_CONFIGS * N_WHAT


def arms_of(n_steps: int, turn_steps: int | Array) -> Array:
    """(..., n_steps) which table runs in each step of a plan with turns of ``turn_steps`` (...)."""
    turn = np.arange(n_steps) // np.asarray(turn_steps)[..., None]
    return PATTERN[turn % QUAD]


@dataclass(frozen=True)
class Measured:
    """What a window gave."""

    step_ms: Array  # (k,) times of the counted steps, in order
    call_us: Array  # (s,) time of each slot's calls; NaN: none was sampled
    obeyed: Array  # (s,) bool: NCCL ran what was decided
    billed: int  # steps that went by in all, those before the table held included
    billed_ms: float  # their time
    first_step: int = -1  # the job's own numbers of the first and last counted step; -1: not known
    last_step: int = -1
    #: (k,) of a plan with turns, see PATTERN: 0 the current table ran, 1 the plan's, -1 the step counts for nobody.
    arms: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    turns: int = 0  # steps of a turn as they ran; 0: the plan has no turns
    #: Steps since the window before, while the policy made up its mind. They count as the current table's; in a running
    #: job a trial may go on for some of them.
    between: int = 0

    @property
    def tried(self) -> Array:
        """Times of the steps under the plan's own configs, in order."""
        return self.step_ms[self.arms == 1] if len(self.arms) else self.step_ms

    @property
    def current(self) -> Array:
        """With turns: times of the steps under the current table, in order."""
        return self.step_ms[self.arms == 0]


@dataclass(frozen=True)
class Plan:
    """What to measure next. Its configs and the current table take turns of so many steps: A B B A. Without turns it
    measures no table against another: it looks at steps of what holds now, or at times of a few calls."""

    kind: str
    configs: Array  # (s,)
    n_steps: int  # counted ones
    discard: int = 0  # steps before them that do not count
    limit_ms: float = math.inf  # it ends with the first step of its configs above this
    one_of: int = 0  # the configs hold at one call of so many; 0: at all calls
    others: Array | int = (
        0  # (s,) configs that hold at the other calls, or in the other turns: the current table
    )
    turns: int = 0  # steps of a turn; steps counted and discarded are whole quads of turns then. 0: no turns


@dataclass
class Job:
    """What the search knows of a job of ``s`` slots."""

    features: Array  # (s, N_FEATURES)
    mask: Array  # (s, N_CONFIGS) bool, aliases folded, AUTO always open
    share: Array  # (s,) of the step
    call_us: Array  # (s,) of the default's calls; NaN where no kernel was ever sampled
    families: Array  # (s, N_CONFIGS) int: configs with the same number need one warm-up; negative: none
    calls: Array  # (s,) a step; 0: no table can hold at a few of them

    def changed(self, call_us: Array, step: float) -> Job:
        """The same job after a change: the default's calls (s,) now, NaN where none was sampled; its step in steps of
        before."""
        us = np.where(np.isfinite(call_us), call_us, self.call_us)
        longer = np.where(np.isfinite(call_us / self.call_us), us / self.call_us / step, 1.0)
        share = np.clip(self.share * longer, 1e-3, 1.0)
        features = self.features.copy()
        features[:, SHARE] = share
        return replace(self, call_us=us, share=share, features=features)


class Windows(Protocol):
    """Source of the windows of one job: a simulator, a trace, or a running job."""

    def begin(self) -> tuple[Job, Measured]:
        """The job and its first default steps. Raises ValueError if there is nothing to tune."""

    def measure(self, plan: Plan) -> Measured:
        """Run ``plan.n_steps`` counted steps with slot i under config ``plan.configs[i]``, with turns in those of its
        own, after ``plan.discard`` that do not count. Ends early with a step of its own configs above
        ``plan.limit_ms``, which is then the last. Times of calls are those of its own configs.

        Every job takes turns. If its steps are not alike, they are as long as LONG_TURN_STEPS, ``Measured.turns`` says
        so, and there may be fewer quads than were asked for, but at least one.
        """

    def confirm(self, configs: Array) -> None:
        """These configs (s,) are the current table from now on, whatever becomes of the search; zeros: the default."""


#: Algorithm of each config as a number, -1 for AUTO's: a row for each of TUNABLE_FUNCS.
_ALGO_NAMES = sorted({algo for pairs in PAIRS_OF.values() for algo, _ in pairs})
_ALGO_NUMBERS = [[-1, *[_ALGO_NAMES.index(algo) for algo, _ in PAIRS_OF[func]]] for func in TUNABLE_FUNCS]
_ALGOS = np.repeat(_ALGO_NUMBERS, N_CHANNELS, axis=1)


def warm_up_families(own_pair: Array, func: Array) -> Array:
    """(s, N_CONFIGS) int, see :class:`Job`: one number an algorithm, but for the ones that NCCL runs by itself.

    ``own_pair`` (s,): index of NCCL's own pair. ``func`` (s,): of each slot's, into TUNABLE_FUNCS.
    """
    func = np.asarray(func, int)
    own = _ALGOS[func, N_CHANNELS * (1 + np.asarray(own_pair, int))]
    algos = _ALGOS[func]
    return np.where(np.isin(algos, np.unique(own)), -1, algos)


class Policy(Protocol):
    """Decides: the ``predict`` of stable-baselines3. One episode is the search on one job, one step is one turn.

    ``observation`` is (N_OBSERVATION,) or (n, N_OBSERVATION) of :mod:`observation`; the action is a number below
    N_ACTIONS, int64, () or (n,), see :func:`actions_of`. ``state`` is what the last call for the same jobs returned
    (None at first), ``episode_start`` (n,) is True if a search begins.
    """

    def predict(
        self,
        observation: Array,
        state: Any = None,
        episode_start: Array | None = None,
        deterministic: bool = True,
    ) -> tuple[Array, Any]:
        """The action and the state to pass next time."""


def action_space() -> gym.spaces.Discrete:
    """A config of one slot and what comes next, as one number: see :func:`actions_of`."""
    return gym.spaces.Discrete(N_ACTIONS)


def actions_of(configs: Array, what: Array | int = GO_ON) -> Array:
    """Indices of configs (...) and what comes next, as actions (...) int64."""
    return np.asarray(np.asarray(configs, np.int64) * N_WHAT + what)


def choices_of(actions: Array) -> tuple[Array, Array]:
    """The inverse of :func:`actions_of`: indices of configs (...), what comes next (...)."""
    return np.divmod(np.asarray(actions, np.int64), N_WHAT)

"""What a search asks of a job, and what it gets: plans of windows, what they measured, and where they come from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from ...traces.records import PAIRS
from ...traces.spaces import N_CHANNELS

Array = np.ndarray[Any, Any]

#: What a window is for. SEARCH and TRIAL: the policy's; the rest are the search's own. REFINE is a phase with no window
#: of its own: of trials, and of the table in force between them.
PROFILE, SEARCH, REFERENCE, TABLE, WATCH = "profile", "search", "reference", "table", "watch"
REFINE, TRIAL = "refine", "trial"
#: What a run's log calls a window of each kind.
PHASES = {
    PROFILE: "profile",
    SEARCH: "search",
    REFERENCE: "verify",
    TABLE: "verify",
    TRIAL: "refine",
    WATCH: "watch",
}
#: Windows after the verdict, of which no kernel times are asked: they are not worth what they cost a running job.
UNTIMED = (TRIAL, WATCH)
#: Steps of a window that do not count after a table has changed, and more where an algorithm is new to a slot's
#: communicator: NCCL connects lazily, and the first runs are slow.
DISCARD, WARM_STEPS = 1, 2


@dataclass(frozen=True)
class Measured:
    """What a window gave. ``step_ms`` (k,): the counted steps in order. ``call_us`` (s,): time of a slot's calls, NaN
    where none was sampled. ``obeyed`` (s,): whether NCCL ran what was decided. ``billed``: steps that went by in all,
    those before the table was in force included, and ``billed_ms`` their time."""

    step_ms: Array
    call_us: Array
    obeyed: Array
    billed: int
    billed_ms: float


@dataclass(frozen=True)
class Plan:
    """The next window."""

    kind: str
    configs: Array  # (s,)
    n_steps: int
    discard: int = 0
    limit_ms: float = math.inf
    one_of: int = 0  # the configs hold at one call of so many, 0: at all
    others: Array | int = 0  # (s,) configs that hold at the other calls: those in force


@dataclass
class Job:
    """What the search is told of a job of ``s`` slots."""

    features: Array  # (s, N_FEATURES)
    mask: Array  # (s, N_CONFIGS) bool, aliases folded, AUTO always open
    share: Array  # (s,) of the step
    call_us: Array  # (s,) of the default's calls; NaN where no kernel was ever sampled
    families: Array  # (s, N_CONFIGS) int: configs with the same number need one warm-up; negative: none
    calls: Array  # (s,) a step; 0 where no table can hold at few of them

    def changed(self, call_us: Array, step: float) -> Job:
        """The same job after a change: the default's calls (s,) now, NaN where none was sampled; its step in steps of
        before."""
        us = np.where(np.isfinite(call_us), call_us, self.call_us)
        longer = np.where(np.isfinite(call_us / self.call_us), us / self.call_us / step, 1.0)
        return replace(self, call_us=us, share=np.clip(self.share * longer, 1e-3, 1.0))


class Windows(Protocol):
    """Where the windows of one job come from."""

    def begin(self) -> tuple[Job, Measured]:
        """Default steps, and what they tell of the job. Raises ValueError where there is nothing to tune."""

    def measure(self, plan: Plan) -> Measured:
        """Run a window: ``plan.n_steps`` counted steps with slot i under config ``plan.configs[i]``, after
        ``plan.discard`` that do not count. Ends early with a step above ``plan.limit_ms``, which is then the last."""

    def confirm(self, configs: Array) -> None:
        """These configs (s,) stay in force from now on, whatever becomes of the search; zeros: NCCL's own choice."""


#: Algorithm of each config as a number, -1 for AUTO's.
_ALGO_NAMES = sorted({algo for algo, _ in PAIRS})
_ALGOS = np.repeat([-1, *[_ALGO_NAMES.index(algo) for algo, _ in PAIRS]], N_CHANNELS)


def warm_up_families(own_pair: Array) -> Array:
    """(s, N_CONFIGS) int, see ``search.Job``: one number an algorithm, but for the ones that NCCL runs by itself.

    ``own_pair`` (s,): index of NCCL's own pair.
    """
    own = _ALGOS[N_CHANNELS * (1 + np.asarray(own_pair, int))]
    known = np.isin(_ALGOS, np.unique(own))
    return np.tile(np.where(known, -1, _ALGOS), (len(own), 1))


class Policy(Protocol):
    """Whatever chooses: SB3's ``predict``. One episode is the search on one job, one step a turn of it.

    ``observation`` is (N_OBSERVATION,) or (n, N_OBSERVATION) of ``turns``; the action is ``[pair, channels, what]``,
    int64, (3,) or (n, 3). ``state`` is what the last call for the same jobs returned (None at first),
    ``episode_start`` (n,) is True where a search begins.
    """

    def predict(
        self,
        observation: Array,
        state: Any = None,
        episode_start: Array | None = None,
        deterministic: bool = True,
    ) -> tuple[Array, Any]:
        """The action and the state to pass next time."""

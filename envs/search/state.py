"""What one search knows: the job, the current table, the account, what was compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .belief.belief import Belief
from .belief.prior import Prior
from .comparison import ADOPTED, OPEN, REJECTED, Comparison, LongSteps, SequentialTest, Terms, level_of
from .config import BUDGET_STEPS, CARRIED_TURN_STEPS, HORIZON, LONGER, TURN_STEPS, SearchConfig
from .interfaces import QUAD, TABLE, Job, Measured, Plan
from .step_guard import Running, StepGuard, Turns
from .step_times import DefaultCalls, NoiseEstimate, trimmed_mean

Array = np.ndarray[Any, Any]


@dataclass
class Milestones:
    """When what happened, in optimizer steps since the job's first; -1: it has not."""

    first_gain: int = -1  # a table was adopted
    verdict: int = -1
    aborted: int = 0  # windows
    reopened: int = 0  # searches after a change of the job
    asked_again: int = 0  # searches that a policy wanted after the verdict
    dropped: int = 0  # tables after the verdict
    refined: int = 0  # slots changed for the better after it

    def gained(self, now: int) -> None:
        """A table was adopted."""
        self.first_gain = now if self.first_gain < 0 else self.first_gain


@dataclass
class Account:
    """Steps that went by, and what they lost against the default, in default steps."""

    steps: int = 0
    lost: float = 0.0
    compared: int = 0  # comparisons since a table was last adopted, in all searches
    rounds: int = 0  # exploring windows of this search
    since_verdict: int = 0
    default_since_verdict: int = 0  # of them under the default

    def spent(self, budget: float) -> float:
        """Part of what the search may lose that it has lost; of nothing, all."""
        allowed = budget * max(self.steps, BUDGET_STEPS)
        return self.lost / allowed if allowed else 1.0


class CurrentTable:
    """The table that holds when nothing is tried, and the comparisons that adopted it: the first against the default,
    each other one against the table before."""

    def __init__(self, n_slots: int, on_confirmed: Callable[[Array], object]) -> None:
        self.configs: Array = np.zeros(n_slots, np.int64)
        self.comparisons: list[Comparison] = []
        self._on_confirmed = on_confirmed

    @property
    def is_default(self) -> bool:
        """Nothing was adopted."""
        return not self.configs.any()

    def set(self, configs: Array, comparisons: Sequence[Comparison] | None = None) -> None:
        """These configs (s,) hold from now on; the job hears of it if they are others."""
        is_other = not np.array_equal(configs, self.configs)
        self.configs = configs.copy()
        if comparisons is not None:
            self.comparisons = list(comparisons)
        if is_other:
            self._on_confirmed(self.configs)

    @property
    def gain(self) -> tuple[float, float, float]:
        """Mean log of the default's step time over the current table's, and its interval."""
        tests = [one.test for one in self.comparisons]
        bounds = [test.interval for test in tests]
        mean = sum(test.mean for test in tests)
        return mean, sum(low for low, _ in bounds), sum(high for _, high in bounds)

    @property
    def saved(self) -> float:
        """Part of a default step that it saves in each step, as far as its comparisons tell."""
        return 1 - math.exp(-self.gain[0])

    @property
    def quads(self) -> int:
        """Quads that the gain was measured from."""
        return sum(one.test.n for one in self.comparisons)


@dataclass
class Comparisons:
    """All comparisons of a job, in order, and the tables that lost."""

    history: list[Comparison] = field(default_factory=list)
    in_search: int = 0  # of this search
    last_rejected: Comparison | None = None  # of them
    rejected: set[bytes] = field(default_factory=set)  # tables that lost in this search
    #: Tables that were dropped for them, in any search.
    with_long_steps: set[bytes] = field(default_factory=set)
    default_logs: list[float] = field(default_factory=list)  # the default against itself, quad by quad: A/A

    def begin(self) -> None:
        """A new search."""
        self.in_search = 0
        self.last_rejected = None
        self.rejected = set(self.with_long_steps)

    def reject(self, comparison: Comparison) -> None:
        """Its table lost."""
        comparison.outcome = REJECTED
        if not comparison.is_trial:
            self.last_rejected = comparison
        self.rejected.add(comparison.table.tobytes())

    def has_lost(self, table: Array) -> bool:
        """Whether a table (s,) lost in this search."""
        return table.tobytes() in self.rejected


@dataclass
class LastWindow:
    """Figures of the last window that the policy sees, see ``observation.Context``."""

    saving: float
    calls: Array  # (s,)
    long: float


class State:
    """Of one job, over all its searches."""

    def __init__(
        self, job: Job, config: SearchConfig, prior: Prior, on_confirmed: Callable[[Array], object]
    ) -> None:
        self.job, self.config, self.prior = job, config, prior
        self.account = Account()
        self.noise = NoiseEstimate()
        self.guard = StepGuard(job.mask)
        self.current = CurrentTable(self.n_slots, on_confirmed)
        self.comparisons = Comparisons()
        self.default_calls = DefaultCalls(job.call_us)
        self.running = Running(job.families)
        self.milestones = Milestones()

    def begin(self, default: Measured, before: Array) -> None:
        """A new search, from these default steps. ``before`` (s,): configs that ran until now."""
        self.default_ms = trimmed_mean(default.step_ms)
        self.turns.begin()
        self.noise.begin(default.step_ms, self.config)
        self.belief = Belief(self.prior, self.job.features, self.open, self.job.share)
        self._begin_belief()
        self.guard.begin(self.job, self.belief, before)
        self.account.rounds = 0
        self.comparisons.begin()
        self.long_steps = LongSteps()
        self.long_steps.add(np.zeros(self.n_slots, np.int64), default.step_ms, self.default_ms)
        self.last = LastWindow(0.0, np.zeros(self.n_slots), 0.0)

    def _begin_belief(self) -> None:
        has_calls = bool(np.isfinite(self.default_calls.logs).any())
        noise = self.noise.of_quads(self.noise.quads) / math.sqrt(2)
        self.belief.begin(noise, self.config.reveal, has_calls)

    def lengthen(self, turn_steps: int) -> None:
        """The job's steps are not alike, so that a turn took ``turn_steps`` of them: it goes on like that until a new
        search begins. What was measured of the open comparisons does not count any more."""
        self.turns.steps = turn_steps
        self.noise.lengthen(turn_steps, self.config)
        self._begin_belief()
        for comparison in self.comparisons.history:
            if comparison.outcome == OPEN:
                comparison.restart(self.noise.of_quads(1))

    # -- reading -----------------------------------------------------------------------------------------------

    @property
    def n_slots(self) -> int:
        """Of the job."""
        return len(self.job.share)

    @property
    def turns(self) -> Turns:
        """How its tables take turns."""
        return self.running.turns

    @property
    def open(self) -> Array:
        """(s, N_CONFIGS) bool: what may be chosen: what NCCL offers, and obeyed so far."""
        return np.asarray(self.job.mask & ~self.guard.refused)

    @property
    def default_ms_now(self) -> float:
        """Step time of the default now: from the last turns or steps of its own since, else as the belief follows
        it."""
        return self.turns.default_ms or self.default_ms * math.exp(float(self.belief.mean[0]))

    def saw_current(self, ms: float) -> None:
        """Turns of the current table took so long."""
        self.turns.default_ms = ms * math.exp(self.current.gain[0])

    def saw_default(self, ms: float) -> None:
        """A look at the default, which holds, took so long. Before any turns the belief follows it."""
        if self.turns.default_ms:
            self.turns.default_ms = ms

    @property
    def spent(self) -> float:
        """Part of what the search may lose that it has lost."""
        return self.account.spent(self.config.budget)

    # -- measurements and comparisons ----------------------------------------------------------------------------

    def tried(
        self, kind: str, configs: Array, comparison: Comparison | None = None, is_long: bool = False
    ) -> Plan:
        """A measurement of these configs (s,), in turns with the current table; a step that is too slow ends it. At few
        calls first if they are risky. A ``comparison`` is checked after half as many quads more each time. ``is_long``:
        it is LONGER. Of the current table: a look at it."""
        current = self.current.configs
        limit = self.guard.limit_ms(configs, self.default_ms_now)
        discard = self.running.discard(configs)
        n_steps = self.noise.window_steps * (LONGER if is_long else 1)
        plan = Plan(kind, configs.copy(), n_steps, discard, limit)
        if kind != TABLE:
            plan = self.guard.before(plan, current)
        quads = self.noise.quads if comparison is None else comparison.quads_until_check
        quads = LONGER * quads if is_long else quads
        return plan if plan.one_of else self.turns.plan(plan, current, quads)

    def search_again(self) -> None:
        """A policy wants another search of the same job."""
        self.milestones.asked_again += 1
        self.account.rounds = self.comparisons.in_search = 0

    def compare(self, table: Array, is_trial: bool = False) -> Comparison:
        """A new comparison of a table (s,) with the current one."""
        self.account.compared += 1
        test = SequentialTest(self.noise.of_quads(1), level_of(self.account.compared))
        found = Comparison(table.copy(), self.current.configs.copy(), test, is_trial)
        self.comparisons.history.append(found)
        return found

    def adopt(self, comparison: Comparison) -> None:
        """Its table is the current one from now on."""
        if self.current.is_default:
            self.milestones.gained(self.account.steps)
        self.account.compared = 0
        comparison.outcome = ADOPTED
        self.current.set(comparison.table, [*self.current.comparisons, comparison])

    def decide(self, comparison: Comparison) -> bool | None:
        """Whether its table replaces the current one, see :meth:`Comparison.decide`."""
        if self.turns.steps == TURN_STEPS and comparison.drop_carried():
            self.turns.steps = CARRIED_TURN_STEPS
            return None
        # Nobody knows how long a job runs: there is always as much time as the budget counts for at least.
        steps_left = max(HORIZON - self.account.steps, BUDGET_STEPS)
        quads_left = steps_left / (QUAD * self.turns.steps)
        config = self.config
        terms = Terms(quads_left, config.quads_long_steps, config.least_gain)
        return comparison.decide(terms, self.long_steps)


@dataclass(frozen=True)
class Look:
    """What the loop adds to the observation of a slot."""

    slot: int
    chosen: int  # its config in the last round
    risk: Array  # (N_CONFIGS,)
    outlook: tuple[Array, Array, Array]  # saving, learned and worth (N_CONFIGS,), see ``Belief.outlook``
    idle: float  # see ``observation.Context``
    is_exploring: bool
    is_refining: bool  # after the verdict

"""Plays a policy's searches on whole jobs, every step on the bill: what the board shows and training is judged by.

The search is the one that runs live (``search.Search``), and the policy is asked as it is live: one turn of one job
at a time. Only the windows are simulated or recorded, and each goes into a :class:`scores.LossAccount`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..search.config import HORIZON
from ..search.interfaces import N_ACTIONS, PATTERN, QUAD, WATCH, Measured, Plan, Policy, choices_of
from ..search.search import Search
from ..sim.jobs import Jobs
from ..sim.mixes import Few
from ..sim.noise import NoiseStream, RandomNumbers, longest
from ..sim.windows import SWITCH_STEPS, SimSearch, SimWindows
from .scores import LossAccount, Scores

Array = np.ndarray[Any, Any]

#: Steps of the watch that are played after a verdict; the rest of a job goes on like them.
AFTER = 1000
#: Where the job has changed meanwhile, its new search is played to its end, for so many steps more at most.
LONGER = 3000
#: A decision may take so many seconds of a processor.
LIMIT_S = 1.0


class AccountedWindows(SimWindows):
    """Windows of which each step goes into a ledger, those around a switch and those thrown away too."""

    def __init__(self, jobs: Jobs, rng: RandomNumbers, ledger: LossAccount) -> None:
        super().__init__(jobs, rng)
        self.ledger = ledger

    def measure(self, rows: Sequence[int], plans: Sequence[Plan]) -> list[Measured]:
        """See :class:`SimWindows`."""
        before = self.running
        few = self.few
        where = np.asarray(rows)
        begun = self.jobs.noise.at[where]
        heavy = self._heavy(where, plans)
        spent_us = self.jobs.first_use.spent_us[where]
        found = super().measure(rows, plans)
        step = np.arange(heavy.shape[1])
        waited = self.waited[where]  # until the table is in force
        is_waiting = step < waited[:, None]
        has_waited = waited > 0
        late = where[has_waited]
        if late.size:
            few_then = few.take(late)
            self._bill(
                late, before[late], is_waiting[has_waited], few_then, begun[has_waited], heavy[has_waited]
            )
        billed = np.array([m.billed for m in found])
        halfway = begun + (waited + billed) // 2  # the job may change within a window
        is_tried = self._is_tried(where, plans, step)
        few_now = self.few.take(where)
        tables = self.tried[where]
        pace = self._bill(where, tables, is_tried, few_now, halfway, heavy)
        by_current = (step < billed[:, None]) & ~is_waiting & ~is_tried  # turns of the current table
        has_turns = by_current.any(axis=1)
        others = where[has_turns]
        if others.size:
            self._bill(
                others,
                self.running[others],
                by_current[has_turns],
                None,
                halfway[has_turns],
                heavy[has_turns],
            )
        connecting_us = self.jobs.first_use.spent_us[where] - spent_us  # all in one step
        connecting = connecting_us / self.jobs.default_us[where]
        uses_first = connecting > 0
        first = pace + connecting
        self.ledger.see(where[uses_first], first[uses_first])
        return found

    def _heavy(self, rows: Array, plans: Sequence[Plan]) -> Array:
        """Of each step that may go by in the windows of ``plans`` (m,), the number that says whether it straggles,
        (m, k); inf: it is not told. In the watch nothing is tried, and one source for all jobs cannot be asked ahead.
        """
        counts = np.zeros(len(self.jobs), int)
        around = 2 * SWITCH_STEPS
        counts[rows] = [around + plan.discard + plan.n_steps for plan in plans]
        shape = len(rows), longest(counts)
        if not isinstance(self.rng, NoiseStream):
            return np.full(shape, np.inf)
        numbers = self.rng.steps(self.jobs.noise.at, counts)
        heavy = numbers.heavy.T[rows]
        is_watch = [plan.kind == WATCH for plan in plans]
        heavy[is_watch] = np.inf
        return heavy

    def _is_tried(self, rows: Array, plans: Sequence[Plan], step: Array) -> Array:
        """In which of the steps (k,) since the last window the plans' own configs ran, (m, k)."""
        waited = self.waited[rows]
        since = step - waited[:, None]
        steps = [plan.turns for plan in plans]
        turns = np.array(steps)[:, None]
        turn = since // np.maximum(turns, 1)
        has_run = (turns == 0) | (PATTERN[turn % QUAD] == 1)
        is_own = has_run & (since >= 0)
        # A window may end early.
        count = is_own.cumsum(axis=1)
        most = self.tried_steps[rows]
        return is_own & (count <= most[:, None])

    def _bill(
        self,
        rows: Array,  # (m,)
        tables: Array,  # (m, S)
        ran: Array,  # (m, k) bool
        few: Few | None,
        at: Array,  # (m,)
        heavy: Array,  # (m, k)
    ) -> Array:
        """Bill the steps in which ``tables`` ``ran``. The bill has stragglers at their mean: those that struck are seen
        besides, as long as they were. Returns the time of a step without one (m,), in default steps."""
        pace = self.ledger.bill(rows, tables, ran.sum(axis=1), few, at)
        is_late, size, mean = self.jobs.straggled(tables, rows, heavy)
        pace = pace / (1 + mean)
        late = is_late & ran
        has_late = late.any(axis=1)
        longest_pace = pace * (1 + size)
        self.ledger.see(rows[has_late], longest_pace[has_late])
        return pace


@dataclass
class PlayedJobs:
    """What a policy did on ``n`` jobs and what came of it."""

    scores: Scores
    decisions: list[list[int]]  # of each job: of every turn the action
    decision_us: float  # mean time of one


class AskedPolicy:
    """A policy that is asked as it is live: one turn of one job at a time."""

    def __init__(self, policy: Policy, limit_s: float) -> None:
        self.policy = policy
        self.limit_s = limit_s
        self.states = dict[int, Any]()  # by job
        self.spent_s = 0.0

    def next(self, job: int, search: Search) -> int:
        """The policy's action. Raises ValueError when the answer is no action or takes
        longer than the limit; what the policy raises passes through."""
        observation = search.observe()[None]
        state = self.states.get(job)
        start = np.array([job not in self.states])
        begin = time.perf_counter()
        processor = time.thread_time()
        action, state = self.policy.predict(observation, state, start, True)
        self.states[job] = state
        self.spent_s += time.perf_counter() - begin
        took = time.thread_time() - processor  # of a processor: a busy machine is no fault of the policy's
        if took > self.limit_s:
            raise ValueError(f"a decision took {took:.1f} s, the limit is {self.limit_s:.0f}")
        return number(action)


class ReplayedDecisions:
    """Plays decisions again that were recorded: of each job its turns in order."""

    spent_s = 0.0

    def __init__(self, decisions: Sequence[Sequence[int]]) -> None:
        self.left = [list(reversed(job)) for job in decisions]

    def next(self, job: int, _search: Search) -> int:
        """The job's next decision. Raises ValueError when there is none left, or it is no decision."""
        left = self.left[job] if job < len(self.left) else []
        if not left:
            raise ValueError("the record has too few decisions")
        decision = int(left.pop())
        if not 0 <= decision < N_ACTIONS:
            raise ValueError(f"{decision} is no decision")
        return decision


def play(
    policy: Policy | ReplayedDecisions,
    search: SimSearch,
    ledger: LossAccount,
    after: int = AFTER,
    limit_s: float = LIMIT_S,
) -> PlayedJobs:
    """Let a policy decide on all jobs until ``after`` steps past each one's verdict; windows of ``search`` are billed
    to ``ledger``.

    Raises ValueError as :meth:`AskedPolicy.next` and :meth:`ReplayedDecisions.next` do.
    """
    n = len(search.searches)
    player = policy if isinstance(policy, ReplayedDecisions) else AskedPolicy(policy, limit_s)
    decisions = [list[int]() for _ in range(n)]
    watch = _Watch(search, ledger, after)
    while True:
        open_ = watch.open_jobs()
        if not open_ and not len(watch.at_work()):
            break
        for i in open_:
            decisions[i] += _turns(i, search.searches[i], player)
        is_left = watch.begin()
        playing = [i for i in open_ if is_left[i]]
        search.measure(playing)
        watch.note()
    if not after:  # what ran last were trials: a job does not go on like them
        ledger.go_on(np.arange(n))
    marks = np.array([s.marks.first_gain for s in search.searches])
    ledger.first_gain = np.where(marks >= 0, marks, np.nan)
    n_turns = max(sum(map(len, decisions)), 1)
    mean_us = 1e6 * player.spent_s / n_turns
    return PlayedJobs(ledger.scores(), decisions, mean_us)


class _Watch:
    """How long each job is played past its verdict. Arrays have the shape (jobs,)."""

    def __init__(self, search: SimSearch, ledger: LossAccount, after: int) -> None:
        self.search = search
        self.ledger = ledger
        self.after = after
        n = len(search.searches)
        self.until = np.full(n, np.inf)  # steps at which a job's watch has been played

    def _each(self, name: str) -> Array:
        """A property of the search of each job, bool."""
        searches = self.search.searches
        return np.array([getattr(one, name) for one in searches])

    def open_jobs(self) -> list[int]:
        """Jobs that are played on. One that searches anew has longer: what is in force now will not last."""
        steps = self.ledger.steps
        searching = ~self._each("is_over")
        is_watched = steps < self.until
        has_longer = steps < self.until + LONGER
        is_open = is_watched | (searching & has_longer)
        return np.flatnonzero(is_open).tolist()

    def at_work(self) -> Array:
        """Jobs that still try something after their verdict: played on, even where all others have ended."""
        trying = self._each("is_over") & ~self._each("is_done")
        is_open = trying & (self.ledger.steps < HORIZON)
        return np.flatnonzero(is_open)

    def begin(self) -> Array:
        """The watch of jobs whose verdict is new begins; that of jobs at work goes on. Whether a job has steps to play,
        bool."""
        ledger = self.ledger
        is_over = self._each("is_over")
        is_fresh = is_over & np.isinf(self.until)
        fresh = np.flatnonzero(is_fresh)
        tables = self.search.tables[fresh]
        ledger.end(fresh, tables)
        self.until[fresh] = ledger.steps[fresh] + self.after
        busy = self.at_work()
        ledger.go_on(busy)
        more = max(self.after, 1)
        self.until[busy] = ledger.steps[busy] + more
        return (ledger.steps < self.until) | ~is_over

    def note(self) -> None:
        """When a job fell quiet, and its final table."""
        ledger = self.ledger
        is_done = self._each("is_done")
        ledger.quiet = np.where(is_done, ledger.quiet, ledger.steps)
        has_begun = np.isfinite(self.until)
        again = np.flatnonzero(has_begun)
        ledger.final[again] = self.search.tables[again]


def _turns(job: int, search: Search, player: AskedPolicy | ReplayedDecisions) -> list[int]:
    """The policy's actions in one job until there is a window to measure. Where the watch has begun a new search, its
    first windows come before the policy's turn."""
    actions = []
    while search.plan() is None:
        action = player.next(job, search)
        config, what = choices_of(np.array(action))
        search.decide(int(config), int(what))
        actions.append(action)
    return actions


def number(action: Any) -> int:
    """One action, () or (1,). Raises ValueError when it is none."""
    found = np.asarray(action)
    is_one = found.size == 1 and np.issubdtype(found.dtype, np.integer)
    one = int(found.item()) if is_one else -1
    if not 0 <= one < N_ACTIONS:
        raise ValueError(f"an action is one integer from 0 to {N_ACTIONS - 1}, not {action!r}")
    return one

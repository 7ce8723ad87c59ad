"""The loop of a search, from the first step to the job's last:

    until the job ends:
        the policy proposes a table, slot by slot, or nothing
        a table: it takes turns with the current one until that decides, it promises nothing, or a step is too slow
        nothing: the current table is watched

Whatever is tried is a :class:`Trial`: it begins, goes on and ends here, before and after the verdict alike. The verdict
is the first time that the policy has nothing to propose. Until then a proposal has a config of its own in each slot,
and most are measured once, for the belief: that learns of all slots at once. From then on a proposal is the current
table with a slot or more changed, each is compared, and :mod:`monitor` watches beside. Such a trial ends with its first
step that is clearly slower: a trial that loses costs a step or two.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .change import Change
from .comparison import Comparison, TimedWindow, Window
from .config import DISCARD, MOST_SEARCHES, SLOWER, SLOWER_LOG
from .interfaces import (
    COMPARE,
    GO_ON,
    LEAVE,
    LOOK,
    PROFILE,
    RUN_LONGER,
    SEARCH,
    SEARCH_AGAIN,
    TABLE,
    TRIAL,
    WATCH,
    Plan,
)
from .monitor import Monitor
from .state import Look, State
from .step_times import Quads, trimmed_mean

Array = np.ndarray[Any, Any]


@dataclass
class Trial:
    """A table beside the current one."""

    kind: (
        str  # SEARCH: measured once, the belief learns; TABLE, TRIAL: compared, before and after the verdict
    )
    table: Array  # (s,)
    is_long: bool = False  # the policy wants a longer measurement
    comparison: Comparison | None = None  # with the current table, once it has begun


class Proposal:
    """The table that the policy is choosing, a slot at a time."""

    def __init__(self, state: State, configs: Array, is_over: bool) -> None:
        """``configs`` (s,): of the last round; ``is_over``: the verdict is there, so they are the current table's."""
        self._state, self._is_over = state, is_over
        self.configs = configs.copy()  # (s,) of this round
        self.last = configs.copy()  # (s,) of the last round
        self.turn = 0  # the slot that is chosen for next
        self.turns = 0  # of this proposal
        self.idle = 0  # before the verdict: proposals in a row of one table
        self.passed = 0  # after it: turns in a row of which no trial came

    def choose(self, config: int, what: int) -> bool:
        """Take in what the slot runs. Whether the proposal is whole: slots without a turn run the config with the best
        mean, after the verdict that of the current table."""
        n_slots = self._state.n_slots
        self._set(slice(self.turn, self.turn + 1), np.array([config]))
        self.turns += 1
        self.turn += 1
        if what == GO_ON and self.turns < n_slots:
            self.turn %= n_slots
            return False
        if not self._is_over:
            left = slice(self.turn, None)
            self._set(left, self._state.belief.best()[left])
            self.idle += 1
        return True

    def _set(self, slots: slice, configs: Array) -> None:
        is_same = self._state.account.rounds > 0 and np.array_equal(self.configs[slots], configs)
        if len(configs) and not is_same:
            self.idle = 0
        self.configs[slots] = configs

    def begin(self, is_tried: bool) -> None:
        """The next one; ``is_tried``: the last one became a trial. After the verdict the turns go round the slots."""
        if not self._is_over:
            self.last, self.turn, self.turns = self.configs.copy(), 0, 0
            return
        self.passed = 0 if is_tried else self.passed + self.turns
        self.configs = self._state.current.configs.copy()
        self.turn %= self._state.n_slots
        self.turns = 0


class Loop:
    """What runs next, and what comes of it."""

    def __init__(self, state: State, before: Array) -> None:
        """``before`` (s,): configs that are tried first."""
        self._state = state
        self._levels = defaultdict[bytes, list[float]](list)  # of step times that a table was seen at
        self._begin(before)

    def _begin(self, before: Array) -> None:
        """A search begins. ``before`` (s,): configs that are tried first."""
        self.change: Change | None = None  # of the job; some default steps tell what to do
        self.trial: Trial | None = None  # that runs, or waits for the current table to be seen as usual
        self.monitor: Monitor | None = None  # from the verdict on
        self.is_done = False  # the policy has nothing more to propose
        self.trials_left = 0  # measurements after the verdict that may still try something
        self.proposal = Proposal(self._state, before, is_over=False)
        self._current_ms: float | None = None  # a step of the current table, as it was seen last
        self._compared: dict[bytes, Comparison] = {}  # of each trial with the current table
        if before.any():
            self.trial = Trial(SEARCH, before.copy())

    def verdict(self, trials: int) -> None:
        """The policy has nothing to propose for the first time in this search. ``trials``: measurements that may still
        try something."""
        state = self._state
        marks = state.milestones
        marks.verdict = state.account.steps if marks.verdict < 0 else marks.verdict
        self.change = self.trial = self._current_ms = None
        self._compared = {}
        self._watch()
        self.trials_left = trials
        self.proposal = Proposal(state, state.current.configs, is_over=True)
        self._end_if_spent()

    def _watch(self) -> None:
        """The current table is monitored from now on."""
        state = self._state
        self.monitor = Monitor(state, self._levels[state.current.configs.tobytes()])

    # -- the policy's turns ------------------------------------------------------------------------------------

    @property
    def turn(self) -> int:
        """The slot that the policy decides for next; the number of slots: none."""
        return self.proposal.turn if self.trial is None else self._state.n_slots

    @property
    def more_choices(self) -> tuple[int, ...]:
        """What may come next beside GO_ON, RUN, COMPARE and LEAVE, if ``SearchConfig.more_choices``. There is nothing
        to look at while the default is the current table."""
        state = self._state
        if self.monitor is None:
            return (RUN_LONGER,)
        look = () if state.current.is_default else (LOOK,)
        is_left = state.milestones.asked_again < MOST_SEARCHES
        again = (SEARCH_AGAIN,) if is_left else ()
        return (RUN_LONGER, *look, *again)

    def look(self) -> Look:
        """For the observation of the slot whose turn it is."""
        state, proposal = self._state, self.proposal
        belief = state.belief
        slot = self.turn % state.n_slots  # the job may end before a measurement: then no decision follows
        best = belief.best()
        is_over = self.monitor is not None
        is_before = np.arange(state.n_slots) < slot
        others = np.where(is_before, proposal.last if is_over else proposal.configs, best)
        is_exploring = bool((others != best).any())
        if is_over:
            risk = self._risk(slot)
            outlook = belief.outlook(slot, lost=risk == 1.0)
            idle = 4 * proposal.passed / state.n_slots
        else:
            risk = state.guard.risk(slot)
            others[slot] = 0
            outlook = belief.outlook(slot, belief.saving(others)[1] ** 2)
            idle = proposal.idle
        return Look(slot, int(proposal.last[slot]), risk, outlook, idle, is_exploring, is_over)

    def _risk(self, slot: int) -> Array:
        """(N_CONFIGS,) as ``StepGuard.risk``; 1 of what has lost as the only change of the current table."""
        state = self._state
        current = state.current.configs
        risk = state.guard.risk(slot)
        for table in state.comparisons.rejected:
            configs = np.frombuffer(table, current.dtype)
            changed = np.flatnonzero(configs != current)
            if changed.tolist() == [slot]:
                risk[configs[slot]] = 1.0
        return risk

    def decide(self, config: int, what: int) -> None:
        """The policy's choice for that slot, and what comes next. While something runs it has no turn."""
        state = self._state
        if self.trial is not None or self.change is not None or self.is_done:
            return
        if what == SEARCH_AGAIN:
            state.search_again()
            self._begin(state.current.configs)
        elif what == LOOK and self.monitor is not None:
            self.monitor.look_at_default()
            self.trials_left -= 1
        elif what == LEAVE:
            self._leave()
        elif self.proposal.choose(config, what):
            self._try(what)
            self._end_if_spent()

    def _leave(self) -> None:
        if self.monitor is None:
            self.verdict(self._state.config.trials)
        else:
            self.trials_left, self.is_done = 0, True

    def _try(self, what: int) -> None:
        """The proposal is whole. After the verdict neither the current table nor one that has lost is tried."""
        proposal = self.proposal
        table = proposal.configs.copy()
        if self.monitor is None:
            if what == COMPARE and self._may_compare(table):
                self.compare(table)
            else:
                self.trial = Trial(SEARCH, table, what == RUN_LONGER)
        elif self._is_new(table):
            self.trial = Trial(TRIAL, table, what == RUN_LONGER, self._compared.get(table.tobytes()))
        proposal.begin(is_tried=self.trial is not None)

    def _is_new(self, table: Array) -> bool:
        """Whether a table (s,) is not the current one, and has not lost to it."""
        state = self._state
        return not np.array_equal(table, state.current.configs) and not state.comparisons.has_lost(table)

    def _may_compare(self, table: Array) -> bool:
        state = self._state
        return self._is_new(table) and state.comparisons.in_search < state.config.comparisons

    def compare(self, table: Array) -> Comparison:
        """From now on this table (s,) is compared with the current one, before the verdict."""
        comparison = self._state.compare(table)
        self.trial = Trial(TABLE, table.copy(), comparison=comparison)
        return comparison

    # -- what runs ---------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """What to measure next; None: the policy has a turn first."""
        state, monitor, trial = self._state, self.monitor, self.trial
        if self.change is not None:
            none = np.zeros(state.n_slots, np.int64)
            return Plan(PROFILE, none, state.config.profile_steps, DISCARD)
        if trial is None:
            is_watched = monitor is not None and (self.is_done or monitor.is_looked_at)
            return monitor.plan() if monitor is not None and is_watched else None
        plan = state.tried(trial.kind, trial.table, trial.comparison, trial.is_long)
        if monitor is None or plan.one_of:
            return plan
        current_ms = self._current_ms
        if monitor.wants_default or not monitor.is_calm or current_ms is None:
            return monitor.plan()
        slower = max(SLOWER * state.noise.of(1), SLOWER_LOG)
        limit_ms = min(plan.limit_ms, current_ms * math.exp(slower))
        return replace(plan, limit_ms=limit_ms)

    def record(self, window: Window) -> None:
        """Take in what was measured."""
        if self.change is not None:
            self._begin_anew(self.change, window)
            return
        found = None
        if self.monitor is None:
            self._tried(window)
        else:
            found = self._recorded_beside(self.monitor, window)
        if found is None:
            self._end_if_spent()
        else:
            self._leave_table(found)

    def _recorded_beside(self, monitor: Monitor, window: Window) -> Change | None:
        """After the verdict the steps of the current table are watched, whatever was measured."""
        current = window.current
        self._state.account.since_verdict += window.seen.billed
        if window.plan.kind == WATCH:
            self._current_ms = window.ms if current is None else current.ms
            return monitor.record(window)
        self.trials_left -= 1
        found = None
        if current is not None:
            self._current_ms = current.ms
            found = monitor.saw_current(window.seen.current)
        self._tried(window)
        return found

    # -- a trial -----------------------------------------------------------------------------------------------

    def _tried(self, window: Window) -> None:
        """A trial was measured. At few calls, or once for the belief: the policy knows more now, and decides anew."""
        trial, quads, current = self.trial, window.quads, window.current
        assert trial is not None
        is_search = trial.kind == SEARCH
        self._state.account.rounds += is_search
        if is_search or quads is None or current is None or self._has_ended(trial, window, quads, current):
            self._end()

    def _has_ended(self, trial: Trial, window: Window, quads: Quads, current: TimedWindow) -> bool:
        """Take in what a compared trial has shown. Whether it is decided, or ends undecided."""
        state = self._state
        if state.current.is_default and not window.is_aborted:
            state.comparisons.default_logs.extend(quads.same.tolist())
        comparison = trial.comparison or self._begin_comparison(trial)
        comparison.add_quads(quads, current, window.timed)
        verdict = state.decide(comparison)
        if window.is_aborted or window.is_refused:
            verdict = False
        if verdict:
            self._adopt(comparison)
        elif verdict is not None:
            state.comparisons.reject(comparison)
        return verdict is not None or not self._goes_on(trial, comparison)

    def _begin_comparison(self, trial: Trial) -> Comparison:
        """A trial's, with its first whole measurement: of the time after the verdict."""
        comparison = self._state.compare(trial.table, is_trial=True)
        trial.comparison = self._compared[trial.table.tobytes()] = comparison
        return comparison

    def _goes_on(self, trial: Trial, comparison: Comparison) -> bool:
        """Whether an undecided trial is measured again at once. Else the policy may propose it again."""
        if self.monitor is None:
            return True
        state, test = self._state, comparison.test
        belief = state.belief
        is_better = belief.saving_mean(trial.table) > belief.saving_mean(state.current.configs)
        is_promising = test.n > 0 and test.is_promising
        return self.trials_left > 0 and (is_better or is_promising)

    def _adopt(self, comparison: Comparison) -> None:
        """The trial's table is the current one from now on."""
        state = self._state
        is_first = state.current.is_default
        state.adopt(comparison)
        self._compared = {}
        if self.monitor is None:
            return
        self._watch()
        self.proposal.begin(is_tried=True)
        if is_first:
            self.trials_left = state.config.trials
        else:
            state.milestones.refined += 1

    def _end(self) -> None:
        """The trial is over."""
        trial, self.trial = self.trial, None
        if trial is not None and trial.kind == TABLE:
            self._state.comparisons.in_search += 1
            self.proposal.idle = 0

    # -- nothing to propose ------------------------------------------------------------------------------------

    def _end_if_spent(self) -> None:
        """Rounds, trials or the budget are spent, or the policy has passed on all slots: nothing more is proposed."""
        state, monitor = self._state, self.monitor
        if self.trial is not None:
            return
        is_spent = state.spent > 1
        if monitor is not None:
            has_passed = self.proposal.passed >= state.config.passes * state.n_slots
            if has_passed or is_spent or self.trials_left <= 0:
                self._leave()
        elif is_spent or state.account.rounds >= self._most_rounds:
            self._close()

    @property
    def _most_rounds(self) -> int:
        config = self._state.config
        return max(config.rounds, config.rounds_a_slot * self._state.n_slots)

    def _close(self) -> None:
        """The table with the best means is compared with the current one, then comes the verdict."""
        belief = self._state.belief
        best = belief.best()
        is_better = belief.saving_mean(best) > belief.saving_mean(self._state.current.configs)
        if is_better and self._may_compare(best):
            self.compare(best)
        else:
            self._leave()

    # -- the job has changed -----------------------------------------------------------------------------------

    def _leave_table(self, change: Change) -> None:
        """The default holds, and is measured anew."""
        state = self._state
        state.milestones.reopened += 1
        state.milestones.dropped += change.is_harmful
        state.current.set(np.zeros_like(state.current.configs), [])
        self.change, self.trial, self.monitor = change, None, None
        self.is_done = False
        self.proposal = Proposal(state, state.current.configs, is_over=False)

    def _begin_anew(self, change: Change, window: Window) -> None:
        """A new search begins: the table before meets the default first."""
        state, before = self._state, change.before
        step_ms = trimmed_mean(window.seen.step_ms)
        state.job = state.job.changed(window.seen.call_us, step_ms / state.default_ms)
        state.default_calls.changed(state.job.call_us)
        state.begin(window.seen, before)
        state.guard.assume_measured(before)
        self._begin(before)

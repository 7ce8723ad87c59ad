"""Exploring: windows under the policy's choices for all slots, and comparisons of tables that promise a gain."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .change import Regimes
from .comparison import ADOPTED, Comparison, TimedWindow, Window
from .config import DISCARD, MOST_FRUITLESS
from .interfaces import COMPARE, GO_ON, LEAVE, PROFILE, REFERENCE, RUN_LONGER, SEARCH, TABLE, Plan
from .state import Changed, Look, NewSearch, Next, State, Verdict
from .step_times import Quads, trimmed_mean

Array = np.ndarray[Any, Any]


class Explore:
    """The phase before the verdict."""

    more_choices = (RUN_LONGER,)

    def __init__(self, state: State, before: Array, first_log: float | None = None) -> None:
        """``before`` (s,): configs that are tried first; ``first_log``: log(default / table) of a pair of them that was
        measured already, so that their comparison comes at once."""
        self._state = state
        self.choices = before.copy()  # (s,) of this round
        self.turn = state.n_slots if self.choices.any() else 0
        self.comparison: Comparison | None = None  # that is running
        self._idle = 0  # windows in a row under one table
        self._is_long = False  # the policy wants a longer window
        if first_log is not None:
            comparison = self.compare(before)
            if not comparison.takes_turns:
                comparison.add_log(first_log)

    @property
    def is_spent(self) -> bool:
        """Nothing more is tried in this search."""
        state = self._state
        config = state.config
        rounds = max(config.rounds, config.rounds_a_slot * state.n_slots)
        return state.spent > 1 or state.account.rounds >= rounds

    def plan(self) -> Plan | None:
        """A window of the running comparison, or of the round once all slots have had their turn."""
        state, comparison = self._state, self.comparison
        if comparison is not None:
            if comparison.takes_turns:
                return state.tried(TABLE, comparison.table, comparison)
            if comparison.next_side:
                return state.window(TABLE, comparison.table)
            return state.window(REFERENCE, comparison.reference)
        if self.turn < state.n_slots:
            return None
        return state.tried(SEARCH, self.choices, is_long=self._is_long)

    # -- the policy's turns ------------------------------------------------------------------------------------

    def look(self) -> Look:
        """See :class:`state.Phase`."""
        belief, slots = self._state.belief, np.arange(self._state.n_slots)
        slot = self.turn % len(slots)  # the job may end before a window: then no decision follows
        best = belief.best()
        others = np.where(slots < slot, self.choices, best)
        is_exploring = bool((others != best).any())
        others[slot] = 0
        variance = belief.saving(others)[1] ** 2
        return Look(
            slot,
            int(self.choices[slot]),
            self._state.guard.risk(slot),
            belief.outlook(slot, variance),
            idle=self._idle,
            is_exploring=is_exploring,
        )

    def decide(self, config: int, what: int) -> Next:
        """What the slot runs in the next window."""
        state, slot = self._state, self.turn
        is_same = self.choices[slot] == config and state.account.rounds > 0
        self._idle = self._idle if is_same else 0
        self.choices[slot] = config
        self.turn += 1
        self._is_long = what == RUN_LONGER
        if what == LEAVE:
            return self._verdict()
        if what != GO_ON:
            self._skip_turns()
        if self.turn == state.n_slots:
            self._idle += 1
            if what == COMPARE and self._may_compare(self.choices):
                self.compare(self.choices)
        return None

    def _skip_turns(self) -> None:
        """Slots without a turn run the config with the best mean."""
        rest = self._state.belief.best()[self.turn :]
        is_same = np.array_equal(self.choices[self.turn :], rest)
        self._idle = self._idle if is_same else 0
        self.choices[self.turn :] = rest
        self.turn = self._state.n_slots

    # -- comparisons -------------------------------------------------------------------------------------------

    def _may_compare(self, table: Array) -> bool:
        """Whether a table (s,) is not the current one, has not lost to it, and comparisons are left."""
        state = self._state
        is_current = np.array_equal(table, state.current.configs)
        has_lost = state.comparisons.has_lost(table)
        return not is_current and not has_lost and state.comparisons.in_search < state.config.comparisons

    def compare(self, table: Array) -> Comparison:
        """From now on windows of this table (s,) and of the current one take turns."""
        self.comparison = self._state.compare(table, self._state.pair_noise)
        return self.comparison

    def _compared(self, window: Window, comparison: Comparison) -> Next:
        """One window of a comparison."""
        state = self._state
        if window.is_guilty or window.is_refused:
            return self._reject(comparison)
        if window.is_aborted:  # it may have been a checkpoint: once more
            comparison.drop_half()
            return None
        if window.quads is not None and window.current is not None:
            return self._compared_turns(window, window.quads, window.current, comparison)
        if comparison.takes_turns:
            self.comparison = state.compare_by_windows(comparison)
            return None
        if not window.plan.configs.any():
            state.comparisons.default_window(window.ms)
        if not comparison.add_window(window.plan.kind == TABLE, window.timed):
            return None
        return self._decide(comparison)

    def _compared_turns(
        self, window: Window, quads: Quads, current: TimedWindow, comparison: Comparison
    ) -> Next:
        """Turns of a comparison."""
        if self._state.current.is_default:
            self._state.comparisons.default_window(current.ms)
        comparison.add_quads(quads, current, window.timed)
        return self._decide(comparison)

    def _decide(self, comparison: Comparison) -> Next:
        verdict = self._state.decide(comparison)
        if verdict:
            return self._adopt(comparison)
        return None if verdict is None else self._reject(comparison)

    def _adopt(self, comparison: Comparison) -> Next:
        state = self._state
        if state.current.is_default:
            state.milestones.gained(state.account.steps)
        comparison.outcome = ADOPTED
        adopted = [*state.current.comparisons, comparison]
        state.current.set(comparison.table, adopted)
        return self._go_on()

    def _reject(self, comparison: Comparison) -> Next:
        self._state.comparisons.last_rejected = comparison
        self._state.comparisons.reject(comparison)
        return self._go_on()

    def _go_on(self) -> Next:
        """After a comparison: on with the rounds, or the end."""
        self.comparison = None
        self._state.comparisons.in_search += 1
        self.turn = self._idle = 0
        return self._close() if self.is_spent else None

    # -- windows -----------------------------------------------------------------------------------------------

    def record(self, window: Window) -> Next:
        """See :class:`state.Phase`."""
        if self.comparison is not None:
            return self._compared(window, self.comparison)
        self._state.account.rounds += 1
        self.turn = 0
        return self._close() if self.is_spent else None

    def _close(self) -> Next:
        """Nothing more is tried: the table with the best means is compared with the current one, then comes the
        verdict."""
        belief = self._state.belief
        best = belief.best()
        current = belief.saving_mean(self._state.current.configs)
        if belief.saving_mean(best) > current and self._may_compare(best):
            self.compare(best)
            return None
        return self._verdict()

    def _verdict(self) -> Verdict:
        return Verdict(self._state.config.trials, self._state.current.configs.copy())


class Remeasure:
    """The phase after a change of the job: some default steps tell what to do."""

    turn = 0
    more_choices = ()

    def __init__(self, state: State, regimes: Regimes, changed: Changed) -> None:
        self._state, self._regimes, self._changed = state, regimes, changed
        regimes.leave(changed.regime, changed.default_ms, state.noise.of_window)
        state.milestones.reopened += 1
        state.current.set(np.zeros_like(state.current.configs), [])

    def plan(self) -> Plan:
        """Default steps."""
        state = self._state
        return Plan(PROFILE, np.zeros(state.n_slots, np.int64), state.config.profile_steps, DISCARD)

    def look(self) -> Look:
        """For an observation that no decision follows."""
        belief = self._state.belief
        risk = self._state.guard.risk(self.turn)
        return Look(self.turn, 0, risk, belief.outlook(self.turn), idle=0.0, is_exploring=False)

    def decide(self, config: int, what: int) -> Next:
        """The policy has no turn here: its choice changes nothing."""
        return None

    def record(self, window: Window) -> Next:
        """A regime that was tuned before has its table again, which the next window is compared with. Else a new search
        begins: the table before meets the default first, with the windows that showed the change for a first pair."""
        state, changed, seen = self._state, self._changed, window.seen
        before, change = changed.before, changed.change
        state.job = state.job.changed(seen.call_us, trimmed_mean(seen.step_ms) / state.default_ms)
        state.default_calls.changed(state.job.call_us)
        state.begin(seen, before)
        state.guard.assume_measured(before)
        noise, logs = state.noise.of_window, state.default_calls.logs
        known = self._regimes.same(changed.regime, change, state.default_ms, logs, noise)
        if known is not None:
            state.current.set(known.configs, known.comparisons)
            state.milestones.returned += 1
            is_same = np.array_equal(known.configs, before)
            levels = change.levels if is_same else ()
            return Verdict(changed.trials, known.configs.copy(), levels, state.default_ms)
        marks = state.milestones
        marks.fruitless = 0 if before.any() else min(marks.fruitless + 1, MOST_FRUITLESS)
        level = change.level
        if not before.any() or level is None or level >= math.log(state.default_ms):
            return NewSearch(before, None)
        return NewSearch(before, math.log(state.default_ms / math.exp(level)))

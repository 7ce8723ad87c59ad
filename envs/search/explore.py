"""Exploring: measurements of the policy's choices for all slots, and comparisons of tables that promise a gain."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .change import Regimes
from .comparison import Comparison, Window
from .config import DISCARD
from .interfaces import COMPARE, GO_ON, LEAVE, PROFILE, RUN_LONGER, SEARCH, TABLE, Plan
from .state import Changed, Look, NewSearch, Next, State, Verdict
from .step_times import trimmed_mean

Array = np.ndarray[Any, Any]


class Explore:
    """The phase before the verdict."""

    more_choices = (RUN_LONGER,)

    def __init__(self, state: State, before: Array, is_compared: bool = False) -> None:
        """``before`` (s,): configs that are tried first; ``is_compared``: their comparison comes at once."""
        self._state = state
        self.choices = before.copy()  # (s,) of this round
        self.turn = state.n_slots if self.choices.any() else 0
        self.comparison: Comparison | None = None  # that is running
        self._idle = 0  # windows in a row under one table
        self._is_long = False  # the policy wants a longer window
        if is_compared:
            self.compare(before)

    @property
    def is_spent(self) -> bool:
        """Nothing more is tried in this search."""
        state = self._state
        config = state.config
        by_slots = config.rounds_a_slot * state.n_slots
        rounds = max(config.rounds, by_slots)
        return state.spent > 1 or state.account.rounds >= rounds

    def plan(self) -> Plan | None:
        """Turns of the running comparison, or of the round once all slots have had their turn."""
        state = self._state
        comparison = self.comparison
        if comparison is not None:
            return state.tried(TABLE, comparison.table, comparison)
        if self.turn < state.n_slots:
            return None
        return state.tried(SEARCH, self.choices, is_long=self._is_long)

    # -- the policy's turns ------------------------------------------------------------------------------------

    def look(self) -> Look:
        """See :class:`state.Phase`."""
        state = self._state
        belief = state.belief
        slots = np.arange(state.n_slots)
        slot = self.turn % len(slots)  # the job may end before a window: then no decision follows
        best = belief.best()
        is_decided = slots < slot
        others = np.where(is_decided, self.choices, best)
        is_exploring = bool((others != best).any())
        others[slot] = 0
        variance = belief.saving(others)[1] ** 2
        return Look(
            slot,
            int(self.choices[slot]),
            state.guard.risk(slot),
            belief.outlook(slot, variance),
            idle=self._idle,
            is_exploring=is_exploring,
        )

    def decide(self, config: int, what: int) -> Next:
        """What the slot runs in the next window."""
        state = self._state
        slot = self.turn
        before = self.choices[slot]
        is_same = before == config and state.account.rounds > 0
        if not is_same:
            self._idle = 0
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
        state = self._state
        left = slice(self.turn, None)
        best = state.belief.best()
        is_same = np.array_equal(self.choices[left], best[left])
        if not is_same:
            self._idle = 0
        self.choices[left] = best[left]
        self.turn = state.n_slots

    # -- comparisons -------------------------------------------------------------------------------------------

    def _may_compare(self, table: Array) -> bool:
        """Whether a table (s,) is not the current one, has not lost to it, and comparisons are left."""
        state = self._state
        comparisons = state.comparisons
        is_current = np.array_equal(table, state.current.configs)
        has_lost = comparisons.has_lost(table)
        are_left = comparisons.in_search < state.config.comparisons
        return not is_current and not has_lost and are_left

    def compare(self, table: Array) -> Comparison:
        """From now on this table (s,) is compared with the current one."""
        self.comparison = self._state.compare(table)
        return self.comparison

    def _compared(self, window: Window, comparison: Comparison) -> Next:
        """Turns of a comparison."""
        state, quads, current = self._state, window.quads, window.current
        assert quads is not None and current is not None
        if window.is_guilty or window.is_refused:
            return self._reject(comparison)
        if window.is_aborted:  # it may have been a checkpoint: once more
            return None
        if state.current.is_default:
            state.comparisons.default_logs.extend(quads.same.tolist())
        comparison.add_quads(quads, current, window.timed)
        verdict = state.decide(comparison)
        if verdict:
            return self._adopt(comparison)
        return None if verdict is None else self._reject(comparison)

    def _adopt(self, comparison: Comparison) -> Next:
        self._state.adopt(comparison)
        return self._go_on()

    def _reject(self, comparison: Comparison) -> Next:
        comparisons = self._state.comparisons
        comparisons.last_rejected = comparison
        comparisons.reject(comparison)
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
        current = self._state.current.configs
        is_better = belief.saving_mean(best) > belief.saving_mean(current)
        if is_better and self._may_compare(best):
            self.compare(best)
            return None
        return self._verdict()

    def _verdict(self) -> Verdict:
        state = self._state
        chosen = state.current.configs.copy()
        return Verdict(state.config.trials, chosen)


class Remeasure:
    """The phase after a change of the job: some default steps tell what to do."""

    turn = 0
    more_choices = ()

    def __init__(self, state: State, regimes: Regimes, changed: Changed) -> None:
        self._state = state
        self._regimes = regimes
        self._changed = changed
        noise = state.noise.of_window
        regimes.leave(changed.regime, noise, changed.is_harmful, changed.default_ms)
        state.milestones.reopened += 1
        none = np.zeros_like(state.current.configs)
        state.current.set(none, [])

    def plan(self) -> Plan:
        """Default steps."""
        state = self._state
        none = np.zeros(state.n_slots, np.int64)
        n_steps = state.config.profile_steps
        return Plan(PROFILE, none, n_steps, DISCARD)

    def look(self) -> Look:
        """For an observation that no decision follows."""
        state = self._state
        slot = self.turn
        risk = state.guard.risk(slot)
        outlook = state.belief.outlook(slot)
        return Look(slot, 0, risk, outlook, idle=0.0, is_exploring=False)

    def decide(self, config: int, what: int) -> Next:
        """The policy has no turn here: its choice changes nothing."""
        return None

    def record(self, window: Window) -> Next:
        """A regime that was tuned before has its table again, which is compared with the default at once. Else a new
        search begins: the table before meets the default first."""
        state = self._state
        changed = self._changed
        seen = window.seen
        before = changed.before
        change = changed.change
        step_ms = trimmed_mean(seen.step_ms)
        state.job = state.job.changed(seen.call_us, step_ms / state.default_ms)
        state.default_calls.changed(state.job.call_us)
        state.begin(seen, before)
        state.guard.assume_measured(before)
        default_ms = state.default_ms
        noise = state.noise.of_window
        logs = state.default_calls.logs
        known = self._regimes.same(changed.regime, change, default_ms, logs, noise)
        is_dropped = changed.is_harmful and known is changed.regime
        if known is not None and not is_dropped and not state.comparisons.has_lost(known.configs):
            state.current.set(known.configs, known.comparisons)
            state.milestones.returned += 1
            is_same = np.array_equal(known.configs, before)
            levels = change.levels if is_same else ()
            chosen = known.configs.copy()
            return Verdict(changed.trials, chosen, levels, is_back=True)
        level = change.level
        is_faster = bool(before.any()) and level is not None and level < math.log(default_ms)
        return NewSearch(before, is_faster)

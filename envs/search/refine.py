"""After the verdict: trials of single slots beside the current table.

Exploring learns of all slots at once and ends as soon as a gain is proven. It mostly leaves a slot whose best config is
a little faster than the one chosen. Such a difference is too small for one window, but not for a comparison: a *trial*
is the current table with a slot (or more) changed, as the policy says. It takes turns with the current table. The
comparison is the same as everywhere. Monitoring sees the steps of the current table.

A trial ends with its first step that is clearly slower: a trial that loses costs a step or two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .comparison import Comparison, Window
from .config import MOST_SEARCHES, SLOWER, SLOWER_LOG
from .interfaces import COMPARE, LEAVE, LOOK, RUN, RUN_LONGER, SEARCH_AGAIN, TRIAL, Plan
from .monitor import Monitor
from .state import Changed, Look, NewSearch, Next, State, Watching

Array = np.ndarray[Any, Any]


class Refine:
    """The phase of trials, from the verdict of a search on."""

    def __init__(
        self, state: State, trials: int, chosen: Array, levels: Sequence[float] = (), is_back: bool = False
    ) -> None:
        """``trials``: measurements that may try something; the rest as for :class:`monitor.Monitor`."""
        self._state = state
        self._chosen = chosen
        self.turn = 0
        self.trials_left = trials
        self.trial: Array | None = None  # (s,) the table that is tried
        self._current_ms: float | None = None  # a step of the current table, as it was seen last
        self._wanted = state.current.configs.copy()  # (s,) what the policy has chosen for the next trial
        self._turns = 0  # of that trial
        self._passed = 0  # turns in a row of which no trial came
        self._is_long = False  # the policy wants a longer trial
        self._compared: dict[bytes, Comparison] = {}  # of each trial with the current table
        self._monitor = Monitor(state, chosen, levels, is_back)

    def plan(self) -> Plan | None:
        """The trial, if the current table was seen and runs as usual; else what monitoring asks for; None if it is the
        policy's turn."""
        state = self._state
        monitor = self._monitor
        trial = self.trial
        if trial is None:
            return monitor.plan() if monitor.is_looked_at else None
        comparison = self._compared.get(trial.tobytes())
        plan = state.tried(TRIAL, trial, comparison, self._is_long)
        if plan.one_of:
            return plan
        if monitor.wants_default:
            return monitor.plan()
        current_ms = self._current_ms
        if current_ms is not None and monitor.is_calm:
            scatter = SLOWER * state.noise.of(1)
            slower = max(scatter, SLOWER_LOG)
            limit_ms = current_ms * math.exp(slower)
            limit_ms = min(plan.limit_ms, limit_ms)
            return replace(plan, limit_ms=limit_ms)
        return monitor.plan()

    # -- the policy's turns ------------------------------------------------------------------------------------

    @property
    def more_choices(self) -> tuple[int, ...]:
        """See :class:`state.Phase`. There is nothing to look at while the default is the current table."""
        state = self._state
        look = () if state.current.is_default else (LOOK,)
        is_left = state.milestones.asked_again < MOST_SEARCHES
        again = (SEARCH_AGAIN,) if is_left else ()
        return (RUN_LONGER, *look, *again)

    def look(self) -> Look:
        """See :class:`state.Phase`."""
        belief = self._state.belief
        n_slots = self._state.n_slots
        slot = self.turn
        is_other = self._chosen != belief.best()
        is_exploring = bool(is_other[:slot].any())
        risk = self._risk()
        return Look(
            slot,
            int(self._chosen[slot]),
            risk,
            belief.outlook(slot, lost=risk == 1.0),
            idle=4 * self._passed / n_slots,
            is_exploring=is_exploring,
            is_refining=True,
        )

    def _risk(self) -> Array:
        """(N_CONFIGS,) as ``StepGuard.risk``; 1 of what has lost as the only change of the current table."""
        state = self._state
        slot = self.turn
        current = state.current.configs
        risk = state.guard.risk(slot)
        for table in state.comparisons.rejected:
            configs = np.frombuffer(table, current.dtype)
            changed = np.flatnonzero(configs != current)
            if changed.tolist() == [slot]:
                risk[configs[slot]] = 1.0
        return risk

    def decide(self, config: int, what: int) -> Next:
        """What the slot runs in the next trial. The current table and tables that lost are not tried; a policy that has
        tried nothing in ``passes`` rounds over the slots is done."""
        state = self._state
        current = state.current.configs
        n_slots = state.n_slots
        if what == SEARCH_AGAIN:
            state.search_again()
            return NewSearch(current.copy())
        if what == LOOK:
            self._monitor.look_at_default()
            self.trials_left -= 1
            return None
        if what == LEAVE:
            self.trials_left = 0
            return self._go_on()
        self._wanted[self.turn] = config
        self._turns += 1
        self.turn = (self.turn + 1) % n_slots
        self._is_long = what == RUN_LONGER
        if what in (RUN, COMPARE, RUN_LONGER) or self._turns == n_slots:
            wanted = self._wanted
            has_lost = state.comparisons.has_lost(wanted)
            is_new = not has_lost and not np.array_equal(wanted, current)
            self.trial = wanted if is_new else None
            self._passed = 0 if is_new else self._passed + self._turns
            self._wanted = current.copy()
            self._turns = 0
        return self._go_on()

    def _go_on(self) -> Next:
        """Only monitoring is left if the policy has nothing to try, or the trials or the budget are spent."""
        state = self._state
        most = state.config.passes * state.n_slots
        has_passed = self._passed >= most
        is_over = has_passed or self.trials_left <= 0 or state.spent > 1
        if self.trial is None and is_over:
            return Watching(self._monitor)
        return None

    # -- windows -----------------------------------------------------------------------------------------------

    def record(self, window: Window) -> Next:
        """See :class:`state.Phase`."""
        if window.plan.kind == TRIAL:
            self.trials_left -= 1
            self._state.account.since_verdict += window.seen.billed
            found = self._tried(window)
        else:
            self._current_ms = window.ms if window.current is None else window.current.ms
            found = self._monitor.record(window)
        if isinstance(found, Changed):
            return replace(found, trials=self.trials_left)
        return self._go_on()

    def _tried(self, window: Window) -> Next:
        """A measurement of a trial. The turns of the current table are monitored too."""
        quads, current = window.quads, window.current
        if quads is None or current is None:  # at few calls: the policy knows more now, and decides anew
            self.trial = None
            return None
        self._current_ms = current.ms
        comparison = self.comparison_of(window.plan.configs)
        comparison.add_quads(quads, current, window.timed)
        found = self._monitor.saw_current(window.seen.current)
        self._judge(window, comparison)
        return found

    def _judge(self, window: Window, comparison: Comparison) -> None:
        """After a measurement of a trial: adopt its table, run it again, or drop it."""
        state = self._state
        trial = comparison.table
        verdict = state.decide(comparison)
        if self._is_hopeless(window, comparison, verdict):
            verdict = False
        belief = state.belief
        current = state.current.configs
        is_better = belief.saving_mean(trial) > belief.saving_mean(current)
        test = comparison.test
        is_promising = test.n > 0 and test.is_promising
        has_time = self.trials_left > 0
        goes_on = verdict is None and has_time and (is_better or is_promising)
        self.trial = trial if goes_on else None
        if verdict:
            self._adopt(comparison)
        elif verdict is not None:
            state.comparisons.reject(comparison)

    def comparison_of(self, trial: Array) -> Comparison:
        """That of a trial (s,) with the current table; a new one if there is none."""
        key = trial.tobytes()
        found = self._compared.get(key)
        if found is None:
            found = self._state.compare(trial, is_trial=True)
            self._compared[key] = found
        return found

    def _is_hopeless(self, window: Window, comparison: Comparison, verdict: bool | None) -> bool:
        """The trial must not run again: it made a step too slow, NCCL refuses it, or it is no gain over the default."""
        state = self._state
        trial = comparison.table
        slots = np.arange(len(trial))
        is_refused = state.guard.refused[slots, trial].any()
        if window.is_aborted or is_refused:
            return True
        if not state.current.is_default or verdict:
            return False
        gain = comparison.test.mean
        reference = comparison.reference
        is_slower = gain <= 0 or state.long_steps.forbids(trial, reference, gain)
        return is_slower or self.trials_left <= 0

    def _adopt(self, comparison: Comparison) -> None:
        state = self._state
        is_first = state.current.is_default
        state.adopt(comparison)
        self._wanted = comparison.table.copy()
        self._passed = 0
        self._compared = {}
        self._monitor = Monitor(state, self._chosen)
        if is_first:
            self.trials_left = state.config.trials
        else:
            state.milestones.refined += 1

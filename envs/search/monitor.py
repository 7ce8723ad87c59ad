"""Monitoring: is the current table still worth having, and is the job still the one that was tuned?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .change import AS_USUAL, MOVED, OFF, RETURNED, Change, StepLevel, VisitSchedule
from .comparison import Comparison, LongSteps, SequentialTest, Window
from .config import CHECK_QUADS, HARM, MOST_SURVIVED, SMALL, SURE, WATCH_ALPHA, WATCH_KNOWN, WATCH_TUNED_FOR
from .interfaces import QUAD, WATCH, Plan
from .state import State
from .step_times import shortest_counted

Array = np.ndarray[Any, Any]


class Monitor:
    """Takes in steps of the current table, now and then in turns with the default, and says when the job has changed.
    Of what is tried beside the table, it sees the table's steps.

    The default takes turns with the table if that is worth its price. On schedule, and out of turn: if the table has
    become so slow that, given its gain, the job has lost what such a visit costs; the price doubles with each visit
    that the table survives.
    """

    def __init__(self, state: State, levels: list[float]) -> None:
        """``levels``: see :class:`change.StepLevel`."""
        self._state = state
        self.is_looked_at = False  # a policy wants to see the default now
        config, noise, current = state.config, state.noise, state.current
        # From here on: the job's own may have become more since the comparison.
        self._long_steps = LongSteps()
        self.gain = current.gain[0]  # of the table (log): as it was adopted, and by the looks since
        self.looks = current.quads  # that it was measured by
        self.scheduled = self._scheduled_looks()
        self.level = StepLevel(noise.of_window, noise.window_steps, config.change, levels)
        self.schedule = VisitSchedule(self._visit_steps, config.watch_share, state.account.steps)
        self._turn_steps = state.turns.steps
        self.survived = 0  # visits out of turn
        self._harm = 0.0  # default steps that the job may have lost through the table

    # -- what to measure ---------------------------------------------------------------------------------------

    @property
    def is_calm(self) -> bool:
        """The last steps were as usual: a trial may run."""
        return not self.level.odd and not self.schedule.is_due

    @property
    def wants_default(self) -> bool:
        """The default takes turns with the table next."""
        state = self._state
        return not state.current.is_default and self.schedule.wants(state.account.steps)

    @property
    def price(self) -> float:
        """Default steps that a visit out of turn has to be worth: what the default costs the job meanwhile, but no more
        than a window that is slower by HARM."""
        by_gain = self._visit_steps * max(self.gain, SMALL)
        by_harm = self._state.noise.window_steps * HARM
        return min(by_gain, by_harm) * 2**self.survived

    def look_at_default(self) -> None:
        """A policy wants to see the default now."""
        self.is_looked_at = True
        self.schedule.be_next(self._state.account.steps)

    def plan(self) -> Plan:
        """A look at the current table, or turns of the default. A checkpoint aborts none of them."""
        state = self._state
        current = state.current.configs
        configs = np.zeros_like(current) if self.wants_default else current.copy()
        discard = state.running.discard(configs)
        plan = Plan(WATCH, configs, state.noise.window_steps, discard)
        # Out of turn one visit has to tell: nothing is tried meanwhile.
        quads = CHECK_QUADS[0] if self.schedule.is_due else 1
        quads = max(quads, state.noise.quads)
        return state.turns.plan(plan, current, quads)

    @property
    def _visit_steps(self) -> int:
        """Default steps of a look at it: half of its quads' steps."""
        state = self._state
        return QUAD // 2 * state.turns.steps * state.noise.quads

    def _scheduled_looks(self) -> Comparison:
        """The looks at the default, beside the current table."""
        current, noise = self._state.current.configs, self._state.noise
        of_a_look = noise.of_quads(noise.quads)
        test = SequentialTest(of_a_look, WATCH_ALPHA, tuned_for=WATCH_TUNED_FOR, known=WATCH_KNOWN)
        return Comparison(current, np.zeros_like(current), test)

    # -- what it shows -----------------------------------------------------------------------------------------

    def saw_current(self, step_ms: Array) -> Change | None:
        """Take in steps (k,) of the current table beside a trial."""
        self._note_turns()
        return self.saw_table(self._state.noise.usual_ms(step_ms), shortest_counted(step_ms))

    def record(self, window: Window) -> Change | None:
        """Take in a look at the current table, or at the default."""
        state, seen, quads = self._state, window.seen, window.quads
        self.is_looked_at = False
        self._note_turns()
        if quads is None:
            found = self.saw_table(window.ms, shortest_counted(seen.step_ms))
        else:
            state.account.default_since_verdict += len(seen.tried)
            ratio = -quads.ratio  # the default takes the turns of a trial
            found = self.saw_turns(ratio, state.noise.of_quads(len(quads.ratios)))
        self._add_long_steps(window)
        if found is None and not state.current.is_default:
            found = self._check_long_steps()
        return found

    def saw_turns(self, log_ratio: float, noise: float) -> Change | None:
        """Take in turns of the default and the table, log(default / table) and its standard deviation. Both ran in the
        same steps, so a change of the job's pace falls out."""
        was_due = self.schedule.visited(self._state.account.steps)
        if not was_due:
            if self.scheduled.refutes(log_ratio):
                # Of a quad or two one long step may say so: once more, with more quads.
                self.schedule.is_due = True
                return None
            return self._count(log_ratio)
        reach = max(self._state.config.change, SURE * noise)
        if self.looks > 0 and log_ratio < self.gain - reach:
            return self._change(is_harmful=log_ratio < -reach)
        # The job changed its pace, and the table gains what it did.
        self.survived = min(self.survived + 1, MOST_SURVIVED)
        self.level.restart_calm()
        self.level.accept()
        return self._count(log_ratio)

    def _count(self, log_ratio: float) -> Change | None:
        """A look at the default, that counts."""
        scheduled = self.scheduled
        is_refuted = scheduled.refutes(log_ratio)
        scheduled.add_log(log_ratio)
        total = self.gain * self.looks + log_ratio
        self.looks += 1
        self.gain = total / self.looks
        least, _ = scheduled.test.interval
        if least > 0:
            self.schedule.gains(is_calm=log_ratio > 0)
        return self._change(is_harmful=True) if is_refuted else None

    def saw_table(self, ms: float, least_ms: float) -> Change | None:
        """Take in steps of the table. Does their time stay where it was? What it loses meanwhile may be worth a visit.
        ``least_ms``: nearly all of them took at least this: stragglers are no fault of a table, which makes all steps
        slow."""
        level, has_table = self.level, not self._state.current.is_default
        log = math.log(ms)
        usual = level.usual[0] if level.is_known else log
        found = level.add(log)
        if found == AS_USUAL:
            self._harm = 0.0
            if level.take_calm():
                self.survived = max(self.survived - 1, 0)
        if found == RETURNED:
            self._harm, self.schedule.is_due = 0.0, False
        if found in (OFF, MOVED) and has_table:
            self._count_harm(math.log(least_ms) - usual - self.gain)
        if found != MOVED:
            return None
        if has_table:  # turns tell whether that matters
            self.schedule.is_due = True
            return None
        return self._change()

    def _change(self, is_harmful: bool = False) -> Change:
        return Change(self._state.current.configs, is_harmful)

    def _count_harm(self, slower: float) -> None:
        if len(self.level.odd) == 1:
            self._harm = 0.0
        self._harm += self._state.noise.window_steps * max(slower, 0.0)
        if self._harm >= self.price:
            self.schedule.is_due, self._harm = True, 0.0

    def _note_turns(self) -> None:
        """Turns may have become longer: the looks begin anew, and are rarer."""
        turn_steps = self._state.turns.steps
        if turn_steps > self._turn_steps:
            self._turn_steps = turn_steps
            self.scheduled = self._scheduled_looks()
            self.schedule.lengthen(self._visit_steps)

    def _add_long_steps(self, window: Window) -> None:
        long_steps, seen = self._long_steps, window.seen
        if window.current is not None:
            long_steps.add(self._state.current.configs, seen.current, window.current.ms)
        long_steps.add(window.plan.configs, seen.tried, window.ms)

    def _check_long_steps(self) -> Change | None:
        """Do long steps cost more than the table gains? If they seem to, the default is measured as often as at first,
        which costs little if little is gained."""
        if not self.looks:  # a table of an earlier tuner: its gain is not known yet
            return None
        table = self._state.current.configs
        none = np.zeros_like(table)
        if self._long_steps.forbids(table, none, self.gain):
            self._state.comparisons.with_long_steps.add(table.tobytes())
            return self._change(is_harmful=True)
        if self._long_steps.gain(table, none, self.gain) <= 0:
            self.schedule.be_early()
        return None

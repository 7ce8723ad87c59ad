"""Monitoring: is the current table still worth having, and is the job still the one that was tuned?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .change import AS_USUAL, MOVED, OFF, RETURNED, Change, Regime, StepLevel, VisitSchedule
from .comparison import Comparison, LongSteps, Window
from .config import CHECK_QUADS, HARM, MOST_SURVIVED, SMALL, SURE, SearchConfig
from .interfaces import QUAD, WATCH, Plan
from .state import Changed, Look, Next, State
from .step_times import shortest_counted

Array = np.ndarray[Any, Any]

#: What steps may show: the table is slower than the default; the job has changed for good.
HARMFUL, CHANGED = "harmful", "changed"


class Watch:
    """Takes in one look after the other and says what it shows.

    The default takes turns with the table if that is worth its price. On schedule, and out of turn: if the table has
    become so slow that, given its gain, the job has lost what such a visit costs; the price doubles with each visit
    that the table survives.
    """

    def __init__(
        self,
        scheduled: Comparison,
        noise: float,
        window_steps: int,
        config: SearchConfig,
        now: int,
        visit_steps: int,
        known: tuple[float, int] = (0.0, 0),
        levels: Sequence[float] = (),
    ) -> None:
        """``scheduled``: the looks at the default; ``noise``: standard deviation of the log step time in so many steps
        as ``window_steps``; ``visit_steps``: default steps of a look; ``known``: the table's gain as it was adopted
        (log), and its quads; ``levels``: logs of step times that the job had under this table before."""
        self.scheduled, self.config = scheduled, config
        self.window_steps, self.visit_steps = window_steps, visit_steps
        self.gain, self.looks = known
        self.level = StepLevel(noise, window_steps, config.change, levels)
        self.schedule = VisitSchedule(self.visit_steps, config.watch_share, now)
        self.survived = 0  # visits out of turn
        self.is_other = False  # the table does not do in this regime what it did
        self._harm = 0.0  # default steps that the job may have lost through the table

    @property
    def has_table(self) -> bool:
        """The table is not the default."""
        return bool(self.scheduled.table.any())

    @property
    def change(self) -> Change:
        """What CHANGED means."""
        return Change(is_other=True) if self.is_other else self.level.change

    @property
    def is_uneasy(self) -> bool:
        """The last steps were off the usual: no time to try anything."""
        return bool(self.level.odd) or self.schedule.is_due

    @property
    def price(self) -> float:
        """Default steps that a visit out of turn has to be worth: what the default costs the job meanwhile, but no more
        than a window that is slower by HARM."""
        by_gain = self.visit_steps * max(self.gain, SMALL)
        by_harm = self.window_steps * HARM
        return min(by_gain, by_harm) * 2**self.survived

    def lengthen(self, scheduled: Comparison, visit_steps: int) -> None:
        """Turns are longer from now on: the looks begin anew, and are rarer."""
        self.scheduled = scheduled
        self.schedule.stretch(visit_steps / self.visit_steps)
        self.visit_steps = visit_steps

    def wants_default(self, now: int) -> bool:
        """Whether the default takes turns next, given the steps so far."""
        return self.has_table and self.schedule.wants(now)

    def saw_turns(self, log_ratio: float, noise: float, now: int) -> str:
        """Take in turns of the default and the table, log(default / table) and its standard deviation: HARMFUL, CHANGED
        or ''. Both ran in the same steps, so a change of the job's pace falls out."""
        was_due = self.schedule.visited(now)
        if not was_due and self.scheduled.refutes(log_ratio):
            self.schedule.is_due = (
                True  # of a quad or two one long step may say so: once more, with more quads
            )
            return ""
        reach = max(self.config.change, SURE * noise)
        is_known = self.looks > 0
        has_fallen = is_known and log_ratio < self.gain - reach
        is_slower = log_ratio < -reach
        if was_due and has_fallen:
            self.is_other = not is_slower
            return HARMFUL if is_slower else CHANGED
        if was_due:  # the job changed its pace, and the table gains what it did
            self._survives()
            self.level.accept()
        return self._count(log_ratio)

    def _count(self, log_ratio: float) -> str:
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
        return HARMFUL if is_refuted else ""

    def _survives(self) -> None:
        self.survived = min(self.survived + 1, MOST_SURVIVED)
        self.level.restart_calm()

    def saw_table(self, ms: float, least_ms: float | None = None) -> str:
        """Take in steps of the table: CHANGED or ''. Does their time stay where it was? What it loses meanwhile may be
        worth a visit. ``least_ms``: nearly all of them took at least this: stragglers are no fault of a table, which
        makes all steps slow."""
        log = math.log(ms)
        least = log if least_ms is None else math.log(least_ms)
        usual = self.level.usual[0] if self.level.is_known else log
        found = self.level.add(log)
        if found == AS_USUAL:
            self._harm = 0.0
            if self.level.take_calm():
                self.survived = max(self.survived - 1, 0)
        if found == RETURNED:
            self._harm, self.schedule.is_due = 0.0, False
        if found in (OFF, MOVED):
            self._count_harm(least - usual - self.gain)
        if found == MOVED and self.has_table:  # turns tell whether that matters
            self.schedule.is_due = True
            return ""
        return CHANGED if found == MOVED else ""

    def _count_harm(self, slower: float) -> None:
        if len(self.level.odd) == 1:
            self._harm = 0.0
        self._harm += self.window_steps * max(slower, 0.0)
        if self.has_table and self._harm >= self.price:
            self.schedule.is_due, self._harm = True, 0.0


class Monitor:
    """The phase in which nothing is tried: looks at the current table, now and then in turns with the default."""

    turn = 0
    more_choices = ()

    def __init__(
        self, state: State, chosen: Array, levels: Sequence[float] = (), is_back: bool = False
    ) -> None:
        """``chosen`` (s,): configs that the policy saw last; ``levels``: see :class:`Watch`; ``is_back``: see
        :class:`state.Verdict`."""
        self._state, self._chosen = state, chosen
        self.is_looked_at = False  # a policy wants to see the default now
        current = state.current
        calls = state.default_calls.logs
        self._regime = Regime(state.default_ms_now, calls, current.configs, tuple(current.comparisons))
        # From here on: the job's own may have become more since the comparison.
        self._long_steps = LongSteps()
        noise = state.noise
        known = current.gain[0], current.quads
        self._turn_steps = state.turns.steps
        self.watch = Watch(
            state.scheduled_looks(),
            noise.of_window,
            noise.window_steps,
            state.config,
            state.account.steps,
            self._visit_steps,
            known,
            levels,
        )
        self.watch.schedule.is_due = is_back and not current.is_default

    @property
    def _visit_steps(self) -> int:
        """Default steps of a look at it: half of its quads' steps."""
        state = self._state
        return QUAD // 2 * state.turns.steps * state.noise.quads

    @property
    def is_calm(self) -> bool:
        """The job runs as usual: a trial may run."""
        return not self.watch.is_uneasy

    @property
    def wants_default(self) -> bool:
        """The default is due."""
        return self.watch.wants_default(self._state.account.steps)

    def look_at_default(self) -> None:
        """A policy wants to see the default now."""
        self.is_looked_at = True
        self.watch.schedule.be_next(self._state.account.steps)

    def plan(self) -> Plan:
        """A look at the current table, or turns of the default. A checkpoint aborts none of them."""
        state = self._state
        current = state.current.configs
        configs = np.zeros_like(current) if self.wants_default else current.copy()
        discard = state.running.discard(configs)
        plan = Plan(WATCH, configs, state.noise.window_steps, discard)
        # Out of turn one visit has to tell: nothing is tried meanwhile.
        quads = CHECK_QUADS[0] if self.watch.schedule.is_due else 1
        quads = max(quads, state.noise.quads)
        return state.turns.plan(plan, current, quads)

    def saw_current(self, step_ms: Array) -> Next:
        """Steps (k,) of the current table beside a trial."""
        self._note_turns()
        least_ms = shortest_counted(step_ms)
        found = self.watch.saw_table(self._state.noise.usual_ms(step_ms), least_ms)
        return self._found(found)

    def look(self) -> Look:
        """For an observation that no decision follows."""
        state = self._state
        belief = state.belief
        slot = self.turn
        others = belief.best()
        others[slot] = 0
        _, deviation = belief.saving(others)
        risk = state.guard.risk(slot)
        outlook = belief.outlook(slot, deviation**2)
        chosen = int(self._chosen[slot])
        return Look(slot, chosen, risk, outlook, idle=0.0, is_exploring=False)

    def decide(self, config: int, what: int) -> Next:
        """The policy has no turn here: its choice changes nothing."""
        return None

    def record(self, window: Window) -> Next:
        """See :class:`state.Phase`."""
        state, seen = self._state, window.seen
        self.is_looked_at = False
        self._note_turns()
        has_table = not state.current.is_default
        account = state.account
        account.since_verdict += seen.billed
        quads, default_ms = window.quads, None
        if quads is not None:
            account.default_since_verdict += len(seen.tried)
            noise = state.noise.of_quads(len(quads.ratios))
            ratio = -quads.ratio  # the default takes the turns of a trial
            found = self.watch.saw_turns(ratio, noise, account.steps)
            default_ms = window.ms
        else:
            least_ms = shortest_counted(seen.step_ms)
            found = self.watch.saw_table(window.ms, least_ms)
        self._add_long_steps(window)
        if not found and has_table:
            found = self._check_long_steps()
        return self._found(found, default_ms)

    def _note_turns(self) -> None:
        """Turns may have become longer."""
        state = self._state
        if state.turns.steps > self._turn_steps:
            self._turn_steps = state.turns.steps
            self.watch.lengthen(state.scheduled_looks(), self._visit_steps)

    def _add_long_steps(self, window: Window) -> None:
        long_steps, seen = self._long_steps, window.seen
        if window.current is not None:
            table = self._state.current.configs
            ms = window.current.ms
            long_steps.add(table, seen.current, ms)
        long_steps.add(window.plan.configs, seen.tried, window.ms)

    def _found(self, found: str, default_ms: float | None = None) -> Next:
        """What comes after steps that show this; ``default_ms``: of the default, if they were a look at it."""
        if not found:
            return None
        is_harmful = found == HARMFUL
        self._state.milestones.dropped += is_harmful
        before = self._state.current.configs
        if is_harmful:
            before = np.zeros_like(before)
        return Changed(self.watch.change, self._regime, before, is_harmful, default_ms)

    def _check_long_steps(self) -> str:
        """HARMFUL if long steps cost more than the table gains. If they seem to, the default is measured as often as at
        first, which costs little if little is gained."""
        state, watch = self._state, self.watch
        if not watch.looks:  # a table of an earlier tuner: its gain is not known yet
            return ""
        table = state.current.configs
        none = np.zeros_like(table)
        if self._long_steps.forbids(table, none, watch.gain):
            state.comparisons.with_long_steps.add(table.tobytes())
            return HARMFUL
        if self._long_steps.gain(table, none, watch.gain) <= 0:
            watch.schedule.be_early()
        return ""

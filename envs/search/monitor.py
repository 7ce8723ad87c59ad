"""Monitoring: is the current table still worth having, and is the job still the one that was tuned?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .change import AS_USUAL, MOVED, OFF, RETURNED, Change, Regime, StepLevel, VisitSchedule
from .comparison import Comparison, LongSteps, Window, proves_slower
from .config import CHECK_QUADS, HARM, MOST_SURVIVED, SMALL, SURE, SWITCHES, SearchConfig
from .interfaces import QUAD, WATCH, Plan
from .state import Changed, Look, Next, State
from .step_times import shortest_counted

Array = np.ndarray[Any, Any]

#: What a window may show: the table is slower than the default; the job has changed for good.
HARMFUL, CHANGED = "harmful", "changed"


class Watch:
    """Takes in one window after the other and says what it shows.

    The default is measured if that is worth its price. On schedule, and out of turn: if the table has become so slow
    that, given its gain, the job has lost what such a visit costs; the price doubles with each visit that the table
    survives. A table that seems only a little slower than the default gets one more window: the job may have changed
    its pace between the two.
    """

    def __init__(
        self,
        scheduled: Comparison,
        noise: float,
        window_steps: int,
        config: SearchConfig,
        now: int,
        known: tuple[float, int] = (0.0, 0),
        levels: Sequence[float] = (),
        visit_steps: int = 0,
    ) -> None:
        """``scheduled``: the pairs of the table with the default; ``noise``: standard deviation of a window's log step
        time; ``known``: the table's gain as it was adopted (log), and its pairs; ``levels``: logs of step times that
        the job had under this table before; ``visit_steps``: default steps of a visit; 0: those of a window."""
        self.scheduled, self.config = scheduled, config
        self.noise, self.window_steps = noise, window_steps
        self.gain, self.pairs = known
        self.level = StepLevel(noise, window_steps, config.change, levels)
        # By turns, half of the steps of so many quads run the default, and none around them.
        self.visit_steps = visit_steps or window_steps + SWITCHES
        self.schedule = VisitSchedule(self.visit_steps, config.watch_share, now)
        self.survived = 0  # visits out of turn
        self.is_other = False  # the table does not do in this regime what it did
        self._harm = 0.0  # default steps that the job may have lost through the table
        # Log of a default window; the next window of the table is compared with it.
        self._default: float | None = None
        self._suspect: float | None = None  # the same, and the last windows of the table were slow

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
        """The last windows were off the usual: no time to try anything."""
        return bool(self.level.odd) or self.schedule.is_due

    @property
    def price(self) -> float:
        """Default steps that a visit out of turn has to be worth: what the default costs the job meanwhile, but no more
        than a window that is slower by HARM."""
        by_gain = self.visit_steps * max(self.gain, SMALL)
        by_harm = self.window_steps * HARM
        return min(by_gain, by_harm) * 2**self.survived

    def use_windows(self, scheduled: Comparison) -> None:
        """The job takes no turns any more: visits are windows, which take more steps, and so are the pairs
        ``scheduled``, which begin anew."""
        self.scheduled = scheduled
        before = self.visit_steps
        self.visit_steps = self.window_steps + SWITCHES
        self.schedule.stretch(self.visit_steps / before)

    def begin_with(self, default_ms: float) -> None:
        """A window of the default was just measured: the table's first one is compared with it."""
        self._default = math.log(default_ms)

    def wants_default(self, now: int) -> bool:
        """Whether the next window is the default's, given the steps so far."""
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
        is_known = self.pairs > 0
        has_fallen = is_known and log_ratio < self.gain - reach
        is_slower = log_ratio < -reach
        if was_due and has_fallen:
            self.is_other = not is_slower
            return HARMFUL if is_slower else CHANGED
        if was_due:  # the job changed its pace, and the table gains what it did
            self._survives()
            self.level.accept()
        self._default = None
        return self._count(log_ratio)

    def saw_default(self, ms: float, now: int) -> str:
        """Take in a window of the default: HARMFUL or ''."""
        was_due = self.schedule.visited(now)
        if not self.level.is_known:
            return ""
        log = math.log(ms)
        return self._asked(log) if was_due and self.level.odd else self._scheduled(log)

    def saw_table(self, ms: float, least_ms: float | None = None) -> str:
        """Take in a window of the table: HARMFUL, CHANGED or ''. ``least_ms``: nearly all of its steps took at least
        this: stragglers are no fault of a table, which makes all steps slow."""
        log = math.log(ms)
        suspect, self._suspect = self._suspect, None
        if suspect is not None:
            if log - suspect > self._clearly_slower(1):
                return HARMFUL
            self._survives()
        default, self._default = self._default, None
        if default is not None and self.has_table:
            found = self._first_window(default - log)
            if found:
                return found
        return self._follow(log, log if least_ms is None else math.log(least_ms))

    def _first_window(self, log_ratio: float) -> str:
        """The first window in a regime that came back, against the default there: a pair of windows, also where the
        scheduled pairs are turns."""
        if proves_slower(log_ratio, math.sqrt(2) * self.noise):
            return HARMFUL
        reach = max(self.config.change, 2 * SURE * self.noise)
        if self.pairs and abs(log_ratio - self.gain) > reach:
            self.is_other = True
            return CHANGED
        return ""

    def _scheduled(self, default: float) -> str:
        return self._count(default - self.level.last)

    def _count(self, log_ratio: float) -> str:
        """A pair of the default and the table."""
        scheduled = self.scheduled
        is_refuted = scheduled.refutes(log_ratio)
        scheduled.add_log(log_ratio)
        total = self.gain * self.pairs + log_ratio
        self.pairs += 1
        self.gain = total / self.pairs
        least, _ = scheduled.test.interval
        if least > 0:
            self.schedule.gains(is_calm=log_ratio > 0)
        return HARMFUL if is_refuted else ""

    def _asked(self, default: float) -> str:
        """A visit out of turn: is the table slow, or the job?"""
        odd = self.level.odd
        table = sum(odd) / len(odd)
        usual, _ = self.level.usual
        expected = default - usual - self.gain  # by how much the default itself is off
        is_fault = expected < (table - usual) / 2
        if not is_fault or table - default < self._clearly_slower(len(odd)):
            self._survives()
        elif table - default > HARM:
            return HARMFUL
        else:  # the job may have changed its pace just before the default's window
            self._suspect = default
        return ""

    def _clearly_slower(self, windows: int) -> float:
        """By how much (log) so many windows of the table have to be slower than one of the default."""
        _, deviation = self.level.usual
        scatter = math.sqrt(1 + 1 / windows)
        by_noise = SURE * deviation * scatter
        return max(self.config.change, by_noise)

    def _survives(self) -> None:
        self.survived = min(self.survived + 1, MOST_SURVIVED)
        self.level.restart_calm()

    def _follow(self, log: float, least: float) -> str:
        """Does the step time stay where it was? What it loses meanwhile may be worth a visit."""
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
        takes_turns = self.scheduled.takes_turns
        if found == MOVED and takes_turns and self.has_table:  # turns tell whether that matters
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
    """The phase in which nothing is tried: windows of the current table, now and then one of the default."""

    turn = 0
    more_choices = ()

    def __init__(
        self, state: State, chosen: Array, levels: Sequence[float] = (), default_ms: float | None = None
    ) -> None:
        """``chosen`` (s,): configs that the policy saw last; ``levels``: see :class:`Watch`; ``default_ms``: of a
        default window that was just measured."""
        self._state, self._chosen = state, chosen
        self.is_looked_at = False  # a policy wants to see the default now
        current = state.current
        calls = state.default_calls.logs
        self._regime = Regime(state.default_ms_now, calls, current.configs, tuple(current.comparisons))
        # From here on: the job's own may have become more since the comparison.
        self._long_steps = LongSteps()
        noise = state.noise
        known = current.gain[0], current.pairs
        by_turns = QUAD // 2 * state.turns.steps * noise.quads
        visit_steps = 0
        if state.turns.is_possible:
            visit_steps = by_turns
        self.watch = Watch(
            state.scheduled_pairs(),
            noise.of_window,
            noise.window_steps,
            state.config,
            state.account.steps,
            known,
            levels,
            visit_steps,
        )
        if default_ms is not None:
            self.watch.begin_with(default_ms)

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
        """A window of the current table, or of the default. A checkpoint aborts none of them."""
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
        """Steps (k,) of the current table, measured by turns beside a trial."""
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
        if self.watch.scheduled.takes_turns and not state.turns.is_possible:
            self.watch.use_windows(state.scheduled_pairs())
        has_table = not state.current.is_default
        is_default = bool(has_table and not window.plan.configs.any())
        account = state.account
        account.since_verdict += seen.billed
        under_default = seen.billed
        if window.quads is not None:
            under_default = len(seen.tried)
        account.default_since_verdict += under_default * is_default
        if window.quads is not None:
            quads = window.quads
            noise = state.noise.of_quads(len(quads.ratios))
            ratio = -quads.ratio  # the default takes the turns of a trial
            now = account.steps
            found = self.watch.saw_turns(ratio, noise, now)
        elif is_default:
            found = self.watch.saw_default(window.ms, account.steps)
        else:
            least_ms = shortest_counted(seen.step_ms)
            found = self.watch.saw_table(window.ms, least_ms)
        self._add_long_steps(window)
        if not found and has_table:
            found = self._check_long_steps()
        return self._found(found, window.ms if is_default else None)

    def _add_long_steps(self, window: Window) -> None:
        long_steps, seen = self._long_steps, window.seen
        if window.current is not None:
            table = self._state.current.configs
            ms = window.current.ms
            long_steps.add(table, seen.current, ms)
        long_steps.add(window.plan.configs, seen.tried, window.ms)

    def _found(self, found: str, default_ms: float | None = None) -> Next:
        """What comes after a window that shows this; ``default_ms``: of the default, if it was the default's."""
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
        if not watch.pairs:  # a table of an earlier tuner: its gain is not known yet
            return ""
        table = state.current.configs
        none = np.zeros_like(table)
        if self._long_steps.forbids(table, none, watch.gain):
            state.comparisons.with_long_steps.add(table.tobytes())
            return HARMFUL
        if self._long_steps.gain(table, none, watch.gain) <= 0:
            watch.schedule.be_early()
        return ""

"""After the verdict: the watch over the table in force, and what is still tried beside it.

The search learns of all slots at once and ends as soon as a gain is sure; what it leaves behind is mostly a slot whose
best config is a little faster than the one chosen. Such differences are too small for a window of its own, but not for
a pair: a *trial* is the table in force with a slot (or more) changed, as the policy says, and it runs beside the table
in force, window against window. What is faster for sure takes its place, by the same test as everywhere
(:mod:`sequential`). The watch sees the windows between the trials as it sees all later ones.

A trial ends with its first step that is slower for sure: one that loses costs a step or two.

Where no table was confirmed, trials run beside the default.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from . import turns
from .regimes import Regime
from .sequential import AGAIN, ALPHA, LIKELY, SOONEST, LongSteps, Race, least, middle
from .watch import CHANGED, HARMFUL, Watch
from .windows import PROFILE, REFINE, TRIAL, WATCH, Measured, Plan

if TYPE_CHECKING:
    from .search import Search

Array = np.ndarray[Any, Any]

#: Level of a trial's comparison with the default: where nothing gains many are tried, and ALPHA each is too much.
FIRST = 0.01
#: A step of a trial is slower for sure by so many standard deviations, and by this much (log).
SLOWER, SLOWER_LOG = 4.0, 0.02


class Refinement:
    """Of one search, from its verdict on."""

    def __init__(self, search: Search, levels: Sequence[float] = ()) -> None:
        """``levels``: as for :class:`watch.Watch`."""
        self.search, self.left = search, 0  # windows that may still try something
        self.noise = search.noise * math.sqrt(2)  # of the log ratio of a pair
        self.trial: Array | None = None  # (s,) the table that is tried
        self.beside_ms: float | None = (
            None  # step time of the window under the table in force that came just before
        )
        self.next: Array = search.confirmed.copy()  # (s,) what the policy has said of the next trial
        self.turns = self.passed = 0  # of that trial; running, of which no trial came
        self._keep_watch(levels)

    def _keep_watch(self, levels: Sequence[float] = ()) -> None:
        """Over the table in force, as it was just confirmed."""
        search = self.search
        self.races: dict[bytes, Race] = {}  # of each trial beside that table
        self.long = LongSteps()  # from here on: the job's own may have become more since it was compared
        step_ms = search.default_ms * math.exp(float(search.belief.mean[0]))
        self.regime = Regime(step_ms, search.default_logs, search.confirmed, tuple(search.races))
        known, has_table = (
            (search.gain[0], sum(race.n for race in search.races)),
            bool(search.confirmed.any()),
        )
        self.level = (
            ALPHA if has_table else FIRST * AGAIN**search.marks.fruitless
        )  # of each trial's comparison
        self.watch = Watch(
            search.noise, search.window_steps, search.rules, has_table, search.steps, known, levels
        )

    # -- trials ------------------------------------------------------------------------------------------------

    def refine(self, trials: int) -> None:
        """From now on there are so many trials, where there is something to try."""
        self.left = trials
        if self.left:
            self.search.phase = REFINE

    def decide(self, config: int, what: int) -> None:
        """What the slot whose turn it is runs in the next trial, and what comes then. Nothing is tried under what is in
        force already, or has lost; a policy that has tried nothing in ``passes`` rounds over the slots is done."""
        search = self.search
        self.next[search.turn] = config
        self.turns += 1
        search.turn = (search.turn + 1) % search.n_slots
        if what in (turns.RUN, turns.COMPARE) or self.turns == search.n_slots:
            is_new = self.next.tobytes() not in search.beaten and not np.array_equal(
                self.next, search.confirmed
            )
            self.trial = self.next if is_new else None
            self.passed = 0 if is_new else self.passed + self.turns
            self.next, self.turns = search.confirmed.copy(), 0
        if what == turns.LEAVE:
            self.left = 0
        self._rest()

    def _rest(self) -> None:
        """Where the policy has nothing left to try, only the watch goes on."""
        search = self.search
        is_done = self.passed >= search.rules.passes * search.n_slots
        if self.trial is None and (is_done or self.left <= 0 or search.spent > 1):
            search.phase, self.left = WATCH, 0

    def risk(self, slot: int) -> Array:
        """(N_CONFIGS,) as ``Canary.risk``; 1 of what has lost as a trial of the table in force."""
        search = self.search
        out = search.few.risk(slot)
        for table in search.beaten:
            configs = np.frombuffer(table, search.confirmed.dtype)
            if np.flatnonzero(configs != search.confirmed).tolist() == [slot]:
                out[configs[slot]] = 1.0
        return out

    def heard(self, seen: Measured) -> None:
        """Few calls of a trial: the policy, which knows more, decides anew."""
        self.trial, self.left = None, self.left - 1
        self.search.after += seen.billed
        self._rest()

    def tried(self, trial: Array, seen: Measured, steps: Array, given_up: bool) -> None:
        """One window of a trial (s,), of which ``steps`` (ms) tell: it takes the place of what is in force, runs again,
        or goes."""
        search, ms = self.search, middle(steps)
        assert self.beside_ms is not None
        self.left -= 1
        search.after += seen.billed
        race = self.races.setdefault(trial.tobytes(), Race(self.noise, self.level))
        noise = math.hypot(search.noise, search.noise_of(len(steps)))
        race.add(self.beside_ms, ms)
        search.belief.compare(trial, search.confirmed, math.log(self.beside_ms / ms), noise)
        verdict = search.verdict(race, trial, math.inf, SOONEST)
        is_slower = race.mean <= 0 or search.long.forbids(trial, search.confirmed, race.mean)
        is_hopeless = not search.confirmed.any() and not verdict and (is_slower or self.left <= 0)
        if given_up or is_hopeless or search.banned[np.arange(len(trial)), trial].any():
            verdict = False
        is_better = search.belief.saving_mean(trial) > search.belief.saving_mean(search.confirmed)
        is_promising = race.mean > LIKELY * race.sigma / math.sqrt(race.n)  # whatever is believed
        self.trial = trial if verdict is None and (is_better or is_promising) else None
        self.beside_ms = None
        if verdict:
            self._take(trial, race)
        elif verdict is not None:
            search.beaten.add(trial.tobytes())
        self._rest()

    def _take(self, trial: Array, race: Race) -> None:
        search, is_first = self.search, not self.search.confirmed.any()
        search.races.append(race)
        search.confirm(trial)
        self.next, self.passed = trial.copy(), 0
        self._keep_watch()
        if is_first:
            search.marks.gained(search.steps)
            self.refine(search.rules.trials)
        else:
            search.marks.refined += 1

    # -- the watch ---------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """The trial, where the window beside it has just run; else one under the table in force, or now and then of the
        default; None where it is the policy's turn. A checkpoint is no canary here."""
        search = self.search
        if self.trial is None and search.phase == REFINE:
            return None
        if self.trial is not None:
            plan = search.few.before(search.window(TRIAL, self.trial), search.confirmed)
            if plan.one_of:
                return plan
            if self.beside_ms is not None and not self.watch.is_uneasy:
                slower = self.beside_ms * math.exp(max(SLOWER * search.noise_of(1), SLOWER_LOG))
                return replace(plan, limit_ms=min(plan.limit_ms, slower))
        wants_default = self.watch.wants_default(search.steps)
        configs = np.zeros_like(search.confirmed) if wants_default else search.confirmed
        return Plan(WATCH, configs.copy(), search.window_steps, search.discard(configs))

    def watched(self, plan: Plan, seen: Measured, ms: float) -> None:
        """A window of the watch."""
        search = self.search
        is_default = bool(search.confirmed.any() and not plan.configs.any())
        self.beside_ms = None if is_default else ms
        search.after += seen.billed
        search.after_default += seen.billed * is_default
        found = self.watch.saw(ms, is_default, search.steps, least(seen.step_ms))
        self.long.add(plan.configs, seen.step_ms, ms)
        if not found and search.confirmed.any():
            found = self._long_steps()
        search.marks.dropped += found == HARMFUL
        if found in (HARMFUL, CHANGED):
            beside = None if found == CHANGED else ms if is_default else search.default_ms
            search.regimes.leave(self.regime, beside, search.noise)
            self.reopen(keep=found == CHANGED)

    def _long_steps(self) -> str:
        """HARMFUL where those of the table in force cost more than it gains; where they seem to, the default is looked
        at as often as at first, which costs little where little is gained."""
        search, table = self.search, self.search.confirmed
        if not self.watch.pairs:  # a table of an earlier tuner: what it gains is not known yet
            return ""
        pair = table, np.zeros_like(table), self.watch.gain
        if self.long.forbids(*pair):
            search.straggling.add(table.tobytes())
            return HARMFUL
        if self.long.gain(*pair) <= 0:
            self.watch.gap = self.watch.early
        return ""

    # -- where the job has changed -------------------------------------------------------------------------------

    def reopen(self, keep: bool = True) -> None:
        """The job has changed: measure the default anew; then go on in a regime that was tuned, or search."""
        search = self.search
        search.marks.reopened += 1
        none = np.zeros_like(search.confirmed)
        search.before = search.confirmed if keep else none
        search.confirm(none)
        search.races, search.phase = [], PROFILE

    def recognise(self) -> None:
        """After a change, with the default just measured: a regime that was tuned before has its table again, which the
        next window is set against. Else a new search goes on; what was in force before meets the default first, with
        the windows that showed the change for a first pair."""
        search, change = self.search, self.watch.change
        search.tried[np.arange(search.n_slots), search.before] = (
            search.before > 0
        )  # it ran until now: no canary
        known = search.regimes.same(self.regime, change, search.default_ms, search.default_logs, search.noise)
        if known is not None:
            search.races = list(known.races)
            search.confirm(known.confirmed)
            search.marks.returned += 1
            search._finish(
                change.levels if np.array_equal(search.confirmed, search.before) else (), self.left
            )
            search.later.watch.begin_with(search.default_ms)
            return
        search.marks.fruitless = (
            0 if search.before.any() else min(search.marks.fruitless + 1, 10)
        )  # no level is 0
        if search.before.any() and change.level is not None and change.level < math.log(search.default_ms):
            search._race(search.before).add(search.default_ms, math.exp(change.level))

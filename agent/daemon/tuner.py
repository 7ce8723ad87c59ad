"""The tuning run: the search over a running job, its verdict, and the watch after it.

Works on any windows of a job (:class:`envs.live.windows.LiveWindows`); prints nothing (``on_window`` hears of every
window) and touches no process.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...envs.live.job import Window
from ...envs.live.job_ends import JobEnded
from ...envs.live.obedience import Disobeyed
from ...envs.live.windows import LiveWindows
from ...envs.search.belief import Prior
from ...envs.search.canary import GIVE_UP
from ...envs.search.search import BUDGET_STEPS, Search
from ...envs.search.sequential import ROOM, Race, half_width
from ...envs.search.watch import SearchConfig
from ...envs.search.windows import PHASES, REFERENCE, SEARCH, TABLE, TRIAL, WATCH, Plan, Policy
from ...traces.queries.slots import SlotProfile
from ...traces.reasons import RowRefused, RunEnds
from ...traces.records import AUTO, Decision, Slot
from ...traces.spaces import config_of, decision_of
from ..report.verdict import OWN, change, ms, rows_text, side
from ..report.verdict import outcome as outcome_text
from .compare import Comparison, Ledger, Paired, Verdict, row_of
from .request import Settings

Array = np.ndarray[Any, Any]

#: Steps after which a job in which there was nothing to tune is looked at again; twice as many each time.
LOOK_AGAIN = 50


def rules_of(s: Settings) -> SearchConfig:
    """The search's rules."""
    steps = SearchConfig().window_steps if s.window_steps is None else (s.window_steps, s.window_steps)
    return SearchConfig(window_steps=steps, rounds=s.windows, pairs=s.verify, budget=s.budget)


@dataclass(frozen=True, kw_only=True)
class WindowLine:
    """One window as it is told to people and written to the trace. Times are ms; tables go by their letters.

    ``default_ms`` is the last window under NCCL's own choice; ``events``: what came of this window, a line each.
    """

    index: int
    phase: str  # profile, search, verify, refine, watch
    table: str
    in_force: str
    decision: str  # the table in words
    step_ms: float
    default_ms: float
    verdict: str  # measured or given up
    events: tuple[str, ...]
    best: tuple[str, float] | None  # of single windows of the search: the letter, its time over the default's
    cost_s: float
    budget_s: float
    generation: int
    first_step: int
    last_step: int

    def __str__(self) -> str:
        text = f"window {self.index}  {self.phase}  {side(self.table)} {ms(self.step_ms)}, {OWN} {ms(self.default_ms)}"
        return "; ".join([f"{text}  {self.verdict}", *self.events])


@dataclass(frozen=True)
class SlotChoice:
    """What was decided for one slot: NCCL's own choice of it, how many other configs were tried, and why NCCL's stays
    where it does."""

    profile: SlotProfile
    decision: Decision
    tried: int
    reason: str = ""


@dataclass
class Outcome:
    """What a run came to. ``verdict`` is None when the job ended before it."""

    choices: list[SlotChoice] = field(default_factory=list)
    verdict: Verdict | None = None
    kept: bool = False  # the table is in force; otherwise NCCL's own choice is
    ledger: Ledger = field(default_factory=Ledger)
    windows: int = 0
    ended: str = ""  # why the run ended early, if it did
    dropped: str = ""  # why a table that was kept is no more in force
    disobeyed: list[Disobeyed] = field(default_factory=list)  # rows that NCCL did not follow, each once
    refused: list[tuple[Slot, Decision, str]] = field(default_factory=list)  # what is not tried again, and why
    first_gain: int | None = None  # optimizer steps from the job's first to the first confirmed gain ...
    steps_to_verdict: int | None = None  # ... and to the verdict
    default_share: float | None = None  # share of the steps since then that ran under the default
    reopened: int = 0  # times that the job had changed
    returned: int = 0  # of them, into a regime that was tuned before: no new search
    refined: int = 0  # slots changed for the better after the verdict

    @property
    def decisions(self) -> dict[Slot, Decision]:
        """What the table holds for each slot."""
        return {c.profile.slot: c.decision for c in self.choices if not c.decision.is_auto}


class Tuner:
    """One tuning run over one job."""

    def __init__(
        self,
        windows: LiveWindows,
        policy: Policy,
        settings: Settings,
        on_window: Callable[[WindowLine], None] = lambda line: None,
        prior: Prior | None = None,
        recall: Callable[[LiveWindows], Mapping[Slot, Decision]] = lambda windows: {},
    ) -> None:
        """``recall``: a table to be tried before all others, asked for once the job's slots are found."""
        self.windows, self.policy, self.settings, self.on_window = windows, policy, settings, on_window
        self.recall = recall
        self.prior = prior or Prior.load()
        self.outcome = Outcome()
        self.search: Search | None = None
        self._state: Any = None
        windows.on_window = self._saw
        windows.on_disobeyed = self.outcome.disobeyed.append
        self._last: Window | None = None
        self._default_ms = self._beside_ms = 0.0  # the last windows under NCCL's own choice, and under what is in force
        self._wait, self._look_at = LOOK_AGAIN, math.inf

    def run(self) -> Outcome:
        """Profile, search, compare. A job that ends early ends the run early, and so does one in which there is nothing
        to tune: the outcome says so, and the latter may be run again, see :meth:`looks_again`."""
        try:
            self._begin()
            while self.search is not None and not self.search.is_over:
                self.step()
        except JobEnded as error:
            self.outcome.ended = self.outcome.ended or str(error)
        finally:  # also where the tuner is interrupted: what was confirmed stays in force
            self._conclude()
        return self.outcome

    def resume(self, decisions: dict[Slot, Decision]) -> None:
        """Go on with a table that was confirmed before: only the watch is left. Raises JobEnded."""
        self._begin()
        if self.search is not None:
            self.search.resume(self._configs(decisions))

    def looks_again(self) -> bool:
        """Whether there was nothing to tune, and the job has taken enough steps since to be looked at once more."""
        return float(self.windows.job.last_step) >= self._look_at

    def _begin(self) -> None:
        self._look_at = math.inf
        try:
            job, default = self.windows.begin()
            self.outcome.ended = ""
        except ValueError as error:  # not for good: first steps are long, and a job may begin with another part
            self.outcome.ended = str(error)
            self._look_at, self._wait = self.windows.job.last_step + self._wait, 2 * self._wait
            return
        finally:
            self._tell_profile()
        rules = rules_of(self.settings)
        first = self._configs(self.recall(self.windows))
        self.search = Search(job, default, self.prior, rules, first, self.windows.confirm)

    def _configs(self, decisions: Mapping[Slot, Decision]) -> Array:
        """Of each slot; AUTO's where there is no decision, or one outside the action space."""
        configs = np.zeros(len(self.windows.profiles), np.int64)
        for i, profile in enumerate(self.windows.profiles):
            with contextlib.suppress(ValueError):
                configs[i] = config_of(decisions.get(profile.slot, AUTO))
        return configs

    def step(self) -> None:
        """One window, with the policy's turns before it; also after the verdict. Raises JobEnded."""
        search = self.search
        assert search is not None
        over = search.is_over
        while (plan := search.plan()) is None:
            self._state = search.ask(self.policy, self._state)
            if search.is_over != over:
                return
        seen = self.windows.measure(plan)
        self.outcome.windows += not over
        lost, sides = search.lost, _Sides.of(search, plan)
        search.record(plan, seen)
        given_up = float(seen.step_ms[-1]) > plan.limit_ms
        self._charge(plan, seen.billed, search.lost - lost, over)
        self._tell(plan, search, sides, given_up)
        if over or search.marks.reopened or (search.confirmed.any() and self.outcome.first_gain is None):
            self._conclude()

    # -- what is told ------------------------------------------------------------------------------------------

    def _conclude(self) -> None:
        """Bring the outcome up to what the search has come to."""
        search, o = self.search, self.outcome
        if search is None:
            return
        self._note_milestones(search)
        sure = search.is_over or bool(search.races)  # a table that was confirmed has its figures, however the job ends
        if o.reopened and not sure:
            o.verdict = None  # it was of the job as it had been
        if sure or search.race is None:
            o.choices = [self._choice(i, p, search) for i, p in enumerate(self.windows.profiles)]
        if sure:
            o.verdict = verdict_of(search, o.ledger)
        o.refused = [self._refusal(int(s), int(c)) for s, c in np.argwhere(search.banned | (search.canary.hits > 1))]

    def _note_milestones(self, search: Search) -> None:
        """What is in force, and at which step of the job it came to that."""
        o, marks, now = self.outcome, search.marks, self.windows.job.last_step
        o.kept = bool(search.confirmed.any())
        if marks.first_gain >= 0 and o.first_gain is None:
            o.first_gain = now
        if marks.verdict >= 0 and o.steps_to_verdict is None:
            o.steps_to_verdict = now
        o.default_share = search.after_default / search.after if search.after else None
        o.reopened, o.returned, o.refined = marks.reopened, marks.returned, marks.refined
        if marks.dropped and not o.dropped and not o.kept:
            o.dropped = RunEnds.SLOWER()

    def _refusal(self, i: int, config: int) -> tuple[Slot, Decision, str]:
        slot, decision = self.windows.profiles[i].slot, decision_of(config)
        row = next((d for d in self.outcome.disobeyed if (d.slot, d.decision) == (slot, decision)), None)
        too_slow = RowRefused.TOO_SLOW(decision=decision, slot=slot, times=GIVE_UP)
        return slot, decision, too_slow if row is None else str(row)

    def _choice(self, i: int, profile: SlotProfile, search: Search) -> SlotChoice:
        decision, tried = decision_of(int(search.confirmed[i])), int((search.tried[i, 1:] > 0).sum())
        why = ""
        if decision.is_auto:
            found = RowRefused.NOT_BETTER if tried else RowRefused.NOT_TRIED
            why = found(own=profile.own, tried=tried)
        return SlotChoice(profile, decision, tried, why)

    def _charge(self, plan: Plan, steps: int, lost: float, over: bool) -> None:
        """What a window cost: up to the verdict as the budget counts it, later against the table in force."""
        search, ledger, window = self.search, self.outcome.ledger, self._last
        assert search is not None and window is not None
        if not over:
            ledger.search_ms += lost * search.default_ms
        elif plan.kind == TRIAL:
            ledger.trials += 1
            ledger.trials_ms += steps * (window.step_ms - self._beside_ms)
        ledger.budget_ms = search.rules.budget * max(search.steps, BUDGET_STEPS) * search.default_ms

    def _saw(self, plan: Plan, window: Window) -> None:
        self._last = window

    def _tell_profile(self) -> None:
        if self._last is None:
            return
        self._default_ms = self._beside_ms = self._last.step_ms
        share = sum(p.share for p in self.windows.profiles)
        found = f"{len(self.windows.profiles)} kinds of call to tune, {share:.0%} of a step of {ms(self._default_ms)}"
        self._line("profile", {}, "measured", [found] if self.windows.profiles else [])

    def _tell(self, plan: Plan, search: Search, sides: _Sides | None, given_up: bool) -> None:
        """Tell the window that was just recorded: enter it where it belongs, and say what came of it."""
        assert self._last is not None
        window, ledger, events = self._last, self.outcome.ledger, list[str]()
        table = self.windows.decisions(plan.configs)
        letter = ledger.letter(table)
        if not plan.configs.any():
            self._default_ms = window.step_ms
        if given_up:
            events += [*ledger.legend(letter), f"{letter} given up: a step took over {GIVE_UP:g} times as long"]
        elif plan.kind in (SEARCH, TABLE, REFERENCE):
            ratio = window.step_ms / self._default_ms
            if ratio < (ledger.best[1] if ledger.best else 1.0) - search.noise:
                ledger.best = letter, ratio
                events += ledger.legend(letter)
                events.append(f"best so far {letter}: one window {change(1 / ratio)} than {OWN}")
        if sides is not None:
            events += self._enter(plan, sides, search, window, given_up)
        if plan.kind != TRIAL and (plan.configs == search.confirmed).all():
            self._beside_ms = window.step_ms
        if plan.kind == WATCH and not events and (plan.configs.any() or not search.confirmed.any()):
            return  # nothing but the job as it runs
        self._line(PHASES[plan.kind], table, "given up" if given_up else "measured", events)

    def _enter(self, plan: Plan, sides: _Sides, search: Search, window: Window, given_up: bool) -> list[str]:
        """Enter a window of a comparison; what there is to say of that."""
        ledger, race, events = self.outcome.ledger, sides.race(), list[str]()
        if race is None:
            return events
        paired = ledger.of(race)
        if paired is None:
            table, against = (ledger.letter(self.windows.decisions(c)) for c in (sides.table, sides.against))
            paired = Paired(table, against, race, plan.kind == TRIAL, int(window.steps[0]))
            ledger.paired.append(paired)
            if not paired.trial:
                events += [*ledger.legend(table, against), f"comparison: {table} against {side(against)}"]
        if not given_up:
            (paired.table_ms if plan.kind in (TABLE, TRIAL) else paired.against_ms).append(window.step_ms)
            paired.against_ms += [self._beside_ms] * paired.trial
        paired.last_step = int(window.steps[-1])
        paired.outcome = sides.outcome(search, race)
        if paired.outcome == "kept" or (paired.outcome == "lost" and not paired.trial):
            events += [*ledger.legend(paired.table), outcome_text(paired.told())]
        return events

    def _line(self, phase: str, table: Mapping[Slot, Decision], verdict: str, events: list[str]) -> None:
        """Tell the last window."""
        assert self._last is not None
        window, ledger = self._last, self.outcome.ledger
        in_force = self.windows.decisions(self.search.confirmed) if self.search is not None else {}
        self.on_window(
            WindowLine(
                index=self.outcome.windows,
                phase=phase,
                table=ledger.letter(table),
                in_force=ledger.letter(in_force),
                decision=rows_text(row_of(slot, decision) for slot, decision in table.items()) if table else "auto",
                step_ms=window.step_ms,
                default_ms=self._default_ms,
                verdict=verdict,
                events=tuple(events),
                best=ledger.best,
                cost_s=ledger.search_ms / 1e3,
                budget_s=ledger.budget_ms / 1e3,
                generation=window.generation,
                first_step=int(window.steps[0]),
                last_step=int(window.steps[-1]),
            )
        )


@dataclass(frozen=True)
class _Sides:
    """The comparison that a window is of: configs (s,) of its two sides, and the search's account of its pairs."""

    table: Array
    against: Array
    race: Callable[[], Race | None]

    @classmethod
    def of(cls, search: Search, plan: Plan) -> _Sides | None:
        """Of a window that is about to be recorded; None for one that is of no comparison."""
        if plan.kind in (REFERENCE, TABLE):
            race = search.race
            return cls(search.table.copy(), search.reference.copy(), lambda: race)
        if plan.kind == TRIAL:
            races = search.later.races
            return cls(plan.configs, search.confirmed.copy(), lambda: races.get(plan.configs.tobytes()))
        return None

    def outcome(self, search: Search, race: Race) -> str:
        """What the search has made of it, once the window is recorded."""
        if any(one is race for one in search.races):
            return "kept"
        is_open = search.race is race or (search.is_over and self.table.tobytes() not in search.beaten)
        return "open" if is_open else "lost"


def verdict_of(search: Search, ledger: Ledger) -> Verdict:
    """The verdict of a search that is over: the table against the default, and the default against itself."""
    noise = search.noise * math.sqrt(2)
    same = Race(noise, logs=search.same_logs)
    aa = Comparison.of(same.mean, *same.interval, same.n) if same.n else None
    races = search.races or ([search.rejected] if search.rejected is not None else [])
    tuned: Comparison | None
    if search.races:
        tuned = Comparison.of(*search.gain, sum(race.n for race in search.races))
    else:
        tuned = next((Comparison.of(race.mean, *race.interval, race.n) for race in races if race.n), None)
    ends = [ledger.of(race) for race in (races[:1] + races[-1:])] or [None, None]
    sigma = max([noise, *(race.sigma for race in races)])
    return Verdict(tuned, aa, ends[0], ends[1], 1 - math.exp(-ROOM * sigma * half_width(search.rules.pairs)))

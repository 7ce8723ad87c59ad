"""The tuning run: the search over a running job, its verdict, and monitoring after it.

Works on any windows of a job (:class:`envs.live.windows.LiveWindows`); prints nothing (``on_window`` hears of every
window) and touches no process.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ...envs.live.job import Window
from ...envs.live.job_ends import JobEnded, NothingToTune, OtherJob
from ...envs.live.obedience import Disobeyed
from ...envs.live.turns import Turns
from ...envs.live.windows import LiveWindows
from ...envs.search.belief.prior import Prior
from ...envs.search.comparison import ADOPTED, REJECTED
from ...envs.search.config import ABORT, BUDGET_STEPS, SearchConfig
from ...envs.search.interfaces import PHASES, SEARCH, TABLE, TRIAL, WATCH, Plan, Policy
from ...envs.search.search import Search
from ...envs.search.state import Account
from ...traces.queries.exposed import critical
from ...traces.reasons import Happened, Why
from ...traces.records import AUTO, Decision, Decisions, Slot
from ...traces.spaces import config_of
from ..report.summary import WINDOW, RunSummary
from ..report.verdict import MEASURED, OWN, ms, outcome, rows_text, side
from .account import Costs, comparison_row, row_of
from .events import Events
from .outcome import Outcome

Array = np.ndarray[Any, Any]

#: Steps after which a job without anything to tune is looked at again; twice as many each time, as it hardly changes.
LOOK_AGAIN = 50


@dataclass(frozen=True, kw_only=True)
class WindowLine:
    """One window as people read it and as the trace keeps it. Times are ms; tables go by their letters.

    ``default_ms`` is the last window under NCCL's own choice; ``events``: what came of this window.
    """

    index: int
    phase: str  # profile, search, verify, refine, watch
    table: str
    in_force: str
    decision: str  # the table in words
    step_ms: float
    default_ms: float
    verdict: str  # measured, few-calls or given-up
    events: tuple[Why, ...]
    best: tuple[str, float] | None  # of single windows of the search: the letter, its time over the default's
    cost_s: float
    budget_s: float
    generation: int
    first_step: int
    last_step: int

    def __str__(self) -> str:
        text = f"window {self.index}  {self.phase}  {side(self.table)} {ms(self.step_ms)}, {OWN} {ms(self.default_ms)}"
        return "; ".join([f"{text}  {MEASURED.get(self.verdict, self.verdict)}", *map(str, self.events)])


class LookAgain:
    """When a job without anything to tune is looked at again."""

    def __init__(self) -> None:
        self._wait, self._last, self._left = LOOK_AGAIN, 0, math.inf

    def put_off(self, now: int) -> None:
        """There was nothing at this step of the job."""
        self._last, self._left = now, self._wait
        self._wait *= 2

    def is_due(self, now: int) -> bool:
        """Whether the job has taken enough steps; it counts from 0 again where it was started again."""
        self._last = min(self._last, now)
        return now - self._last >= self._left

    def cancel(self) -> None:
        """It is looked at now."""
        self._left = math.inf


class Tuner:
    """One tuning run over one job."""

    def __init__(
        self,
        windows: LiveWindows,
        policy: Policy,
        config: SearchConfig | None = None,
        on_window: Callable[[WindowLine], None] = lambda line: None,
        recall: Callable[[LiveWindows], Decisions] = lambda windows: {},
        events: Events | None = None,
        before: RunSummary | None = None,
    ) -> None:
        """``recall``: a table to be tried before all others, asked for once the job's slots are found; ``events``: the
        log, of which one line tells each window; ``before``: the summary of an earlier tuner, to go on with."""
        self.windows, self.policy, self.config, self.on_window = windows, policy, config, on_window
        self.recall = recall
        self.costs = Costs()
        self.events = events or Events(lambda: windows.job.last_step)
        self.result = Outcome(windows, self.events, before)
        self.names = self.result.tables
        self.search: Search | None = None
        self._account = Account()  # of all searches: the budget is the job's
        self._state: Any = None  # the policy's
        self._look_again = LookAgain()
        self._window: Window | Turns | None = None  # the last one
        self._default_ms = 0.0  # a step under the default, by the last window that tells
        windows.on_window = self._saw
        windows.on_disobeyed = self._saw_disobeyed

    @property
    def outcome(self) -> RunSummary:
        """What the run came to, as far as the search knows."""
        return self.result.summary

    def sum_up(self) -> RunSummary:
        """The same, with the figures that each window moves."""
        self.result.cost(self.costs)
        return self.outcome

    @property
    def decisions(self) -> dict[Slot, Decision]:
        """The current table."""
        return self.windows.decisions(self.search.confirmed) if self.search is not None else {}

    def run(self, is_begun: bool = False) -> RunSummary:
        """Profile, search, compare. A job that ends early ends the run early, and so does one without anything to tune:
        the outcome says so, and the latter may be run again, see :meth:`looks_again`.

        ``is_begun``: the job is profiled, and no table holds.
        """
        try:
            if not is_begun:
                self._begin()
            while self.search is not None and not self.search.is_over:
                self.step()
        except JobEnded as error:
            self.result.ended(self.outcome.ended or error.why)
        finally:  # also if the tuner is interrupted: the table that was adopted stays
            self._conclude()
        return self.sum_up()

    def resume(self, decisions: dict[Slot, Decision]) -> list[Slot]:
        """Go on with a table that was adopted before: only monitoring is left. Raises JobEnded.

        Returns the slots of rows that cannot go on: the job makes no such calls now, or they must not run. If no row is
        left, NCCL's default is in force, and :meth:`run` begins a search.
        """
        self._begin()
        if self.search is None:
            return []
        kept = dict[Slot, Decision]()
        for slot, decision in decisions.items():
            if self.windows.may_run(slot, decision):
                kept[slot] = decision
        configs = self._configs(kept)
        if configs.any():
            self.search.resume(configs)
            self._conclude()
        else:
            self.windows.confirm(configs)
            self.result.searches()
            self.result.no_table(self.outcome.dropped)
        left = self.windows.decisions(configs)
        return [slot for slot in decisions if slot not in left]

    def looks_again(self) -> bool:
        """Whether there was nothing to tune, and the job has taken enough steps since to be looked at once more."""
        return self._look_again.is_due(self.windows.job.last_step)

    def step(self) -> None:
        """One window, with the policy's turns before it; also after the verdict. Raises JobEnded."""
        search = self.search
        assert search is not None
        was_over = search.is_over
        while (plan := search.plan()) is None:
            self._state = search.ask(self.policy, self._state)
            if search.is_over != was_over:
                self._conclude()
                return
        try:
            seen = self.windows.measure(plan)
        except OtherJob as reason:
            self._begin_anew(reason.why)
            return
        except NothingToTune as error:
            self._leave_alone(error.why)
            return
        self.costs.windows += not was_over
        lost = search.lost
        before = search.confirmed.copy()
        saved = search.record(plan, seen)
        self._charge(plan, search, saved, search.lost - lost, was_over)
        if self.result.goes_on and not search.is_over:
            self.result.searches()
        is_other = not np.array_equal(search.confirmed, before)
        self._tell(plan, search, is_other)
        if was_over or search.marks.reopened or is_other:
            self._conclude()

    def _begin_anew(self, why: Why) -> None:
        """Over a job that is another than the one known: from the default on. Raises JobEnded."""
        self._forget(why)
        self._begin()
        self._conclude()

    def _forget(self, why: Why) -> None:
        """The default holds, and what was found holds no more."""
        kept = self.outcome.kept
        self.windows.confirm(np.zeros(len(self.windows.profiles), np.int64))
        self.search, self._state = None, None
        self._account.since_verdict = self._account.default_since_verdict = 0
        self.result.begin_anew(why if kept else None)

    def _leave_alone(self, why: Why) -> None:
        """No table can be compared in this job now: NCCL's default, until it is looked at again."""
        self._forget(why)
        self.result.ended(why)
        self._look_again.put_off(self.windows.job.last_step)

    def _begin(self) -> None:
        self._look_again.cancel()
        try:
            job, default = self.windows.begin()
            self.result.ended(None)
        except NothingToTune as error:
            self.result.ended(error.why)
            self._look_again.put_off(self.windows.job.last_step)
            return
        except JobEnded:  # not for good either: ranks that are started again may agree
            self._look_again.put_off(self.windows.job.last_step)
            raise
        finally:
            self._tell_profile()
        first = self._configs(self.recall(self.windows))
        prior, account = Prior.load(), self._account
        default_ms = float(np.median(default.step_ms))
        self.costs.hand_over(account, default_ms, self.windows.job.last_step)
        self.search = Search(job, default, prior, self.config, first, self.windows.confirm, account)

    def _configs(self, decisions: Decisions) -> Array:
        """Of each slot; AUTO's if there is no decision, or one outside the action space."""
        configs = np.zeros(len(self.windows.profiles), np.int64)
        for i, profile in enumerate(self.windows.profiles):
            slot = profile.slot
            with contextlib.suppress(ValueError):
                configs[i] = config_of(decisions.get(slot, AUTO), slot.func)
        return configs

    def _conclude(self) -> None:
        if self.search is not None:
            self.result.conclude(self.search)

    # -- costs -------------------------------------------------------------------------------------------------

    def _charge(self, plan: Plan, search: Search, saved: float, lost: float, was_over: bool) -> None:
        """What a window cost: up to the verdict as the budget counts it, later beyond the current table.

        ``saved``: default steps that it saved beyond the current table; ``lost``: those lost against the default.
        """
        state, costs, last = search.state, self.costs, search.last
        assert last is not None
        if not was_over:
            costs.search_ms += lost * state.default_ms
        elif plan.kind == TRIAL:
            costs.trials += 1
            if last.current is not None:  # by turns: its own steps beside those of the current table
                costs.trials_ms += len(last.seen.tried) * (last.ms - last.current.ms)
            else:
                costs.trials_ms -= saved * state.default_ms
        budget_steps = search.config.budget * max(search.steps, BUDGET_STEPS)
        costs.budget_ms = costs.budget_before_ms + budget_steps * state.default_ms

    # -- what is told ------------------------------------------------------------------------------------------

    def _saw(self, plan: Plan, window: Window | Turns) -> None:
        self._window = window

    def _saw_disobeyed(self, row: Disobeyed) -> None:
        self.result.disobeyed(row)

    def _tell_profile(self) -> None:
        if self._window is None:
            return
        step_ms = self._default_ms = self._window.step_ms
        profiles = self.windows.profiles
        share = sum(p.share for p in profiles)
        found = Happened.SLOTS(count=len(profiles), share=share, step=step_ms)
        windows = self.windows
        untried = [*windows.left_alone, *windows.withheld]
        notes = [found, *critical(self.result.exposed()), *untried] if profiles else []
        self._line("profile", {}, step_ms, "measured", notes)

    def _tell(self, plan: Plan, search: Search, is_other: bool) -> None:
        """Tell the window that was just recorded, and what came of it; ``is_other``: another table is in force."""
        last = search.last
        assert last is not None
        table = self.windows.decisions(plan.configs)
        letter = self.names.of(table)
        if not plan.configs.any():
            self._default_ms = last.ms
        elif last.current is not None:  # by turns the current table ran beside it
            self._default_ms = search.state.default_ms_now
        events = self._window_events(plan, search, letter)
        events += self._comparison_events(search)
        is_job = plan.configs.any() or not search.confirmed.any()
        if plan.kind == WATCH and is_job and not (events or is_other or search.is_trying):
            return  # nothing but the job as it runs
        verdict = "given-up" if last.is_aborted else "few-calls" if plan.one_of else "measured"
        self._line(PHASES[plan.kind], table, last.ms, verdict, events)

    def _window_events(self, plan: Plan, search: Search, letter: str) -> list[Why]:
        last = search.last
        assert last is not None
        if last.is_aborted:
            return [*self.names.describe(letter), Happened.GIVEN_UP(table=letter, times=ABORT)]
        if plan.kind not in (SEARCH, TABLE) or plan.one_of:  # few calls do not show steps
            return []
        ratio = last.ms / self._default_ms
        if not self.costs.better(letter, ratio, search.state.noise.of_window):
            return []
        return [*self.names.describe(letter), Happened.BEST(table=letter, speedup=1 / ratio)]

    def _comparison_events(self, search: Search) -> list[Why]:
        """Comparisons that began or were decided. Of trials only those are told that were adopted."""
        events = list[Why]()
        begun, over = self.result.compared(search)
        for comparison in begun:
            table, against = self.result.sides(comparison)
            if not comparison.is_trial:
                events += self.names.describe(table, against)
                events.append(Happened.COMPARES(table=side(table), against=side(against)))
        for comparison in over:
            is_told = comparison.outcome == ADOPTED or not comparison.is_trial
            if comparison.outcome in (ADOPTED, REJECTED) and is_told:
                table, against = self.result.sides(comparison)
                events += self.names.describe(table)
                events.append(outcome(comparison_row(comparison, table, against)))
        return events

    def _line(self, phase: str, table: Decisions, step_ms: float, verdict: str, events: list[Why]) -> None:
        """Tell the last window."""
        window, costs = self._window, self.costs
        assert window is not None
        rows = [row_of(slot, decision) for slot, decision in table.items()]
        line = WindowLine(
            index=costs.windows,
            phase=phase,
            table=self.names.of(table),
            in_force=self.names.of(self.decisions),
            decision=rows_text(rows) if rows else "auto",
            step_ms=step_ms,
            default_ms=self._default_ms,
            verdict=verdict,
            events=tuple(events),
            best=costs.best,
            cost_s=costs.search_ms / 1e3,
            budget_s=costs.budget_ms / 1e3,
            generation=window.generation,
            first_step=int(window.steps[0]),
            last_step=int(window.steps[-1]),
        )
        self.events.tell(WINDOW, **asdict(line))
        self.result.cost(costs)
        self.on_window(line)

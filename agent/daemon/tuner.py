"""The tuning run: the search over a running job, its verdict, and the watch after it.

Works on any windows of a job (:class:`envs.live.windows.LiveWindows`); prints nothing (``on_window`` hears of every
window) and touches no process.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...envs.live.job import Window
from ...envs.live.job_ends import JobEnded
from ...envs.live.obedience import Disobeyed
from ...envs.live.windows import LiveWindows
from ...envs.search.belief import Prior
from ...envs.search.canary import GIVE_UP, ONCE
from ...envs.search.search import BUDGET_STEPS, Search
from ...envs.search.sequential import ROOM, Race, half_width
from ...envs.search.watch import SearchConfig
from ...envs.search.windows import PHASES, REFERENCE, SEARCH, TABLE, TRIAL, WATCH, Plan, Policy
from ...traces.queries.slots import SlotProfile
from ...traces.reasons import RowRefused, RunEnds, names
from ...traces.records import AUTO, Decision, Decisions, Slot
from ...traces.spaces import config_of, decision_of
from ..report.summary import RunSummary
from ..report.verdict import DEFAULT, OWN, change, ms, rows_text, side
from ..report.verdict import outcome as outcome_text
from .compare import Ledger, Paired, row_of, speedups

Array = np.ndarray[Any, Any]

#: Steps after which a job in which there was nothing to tune is looked at again; twice as many each time.
LOOK_AGAIN = 50


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
    verdict: str  # measured, few calls or given up
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


#: Fields of a summary that only a verdict has.
_VERDICT = (
    *("speedup", "speedup_ci95", "aa_speedup_ci95", "detectable", "compared", "compared_steps"),
    *("default_step_ms", "default_windows", "tuned_step_ms", "tuned_windows"),
)


class Tuner:
    """One tuning run over one job. ``outcome`` is what it came to, as far as the search knows; what was tried, compared
    and paid is in ``ledger``, see :meth:`Ledger.sum_up`."""

    def __init__(
        self,
        windows: LiveWindows,
        policy: Policy,
        rules: SearchConfig | None = None,
        on_window: Callable[[WindowLine], None] = lambda line: None,
        recall: Callable[[LiveWindows], Decisions] = lambda windows: {},
    ) -> None:
        """``recall``: a table to be tried before all others, asked for once the job's slots are found."""
        self.windows, self.policy, self.rules, self.on_window = windows, policy, rules, on_window
        self.recall = recall
        self.outcome, self.ledger = RunSummary(kept=False, in_force=DEFAULT), Ledger()
        self.search: Search | None = None
        self._state: Any = None
        self._disobeyed: dict[
            tuple[Slot, Decision], str
        ] = {}  # rows that NCCL did not follow, and what it did
        windows.on_window = self._saw
        windows.on_disobeyed = self._saw_disobeyed
        self._last: Window | None = None
        self._default_ms = self._beside_ms = (
            0.0  # the last windows under NCCL's own choice, and under what is in force
        )
        self._wait, self._look_at = LOOK_AGAIN, math.inf

    def run(self) -> RunSummary:
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
            self.outcome.ended = None
        except (
            ValueError
        ) as error:  # not for good: first steps are long, and a job may begin with another part
            self.outcome.ended = str(error)
            self._look_at, self._wait = self.windows.job.last_step + self._wait, 2 * self._wait
            return
        finally:
            self._tell_profile()
        first = self._configs(self.recall(self.windows))
        self.search = Search(job, default, Prior.load(), self.rules, first, self.windows.confirm)

    def _configs(self, decisions: Decisions) -> Array:
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
        self.ledger.windows += not over
        lost, strikes, sides = search.lost, search.marks.canaries, _sides(search, plan)
        search.record(plan, seen)
        self._charge(plan, seen.billed, search.lost - lost, over)
        self._tell(plan, search, sides, search.marks.canaries > strikes)
        if (
            over
            or search.marks.reopened
            or (search.confirmed.any() and self.outcome.steps_to_first_gain is None)
        ):
            self._conclude()

    @property
    def decisions(self) -> dict[Slot, Decision]:
        """The table that is in force when nothing is tried."""
        return self.windows.decisions(self.search.confirmed) if self.search is not None else {}

    # -- what is told ------------------------------------------------------------------------------------------

    def _conclude(self) -> None:
        """Bring the outcome up to what the search has come to."""
        search, o = self.search, self.outcome
        if search is None:
            return
        self._note_milestones(search)
        o.in_force = self.ledger.letter(self.decisions)
        sure = search.is_over or bool(
            search.races
        )  # a table that was confirmed has its figures, however the job ends
        if sure or search.race is None:
            o.decisions = [self._decision(i, p, search) for i, p in enumerate(self.windows.profiles)]
        vars(o).update(_verdict_of(search, self.ledger) if sure else dict.fromkeys(_VERDICT))
        o.refused = [
            self._refusal(*at) for at in np.argwhere(search.banned | (search.canary.blame > ONCE)).tolist()
        ]

    def _note_milestones(self, search: Search) -> None:
        """What is in force, and at which step of the job it came to that."""
        o, marks, now = self.outcome, search.marks, self.windows.job.last_step
        o.kept = bool(search.confirmed.any())
        if marks.first_gain >= 0 and o.steps_to_first_gain is None:
            o.steps_to_first_gain = now
        if marks.verdict >= 0 and o.steps_to_verdict is None:
            o.steps_to_verdict = now
        o.default_share_after = search.after_default / search.after if search.after else None
        if marks.dropped and not o.dropped and not o.kept:
            o.dropped = RunEnds.SLOWER()

    def _refusal(self, i: int, config: int) -> dict[str, Any]:
        slot, decision = self.windows.profiles[i].slot, decision_of(config)
        too_slow = RowRefused.TOO_SLOW(decision=decision, slot=slot, times=GIVE_UP)
        why = self._disobeyed.get((slot, decision), too_slow)
        return {
            "slot": str(slot),
            "decision": str(decision),
            "reason": next(iter(names(why)), None),
            "why": why,
        }

    def _decision(self, i: int, profile: SlotProfile, search: Search) -> dict[str, Any]:
        """The row of a slot; how many other configs were tried, and why NCCL's own choice stays where it does."""
        decision, tried = decision_of(int(search.confirmed[i])), int((search.tried[i, 1:] > 0).sum())
        why = ""
        if decision.is_auto:
            found = RowRefused.NOT_BETTER if tried else RowRefused.NOT_TRIED
            why = found(own=profile.own, tried=tried)
        return row_of(profile.slot, decision) | {"own": profile.own, "tried": tried, "reason": why}

    def _charge(self, plan: Plan, steps: int, lost: float, over: bool) -> None:
        """What a window cost: up to the verdict as the budget counts it, later against the table in force."""
        search, ledger, window = self.search, self.ledger, self._last
        assert search is not None and window is not None
        if not over:
            ledger.search_ms += lost * search.default_ms
        elif plan.kind == TRIAL:
            ledger.trials += 1
            ledger.trials_ms += steps * (window.step_ms - self._beside_ms)
        ledger.budget_ms = search.rules.budget * max(search.steps, BUDGET_STEPS) * search.default_ms

    def _saw(self, plan: Plan, window: Window) -> None:
        self._last = window

    def _saw_disobeyed(self, row: Disobeyed) -> None:
        self._disobeyed[row.slot, row.decision] = str(row)
        self.outcome.not_obeyed.append(str(row))

    def _tell_profile(self) -> None:
        if self._last is None:
            return
        self._default_ms = self._beside_ms = self._last.step_ms
        share = sum(p.share for p in self.windows.profiles)
        found = f"{len(self.windows.profiles)} kinds of call to tune, {share:.0%} of a step of {ms(self._default_ms)}"
        notes = [found, *self.windows.left_alone] if self.windows.profiles else []
        self._line("profile", {}, "measured", notes)

    def _tell(self, plan: Plan, search: Search, sides: _Sides | None, given_up: bool) -> None:
        """Tell the window that was just recorded: enter it where it belongs, and say what came of it."""
        assert self._last is not None
        window, ledger, events = self._last, self.ledger, list[str]()
        table = self.windows.decisions(plan.configs)
        letter = ledger.letter(table)
        if not plan.configs.any():
            self._default_ms = window.step_ms
        if given_up:
            events += [
                *ledger.legend(letter),
                f"{letter} given up: a step took over {GIVE_UP:g} times as long",
            ]
        elif plan.kind in (SEARCH, TABLE, REFERENCE):
            ratio = max(window.step_ms / self._default_ms, plan.one_of)  # few calls do not tell of steps
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
        verdict = "given up" if given_up else ("measured", "few calls")[plan.one_of > 0]
        self._line(PHASES[plan.kind], table, verdict, events)

    def _enter(self, plan: Plan, sides: _Sides, search: Search, window: Window, given_up: bool) -> list[str]:
        """Enter a window of a comparison; what there is to say of that."""
        ledger, events = self.ledger, list[str]()
        race = sides.races.get(sides.table.tobytes())
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
        paired.outcome = _came_to(search, race, sides.table)
        if paired.outcome == "kept" or (paired.outcome == "lost" and not paired.trial):
            events += [*ledger.legend(paired.table), outcome_text(paired.told())]
        return events

    def _line(self, phase: str, table: Decisions, verdict: str, events: list[str]) -> None:
        """Tell the last window."""
        assert self._last is not None
        window, ledger = self._last, self.ledger
        self.on_window(
            WindowLine(
                index=ledger.windows,
                phase=phase,
                table=ledger.letter(table),
                in_force=ledger.letter(self.decisions),
                decision=rows_text(row_of(slot, decision) for slot, decision in table.items())
                if table
                else "auto",
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


class _Sides(NamedTuple):
    """The comparison that a window is of: configs (s,) of its two sides, and the races of tables with the second."""

    table: Array
    against: Array
    races: Mapping[bytes, Race | None]


def _sides(search: Search, plan: Plan) -> _Sides | None:
    """Of a window that is about to be recorded; None for one that is of no comparison."""
    if plan.kind in (REFERENCE, TABLE):
        return _Sides(search.table, search.reference, {search.table.tobytes(): search.race})
    return _Sides(plan.configs, search.confirmed, search.later.races) if plan.kind == TRIAL else None


def _came_to(search: Search, race: Race, table: Array) -> str:
    """What the search has made of a comparison, once its window is recorded."""
    if any(one is race for one in search.races):
        return "kept"
    is_open = search.race is race or (search.is_over and table.tobytes() not in search.beaten)
    return "open" if is_open else "lost"


def _verdict_of(search: Search, ledger: Ledger) -> dict[str, Any]:
    """The fields _VERDICT of a search that is over: the table against the default, and the default against itself.
    Intervals hold however often the search looked (:mod:`envs.search.sequential`); what was not measured is None."""
    found: dict[str, Any] = dict.fromkeys(_VERDICT)
    noise = search.noise * math.sqrt(2)
    same = Race(noise, logs=search.same_logs)
    if same.n:
        found["aa_speedup_ci95"] = speedups(*same.interval)
    # Of more than one race: a chain, from the default to the table in force.
    races = search.races or ([search.rejected] if search.rejected is not None else [])
    if any(race.n for race in races):
        logs = search.gain if search.races else (races[0].mean, *races[0].interval)
        found["speedup"], *found["speedup_ci95"] = speedups(*logs)
    first, last = (ledger.of(race) for race in (races[:1] + races[-1:])) if races else (None, None)
    if first and last:
        of_default, of_table = first.told(), last.told()
        found |= {"compared": last.table, "compared_steps": [first.first_step, last.last_step]}
        found |= {
            "default_step_ms": of_default["against_ms"],
            "default_windows": of_default["against_windows"],
        }
        found |= {"tuned_step_ms": of_table["table_ms"], "tuned_windows": of_table["table_windows"]}
    sigma = max([noise, *(race.sigma for race in races)])
    return found | {"detectable": 1 - math.exp(-ROOM * sigma * half_width(search.rules.pairs))}

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
from ...envs.search.search import Search
from ...envs.search.sequential import Race
from ...envs.search.watch import SearchConfig
from ...envs.search.windows import PHASES, WATCH, Plan, Policy
from ...traces.queries.audit import regime
from ...traces.queries.slots import SlotProfile
from ...traces.reasons import RowRefused, RunEnds
from ...traces.records import AUTO, Decision, Slot
from ...traces.spaces import config_of, decision_of
from .compare import Comparison, Verdict
from .request import LEAST_PAIRS, Settings

Array = np.ndarray[Any, Any]

#: Steps after which a job in which there was nothing to tune is looked at again; twice as many each time.
LOOK_AGAIN = 50


def rules_of(s: Settings) -> SearchConfig:
    """The search's rules."""
    steps = SearchConfig().window_steps if s.window_steps is None else (s.window_steps, s.window_steps)
    return SearchConfig(window_steps=steps, rounds=s.windows, pairs=s.verify, budget=s.budget)


@dataclass(frozen=True, kw_only=True)
class WindowLine:
    """One window as it is told to people and written to the trace. Times in ms, ``saving`` relative to the default."""

    index: int
    total: int
    phase: str  # profile, search, verify, refine, watch
    regime: str
    slot: str = "all slots"
    previous: str = "auto"
    decision: str
    step_ms: float
    default_ms: float
    saving: float
    verdict: str
    reason: str
    generation: int
    first_step: int
    last_step: int

    def __str__(self) -> str:
        number = "trial" if self.phase == "refine" else f"window {self.index}/{self.total}"
        text = f"{number}  {self.regime}  step {self.step_ms:.0f} ms"
        if self.phase == "profile":
            return f"{text}  {self.reason}"
        text += f", default {self.default_ms:.0f} ms ({-100 * self.saving:+.1f} %)"
        return f"{text}  {self.decision}  {self.verdict}"


@dataclass(frozen=True)
class SlotChoice:
    """What was decided for one slot, and why."""

    profile: SlotProfile
    decision: Decision
    reason: str


@dataclass
class Outcome:
    """What a run came to. ``verdict`` is None when the job ended before it."""

    regime: str = "unknown"
    choices: list[SlotChoice] = field(default_factory=list)
    verdict: Verdict | None = None
    kept: bool = False  # the table is in force; otherwise NCCL's own choice is
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

    @property
    def told(self) -> str:
        """The verdict, for who waits for it."""
        found = f"speed-up {self.verdict.tuned}; the table stays in force" if self.kept and self.verdict else None
        return f"verdict after {self.steps_to_verdict} steps: {found or RunEnds.NO_GAIN()}"


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
            if len(self.windows.profile_events):
                self.outcome.regime = regime(self.windows.profile_events)
            self._tell_profile()
        rules = rules_of(self.settings).of(self.policy)
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
        race = search.race
        pairs = race.n if race else 0
        search.record(plan, seen)
        self._tell(plan, search, race if race and race.n > pairs else None, float(seen.step_ms[-1]) > plan.limit_ms)
        if over or search.marks.reopened:
            self._conclude()

    # -- what is told ------------------------------------------------------------------------------------------

    def _conclude(self) -> None:
        """Bring the outcome up to what the search has come to."""
        search, o = self.search, self.outcome
        if search is None:
            return
        o.kept = bool(search.confirmed.any())
        o.first_gain = search.marks.first_gain if search.marks.first_gain >= 0 else None
        o.steps_to_verdict = search.marks.verdict if search.marks.verdict >= 0 else None
        o.default_share = search.after_default / search.after if search.after else None
        o.reopened, o.returned, o.refined = search.marks.reopened, search.marks.returned, search.marks.refined
        if search.marks.dropped and not o.dropped and not o.kept:
            o.dropped = RunEnds.SLOWER()
        sure = search.is_over or bool(search.races)  # a table that was confirmed has its figures, however the job ends
        if sure or search.race is None:
            o.choices = [self._choice(i, p, search) for i, p in enumerate(self.windows.profiles)]
        if sure:
            o.verdict = verdict_of(search)
        o.refused = [self._refusal(int(s), int(c)) for s, c in np.argwhere(search.banned)]

    def _refusal(self, i: int, config: int) -> tuple[Slot, Decision, str]:
        slot, decision = self.windows.profiles[i].slot, decision_of(config)
        row = next((d for d in self.outcome.disobeyed if (d.slot, d.decision) == (slot, decision)), None)
        too_slow = RowRefused.TOO_SLOW(decision=decision, slot=slot, times=GIVE_UP)
        return slot, decision, too_slow if row is None else str(row)

    def _choice(self, i: int, profile: SlotProfile, search: Search) -> SlotChoice:
        config = int(search.confirmed[i])
        decision = decision_of(config)
        mean, deviation = search.belief.figures(i)
        # More than all of it is possible, a call slows what runs beside it, but is no more than that in words.
        exposure = f"the step waits for {min(1.0, search.belief.exposure[0][i]):.0%} of its time"
        tried = int((search.tried[i, 1:] > 0).sum())
        own = profile.own
        if decision.is_auto and not tried:
            return SlotChoice(profile, AUTO, RowRefused.NOT_TRIED(own=own))
        if decision.is_auto:
            return SlotChoice(profile, AUTO, RowRefused.NOT_BETTER(own=own, tried=tried, exposure=exposure))
        percent = f"{100 * mean[config]:.1f} % +- {196 * deviation[config]:.1f}"
        return SlotChoice(
            profile, decision, f"saves {percent} of the step against NCCL's {own}; {tried} tried; {exposure}"
        )

    def _saw(self, plan: Plan, window: Window) -> None:
        self._last = window

    def _tell_profile(self) -> None:
        if self._last is None:
            return
        found = ", ".join(f"{p.slot} x{p.calls:.0f} ({p.share:.0%} of the step)" for p in self.windows.profiles)
        self._line("profile", "auto", self._last.step_ms, "measured", found or "no slot")

    def _tell(self, plan: Plan, search: Search, pair: Race | None, given_up: bool) -> None:
        default_ms = search.default_ms * math.exp(float(search.belief.mean[0]))
        table = self.windows.decisions(plan.configs)
        text = ", ".join(f"{slot} {decision}" for slot, decision in table.items()) or "auto"
        if plan.kind == WATCH and (plan.configs.any() or not search.confirmed.any()):
            return  # nothing but the job as it runs
        verdict = "given up" if given_up else "measured"
        if pair is not None:
            low, _ = pair.interval
            verdict = "kept" if low > 0 and pair.n >= LEAST_PAIRS else "rolled back" if search.race is None else verdict
        of_the_table = verdict == "kept" and not plan.configs.any()  # it was this window that made it sure
        self._line(PHASES[plan.kind], text, default_ms, verdict, "the table beside it" if of_the_table else "")

    def _line(self, phase: str, text: str, default_ms: float, verdict: str, reason: str) -> None:
        """Tell the last window."""
        assert self._last is not None
        window = self._last
        self.on_window(
            WindowLine(
                index=self.outcome.windows,
                total=self.settings.windows + 2 * self.settings.verify,
                phase=phase,
                regime=self.outcome.regime,
                decision=text,
                step_ms=window.step_ms,
                default_ms=default_ms,
                saving=1 - window.step_ms / default_ms,
                verdict=verdict,
                reason=reason,
                generation=window.generation,
                first_step=int(window.steps[0]),
                last_step=int(window.steps[-1]),
            )
        )


def verdict_of(search: Search) -> Verdict:
    """The verdict of a search that is over: the table against the default, and the default against itself.

    Where no table was ever worth a comparison both are the default against itself.
    """
    noise = search.noise * math.sqrt(2)
    same = Race(noise, logs=search.same_logs)
    aa = _comparison(same.mean, *same.interval, same.n) if same.n else _comparison(0.0, -3 * noise, 3 * noise, 0)
    if search.races:
        tuned = _comparison(*search.gain, sum(race.n for race in search.races))
    elif search.rejected is not None:
        tuned = _comparison(search.rejected.mean, *search.rejected.interval, search.rejected.n)
    else:
        tuned = aa
    return Verdict(tuned, aa, search.default_ms, search.default_ms / tuned.speedup)


def _comparison(mean: float, low: float, high: float, n: int) -> Comparison:
    return Comparison(math.exp(mean), math.exp(low), math.exp(high), n)

"""The tuning run: find the slots, search each with the policy, confirm, and let an interleaved A/B have the last word.

Works on any :class:`LiveEnv`; prints nothing (``on_window`` hears of every window) and touches no process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..envs.arena import Policy
from ..envs.live import DISCARD, SWITCH_STEPS, JobEnded, Window
from ..envs.live_env import DEFAULT, TRIAL, WARM, LiveEnv
from ..envs.obedience import Disobeyed
from ..traces.audit import regime
from ..traces.records import AUTO, PAIRS, Decision, Slot
from ..traces.slots import SlotProfile
from .compare import Verdict, judge
from .guard import MAX_PAIRS, Confirmation, Guard
from .stopping import StopRule

#: A closing A/B of fewer pairs has no interval worth printing.
LEAST_PAIRS = 6


@dataclass(frozen=True)
class Settings:
    """How long a run may take. Windows are counted as pairs: a default window and one under a table."""

    windows: int = 60  # for the search, confirmations included
    verify: int = 20  # for the closing A/B
    window_steps: int = 4
    steps: int | None = None  # that the job will take, if known: the closing A/B is kept free
    budget: float = 0.05  # share of the job's time that the search may lose against the default


@dataclass(frozen=True)
class Line:
    """One window as it is told to people and written to the trace. Times in ms, ``saving`` relative to the default."""

    index: int
    total: int
    phase: str  # profile, search, confirm, verify
    regime: str
    slot: str
    previous: str
    decision: str
    step_ms: float
    default_ms: float
    saving: float
    verdict: str
    reason: str
    generation: int
    first_step: int
    last_step: int


@dataclass(frozen=True)
class Choice:
    """What was decided for one slot, and why."""

    profile: SlotProfile
    decision: Decision
    reason: str


@dataclass
class Outcome:
    """What a run came to. ``verdict`` is None when the job ended before the closing A/B."""

    regime: str = "unknown"
    choices: list[Choice] = field(default_factory=list)
    verdict: Verdict | None = None
    kept: bool = False  # the table is in force; otherwise NCCL's own choice is
    windows: int = 0
    ended: str = ""  # why the run ended early, if it did
    dropped: str = ""  # why a table that was kept is no more in force
    disobeyed: list[Disobeyed] = field(default_factory=list)  # rows that NCCL did not follow, each once

    @property
    def decisions(self) -> dict[Slot, Decision]:
        """What the table holds for each slot."""
        return {c.profile.slot: c.decision for c in self.choices if not c.decision.is_auto}


class Tuner:
    """One tuning run over one job."""

    def __init__(
        self,
        env: LiveEnv,
        policy: Policy,
        settings: Settings,
        on_window: Callable[[Line], None] = lambda line: None,
    ) -> None:
        self.env, self.policy, self.settings, self.on_window = env, policy, settings, on_window
        self.guard = Guard(settings.budget)
        self.outcome = Outcome()
        env.on_disobeyed = self.outcome.disobeyed.append
        self._total = settings.windows + settings.verify

    def run(self) -> Outcome:
        """Profile, search, verify. A job that ends early ends the run early: the outcome says so."""
        try:
            self._profile()
            profiles = self.env.profiles
            if not profiles:
                self.outcome.ended = self.env.nothing()
                return self.outcome
            for i, profile in enumerate(profiles):
                self.outcome.choices.append(self._tune(profile, self._allowance(len(profiles) - i)))
            self._verify()
        except JobEnded as error:
            self.outcome.ended = str(error)
        return self.outcome

    def _profile(self) -> None:
        env = self.env
        profiles = env.profile()
        if len(env.profile_events):
            self.outcome.regime = regime(env.profile_events)
        _, window = env.log[-1]
        found = ", ".join(f"{p.slot} x{p.calls:.0f} ({p.share:.0%} of the step)" for p in profiles) or "no slot"
        self._tell("profile", "", AUTO, AUTO, window, window, "measured", found)

    def _allowance(self, slots_left: int) -> int:
        """Trials that the next slot may take, so that every slot after it can be searched and confirmed too."""
        return (self.settings.windows - self.outcome.windows) // slots_left - MAX_PAIRS

    def _tune(self, profile: SlotProfile, trials: int) -> Choice:
        """Search one slot, confirm the best, commit it or leave the slot to NCCL."""
        slot, own = profile.slot, _own(profile)
        stop = self._out_of_time()
        if stop:
            return Choice(profile, AUTO, f"left to NCCL's {own}: not searched, {stop}")
        tried = self._search(profile, trials)
        best = self.env.best()
        if best.is_auto:
            return Choice(profile, AUTO, f"left to NCCL's {own}: none of {tried} other configs was faster")
        outcome = self._confirm(slot, best)
        percent = f"{100 * outcome.gain:.1f} % +- {196 * outcome.error:.1f}"
        if not outcome.kept:
            return Choice(
                profile,
                AUTO,
                f"left to NCCL's {own}: {best} looked best of {tried}, saved {percent} of the step",
            )
        self.env.committed[slot] = best
        return Choice(profile, best, f"saves {percent} of the step against NCCL's {own}; best of {tried} configs tried")

    def _search(self, profile: SlotProfile, trials: int) -> int:
        """Let the policy try configs on one slot, at most ``trials``; returns how many different ones it tried."""
        env, state, start = self.env, None, True
        rule = StopRule(self.policy)
        observation, info = env.reset(options={"slot": profile.slot})
        self._account(info["log"])
        previous, tried = AUTO, set[Decision]()
        for _ in range(trials):
            if self._out_of_time():
                break
            action, state = self.policy.predict(
                observation, state=state, episode_start=np.array([start]), deterministic=True
            )
            start = False
            if rule(observation, action):
                break
            before = env.best()
            observation, _, _, _, info = env.step(action)
            self._account(info["log"])
            decision = info["decision"]
            if not decision.is_auto:
                tried.add(decision)
            verdict = (
                "best so far" if env.best() == decision != before else ("again" if decision == before else "worse")
            )
            self.outcome.windows += 1
            self._tell("search", str(profile.slot), previous, decision, info["window"], info["default"], verdict)
            previous = env.best()
        return len(tried)

    def _confirm(self, slot: Slot, best: Decision) -> Confirmation:
        last: tuple[Window, Window] | None = None
        for item in self.guard.confirm(self.env, slot, best):
            if isinstance(item, Confirmation):
                break
            if last:
                self._tell("confirm", str(slot), AUTO, best, last[1], last[0], "measured again")
            last = item
            self.outcome.windows += 1
        assert isinstance(item, Confirmation) and last is not None
        word = "kept" if item.kept else "rolled back"
        self._tell("confirm", str(slot), AUTO, best, last[1], last[0], word)
        return item

    def _verify(self) -> None:
        """The closing A/B: default and table in turn, D T D T ... D. The table stays only where it wins."""
        env, decisions = self.env, self.outcome.decisions
        default = [env.measure(DEFAULT, {})]
        tuned: list[Window] = []
        try:
            for i in range(self.settings.verify):
                window = env.measure(TRIAL, decisions)
                default.append(env.measure(DEFAULT, {}))
                tuned.append(window)
                self.outcome.windows += 1
                self._tell("verify", "all slots", AUTO, AUTO, window, default[i], "measured")
        except JobEnded:
            if len(tuned) < LEAST_PAIRS:
                raise
        verdict = judge(np.array([w.step_ms for w in default]), np.array([w.step_ms for w in tuned]))
        self.outcome.verdict = verdict
        self.outcome.kept = bool(decisions) and verdict.tuned.is_faster
        env.job.confirm(decisions if self.outcome.kept else {})

    def _out_of_time(self) -> str:
        """Why no further trial may start, or ''."""
        if self.outcome.windows >= self.settings.windows:
            return "the search's windows are used up"
        if self.guard.is_spent:
            return "the search has cost its budget"
        if self.settings.steps is not None:
            pairs = 2 + MAX_PAIRS + self.settings.verify + 1  # one more trial, its confirmation, the closing A/B
            job = self.env.job
            # Every window is a generation of its own, and a new table takes some steps to reach all ranks.
            pace = max(job.last_step / max(1, job.generation), self.settings.window_steps + DISCARD + SWITCH_STEPS)
            if job.last_step + 2 * pairs * pace > self.settings.steps:
                return "the job's last steps are kept for the closing comparison"
        return ""

    def _account(self, log: list[tuple[str, Window]]) -> None:
        for kind, window in log:
            if kind != WARM:
                self.guard.note(kind, window, self.env.default_ms)

    def _tell(
        self,
        phase: str,
        slot: str,
        previous: Decision,
        decision: Decision,
        window: Window,
        default: Window,
        verdict: str,
        reason: str = "",
    ) -> None:
        self.on_window(
            Line(
                index=self.outcome.windows,
                total=self._total,
                phase=phase,
                regime=self.outcome.regime,
                slot=slot,
                previous=str(previous),
                decision=str(decision),
                step_ms=window.step_ms,
                default_ms=default.step_ms,
                saving=1 - window.step_ms / default.step_ms,
                verdict=verdict,
                reason=reason,
                generation=window.generation,
                first_step=int(window.steps[0]),
                last_step=int(window.steps[-1]),
            )
        )


def _own(profile: SlotProfile) -> str:
    """NCCL's own choice for a slot, as text."""
    algo, proto = PAIRS[int(profile.fingerprint.own_pair[0])]
    return f"{algo}/{proto}/{int(profile.fingerprint.own_channels[0])}"

"""The search over a whole job: one code for training, board, replay and a running job.

It goes in *turns*: the policy decides for one slot, and says what comes next: another slot's turn, a *window* of some
steps under all decisions at once (``Windows.measure``), a comparison, or the end. The belief advises it, and forbids
nothing. What must be promised is the search's own: what NCCL offers, the end of a window that is far too long, how much
may be lost, and the test: a table takes the place of what is in force only when it has met it, window by window, until
:class:`sequential.Race` is sure. After the verdict the same object keeps watch, and begins anew where the job has
changed.

Where windows come from (a simulator, a trace, a running job) is all that differs between the environments.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import turns, windows
from .afterwards import Refinement
from .belief import Belief, Prior
from .canary import GIVE_UP, Canary, is_new
from .few_calls import FewCalls
from .regimes import Regimes
from .sequential import AGAIN, ALPHA, MORE, LongSteps, Race, median, middle, window_noise
from .watch import Milestones, SearchConfig
from .windows import (
    DISCARD,
    PROFILE,
    REFERENCE,
    REFINE,
    SEARCH,
    TABLE,
    TRIAL,
    WARM_STEPS,
    WATCH,
    Job,
    Measured,
    Plan,
)

Array = np.ndarray[Any, Any]

#: The budget counts for so many steps from the start.
BUDGET_STEPS = 4000


class Search:
    """The search over one job. Ask :meth:`plan`; where it gives a window, measure it and :meth:`record` it; where it
    gives None it is the policy's turn: :meth:`observe`, then :meth:`decide`."""

    def __init__(
        self,
        job: Job,
        default: Measured,
        prior: Prior,
        rules: SearchConfig | None = None,
        first: Array | None = None,
        on_confirmed: Callable[[Array], object] = lambda configs: None,
    ) -> None:
        """``first``: configs (s,) to be tried first; ``on_confirmed`` hears of other configs that are confirmed."""
        self.job, self.prior, self.rules = job, prior, rules or SearchConfig()
        self.n_slots, self.marks, self.on_confirmed = len(job.share), Milestones(), on_confirmed
        self.steps = default.billed
        self.lost = 0.0  # default steps that the job lost against its default, so far
        self.default_logs, self.n_default = (
            np.log(job.call_us),
            np.ones(self.n_slots),
        )  # of the default's calls
        self.confirmed: Array = np.zeros(self.n_slots, np.int64)  # in force when nothing is tried
        # What confirmed it: the first against the default, each other against the one before.
        self.races: list[Race] = []
        self.same_logs: list[
            float
        ] = []  # of each default window and the one before it: the default against itself
        self.running: Array = np.zeros(self.n_slots, np.int64)  # under what the job runs now
        self.before = (
            self.confirmed if first is None else np.where(job.mask[np.arange(self.n_slots), first], first, 0)
        )
        self.after = self.after_default = 0  # steps since the verdict; of them under the default
        self.warm: set[int] = set()
        self._single: deque[float] = deque(
            maxlen=96
        )  # logs of single steps over their window's; a change keeps them
        self.banned, self.canary = (
            np.zeros_like(job.mask, bool),
            Canary(job.mask.shape),
        )  # a change keeps these, too
        self.regimes = Regimes()
        self.straggling = set[bytes]()  # tables that were taken back for their long steps
        self._begin(default)

    def _begin(self, default: Measured) -> None:
        """A new search, from these default steps."""
        self._single.extend(np.log(default.step_ms / middle(default.step_ms)))
        self.default_ms = middle(default.step_ms)
        lowest, most = self.rules.window_steps
        fits = (n for n in range(lowest, most) if self.noise_of(n) <= self.rules.good_noise)
        self.window_steps = next(fits, most)
        self.noise = self.noise_of(self.window_steps)
        self.belief = Belief(self.prior, self.job.features, self.job.mask & ~self.banned, self.job.share)
        self.belief.reveal = self.rules.reveal * self.noise
        # The default's own step time is no surer than a window of it, nor steadier.
        self.belief.cov[0, 0] = max(self.belief.cov[0, 0], self.noise**2)
        self.belief.wander = max(self.belief.wander, self.noise / 10)
        self.belief.has_calls = bool(np.isfinite(self.default_logs).any())
        self.choices = self.before.copy()
        self.tried = np.zeros(self.job.mask.shape)
        ran_before = np.arange(self.job.mask.shape[1]) == self.before[:, None]
        has_times = np.isfinite(self.job.call_us)
        self.few = FewCalls(self.job.calls, has_times, self.belief, self.canary, self.tried, ran_before)
        self.turn = self.n_slots if self.choices.any() else 0  # what was good before is the first to be tried
        self.round = self.idle = 0
        self.phase, self.comparisons = SEARCH, 0
        self.last_saving, self.last_calls, self.last_long = (
            0.0,
            np.zeros(self.n_slots),
            0.0,
        )  # of the last window
        self.race: Race | None = None
        self.rejected: Race | None = None
        self._half: list[tuple[str, float]] = []
        self._default_before = self.default_ms
        self.beaten = set(self.straggling)  # tables that lost their comparison
        self.long = LongSteps()
        self.long.add(np.zeros(self.n_slots, np.int64), default.step_ms, self.default_ms)

    # -- what comes next ---------------------------------------------------------------------------------------

    @property
    def open(self) -> Array:
        """(s, N_CONFIGS) bool: what may be chosen: what NCCL offers, and obeyed so far."""
        return np.asarray(self.job.mask & ~self.banned)

    @property
    def is_over(self) -> bool:
        """The verdict is there; what comes now is the watch, and what is still tried beside it."""
        return self.phase in (REFINE, WATCH)

    @property
    def is_done(self) -> bool:
        """The policy has nothing left to decide."""
        return self.phase == WATCH

    @property
    def spent(self) -> float:
        """Part of what the search may lose that it has lost."""
        return self.lost / (self.rules.budget * max(self.steps, BUDGET_STEPS))

    @property
    def is_spent(self) -> bool:
        """Nothing is tried any more in this search."""
        return self.spent > 1 or self.round >= max(self.rules.rounds, self.rules.rounds_a_slot * self.n_slots)

    def plan(self) -> Plan | None:
        """The window to run now, or None where the policy has a turn first."""
        if self.phase == SEARCH:
            is_due = self.turn == self.n_slots
            return self.few.before(self.window(SEARCH, self.choices), self.confirmed) if is_due else None
        if self.is_over:
            return self.later.plan()
        if self.phase == PROFILE:
            return Plan(PROFILE, np.zeros(self.n_slots, np.int64), self.rules.profile_steps, DISCARD)
        reference = (
            (len(self._half) + self.race.n) % 2 == 0 if self.race else True
        )  # R T, T R, R T: one switch a pair
        return self.window(REFERENCE, self.reference) if reference else self.window(TABLE, self.table)

    def window(self, kind: str, configs: Array) -> Plan:
        """A window under these configs (s,), given up where a step is far too long."""
        return Plan(kind, configs.copy(), self.window_steps, self.discard(configs), self.too_long_ms(configs))

    def too_long_ms(self, configs: Array) -> float:
        """A step longer than this is far too long under configs (s,); none is where they have all been measured."""
        most = GIVE_UP * self.default_ms * math.exp(self.belief.mean[0])
        return most if is_new(configs, self.tried).any() else math.inf

    def noise_of(self, n_steps: int) -> float:
        """Standard deviation of the log step time of a window of so many steps."""
        return window_noise(np.array(self._single), n_steps)

    def discard(self, configs: Array) -> int:
        """Steps that do not count after a change to these configs (s,)."""
        if np.array_equal(configs, self.running):
            return 0
        return DISCARD + (WARM_STEPS if self._families(configs) - self.warm else 0)

    def _families(self, configs: Array) -> set[int]:
        return {f for s, c in enumerate(configs) if (f := int(self.job.families[s, c])) >= 0}

    @property
    def gain(self) -> tuple[float, float, float]:
        """Mean of the log of the default's step time over the confirmed table's, and its interval."""
        bounds = [race.interval for race in self.races]
        return sum(r.mean for r in self.races), sum(b[0] for b in bounds), sum(b[1] for b in bounds)

    # -- the policy's turns ------------------------------------------------------------------------------------

    def observe(self) -> Array:
        """What the policy sees of the slot whose turn it is, (turns.N_OBSERVATION,) float32."""
        slot, belief, refines = self.turn, self.belief, self.phase == REFINE
        best = belief.best()
        beside = np.where(np.arange(self.n_slots) < slot, self.choices, best)
        is_exploring = bool((beside != best).any())
        beside[slot] = 0  # after the verdict all other slots run alike in both windows
        if refines:
            risk = self.later.risk(slot)
            ahead, learned, worth = belief.ahead(slot, lost=risk == 1.0)
        else:
            risk = self.few.risk(slot)
            ahead, learned, worth = belief.ahead(slot, belief.saving(beside)[1] ** 2)
        exposure, unsure = belief.exposure
        saving, deviation = belief.saving(best)
        promised = saving - belief.saving_mean(self.confirmed)
        idle = self.later.passed / self.n_slots if refines else self.idle / 4
        context = np.array([
            self.job.share[slot], exposure[slot], unsure[slot], 50 * self.noise, 5 * self.last_saving, 5 * saving,
            5 * deviation, self.round / 16, self.n_slots / 8, slot / self.n_slots, float(self.confirmed.any()),
            self.comparisons / 4, 20 * belief.mean[0], belief.off_step / 2, belief.off_calls[slot] / 2, float(refines),
            turns.SCALE * promised, float(is_exploring), float(best.tobytes() in self.beaten), idle, self.spent,
            self.last_calls[slot], 20 * self.last_long,
        ])  # fmt: skip
        figures = np.zeros((turns.N_PER_CONFIG, ahead.size))
        figures[:3] = turns.SCALE * ahead, turns.SCALE * learned, 10 * turns.SCALE * worth
        figures[3] = np.minimum(self.tried[slot], 16) / 4
        figures[4, self.choices[slot]] = float(self.round > 0)
        figures[5, self.confirmed[slot]] = 1.0
        figures[6] = risk
        return turns.observe(self.job.features[slot], context, figures, self.open[slot])

    def decide(self, config: int, what: int = turns.GO_ON) -> bool:
        """The policy's choice for the slot whose turn it is, and what comes next (``turns.GO_ON`` ...). A config that
        is not open runs as AUTO, after the verdict as it does already. Returns whether it was open."""
        slot = self.turn
        ok = bool(self.open[slot, config])
        if self.phase == REFINE:
            self.later.decide(config if ok else int(self.confirmed[slot]), what)
            return ok
        choice = config if ok else 0
        self.idle = self.idle if self.choices[slot] == choice and self.round else 0
        self.choices[slot] = choice
        self.turn += 1
        if what == turns.LEAVE:
            self._finish(trials=self.rules.trials)
            return ok
        if what != turns.GO_ON:
            rest = self.belief.best()[self.turn :]
            self.idle = self.idle if np.array_equal(self.choices[self.turn :], rest) else 0
            self.choices[self.turn :] = rest
            self.turn = self.n_slots
        if self.turn == self.n_slots:
            self.idle += 1
            if what == turns.COMPARE and self._may_race(self.choices):
                self._race(self.choices)
        return ok

    def ask(self, policy: windows.Policy, state: Any = None) -> Any:
        """Let a policy decide for the slot whose turn it is, from its state of the turn before; its state now."""
        action, state = policy.predict(self.observe()[None], state, np.array([state is None]), True)
        self.decide(*map(int, turns.choices_of(np.reshape(action, 3))))
        return state

    # -- comparisons -------------------------------------------------------------------------------------------

    def _may_race(self, table: Array) -> bool:
        """Whether a table (s,) is another than what is in force, has not lost to it, and comparisons are left."""
        is_new = not np.array_equal(table, self.confirmed) and table.tobytes() not in self.beaten
        return is_new and self.comparisons < self.rules.comparisons

    def _race(self, table: Array) -> Race:
        self.phase = TABLE
        self.table, self.reference = table.copy(), self.confirmed.copy()
        self.race, self._half = Race(self.noise * math.sqrt(2), ALPHA * AGAIN**self.marks.fruitless), []
        return self.race

    def resume(self, confirmed: Array) -> None:
        """A table was confirmed before: straight to the watch."""
        self.confirmed = confirmed.copy()
        self._finish()

    def _compare(self, plan: Plan, ms: float, given_up: bool) -> None:
        """One window of a comparison."""
        race = self.race
        assert race is not None
        if given_up:  # it may have been a checkpoint: once more
            self._half = []
            return
        if not plan.configs.any():
            self.same_logs.append(math.log(self._default_before / ms))
            self._default_before = ms
        self._half.append((plan.kind, ms))
        if len(self._half) < 2:
            return
        pair = dict(self._half)
        self._half = []
        race.add(pair[REFERENCE], pair[TABLE])
        verdict = self.verdict(race, self.table, self.rules.pairs)
        if verdict:
            if not self.confirmed.any():
                self.marks.gained(self.steps)
            self.races.append(race)
            self.confirm(self.table)
            self._continue()
        elif verdict is not None:
            self._reject()

    def verdict(self, race: Race, table: Array, pairs: float, soonest: int = 2) -> bool | None:
        """Whether a table (s,) takes the place of what is in force: :meth:`Race.verdict`, long steps counted."""
        known, pairs = (self.gain[1], self.rules.pairs_again) if self.races else (None, pairs)
        found = race.verdict(pairs, self.rules.least_gain, known, soonest)
        if not found or self.long.allows(table, self.confirmed, race.mean):
            return found
        most = (
            MORE * pairs if known is not None else self.rules.pairs_long_steps
        )  # it goes on: it gains, and costs little
        return False if race.n >= most or self.long.forbids(table, self.confirmed, race.mean) else None

    def confirm(self, configs: Array) -> None:
        """These configs (s,) are in force from now on, when nothing is tried; the job is told where they are others."""
        is_other = not np.array_equal(configs, self.confirmed)
        self.confirmed = configs.copy()
        if is_other:
            self.on_confirmed(self.confirmed)

    def _reject(self) -> None:
        self.rejected = self.race
        self.beaten.add(self.table.tobytes())
        self._continue()

    def _continue(self) -> None:
        """After a comparison: on with the search, or the end."""
        self.race = None
        self.comparisons += 1
        self.phase, self.turn, self.idle = SEARCH, 0, 0
        if self.is_spent:
            self._close()

    def _close(self) -> None:
        """Nothing more is tried: what is believed best is compared with what is in force, then there is a verdict."""
        best = self.belief.best()
        if self.belief.saving_mean(best) > self.belief.saving_mean(self.confirmed) and self._may_race(best):
            self._race(best)
        else:
            self._finish(trials=self.rules.trials)

    def _finish(self, levels: Sequence[float] = (), trials: int = 0) -> None:
        self.marks.verdict = self.steps if self.marks.verdict < 0 else self.marks.verdict
        self.phase, self.turn, self.choices = WATCH, 0, self.confirmed.copy()
        self.later = Refinement(self, levels)
        self.later.refine(trials)

    # -- what a window gave ------------------------------------------------------------------------------------

    def record(self, plan: Plan, seen: Measured) -> float:
        """Take in a window. Returns the reward, as :class:`search_env.SearchEnv` describes it."""
        self.steps += seen.billed
        if plan.kind == PROFILE:
            self.job = self.job.changed(seen.call_us, middle(seen.step_ms) / self.default_ms)
            self.default_logs = np.log(self.job.call_us)
            self._begin(seen)
            self.later.recognise()
            return 0.0
        default_ms = self.default_ms * math.exp(float(self.belief.mean[0]))
        steps, given_up = _telling(plan, seen.step_ms, self.too_long_ms(plan.configs))
        ms = middle(steps)
        saved = seen.billed - seen.billed_ms / default_ms
        anyway = seen.billed * (1 - math.exp(-self.gain[0])) if self.is_over else 0.0
        # A step that saves a checkpoint is not the search's doing, but a step that was given up is.
        self.lost -= saved if given_up else seen.billed * (1 - ms / default_ms)
        self.long.add(plan.configs, seen.step_ms, default_ms if given_up else ms)
        if plan.kind != WATCH or not plan.configs.any():
            self._learn(plan, seen, steps, given_up)
        is_guilty = given_up and self.canary.struck(plan.configs, self.tried, self.belief)
        self.marks.canaries += given_up
        if not given_up:
            self.warm |= self._families(plan.configs)
        self.running = np.where(
            plan.one_of, -1, plan.configs
        )  # after few calls whatever comes is another table
        if plan.kind == SEARCH:
            self._after_round()
        elif plan.one_of:
            self.later.heard(seen)
        elif plan.kind == TRIAL:
            self.later.tried(plan.configs, seen, steps, given_up)
        elif plan.kind in (REFERENCE, TABLE) and is_guilty | (~seen.obeyed & (plan.configs > 0)).any():
            self._reject()
        elif plan.kind in (REFERENCE, TABLE):
            self._compare(plan, ms, given_up)
        else:
            self.later.watched(plan, seen, ms)
        return (saved - anyway) / 100.0

    def _learn(self, plan: Plan, seen: Measured, steps: Array, given_up: bool) -> None:
        logs = np.log(steps / self.default_ms)
        if len(logs) >= 3:
            self._single.extend(logs - median(logs))
            self.noise = self.noise_of(self.window_steps)
        # A trial is set beside the table in force; of few calls the step does not tell.
        is_told = plan.kind != TRIAL and not plan.one_of
        log_step = math.log(middle(steps) / self.default_ms) if is_told else math.nan
        noise = self.noise_of(len(steps)) if is_told else 1.0
        logs_us = np.log(np.asarray(seen.call_us, np.float64))
        own = (plan.configs == 0) & np.isfinite(logs_us)
        self.n_default += own
        self.default_logs = self.default_logs + np.where(
            own, (logs_us - self.default_logs) / self.n_default, 0.0
        )
        calls = np.where(seen.obeyed, logs_us - self.default_logs, np.nan)
        # What NCCL did not obey says nothing of the config, which is not tried again.
        refused = np.flatnonzero(~seen.obeyed & (plan.configs > 0))
        self.banned[refused, plan.configs[refused]] = True
        configs = np.where(seen.obeyed, plan.configs, 0)
        self.belief.observe(configs, log_step, noise, calls, seen.billed)
        if plan.one_of:
            self.few.took(configs, np.isfinite(calls))
        elif not given_up:
            self.tried[np.arange(self.n_slots), configs] += 1
        self.last_saving, self.last_calls = -log_step if is_told else 0.0, np.nan_to_num(calls)
        self.last_long = float(np.mean(steps) / middle(steps)) - 1

    def _after_round(self) -> None:
        self.round, self.turn = self.round + 1, 0
        if self.is_spent:
            self._close()


def _telling(plan: Plan, step_ms: Array, too_long_ms: float) -> tuple[Array, bool]:
    """Of the steps of a window those that tell of its table, an only one does, and whether it was given up. Where a
    table makes all far too long, the first or second shows it, none faster than the default; any other is a stray."""
    has_ended, is_too_long = bool(step_ms[-1] > plan.limit_ms), bool(step_ms[-1] > too_long_ms)
    given_up = is_too_long and len(step_ms) <= 2 and bool(step_ms[0] > too_long_ms / GIVE_UP)
    return step_ms[-1:] if given_up or len(step_ms) == 1 else step_ms[: len(step_ms) - has_ended], given_up

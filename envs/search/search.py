"""The search over a whole job: one code for training, board, replay and a running job.

It goes in *turns*: the policy decides for one slot, and says what comes next: another slot's turn, a *window* of some
steps under all decisions at once (``Windows.measure``), a comparison, or the end. The belief advises the policy and
forbids nothing. The search itself keeps what is promised: NCCL's offer, the abort of a step that is too slow, the
budget, and the comparison: a table replaces the current one only if :mod:`comparison` proves a gain.

This file keeps the account and teaches the belief. :mod:`loop` says what runs next: a table that the policy proposes,
or looks at the current one, which :mod:`monitor` understands. What all of them know is in :mod:`state`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .belief.prior import Prior
from .comparison import Comparison, TimedWindow, Window
from .config import HORIZON, SearchConfig
from .interfaces import (
    GO_ON,
    LEAVE,
    N_WHAT,
    PROFILE,
    SEARCH,
    TABLE,
    WATCH,
    WHAT,
    Job,
    Measured,
    Plan,
    Policy,
    choices_of,
)
from .loop import Loop
from .observation import observe
from .state import Account, LastWindow, Milestones, State
from .step_guard import measuring_steps
from .step_times import Quads, trimmed_mean

Array = np.ndarray[Any, Any]


class Search:
    """The search over one job. Ask :meth:`plan`: if it gives a window, measure it and :meth:`record` it; if it gives
    None it is the policy's turn: :meth:`observe`, then :meth:`decide`."""

    def __init__(
        self,
        job: Job,
        default: Measured,
        prior: Prior,
        config: SearchConfig | None = None,
        first: Array | None = None,
        on_confirmed: Callable[[Array], object] = lambda configs: None,
        account: Account | None = None,
    ) -> None:
        """``first``: configs (s,) to be tried first; ``on_confirmed`` hears of each new current table; ``account``: of
        the search before in the same job, which goes on: what was lost counts for the budget of all."""
        self.state = State(job, config or SearchConfig(), prior, on_confirmed)
        if account is not None:
            self.state.account = account
        self.last: Window | None = None  # the last measurement
        before = np.zeros(self.n_slots, np.int64)
        if first is not None and self.state.config.budget:
            slots = np.arange(self.n_slots)
            is_offered = job.mask[slots, first]
            before = np.where(is_offered, first, 0)
        self.state.account.steps += default.billed
        self.state.begin(default, before)
        self.loop = Loop(self.state, before)

    # -- reading -----------------------------------------------------------------------------------------------

    @property
    def config(self) -> SearchConfig:
        """How the search is run."""
        return self.state.config

    @property
    def n_slots(self) -> int:
        """Of the job."""
        return self.state.n_slots

    @property
    def steps(self) -> int:
        """Optimizer steps that went by."""
        return self.state.account.steps

    @property
    def lost(self) -> float:
        """Default steps that the job lost against its default, so far."""
        return self.state.account.lost

    @property
    def marks(self) -> Milestones:
        """When what happened."""
        return self.state.milestones

    @property
    def confirmed(self) -> Array:
        """(s,) configs of the current table: it holds when nothing is tried."""
        return self.state.current.configs

    @property
    def gain(self) -> tuple[float, float, float]:
        """Mean log of the default's step time over the current table's, and its interval."""
        return self.state.current.gain

    @property
    def comparisons(self) -> list[Comparison]:
        """All of them, in order."""
        return self.state.comparisons.history

    @property
    def open(self) -> Array:
        """(s, N_CONFIGS) bool: what may be chosen."""
        return self.state.open

    @property
    def turn(self) -> int:
        """The slot that the policy decides for next; the number of slots: none."""
        return self.loop.turn

    @property
    def is_over(self) -> bool:
        """The verdict is there: what comes now are trials, and monitoring."""
        return self.loop.monitor is not None

    @property
    def is_done(self) -> bool:
        """The policy has nothing left to decide."""
        return self.loop.is_done

    @property
    def is_comparing(self) -> bool:
        """A comparison is running before the verdict."""
        trial = self.loop.trial
        return trial is not None and trial.kind == TABLE

    @property
    def is_trying(self) -> bool:
        """A trial is waiting until the current table is seen to run as usual."""
        return self.is_over and self.loop.trial is not None

    @property
    def trials_left(self) -> int:
        """Windows that may still try something after the verdict."""
        return self.loop.trials_left

    # -- the policy's turns ------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """The window to run now, or None if the policy has a turn first."""
        return self.loop.plan()

    def observe(self) -> Array:
        """What the policy sees of the slot whose turn it is, (observation.N_OBSERVATION,) float32."""
        return observe(self.state, self.loop.look())

    @property
    def what_open(self) -> Array:
        """(N_WHAT,) bool: what may come next."""
        allowed = list(WHAT)
        if self.config.more_choices:
            allowed += self.loop.more_choices
        every = np.arange(N_WHAT)
        return np.isin(every, allowed)

    def decide(self, config: int, what: int = GO_ON) -> bool:
        """The policy's choice for the slot whose turn it is, and what comes next. Returns whether both may be chosen:
        else the slot runs what the current table has, and the next slot's turn comes."""
        slot = self.turn
        is_open = bool(self.open[slot, config] and self.what_open[what])
        kept = int(self.confirmed[slot])
        if not is_open:
            config, what = kept, GO_ON
        if not self.config.budget:  # nothing may be tried, whatever the policy wants
            config, what = kept, LEAVE
        self.loop.decide(config, what)
        return is_open

    def ask(self, policy: Policy, state: Any = None) -> Any:
        """Let a policy decide for the slot whose turn it is, from its state of the turn before; its state now."""
        seen = self.observe()
        is_first = np.array([state is None])
        action, state = policy.predict(seen[None], state, is_first, True)
        config, what = choices_of(np.reshape(action, ()))
        self.decide(int(config), int(what))
        return state

    # -- measurements --------------------------------------------------------------------------------------------

    def record(self, plan: Plan, seen: Measured) -> float:
        """Take in what was measured. Returns the default steps that it saved beyond the table that was the current
        one."""
        state = self.state
        account = state.account
        account.steps += seen.between + seen.billed
        account.lost -= seen.between * state.current.saved
        if seen.turns:
            return self._record_turns(plan, seen)
        if plan.kind == PROFILE:
            ms = trimmed_mean(seen.step_ms)
            window = Window(plan, seen, seen.step_ms, ms, False)
            return self._recorded(window, 0.0)
        return self._record_look(plan, seen)

    def _record_look(self, plan: Plan, seen: Measured) -> float:
        """Take in steps of the current table as it is, or of one that holds at a few calls."""
        state = self.state
        limit_ms = state.guard.limit_ms(plan.configs, state.default_ms_now)
        steps, is_aborted = measuring_steps(plan, seen.step_ms, limit_ms)
        ms = state.noise.usual_ms(steps)
        if not plan.configs.any():
            state.saw_default(ms)
        default_ms = state.default_ms_now
        anyway = seen.billed * state.current.saved
        # The job's own long steps, such as checkpoints, are not charged to the search. An aborted step is.
        saved = seen.billed * (1 - ms / default_ms)
        usual_ms = ms
        if is_aborted:
            saved = seen.billed - seen.billed_ms / default_ms
            usual_ms = default_ms
        state.account.lost -= saved
        state.long_steps.add(plan.configs, seen.step_ms, usual_ms)
        if plan.kind != WATCH or not plan.configs.any():
            self._learn_look(plan, seen, steps, ms, is_aborted)
        self._ran(plan, is_aborted)
        window = Window(plan, seen, steps, ms, is_aborted)
        return self._recorded(window, saved - anyway)

    def _record_turns(self, plan: Plan, seen: Measured) -> float:
        """Take in turns of the plan's configs and the current table."""
        state = self.state
        account = state.account
        if seen.turns > plan.turns:
            state.lengthen(seen.turns)
        current_ms = state.noise.usual_ms(seen.current)
        state.saw_current(current_ms)
        default_ms = state.default_ms_now
        limit_ms = state.guard.limit_ms(plan.configs, default_ms)
        steps, is_aborted = measuring_steps(plan, seen.tried, limit_ms)
        ms = state.noise.usual_ms(steps)
        last_ms = seen.tried[-1]
        has_ended = bool(last_ms > plan.limit_ms)
        quads = Quads.of(seen.step_ms, seen.arms, seen.turns, has_ended)
        if not len(quads.ratios):  # it ended before a whole quad
            ratio = math.log(current_ms / ms)
            quads = Quads.single(ratio)
        gain = self.gain[0]
        by_current = state.current.saved
        anyway = seen.billed * by_current
        if is_aborted:
            saved = seen.billed - seen.billed_ms / default_ms
            usual_ms = default_ms
        else:
            by_tried = 1 - math.exp(-gain - quads.ratio)
            n_tried = len(seen.tried)
            n_current = seen.billed - n_tried
            saved = n_tried * by_tried + n_current * by_current
            usual_ms = ms
        account.lost -= saved
        long_steps = state.long_steps
        long_steps.add(plan.configs, seen.tried, usual_ms)
        long_steps.add(self.confirmed, seen.current, current_ms)
        self._learn(plan, seen, quads, is_aborted)
        self._ran(plan, is_aborted)
        beside = TimedWindow(current_ms, seen.first_step, seen.last_step)
        window = Window(plan, seen, steps, ms, is_aborted, quads, beside)
        return self._recorded(window, saved - anyway)

    def _ran(self, plan: Plan, is_aborted: bool) -> None:
        """A measurement is over."""
        state = self.state
        if is_aborted:
            state.guard.abort(plan.configs)
            state.milestones.aborted += 1
        state.running.ran(plan, is_aborted)

    def _learn(self, plan: Plan, seen: Measured, quads: Quads, is_aborted: bool) -> None:
        """The belief learns by how much the two tables differ, and the times of the calls."""
        state = self.state
        state.noise.add_quads(quads)
        configs, calls = self._obeyed_calls(plan, seen)
        n_quads = len(quads.ratios)
        noise = state.noise.of_quads(n_quads)
        is_far = plan.kind == SEARCH
        belief = state.belief
        belief.observe(configs, math.nan, noise, calls, seen.billed)
        belief.compare(configs, self.confirmed, quads.ratio, noise, is_far)
        if not is_aborted:
            state.guard.ran(configs)
        gain = self.gain[0]
        saving = quads.ratio + gain
        known_calls = np.nan_to_num(calls)
        state.last = LastWindow(saving, known_calls, 0.0)

    def _learn_look(self, plan: Plan, seen: Measured, steps: Array, ms: float, is_aborted: bool) -> None:
        """The belief learns how long a step takes now, and the times of the calls; ``ms``: trimmed mean of the
        ``steps`` (n,)."""
        state = self.state
        default_ms = state.default_ms
        logs = np.log(steps / default_ms)
        state.noise.add(logs)
        log_step = math.nan  # at few calls the step measures nothing
        noise = 1.0
        saving = 0.0
        if not plan.one_of:
            log_step = math.log(ms / default_ms)
            noise = state.noise.of(len(steps))
            saving = -log_step
        configs, calls = self._obeyed_calls(plan, seen)
        state.belief.observe(configs, log_step, noise, calls, seen.billed)
        if plan.one_of:
            is_timed = np.isfinite(calls)
            state.guard.ran_at_few_calls(configs, is_timed)
        elif not is_aborted:
            state.guard.ran(configs)
        long = float(np.mean(steps) / ms) - 1
        known_calls = np.nan_to_num(calls)
        state.last = LastWindow(saving, known_calls, long)

    def _obeyed_calls(self, plan: Plan, seen: Measured) -> tuple[Array, Array]:
        """Configs (s,) that NCCL ran, and log times (s,) of their calls over the default's; NaN: not sampled. The
        others are refused."""
        state = self.state
        planned = plan.configs
        obeyed = seen.obeyed
        us = np.asarray(seen.call_us, np.float64)
        call_logs = np.log(us)
        is_default = planned == 0
        state.default_calls.add(call_logs, is_default)
        longer = call_logs - state.default_calls.logs
        calls = np.where(obeyed, longer, np.nan)
        is_refused = ~obeyed & (planned > 0)
        if is_refused.any():
            state.guard.refuse(planned, is_refused)
            state.belief.refuse(state.guard.refused)
        return np.where(obeyed, planned, 0), calls

    @property
    def steps_left(self) -> int:
        """Of a job of :data:`HORIZON` steps."""
        return max(HORIZON - self.steps, 0)

    def _recorded(self, window: Window, saved: float) -> float:
        self.last = window
        self.loop.record(window)
        return saved

    # -- from outside ---------------------------------------------------------------------------------------------

    def resume(self, confirmed: Array) -> None:
        """A table was adopted before: straight to monitoring."""
        self.state.current.set(confirmed)
        self.loop.verdict(trials=0)

    def withdraw(self) -> None:
        """The job is to run as if nobody had tuned it."""
        self.state.current.set(np.zeros_like(self.confirmed))

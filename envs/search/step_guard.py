"""Protects the job from steps that are too slow: risky settings run at a few calls first, slow windows are aborted.

A table that holds at about one call a step hardly makes the step too slow, and the time of such a call predicts what
all of them would do. A setting runs at every call only after such a time was measured, or if it is not risky. A
window with a setting that was never measured ends with its first step that is too slow; a setting that causes this
twice is refused.

This file also knows what runs: which algorithms are connected, and how two tables take turns.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from .belief.belief import Belief
from .config import (
    ABORT,
    DISCARD,
    FEW_CALLS,
    FEWEST_CALLS,
    MOST_ABORTED,
    RISKY,
    RISKY_AT_ONE_CALL,
    TURN_STEPS,
    WARM_STEPS,
)
from .interfaces import QUAD, Job, Plan

Array = np.ndarray[Any, Any]


class StepGuard:
    """What ran on one job, what NCCL refused, and what made steps too slow. Arrays are (s, N_CONFIGS)."""

    def __init__(self, mask: Array) -> None:
        self.refused = np.zeros_like(mask, bool)  # NCCL did not obey; stays when the job changes
        # Windows, as the likeliest cause; stays when the job changes.
        self.aborted = np.zeros(mask.shape, np.int64)
        self.windows = np.zeros(mask.shape)  # measured at all calls

    def begin(self, job: Job, belief: Belief, ran_before: Array) -> None:
        """A new search. ``ran_before`` (s,): configs that ran until now need no few calls."""
        self.calls = job.calls
        self.has_times = np.isfinite(job.call_us)
        self.belief = belief
        shape = self.refused.shape
        self.windows = np.zeros(shape)
        configs = np.arange(shape[1])
        self.timed = configs == ran_before[:, None]  # a time of few calls was measured
        self.silent = np.zeros_like(self.refused)  # the last window at few calls gave no time

    # -- what ran ----------------------------------------------------------------------------------------------

    def ran(self, configs: Array) -> None:
        """A window under configs (s,) at all calls was measured."""
        self.windows[_places(configs)] += 1

    def ran_at_few_calls(self, configs: Array, is_timed: Array) -> None:
        """A window of few calls under configs (s,) has ended. Only a measured time (``is_timed`` (s,)) is evidence: a
        config without one never runs at all calls on the strength of this window."""
        places = _places(configs)
        self.timed[places] |= is_timed
        self.silent[places] = ~is_timed

    def refuse(self, configs: Array, is_refused: Array) -> None:
        """NCCL did not obey configs (s,) in the slots ``is_refused`` (s,): they are not tried again."""
        slots = np.flatnonzero(is_refused)
        self.refused[slots, configs[slots]] = True

    def assume_measured(self, configs: Array) -> None:
        """Configs (s,) ran until the job changed: no window is aborted for their sake."""
        self.windows[_places(configs)] = configs > 0

    # -- steps that are too slow -------------------------------------------------------------------------------

    def is_new(self, configs: Array) -> Array:
        """(s,) bool: which of these configs (s,) were never measured; AUTO is never new."""
        windows = self.windows[_places(configs)]
        is_other = configs > 0
        return np.asarray(is_other & (windows == 0))

    def limit_ms(self, configs: Array, default_ms: float) -> float:
        """A step above this is too slow under configs (s,); infinite if all of them were measured."""
        is_new = self.is_new(configs)
        if is_new.any():
            return ABORT * default_ms
        return math.inf

    def abort(self, configs: Array) -> None:
        """A window was aborted: the likeliest of the new configs (s,) is taken for the cause."""
        is_new = self.is_new(configs)
        slots = np.flatnonzero(is_new).tolist()
        if not slots:
            return

        def likely(slot: int) -> float:
            """Probability that the slot's config made the step too slow."""
            by_config = self.belief.too_long(slot, ABORT)
            config = configs[slot]
            return float(by_config[config])

        slot = max(slots, key=likely)
        cause = slot, configs[slot]
        self.aborted[cause] += 1

    @property
    def is_guilty(self) -> Array:
        """(s, N_CONFIGS) bool: settings that made a step too slow twice."""
        return self.aborted > MOST_ABORTED

    def risk_at_all_calls(self, slot: int) -> Array:
        """(N_CONFIGS,) probability that each config of a slot makes a step too slow; 0 of what was measured."""
        believed = self.belief.too_long(slot, ABORT)
        is_guilty = self.is_guilty[slot]
        likely = np.where(is_guilty, 1.0, believed)
        is_unmeasured = self.windows[slot] == 0
        return np.asarray(np.where(is_unmeasured, likely, 0.0))

    def risk(self, slot: int) -> Array:
        """The same of a trial of each config, which may run at few calls first."""
        at_all = self.risk_at_all_calls(slot)
        is_first = self._needs_few_calls(slot, at_all)
        if not is_first.any():
            return at_all
        calls = self.calls[slot]
        times = 1 + calls * (ABORT - 1)
        at_few = self.belief.too_long(slot, times)
        may_tell = is_first & ~self.silent[slot]
        is_cheap = may_tell & (at_all < RISKY_AT_ONE_CALL)
        smaller = np.minimum(at_all, at_few)
        return np.where(is_cheap, smaller, at_all)

    # -- few calls ---------------------------------------------------------------------------------------------

    def needs_few_calls(self, slot: int) -> Array:
        """(N_CONFIGS,) bool: configs of a slot that run at few calls first."""
        risk = self.risk_at_all_calls(slot)
        return self._needs_few_calls(slot, risk)

    def _needs_few_calls(self, slot: int, risk: Array) -> Array:
        has_many = self.calls[slot] >= FEWEST_CALLS
        has_times = self.has_times[slot]
        can_tell = has_many and has_times and self.belief.has_calls
        is_unmeasured = self.windows[slot] == 0
        is_untimed = ~self.timed[slot]
        is_new = can_tell & is_unmeasured & is_untimed
        is_risky = risk > RISKY
        return np.asarray(is_new & is_risky)

    def before(self, plan: Plan, current: Array) -> Plan:
        """The window that comes before this one, in which its risky configs run at about one call a step; the window
        itself if it has none. ``current`` (s,): configs of all other calls."""
        n_slots = len(current)
        is_risky = np.zeros(n_slots, bool)
        for slot, config in enumerate(plan.configs):
            if config != current[slot]:
                needs = self.needs_few_calls(slot)
                is_risky[slot] = needs[config]
        if not is_risky.any():
            return plan
        calls = self.calls[is_risky]
        most = calls.max()
        fewest = calls.min()
        one_of = math.ceil(most)
        n_steps = math.ceil(FEW_CALLS * one_of / fewest)
        configs = np.where(is_risky, plan.configs, current)
        others = current.copy()
        return replace(plan, configs=configs, n_steps=n_steps, one_of=one_of, others=others)


def _places(configs: Array) -> tuple[Array, Array]:
    """Where configs (s,) lie in an array (s, N_CONFIGS)."""
    slots = np.arange(len(configs))
    return slots, configs


class Turns:
    """How this job's tables take turns."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A new search: the job may have another rhythm now."""
        self.steps = TURN_STEPS  # of a turn
        self.default_ms = 0.0  # step of the default, from the last turns; 0: none were measured

    def plan(self, plan: Plan, current: Array, quads: int) -> Plan:
        """The same plan by turns with the current table (s,): so many quads. The first one does not count if an
        algorithm may be new: NCCL connects lazily. The current table takes no turns with itself."""
        if np.array_equal(plan.configs, current):
            return plan
        turns = self.steps
        size = QUAD * turns
        n_steps = size * quads
        may_connect = plan.discard > DISCARD
        discard = size if may_connect else 0
        others = current.copy()
        return replace(plan, n_steps=n_steps, discard=discard, others=others, turns=turns)


class Running:
    """What the job runs now, and which algorithms are connected."""

    def __init__(self, families: Array) -> None:
        self.turns = Turns()
        self._families = families  # (s, N_CONFIGS), see ``interfaces.Job``
        self._warm: set[int] = set()
        n_slots = len(families)
        self.configs: Array = np.zeros(n_slots, np.int64)

    def ran(self, plan: Plan, is_aborted: bool) -> None:
        """A window has ended. After one at few calls any table is another one."""
        if not is_aborted:
            ran = self._families_of(plan.configs)
            self._warm |= ran
        after = plan.others if plan.turns else plan.configs
        self.configs = np.where(plan.one_of, -1, after)

    def discard(self, configs: Array) -> int:
        """Steps that do not count after a change to these configs (s,)."""
        if np.array_equal(configs, self.configs):
            return 0
        families = self._families_of(configs)
        cold = families - self._warm
        return DISCARD + WARM_STEPS * bool(cold)

    def _families_of(self, configs: Array) -> set[int]:
        found = set[int]()
        for slot, config in enumerate(configs):
            family = int(self._families[slot, config])
            if family >= 0:
                found.add(family)
        return found


def measuring_steps(plan: Plan, step_ms: Array, limit_ms: float) -> tuple[Array, bool]:
    """The steps of a window that measure its table, and whether it was aborted because a step was too slow.

    If a table makes all steps too slow, the first or second step shows it, and none is faster than the default. A
    single long step later in the window is an outlier: it ends the window and is left out.
    """
    n_steps = len(step_ms)
    last_ms = step_ms[-1]
    has_ended = bool(last_ms > plan.limit_ms)
    is_too_slow = bool(last_ms > limit_ms)
    is_early = n_steps <= 2 and bool(step_ms[0] > limit_ms / ABORT)
    is_aborted = is_too_slow and is_early
    if is_aborted or n_steps == 1:
        return step_ms[-1:], is_aborted
    return step_ms[: n_steps - has_ended], is_aborted

"""``dynamiccl/Live-v0``: the search on a running job. The same spaces and reward as the simulator; time is real."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import pandas as pd

from ..traces.records import AUTO, TUNED_FUNCS, Decision, Slot
from ..traces.slots import SlotProfile, find_slots
from . import spaces
from .live import DISCARD, Job, Window
from .obedience import Disobeyed

DEFAULT, WARM, TRIAL = "default", "warm", "trial"
NOTHING = "the job runs no all_gather or reduce_scatter that a tuner can reach: nothing to tune"
NOT_LOADED = (
    "NCCL has not loaded the plugin in any process here, so there is nothing to tune: let the job keep the variables "
    "that begin with NCCL_ and DYNAMICCL_, and look at NCCL_DEBUG=INFO for TUNER/Plugin"
)
NOT_ASKED = (
    "NCCL runs all_gather or reduce_scatter but never asks the tuner (symmetric kernels, copy engines, another "
    "tuner): `dynamiccl doctor` names the variables that do that"
)

#: Steps that the first window of a config runs, and that are thrown away: NCCL connects an algorithm when it is first
#: used, and the first runs of some protocols are slow. The last of them is the config's canary: where it takes
#: ``spaces.GIVE_UP`` default steps, the config goes no further, and that is its measurement.
WARM_STEPS = 2


class LiveEnv(gym.Env[np.ndarray[Any, Any], np.ndarray[Any, Any]]):
    """Tune one slot of a running job.

    ## Description
    One step is one window: the decision goes into the table beside what is committed for the other slots, the job runs
    ``window_steps`` steps, and their median is compared with that of the default windows around it. One episode is the
    search on one slot.

    ## Action Space
    ``MultiDiscrete([pair, channels])``, see :mod:`dynamiccl.envs.spaces`. A masked action is run as AUTO and reported
    in ``info["masked"]``.

    ## Observation Space
    ``Box``: fingerprint, last outcome, statistics per config, mask.

    ## Starting State
    ``reset(options={"slot": Slot})`` begins that slot, without options the next one in order of its share of the step.
    The incumbent (this slot left to NCCL, the others as committed) has been measured once.

    ## Reward
    :func:`dynamiccl.envs.spaces.reward` of the measured relative step time saved.

    ## Episode End
    Truncated after ``spaces.HORIZON`` trials.

    ## Information
    ``window``, ``default`` (both :class:`dynamiccl.envs.live.Window`), ``saving`` (relative step time, against the
    default), ``decision``, ``log`` (every window that this step ran, with its kind).

    ## Arguments
    ``job``: a :class:`dynamiccl.envs.live.Job`; ``window_steps``: counted steps a window; ``profile_steps``: default
    steps that find the slots; ``min_share``: slots with a smaller share of the step are left to NCCL.

    ## Version History
    v0: first.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - gymnasium's contract

    def __init__(
        self,
        job: Job,
        window_steps: int = 4,
        profile_steps: int = 8,
        min_share: float = 0.02,
        time_scale: float = 1.0,
        funcs: Sequence[str] = TUNED_FUNCS,
    ) -> None:
        self.observation_space = spaces.observation_space()
        self.action_space = spaces.action_space()
        self.job, self.window_steps, self.profile_steps = job, window_steps, profile_steps
        self.min_share, self.time_scale, self.horizon = min_share, time_scale, spaces.HORIZON
        self.funcs = funcs
        self.on_disobeyed: Callable[[Disobeyed], object] = lambda row: None
        self.refused: dict[tuple[Slot, Decision], Disobeyed] = {}  # what NCCL does not do although it offers it
        self.profiles: list[SlotProfile] = []
        self.profile_events = pd.DataFrame()
        self.committed: dict[Slot, Decision] = {}  # what holds for the other slots
        # The windows of the current step, in order. Bounded: confirmations and the closing A/B measure without a step.
        self.log: deque[tuple[str, Window]] = deque(maxlen=8)
        self._defaults: deque[float] = deque(maxlen=2)
        self._used: set[tuple[Slot, Decision]] = set()
        self._next = 0

    # -- measuring ---------------------------------------------------------------------------------------------

    def profile(self, skip: int = 3) -> list[SlotProfile]:
        """Run default steps (the first ``skip`` of the job do not count) and find the slots."""
        self.job.take_events()
        window = self.measure(DEFAULT, {}, n_steps=self.profile_steps, discard=skip)
        events = self.job.take_events()
        if len(events):
            events = events[events["step"].isin(window.steps)]
        self.profile_events = events
        self.profiles = [
            p
            for p in find_slots(
                events,
                self.job.assembler.offers,
                window.step_ms * 1e3,
                self.job.memory_pressure,
                self.time_scale,
            )
            if p.share >= self.min_share and p.slot.func in self.funcs
        ]
        return self.profiles

    def measure(self, kind: str, decisions: dict[Slot, Decision], n_steps: int = 0, discard: int = DISCARD) -> Window:
        """One window of ``kind`` (DEFAULT, WARM or TRIAL) under ``decisions``, noted in ``self.log``."""
        limit = spaces.GIVE_UP * self.default_ms if kind == TRIAL else float("inf")
        window = self.job.window(decisions, n_steps or self.window_steps, discard, limit)
        if kind == DEFAULT:
            self._defaults.append(window.step_ms)
        for row in window.disobeyed:
            if (row.slot, row.decision) not in self.refused:
                self.refused[row.slot, row.decision] = row
                self.on_disobeyed(row)
        self.log.append((kind, window))
        return window

    def measure_pair(self, decisions: dict[Slot, Decision]) -> tuple[Window, Window]:
        """A default window and one under ``decisions``, neighbours in time; new configs are warmed up first."""
        new = {(s, d) for s, d in decisions.items() if not d.is_auto} - self._used
        if new:
            warm = self.measure(WARM, decisions, WARM_STEPS, discard=0)
            if warm.durations_ms[-1] > spaces.GIVE_UP * self.default_ms:
                canary = Window(warm.generation, warm.steps[-1:], warm.durations_ms[-1:])
                return self.measure(DEFAULT, {}), canary
            self._used |= new
        return self.measure(DEFAULT, {}), self.measure(TRIAL, decisions)

    def nothing(self) -> str:
        """Why there is no slot, and the cure."""
        seen = self.profile_events
        tuned = seen[seen["func"].isin(self.funcs)] if len(seen) else seen
        if seen.empty and not self.job.assembler.comms:
            text = self.job.state[1] if self.job.state else ""
            return f"{NOT_LOADED}; rank 0 says: {text}" if text else NOT_LOADED
        if len(tuned) and not self.job.assembler.offers:
            return NOT_ASKED
        return NOTHING

    @property
    def default_ms(self) -> float:
        """The default's step time now: mean of the last two default windows."""
        return float(np.mean(self._defaults)) if self._defaults else float("inf")

    # -- gymnasium ---------------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
        """Begin the search on a slot. Raises ValueError when the job has none."""
        super().reset(seed=seed)
        self.log.clear()
        if not self.profiles and not self.profile():
            raise ValueError(NOTHING)
        slot = (options or {}).get("slot")
        if slot is None:
            slot = self.profiles[self._next % len(self.profiles)].slot
            self._next += 1
        self._profile = next(p for p in self.profiles if p.slot == slot)
        self.committed.pop(slot, None)
        self._features = self._profile.fingerprint.vector()
        self._mask = spaces.action_mask(self._profile.fingerprint)
        self._trials = spaces.Trials.start(1)
        self._incumbent_saving = 0.0
        if any(not d.is_auto for d in self.committed.values()):
            _, window = self.measure_pair(self.committed)
            self._incumbent_saving = 1 - window.step_ms / self.default_ms
        return self._observe(), {"slot": slot, "log": list(self.log), "saving": self._incumbent_saving}

    def step(self, action: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], float, bool, bool, dict[str, Any]]:
        """Run one default window and one window of ``action``."""
        self.log.clear()
        config = int(spaces.config_index(np.asarray(action)[None])[0])
        valid = bool(spaces.config_mask(self._observe()[None])[0, config])
        decision = spaces.decision_of(action) if valid else AUTO
        default, window = self.measure_pair({**self.committed, self._profile.slot: decision})
        saving = 1 - window.step_ms / self.default_ms
        if (self._profile.slot, decision) in self.refused:  # what was measured is not this config's time
            pair, channels = map(int, np.asarray(action))
            self._mask[0, pair or spaces.N_PAIRS + channels] = False
            valid, saving = False, self._incumbent_saving
        gain = spaces.scale_saving(np.array([saving - self._incumbent_saving]), self._profile.share)
        self._trials.record(np.array([config if valid else 0]), gain)
        reward = float(spaces.reward(self._trials.means().max(axis=1), gain)[0])
        truncated = bool(self._trials.n_trials[0] >= self.horizon)
        info = {
            "slot": self._profile.slot,
            "decision": decision,
            "masked": not valid,
            "default": default,
            "window": window,
            "saving": saving,
            "log": list(self.log),
        }
        return self._observe(), reward, False, truncated, info

    def best(self) -> Decision:
        """What the search on this slot has found so far."""
        return spaces.decision_of(spaces.actions_of(self._trials.best())[0])

    def _observe(self) -> np.ndarray[Any, Any]:
        return np.asarray(spaces.observe(self._features, self._mask, self._trials)[0])


gym.register("dynamiccl/Live-v0", "dynamiccl.envs.live_env:LiveEnv", nondeterministic=True)

"""Replay of a recorded trace (``dynamiccl/Replay-v0``): the same task without the machine it ran on."""

from __future__ import annotations

import os
from typing import Any

import gymnasium as gym
import numpy as np

from ..traces.files import Trace
from ..traces.records import Slot
from . import replay, spaces

Array = np.ndarray[Any, Any]


class ReplayEnv(gym.Env[Array, Array]):
    """Search for the best NCCL decision of a slot of a recorded job (``dynamiccl/Replay-v0``).

    ## Description
    One episode is the search on one slot. A config that the trace measured answers with its recorded windows, one
    after the other and round again; any other with the prediction of a model fitted to the trace, plus the trace's own
    noise. ``info["measured"]`` says which it was.

    ## Action Space
    ``MultiDiscrete([pair, channels])``, see :mod:`dynamiccl.envs.spaces`. A masked action runs as AUTO and is
    reported in ``info["refused"]``.

    ## Observation Space
    ``Box(-4, 4, (N_OBSERVATION,), float32)``: fingerprint, last outcome, statistics per config, mask.

    ## Rewards
    :func:`dynamiccl.envs.spaces.reward` of the mean savings, measured or predicted.

    ## Starting State
    ``reset(options={"slot": Slot})`` begins that slot, without options the next one in order of its share of the
    step. AUTO counts as measured once with saving 0.

    ## Episode End
    Truncated after ``horizon`` windows; never terminated.

    ## Arguments
    ``trace``: a folder, or a :class:`dynamiccl.traces.files.Trace`; ``min_share``: slots with a smaller share of the
    step are left out. Raises TraceError when the trace cannot be read or holds nothing to tune.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - gymnasium's contract

    def __init__(
        self, trace: Trace | str | os.PathLike[str], min_share: float = 0.01, horizon: int = spaces.HORIZON
    ) -> None:
        self.recorded = replay.load(trace if isinstance(trace, Trace) else Trace.read(trace), min_share)
        self.observation_space, self.action_space = spaces.observation_space(), spaces.action_space()
        self.horizon = horizon
        self._next = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Begin the search on a slot. Raises ValueError for a slot that the trace does not have."""
        super().reset(seed=seed)
        slot: Slot | None = (options or {}).get("slot")
        if seed is not None:
            self._next = 0
        if slot is None:
            self._row = self._next % len(self.recorded.slots)
            self._next += 1
        elif slot in self.recorded.slots:
            self._row = self.recorded.slots.index(slot)
        else:
            raise ValueError(f"the trace has no slot {slot}; it has {', '.join(map(str, self.recorded.slots))}")
        self._trials = spaces.Trials.start(1)
        self._played: dict[int, int] = {}
        return self._observe(), {"slot": self.recorded.slots[self._row], "oracle_saving": self._oracle()}

    def _oracle(self) -> float:
        return float(self.recorded.truth[self._row].max())

    def _observe(self) -> Array:
        rows = slice(self._row, self._row + 1)
        return np.asarray(spaces.observe(self.recorded.features[rows], self.recorded.mask[rows], self._trials)[0])

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """One window."""
        r, row = self.recorded, self._row
        config = int(spaces.config_index(np.asarray(action, np.int64).reshape(1, 2))[0])
        refused = not np.isfinite(r.truth[row, config])
        config = 0 if refused else config
        runs = r.windows[row].get(config)
        if runs:
            k = self._played.get(config, 0)
            self._played[config] = k + 1
            seen = np.array([runs[k % len(runs)]])
        else:
            noise = self.np_random.standard_t(4) / np.sqrt(2.0) * r.noise[row]
            seen = spaces.scale_saving(np.array([r.truth[row, config] * r.share[row] + noise]), r.share[row])
        self._trials.record(np.array([config]), seen)
        best = r.truth[row, self._trials.best()]
        reward = float(spaces.reward(best, r.truth[row, config])[0])
        info = {
            "slot": r.slots[row],
            "config": config,
            "refused": refused,
            "measured": bool(r.measured[row, config]),
            "saving": float(seen[0]),
            "expected_saving": float(r.truth[row, config]),
            "oracle_saving": self._oracle(),
        }
        return self._observe(), reward, False, bool(self._trials.n_trials[0] >= self.horizon), info


gym.register("dynamiccl/Replay-v0", "dynamiccl.envs.replay_env:ReplayEnv")

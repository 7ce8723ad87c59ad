"""How long a job's steps take, and which of them are pauses of the job's own: a checkpoint, an evaluation."""

from __future__ import annotations

from collections import deque

import numpy as np

#: A pause (checkpoint, evaluation) is a step that takes so many times what most before it took, and so long.
PAUSE_TIMES, PAUSE_STEP_S, PAUSE_S = 20, 1.0, 5.0
_OFTEN = 0.8  # a fifth of the steps that are longer are the job's rhythm


class Rhythm:
    """How long a job's steps take."""

    def __init__(self) -> None:
        self._durations: deque[float] = deque(maxlen=50)

    @property
    def pause_ms(self) -> float:
        """A longer step is a pause."""
        known = float(np.quantile(self._durations, _OFTEN)) if len(self._durations) >= 3 else float("inf")
        return max(PAUSE_STEP_S * 1e3, PAUSE_TIMES * known)

    @property
    def silence_s(self) -> float:
        """After so long without a step the job pauses."""
        return max(PAUSE_S, self.pause_ms / 1e3) if self._durations else float("inf")

    def note(self, took_ms: float) -> bool:
        """A step was taken; whether it was a pause."""
        is_pause = took_ms > self.pause_ms
        self._durations.append(took_ms)
        return is_pause

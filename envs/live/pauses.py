"""Which steps of a job count in a window: those under its table, without the pauses that a job makes of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...traces.reasons import Happened, Why

#: So many steps in a row under another table, and the table of a window has ended. A communicator that is used in few
#: steps comes to a new table later than the others: such a step alone is left out.
ODD_STEPS = 3
#: A trial of which no step was seen for so long has come and gone between two steps, in an evaluation say.
UNSEEN_S = 30.0
#: A pause (checkpoint, evaluation) is a step that takes so many times what most before it took, and so long.
PAUSE_TIMES, PAUSE_STEP_S, PAUSE_S = 20, 1.0, 5.0
_OFTEN = 0.8  # a fifth of the steps that are longer are the job's rhythm


@dataclass(frozen=True)
class Cut:
    """Why a try at a window was cut short, and the step in which it was; ``took_ms`` 0: the job did not pause."""

    why: Why
    step: int = 0
    took_ms: float = 0.0
    is_fatal: bool = False  # the ranks have ended in a trial of these rows: they do not run again


class Rhythm:
    """How long a job's steps take."""

    def __init__(self) -> None:
        self.pauses = 0  # under confirmed tables
        self._durations: deque[float] = deque(maxlen=50)

    @property
    def has_pauses(self) -> bool:
        """The job makes pauses of its own (rollouts, evaluations): two were seen under confirmed tables."""
        return self.pauses >= 2

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


@dataclass
class Attempt:
    """One try at a window of ``n_steps`` counted steps under one table, of which the first ``discard`` do not count."""

    generation: int
    is_trial: bool
    n_steps: int
    discard: int
    counted: dict[int, float]  # duration in ms by step, those of the tries before included
    rhythm: Rhythm
    is_few: bool = False  # the table holds at few calls: others answer in the same steps
    seen: int = 0  # steps under the table
    odd: int = 0  # steps in a row under another one
    newest_ms: float = 0.0

    def add(self, step: Any, passed_s: float) -> Cut | None:
        """A STEP record of rank 0, so long after the try began; what cuts the try short."""
        took = float(step["duration_ns"]) / 1e6
        is_pause = self.rhythm.note(took)
        if int(step["trial" if self.is_few else "generation"]) != self.generation:
            self.odd += 1
            was_there = self.seen or (self.is_trial and passed_s > UNSEEN_S)
            return Cut(Happened.TABLE_ENDED()) if self.odd >= ODD_STEPS and was_there else None
        self.seen, self.odd = self.seen + 1, 0
        if is_pause:
            return Cut(Happened.LONG_STEP(seconds=took / 1e3), int(step["step"]), took)
        if self.seen > self.discard and not self.is_whole:
            self.counted[int(step["step"])] = self.newest_ms = took
        return None

    @property
    def is_whole(self) -> bool:
        """All steps were counted."""
        return len(self.counted) >= self.n_steps


@dataclass
class LastRound(Attempt):
    """The round after turns. It is over once rank 0 says that they were steady, at the latest with its first step."""

    lease: int = 0  # generation of the last turns
    steady: Collection[int] = ()  # generations whose turns were

    @property
    def is_whole(self) -> bool:
        """Nothing more will be heard."""
        return self.lease in self.steady or super().is_whole

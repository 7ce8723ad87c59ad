"""Two tables take turns in a running job: the trial's turns and the current table's, step by step, in short leases.

A lease is one agreed trial. All that it needs was decided when it began, so it goes on without a message; each new one
finds out anew where the job's steps end. A step counts for a table only if that table answered all of it. Where a
communicator is without rank 0, a lease counts only if the round after it has shown that its steps were alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...traces.reasons import Happened
from ...traces.records import FLAG_WHOLE
from .obedience import Disobeyed
from .pauses import ODD_STEPS, UNSEEN_S, Cut, Rhythm

Array = np.ndarray[Any, Any]

#: Steps of a lease, or four times those that go by until one begins.
LEASE_STEPS, LEASE_ROUNDS = 32, 4
#: So many tries in a row without a rhythm, and the job takes no turns.
MOST_FAILED = 2
#: Steps that are waited for after one of them, as an evaluation may have been in the way: four alike are a rhythm.
ALIKE_STEPS = 5
CURRENT, TRIAL, NOBODY = 0, 1, -1


@dataclass(frozen=True)
class Turns:
    """Steps in which two tables took turns, in order, as rank 0 measured them; shape (k,) each.

    ``arms``: CURRENT or TRIAL by the table that ran, NOBODY where the step counts for none. Quads of steps lie in one
    lease each.
    """

    generations: tuple[int, ...]  # of the leases
    steps: Array  # step numbers
    durations_ms: Array
    arms: Array
    disobeyed: tuple[Disobeyed, ...] = ()  # rows of the table that NCCL did not follow

    @property
    def generation(self) -> int:
        """Of the last lease."""
        return self.generations[-1]

    @property
    def step_ms(self) -> float:
        """Median step time under the trial's table."""
        return float(np.median(self.durations_ms[self.arms == TRIAL]))

    @property
    def current_ms(self) -> float:
        """Median step under the current table."""
        return float(np.median(self.durations_ms[self.arms == CURRENT]))

    @property
    def has_both(self) -> bool:
        """Whether steps of both tables count."""
        return bool((self.arms == TRIAL).any() and (self.arms == CURRENT).any())


@dataclass
class Lease:
    """One lease under way. ``quad``: its steps of a quad; fewer at its end count for nobody."""

    generation: int
    n_steps: int
    quad: int
    rhythm: Rhythm
    discard: int = 0  # its first steps, which are not looked at
    waited: int = 0  # steps until its first
    seen: int = 0
    odd: int = 0  # steps in a row that count for nobody
    newest_ms: float = 0.0  # of the trial's steps
    is_fatal: bool = False  # the ranks have ended in such turns: they do not run again
    is_given_up: bool = False  # a step of the trial was too slow: steps of a part of a quad are kept, too
    steps: list[int] = field(default_factory=list)
    durations_ms: list[float] = field(default_factory=list)
    arms: list[int] = field(default_factory=list)

    def add(self, step: Any, passed_s: float) -> Cut | None:
        """A STEP record of rank 0, so long after the lease was published; what ends the lease early."""
        if self.is_whole:
            return None
        took = float(step["duration_ns"]) / 1e6
        is_pause = self.rhythm.note(took)
        if int(step["trial"]) != self.generation:
            self.waited += self.seen == 0
            is_over = self.seen > 0 or passed_s > UNSEEN_S
            return Cut(Happened.TRIAL_ENDED()) if is_over else None
        self.seen += 1
        arm = int(int(step["generation"]) == self.generation)
        if is_pause or not int(step["flags"]) & FLAG_WHOLE:
            arm = NOBODY
        self.steps.append(int(step["step"]))
        self.durations_ms.append(took)
        self.arms.append(arm)
        if arm == TRIAL and self.seen > self.discard:
            self.newest_ms = took
        self.odd = self.odd + 1 if arm == NOBODY else 0
        return Cut(Happened.STEPS_DIFFER()) if self.odd >= ODD_STEPS else None

    @property
    def is_whole(self) -> bool:
        """All its steps were seen."""
        return self.seen >= self.n_steps

    @property
    def n_kept(self) -> int:
        """Steps in whole quads; all of them if the last one was too slow."""
        n_steps = len(self.steps)
        return n_steps if self.is_given_up else n_steps // self.quad * self.quad


def lease_steps(remaining: int, waited: int, quad: int) -> int:
    """Steps of the next lease, in whole quads, given what is wanted still and how long the last one was waited for."""
    steps = min(remaining, max(LEASE_STEPS, LEASE_ROUNDS * waited))
    return quad * math.ceil(steps / quad)


def together(leases: Sequence[Lease], steady: set[int], discard: int, last: int) -> Turns:
    """The steps of all leases: the first ``discard`` are left out, at most ``last`` kept. Those of a lease whose ranks
    did not keep their rhythm count for nobody."""
    steps: list[int] = []
    durations: list[float] = []
    arms: list[int] = []
    for lease in leases:
        n = lease.n_kept
        is_steady = lease.generation in steady
        steps += lease.steps[:n]
        durations += lease.durations_ms[:n]
        arms += lease.arms[:n] if is_steady else [NOBODY] * n
    kept = slice(discard, discard + last)
    generations = tuple(lease.generation for lease in leases)
    return Turns(
        generations, np.array(steps[kept]), np.array(durations[kept]), np.array(arms[kept], np.int64)
    )

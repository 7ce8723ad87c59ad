"""Steps of a running job as they are asked for, and which of them count for which table.

A *lease* is one published table whose steps are looked at. A step counts if one table answered all of it; where a
communicator lacks rank 0, only once the round after it has shown that its steps were alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...traces.records import FLAG_WHOLE
from ..search.config import LONG_TURN_STEPS
from ..search.interfaces import QUAD
from .obedience import Disobeyed
from .pauses import Rhythm

Array = np.ndarray[Any, Any]

#: Steps of a lease in turns of agreed steps, or four times those that go by until one begins.
LEASE_STEPS, LEASE_ROUNDS = 32, 4
#: So many steps in a row that count for nobody, and the ranks have lost their rhythm: the next lease finds it anew.
ODD_STEPS = 3
#: A trial of which no step was seen for so long has come and gone between two steps, in an evaluation say.
UNSEEN_S = 30.0
#: So many tries in a row without a rhythm, and the job goes on in long turns.
MOST_FAILED = 2
#: So many tries in a row in long turns of which no quad counts, and nothing is tuned for a while.
MOST_UNEVEN = 6
#: Steps that are waited for after one of them, as an evaluation may have been in the way: four alike are a rhythm.
ALIKE_STEPS = 5
#: A long turn is so many steps longer than what counts of it: a table changes within a step, the next one still has
#: collectives of the table before, and communicators without rank 0 may change in the one before or after. Doubled
#: after a lease in which a turn came out too short, up to the second.
SPARE_STEPS, MOST_SPARE_STEPS = 3, 16
#: So many steps of a trial in a row that look like pauses of the job's are the table's doing.
MOST_PAUSED = 2
CURRENT, TRIAL, NOBODY = 0, 1, -1


@dataclass(frozen=True)
class Turns:
    """Steps in which two tables took turns, in order, as rank 0 measured them; shape (k,) each.

    ``arms``: CURRENT or TRIAL by the table that ran, NOBODY where the step counts for none. Quads of turns of
    ``turn_steps`` steps each lie in one lease each; long ones have only steps that count.
    """

    generations: tuple[int, ...]  # of the leases
    steps: Array  # step numbers
    durations_ms: Array
    arms: Array
    turn_steps: int = 1
    others: int = 0  # the other steps of the leases, which are not among these, and their time
    others_ms: float = 0.0
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
    """The steps of one published table, as they come. Without ``turn_steps`` it holds alone: to stay, or at few calls.

    A pause of the job's is a step that counts for nobody.
    """

    generation: int
    n_steps: int  # to be seen, pauses and all; where the table holds alone: to be counted
    rhythm: Rhythm
    discard: int = 0  # its first steps, which do not count or are not looked at
    is_trial: bool = False
    turn_steps: int = 0  # that count, of a turn
    waited: int = 0  # steps until its first
    seen: int = 0
    odd: int = 0  # steps in a row that count for nobody
    paused: int = 0  # steps of the trial in a row that look like pauses
    newest_ms: float = 0.0  # of the steps that count for its table
    is_over: bool = False  # no more steps of it come
    is_fatal: bool = False  # the ranks have ended in such a trial: it does not run again
    is_given_up: bool = False  # a step of its table was too slow: all steps are kept
    steps: list[int] = field(default_factory=list)
    durations_ms: list[float] = field(default_factory=list)
    arms: list[int] = field(default_factory=list)

    def add(self, step: Any, passed_s: float) -> None:
        """A STEP record of rank 0, so long after the table was published."""
        if self.is_whole:
            return
        took = float(step["duration_ns"]) / 1e6
        is_pause = self.rhythm.note(took)
        if int(step["trial" if self.is_trial else "generation"]) != self.generation:
            self.waited += self.seen == 0
            self.is_over = self.is_trial and (self.seen > 0 or passed_s > UNSEEN_S)
            return
        self.seen += 1
        if self.turn_steps or self.seen > self.discard:
            self._take(step, took, self._arm(step, is_pause))

    def _take(self, step: Any, took_ms: float, arm: int) -> None:
        """Keep a step of this lease."""
        # The first step of a long turn may still have some of the table before.
        is_mixed = self.is_long and self.arms[-1:] != [arm]
        self.steps.append(int(step["step"]))
        self.durations_ms.append(took_ms)
        self.arms.append(arm)
        if arm == TRIAL and self.seen > self.discard and not is_mixed:
            self.newest_ms = took_ms
        self.odd = self.odd + 1 if arm == NOBODY else 0
        # Long turns end at any place: whole turns may count for nobody.
        self.is_over = bool(self.turn_steps) and not self.is_long and self.odd >= ODD_STEPS

    def _arm(self, step: Any, is_pause: bool) -> int:
        """The table that the step counts for."""
        is_own = int(step["generation"]) == self.generation or not self.turn_steps
        if self.turn_steps and not int(step["flags"]) & FLAG_WHOLE:
            return NOBODY
        if is_own:
            self.paused = (self.paused + 1) * is_pause
        is_its_doing = is_own and self.is_trial and self.paused >= MOST_PAUSED
        if is_pause and not is_its_doing:
            return NOBODY
        return TRIAL if is_own else CURRENT

    @property
    def is_long(self) -> bool:
        """Whether its turns are long."""
        return self.turn_steps >= LONG_TURN_STEPS

    @property
    def is_whole(self) -> bool:
        """All its steps were seen."""
        if self.is_over:
            return True
        if not self.turn_steps:
            return self.arms.count(TRIAL) >= self.n_steps
        # In steps nobody knows how long long turns are; one that lasts and lasts has a communicator that rests.
        return self.seen >= (2 * self.n_steps if self.is_long else self.n_steps)

    @property
    def kept(self) -> list[int]:
        """Which of its steps are kept: whole quads; all of them if the last one was too slow."""
        n_steps = len(self.steps)
        if not self.turn_steps:
            return [at for at in range(n_steps) if self.arms[at] == TRIAL]
        if self.is_given_up:
            return [*range(n_steps)]
        if self.is_long:
            return self._long_quad()
        quad = QUAD * self.turn_steps
        return [*range(n_steps // quad * quad)]

    def _long_quad(self) -> list[int]:
        """The middle of the steps of each turn that count; none if it has too few. Its two middle turns are one."""
        count = [at for at, arm in enumerate(self.arms) if arm != NOBODY]
        runs = [[*run] for _, run in itertools.groupby(count, lambda at: self.arms[at])]
        wanted = [self.turn_steps, 2 * self.turn_steps, self.turn_steps]
        if len(runs) != len(wanted):
            return []
        kept: list[int] = []
        for run, n in zip(runs, wanted, strict=True):
            if len(run) < n:
                return []
            begin = (len(run) - n + 1) // 2
            kept += run[begin : begin + n]
        return kept


def lease_steps(remaining: int, waited: int, quad: int) -> int:
    """Steps of the next lease, in whole quads, given what is wanted still and how long the last one was waited for."""
    steps = min(remaining, max(LEASE_STEPS, LEASE_ROUNDS * waited))
    return quad * math.ceil(steps / quad)


def together(
    leases: Sequence[Lease], steady: set[int], discard: int, last: int, failed: Sequence[Lease] = ()
) -> Turns:
    """The steps of all leases: the first ``discard`` are left out, at most ``last`` kept. Those of a lease whose ranks
    did not keep their rhythm count for nobody. ``failed``: leases before them of which no step is kept."""
    steps: list[int] = []
    durations: list[float] = []
    arms: list[int] = []
    for lease in leases:
        kept = lease.kept
        is_steady = lease.generation in steady
        steps += [lease.steps[at] for at in kept]
        durations += [lease.durations_ms[at] for at in kept]
        arms += [lease.arms[at] if is_steady else NOBODY for at in kept]
    kept_steps = slice(discard, discard + last)
    seen_ms = [ms for lease in (*failed, *leases) for ms in lease.durations_ms]
    kept_ms = np.array(durations[kept_steps])
    return Turns(
        tuple(lease.generation for lease in leases),
        np.array(steps[kept_steps]),
        kept_ms,
        np.array(arms[kept_steps], np.int64),
        leases[-1].turn_steps,
        len(seen_ms) - len(kept_ms),
        sum(seen_ms) - float(kept_ms.sum()),
    )

"""Which steps take kernel times: as many as cost the job no more than BUDGET, by what sampled steps take."""

from __future__ import annotations

from collections import deque
from statistics import median

#: Share of the job's time that taking kernel times may cost.
BUDGET = 0.005
#: One step of so many: at the start, at most and at least. Powers of two, so that ranks that come to different answers
#: still have steps in common: the rarer rank's steps are a part of the other's.
START, MOST_OFTEN, LEAST_OFTEN = 8, 4, 128
#: Sampled steps that are looked at for each answer. The odd step, a checkpoint say, does not move a median.
EVIDENCE = 16


class Sampling:
    """Decides for one rank. ``fixed`` is the user's word instead: one step of so many, 0 = never."""

    def __init__(self, fixed: int | None = None) -> None:
        self.every = START if fixed is None else fixed
        self._adapts = fixed is None
        self._last: deque[tuple[bool, int, int]] = deque(maxlen=3)  # sampled, duration, generation
        self._costs: deque[float] = deque(maxlen=4 * EVIDENCE)
        self._fresh = 0

    def wants(self, step: int, block: int = 0) -> bool:
        """Whether ``step`` is one of those with kernel times; a function of `every`, the step and the block alone.

        ``block``: number of its block of turns, 0: none. A block of turns is sampled whole or not at all: every 4th
        step has the same place in A B B A, so its cost would fall on one table.
        """
        return self.every > 0 and (block or step) % self.every == 0

    def ended(self, sampled: bool, duration_ns: int, generation: int) -> None:
        """A step has ended. Call it for every step, in order."""
        if not self._adapts:
            return
        last = self._last
        last.append((sampled, duration_ns, generation))
        if sampled or len(last) < 3 or not last[1][0] or last[0][0]:
            return
        (_, before, g0), (_, during, g1), (_, after, g2) = last
        if g0 == g1 == g2 and before + after > 0:  # under one table, or it would be the table's cost
            self._costs.append(2 * during / (before + after) - 1)
            self._fresh += 1
        if self._fresh >= EVIDENCE:
            self._fresh = 0
            self.every = share(list(self._costs))


def share(costs: list[float]) -> int:
    """One step of how many may be sampled, given the relative cost of each sampled step beside its neighbours.

    The cost is taken as the median plus two of its standard errors (from the median absolute deviation, as for normal
    noise): where little is known, less is sampled.
    """
    middle = median(costs)
    error = 1.2533 * 1.4826 * median(abs(c - middle) for c in costs) / len(costs) ** 0.5
    every = MOST_OFTEN
    while every < LEAST_OFTEN and (middle + 2 * error) / every > BUDGET:
        every *= 2
    return every

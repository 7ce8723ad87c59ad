"""How fast a rank issues collectives: what turns a time, or some steps, into a number of calls."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

#: Samples are kept so long, and taken no more often than this.
_KEPT_S, _EVERY_S = 10.0, 0.1
#: The least distance of a limit: of a communicator in use, and of one that rests and may begin any moment.
_LEAST, _RESTING = 2, 64
#: Half a second is enough for the store to answer, as are two steps; a round beyond the last of these is its fault.
_HALF_S, _STEPS, _MOST_S = 0.5, 2.0, 5.0
_REQUESTS = 6  # of a rank to the store in a round


class _Sample(NamedTuple):
    at_s: float
    steps: int
    counts: Mapping[int, int]


class Pace:
    """Counts of a rank's communicators over the last seconds."""

    def __init__(self, first_s: float = 0.0) -> None:
        """``first_s``: how long a round lasts at least, by the times between looks; before any was measured."""
        self._samples: deque[_Sample] = deque()
        self._round_s: deque[float] = deque([first_s], maxlen=8)
        self._whole_s: deque[float] = deque([first_s], maxlen=8)  # those with all votes that were expected
        self._caution = 1.0  # grows with every round in which a call was held

    def is_due(self) -> bool:
        """Whether the last sample is old enough for another."""
        if not self._samples:
            return True
        age_s = time.monotonic() - self._samples[-1].at_s
        return age_s >= _EVERY_S

    def sample(self, steps: int, counts: Mapping[int, int]) -> None:
        """Note what was counted so far; ``steps`` are those of this rank."""
        now = time.monotonic()
        samples = self._samples
        samples.append(_Sample(now, steps, dict(counts)))
        while now - samples[0].at_s > _KEPT_S and len(samples) > 2:
            samples.popleft()

    def round_took(self, seconds: float, held: bool, is_whole: bool = True) -> None:
        """A round is over; ``held``: a call of this rank came to its limit before the decision was known.

        ``is_whole``: rank 0 has had all votes that it expected; else it has waited as long as it waits.
        """
        self._round_s.append(min(seconds, _MOST_S))
        if is_whole:
            self._whole_s.append(min(seconds, _MOST_S))
        if held:
            self._caution = min(self._caution * 2, 64.0)
        else:
            self._caution = max(self._caution / 2, 1.0)

    @property
    def round_s(self) -> float:
        """The longest of the last rounds, but for what was the store's fault."""
        return max(self._round_s)

    def again_s(self, least_s: float, answer_s: float) -> float:
        """How long a round waits that is led again for who lacks what stays: as long as two whole rounds took.

        ``least_s`` and the time for the requests at least. How long rank 0 has waited in vain does not count.
        """
        two_rounds_s = min(2 * max(self._whole_s), _MOST_S)
        return max(least_s + self.requests_s(answer_s), two_rounds_s)

    @staticmethod
    def requests_s(answer_s: float) -> float:
        """How long a rank's requests in a round take, if the store answers in ``answer_s``."""
        return min(_REQUESTS * answer_s, _MOST_S)

    def calls_a_step(self, comm: int) -> float:
        """Collectives of a communicator in a step; 0 where no step was seen."""
        first, last = self._ends(comm)
        steps = last.steps - first.steps
        if steps <= 0:
            return 0.0
        calls = last.counts[comm] - first.counts[comm]
        return calls / steps

    def distance(self, comm: int, answer_s: float, spread_s: float = 0.0, rhythm: int = 0) -> int:
        """How many calls ahead a limit is: two rounds as they last, half a second or two steps, one step at least.

        ``answer_s``: how long the store took to answer in this round. ``spread_s``: another rank may hear of the round
        so much later. ``rhythm``: the last steps had so many calls each, 0: they differed.
        """
        pairs = pairwise(self._samples)
        rates = [self._rate(comm, before, after) for before, after in pairs]
        busiest = max(rates, default=0.0)
        if not busiest and rhythm and rates:  # it is new, or a step lasts longer than samples are kept
            busiest = rhythm * self._steps_a_second()
            if not busiest:
                return 2 * rhythm + _LEAST
        if not busiest:
            return _RESTING
        a_step = max(self.calls_a_step(comm), rhythm)
        round_s = max(self.round_s, self.requests_s(answer_s))
        two_steps_s = _STEPS * self._step_s()
        least_s = min(_HALF_S, two_steps_s)
        ahead_s = max(2 * round_s, least_s) + spread_s
        ahead_s *= self._caution
        calls = max(a_step, busiest * ahead_s)
        return math.ceil(calls) + _LEAST

    def _steps_a_second(self) -> float:
        """In the busiest time between two samples."""
        rates = list[float]()
        for before, after in pairwise(list(self._samples)):
            steps = after.steps - before.steps
            rates.append(steps / _between_s(before, after))
        return max(rates, default=0.0)

    def _step_s(self) -> float:
        """How long a step lasts; infinity where none was seen."""
        first = self._samples[0]
        last = self._samples[-1]
        steps = last.steps - first.steps
        seconds = last.at_s - first.at_s
        return seconds / steps if steps > 0 else math.inf

    def _ends(self, comm: int) -> tuple[_Sample, _Sample]:
        known = [sample for sample in self._samples if comm in sample.counts]
        if known:
            return known[0], known[-1]
        nothing = _Sample(0.0, 0, {comm: 0})
        return nothing, nothing

    @staticmethod
    def _rate(comm: int, before: _Sample, after: _Sample) -> float:
        count = after.counts.get(comm, 0)
        made = count - before.counts.get(comm, count)
        return made / _between_s(before, after)


def _between_s(before: _Sample, after: _Sample) -> float:
    """Seconds between two samples, never 0."""
    passed = after.at_s - before.at_s
    return max(passed, 1e-3)

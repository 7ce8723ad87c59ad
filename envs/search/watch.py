"""After the verdict: is the table still worth having, and is the job still the one that was tuned?"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from .sequential import Race

#: What a window after the verdict may say: the table is slower than the default; the job has changed for good.
HARMFUL, CHANGED = "harmful", "changed"
#: Windows by which the usual step time goes, and so many odd ones running are a change; fewer of LONG steps and more.
USUAL, ODD, ODD_LONG, LONG = 64, 6, 4, 8
#: A window is odd so many standard deviations from the usual.
FAR = 3.0
#: The usual is worked out anew so often.
FRESH = 4
#: Level of a single pair that is taken as proof by itself, where the default is so much faster (log).
AT_ONCE, PLAIN = 1e-3, 0.08
#: Level of all scheduled pairs of a watch together: it goes on for as long as the job does.
ALL = 0.01
#: Steps that a visit to the default costs beside its window: there and back.
SWITCHES = 8
#: The longest time between two scheduled visits, in usual ones. They come EARLY times as often until they show that the
#: table gains, for it may have been confirmed by luck. A table that gains nothing in PROOF visits is taken back.
LONGEST, EARLY, PROOF = 8, 16, 6
#: A table that is slower than the default by so much (log) is looked into at once, and then gone without one more
#: window; and the least gain that a look is taken to cost.
HARM, SMALL = 0.12, 0.05
#: Standard deviations of a pair by which a table that has become slower has to be slower than the default.
SURE = 2.5
#: Levels of the step time (log) within which a job is at the same pace.
SAME_LEVEL = 0.015


@dataclass
class Milestones:
    """When what happened, in optimizer steps since the job's first; -1: it has not."""

    first_gain: int = -1  # a gain was confirmed
    verdict: int = -1
    canaries: int = 0  # windows given up
    reopened: int = 0
    returned: int = 0  # of them, into regimes that were tuned before
    fruitless: int = 0  # searches running that left no table, or one that was taken back
    dropped: int = 0  # tables taken back after the verdict
    refined: int = 0  # slots changed for the better after it

    def gained(self, now: int) -> None:
        """A gain was confirmed."""
        self.first_gain = now if self.first_gain < 0 else self.first_gain


@dataclass(frozen=True)
class SearchConfig:
    """How a search is run; steps are optimizer steps."""

    profile_steps: int = 8
    window_steps: tuple[int, int] = (5, 10)  # least and most counted steps of a window
    good_noise: float = 0.004  # standard deviation of a window's log step time that is good enough
    rounds: int = 20  # windows that the policy may ask for, at most ...
    rounds_a_slot: int = 3  # ... or so many a slot, where that is more
    pairs: int = 10  # of one comparison, at most ...
    pairs_again: int = 4  # ... and of one with a table that is confirmed already
    pairs_long_steps: int = (
        400  # after so many pairs a table is rejected whose long steps may cost what it gains
    )
    comparisons: int = 4  # of one search, at most
    least_gain: float = 0.001  # part of the step below which a table is not worth a comparison
    trials: int = 250  # windows after the verdict that may try a slot otherwise, beside the table in force
    passes: int = 2  # rounds over the slots in which a policy tries nothing that end the trials
    reveal: float = 0.5  # noise that a trial is judged by beforehand, in windows: it will not be the last
    budget: float = 0.05  # part of the job's time that the search may lose against the default
    watch_share: float = (
        0.008  # of the later steps that may run the default, once it shows that the table gains
    )
    change: float = 0.03  # lasting change of the step time that begins a new search


@dataclass(frozen=True)
class Change:
    """How a job changed, as a watch saw it: logs of step times under the table."""

    levels: Sequence[float] = ()  # all that it was seen at before
    level: float | None = None  # what it came to; None: unknown
    moved: float | None = None  # by how much
    is_other: bool = False  # a regime that came back, and its table does not do there what it did


class Watch:
    """Sees a window after the other. ``noise``: standard deviation of a window's log step time.

    The default is looked at where that is worth its price. On schedule: often until these visits show that the table
    gains, then ever less while nothing speaks against it. Out of turn: where the table has become so slow that, going
    by what it gained, the job has lost what a look costs; the price doubles with every look that the table survives. A
    table that seems but a little slower than the default is seen once more: the job may have changed its pace between
    the two. A level that the job was seen at before, as one with two paces has, is no change.
    """

    def __init__(
        self,
        noise: float,
        window_steps: int,
        rules: SearchConfig,
        has_table: bool,
        now: int,
        gain: tuple[float, int] = (0.0, 0),
        levels: Sequence[float] = (),
    ) -> None:
        """``gain``: mean log ratio of the default's step to the table's as it was confirmed, and the pairs that it is
        the mean of; ``levels``: logs of step times that the job had under this table before."""
        self.noise, self.rules, self.has_table = noise, rules, has_table
        self.steps, self.visit = window_steps, window_steps + SWITCHES
        self.since, self.check = now, False
        self.base = self.visit / rules.watch_share
        self.gap = self.early = self.base / EARLY
        self.gain, self.pairs = gain
        self.levels = list(levels)
        self.race = Race(noise * math.sqrt(2), ALL)
        self.innocent = 0  # looks out of turn that the table survived
        self._harm = 0.0  # default steps that the job may have lost by the table's doing
        self._calm = 0  # windows as usual since the last of those looks
        self._default: float | None = None  # waits for the window under the table that follows
        self._accused: float | None = (
            None  # as well: the default, beside which the last windows of the table were slow
        )
        self._usual: deque[float] = deque(maxlen=USUAL)
        self._figures: tuple[float, float] | None = None  # what _as_usual says
        self.change = Change()  # what CHANGED means
        self._odd: list[float] = []

    def begin_with(self, default_ms: float) -> None:
        """A window of the default has just been measured: the table's first one is set against it."""
        self._default = math.log(default_ms)

    def wants_default(self, now: int) -> bool:
        """Whether the next window is the default's, given the steps so far."""
        return self.has_table and (self.check or now - self.since >= self.gap)

    def saw(self, ms: float, is_default: bool, now: int, least_ms: float | None = None) -> str:
        """One window; HARMFUL, CHANGED or nothing. ``least_ms``: what nearly all of its steps took at least: stragglers
        are no fault of a table, under which all steps are slow."""
        log = math.log(ms)
        if is_default:
            asked, self.since, self.check = self.check, now, False
            if not self._usual:
                return ""
            return self._asked(log) if asked and self._odd else self._scheduled(log)
        accused, self._accused = self._accused, None
        if accused is not None:
            if log - accused > self._slower(1):
                return HARMFUL
            self._acquit()
        default, self._default = self._default, None
        if default is not None and self.has_table:
            if self._is_plain(default - log):
                return HARMFUL
            if self.pairs and abs(default - log - self.gain) > max(self.rules.change, 2 * SURE * self.noise):
                self.change = Change(is_other=True)
                return CHANGED
        return self._level(log, log if least_ms is None else math.log(least_ms))

    @property
    def is_uneasy(self) -> bool:
        """The last windows were odd: no time to try anything."""
        return bool(self._odd) or self.check

    @property
    def price(self) -> float:
        """Default steps that a look out of turn has to be worth: what the default costs the job meanwhile, but no more
        than what a window of HARM costs."""
        return min(self.visit * max(self.gain, SMALL), self.steps * HARM) * 2**self.innocent

    def _scheduled(self, default: float) -> str:
        ahead = default - (self._odd[-1] if self._odd else self._usual[-1])
        self.race.logs.append(ahead)
        self.gain = (self.gain * self.pairs + ahead) / (self.pairs + 1)
        self.pairs += 1
        if self.race.interval[0] > 0:
            is_usual = ahead > 0 and self.gap >= self.base
            self.gap = min(2 * self.gap, LONGEST * self.base) if is_usual else self.base
        is_worthless = self.race.n >= PROOF and self.race.mean <= 0
        return HARMFUL if is_worthless or self._is_plain(ahead) else ""

    def _is_plain(self, ahead: float) -> bool:
        """One pair of windows is proof by itself."""
        at_once = Race(self.race.noise, AT_ONCE, [ahead])
        return at_once.interval[1] < 0 and ahead < -PLAIN

    def _asked(self, default: float) -> str:
        """A look out of turn, after odd windows: is it the table that is slow, or all that the job does?"""
        table, middle = sum(self._odd) / len(self._odd), self._as_usual()[0]
        is_fault = (
            default - middle - self.gain < (table - middle) / 2
        )  # the default is nearer to where it was
        if not is_fault or table - default < self._slower(len(self._odd)):
            self._acquit()
        elif table - default > HARM:
            return HARMFUL
        else:  # the job itself may have changed its pace just before the default's window
            self._accused = default
        return ""

    def _slower(self, windows: int) -> float:
        """By how much (log) so many windows of the table have to be slower than one of the default."""
        return max(self.rules.change, SURE * self._as_usual()[1] * math.sqrt(1 + 1 / windows))

    def _acquit(self) -> None:
        self.innocent, self._calm = self.innocent + 1, 0

    def _as_usual(self) -> tuple[float, float]:
        """Middle and standard deviation of the last windows' logs; no less than the noise as it was measured."""
        if self._figures is None:
            x = sorted(self._usual)
            middle = x[len(x) // 2]
            away = sorted([abs(v - middle) for v in x])
            self._figures = middle, max(self.noise, 1.4826 * away[len(x) // 2])
        return self._figures

    def _note(self, log: float) -> None:
        """One more window that is as usual."""
        self._usual.append(log)
        self._calm += 1
        if self._calm % FRESH == 0 or len(self._usual) < USUAL // 4:
            self._figures = None
        if self._calm >= USUAL:
            self.innocent, self._calm = max(self.innocent - 1, 0), 0

    def _level(self, log: float, least: float) -> str:
        """Does the step time stay where it was? Several windows in a row that do not are a change."""
        if len(self._usual) < 4:
            self._note(log)
            return ""
        middle, noise = self._as_usual()
        off = log - middle
        if abs(off) < max(FAR * noise, self.rules.change):
            self._odd.clear()
            self._harm = 0.0
            self._note(log)
            return ""
        if self._odd and (off > 0) != (self._odd[-1] > middle):
            self._odd.clear()
            self._harm = 0.0
        self._odd.append(log)
        self._harm += self.steps * max(least - middle - self.gain, 0.0)
        if self.has_table and self._harm >= self.price:
            self.check, self._harm = True, 0.0
        if len(self._odd) < (ODD if self.steps < LONG else ODD_LONG):
            return ""
        later = self._odd[1:]  # the first may be of both
        level = sum(later) / len(later)
        if not any(abs(middle - known) < SAME_LEVEL for known in self.levels):
            self.levels.append(middle)
        if any(abs(level - known) < max(SAME_LEVEL, noise) for known in self.levels):
            self._usual, self._figures = deque(self._odd, USUAL), None
            self._odd.clear()
            self._harm, self.check = 0.0, False
            return ""
        self.change = Change(self.levels, level, level - middle)
        return CHANGED

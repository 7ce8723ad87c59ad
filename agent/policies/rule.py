"""The default policy, nothing trained: it runs the config with the largest expected improvement, one slot at a time.

It speaks SB3's ``predict`` on the observations of ``envs.search.observation``. Savings are parts of the step.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy import arange, asarray, maximum, where

from ...envs.search.interfaces import COMPARE, GO_ON, LEAVE, RUN, actions_of
from ...envs.search.observation import Seen, decode

Array = np.ndarray[Any, Any]

#: A config is not tried if its probability of a step that is too slow is above this: it is likelier than not.
MOST_RISK = 0.5
#: What such a step costs, in the time of windows: one default step is lost in a window of a few.
RISK_PRICE = 0.4
#: The same after the verdict, where a trial is worth more windows and no harm is accepted for a small gain.
RISK_PRICE_AFTER = 45.0
#: Smallest saving that is worth a comparison: a comparison of 20 windows costs about that much of 20,000 steps.
WORTHWHILE = 1e-3
#: Windows before a gain that is proven enough is compared ahead of the rest: two windows may share one slow spell.
EARLY = 3
#: Standard deviations of a pair, and of the belief, by which such a gain is above 0.
PROVEN_NOISE, PROVEN_BELIEF = 3.0, 2.0
#: Windows in a row under one table after which the table as a whole teaches nothing more: then one slot runs alone.
TOGETHER = 1
#: Windows in a row under one table after which nothing else is worth a window.
SETTLED = 3
#: Windows of a search, or this many per slot if that is more: what it leaves open is tried after the verdict.
ROUNDS, ROUNDS_A_SLOT = 12, 2
#: Comparisons of a search: later ones would compare nearly equal tables.
COMPARISONS = 2
#: Windows for which a gain counts when a window is chosen: about as long as the search lasts.
FORESIGHT = 20.0
#: The same after the verdict, where a trial concerns one slot and delays nothing.
FORESIGHT_AFTER = 600.0
#: Smallest expected improvement that is worth a window, over the foresight.
LEAST = 2e-4
#: Standard deviations by which a config is taken to be worse than its mean: the trial itself costs.
CAUTION = 0.3
#: Scores of configs that are not tried lie this far below 0, and that of a config that must be chosen above all others.
FEAR = 0.5
#: Halves: a count that was encoded as a number is above n if it is above n - HALF.
HALF = 0.5


def _column(x: Array) -> Array:
    return asarray(x)[:, None]


def promises_gain(seen: Seen) -> Array:
    """(n,) bool: the table with the best means is worth a comparison with the current one."""
    is_worthwhile = seen.context.promised >= WORTHWHILE
    return asarray(is_worthwhile & (seen.context.beaten < HALF))


def is_proven(seen: Seen) -> Array:
    """(n,) bool: the first gain is so sure that it is compared before the search goes on."""
    c = seen.context
    has_windows = c.round > EARLY - HALF
    is_time = (c.place == 0) & has_windows & ~seen.is_refining
    of_a_pair = PROVEN_NOISE * math.sqrt(2) * c.noise
    is_large = c.best_saving > of_a_pair
    is_sure = c.best_saving > PROVEN_BELIEF * c.best_sd
    is_first = (c.confirmed < HALF) & promises_gain(seen)
    return asarray(is_time & is_first & is_large & is_sure)


class ExpectedImprovement:
    """Runs what promises most: the expected improvement over the best (Jones et al. 1998) for the windows of the
    foresight, less the expected cost of the window itself."""

    def __init__(self, rounds: int | None = None) -> None:
        """``rounds``: windows of a search, at most; None: ROUNDS, or ROUNDS_A_SLOT per slot if that is more."""
        self.rounds = rounds

    def predict(
        self,
        observation: Array,
        state: Any = None,
        episode_start: Array | None = None,
        deterministic: bool = True,
    ) -> tuple[Array, Any]:
        """See ``envs.search.interfaces.Policy``."""
        scores, what = self.decide(decode(observation))
        chosen = scores.argmax(axis=1)
        rows = arange(len(chosen))
        actions = actions_of(chosen, what[rows, chosen])
        if np.ndim(observation) != 2:
            actions = actions[0]
        return actions, state

    def decide(self, seen: Seen) -> tuple[Array, Array]:
        """Scores (n, N_CONFIGS) as parts of the step, of which the largest is chosen; and what comes after each
        config, (n, N_CONFIGS), one of ``interfaces.GO_ON`` ... The config with the best mean has 0 at least: it is
        chosen if nothing is worth a window, and if it is time to compare it."""
        is_avoided = ~seen.open | (seen.risk > MOST_RISK)
        is_after = _column(seen.is_refining)
        # After the verdict nothing beats the current table.
        known = where(is_after, seen.current, seen.saving)
        allowed = where(is_avoided, -np.inf, known)
        best = allowed.argmax(axis=1)
        configs = arange(seen.open.shape[1])
        is_best = configs == _column(best)

        ends = is_proven(seen) | self._is_enough(seen)
        must_end = _column(ends)
        scores = where(is_avoided, -FEAR, self._worth(seen))
        largest = scores.max(axis=1, keepdims=True)
        above_all = maximum(largest, 0.0) + FEAR
        at_least = maximum(scores, 0.0)
        unless_tried = where(is_after, 0.0, at_least)  # the current table is no trial
        best_scores = where(must_end, above_all, unless_tried)
        scores = where(is_best, best_scores, scores)
        scores = where(seen.open, scores, -np.inf)
        return scores, self._what_next(seen, is_best)

    def _worth(self, seen: Seen) -> Array:
        """Of trying each config once more, (n, N_CONFIGS)."""
        is_after = _column(seen.is_refining)
        foresight = where(is_after, FORESIGHT_AFTER, FORESIGHT)
        gain = foresight * seen.worth
        price = where(is_after, RISK_PRICE_AFTER, RISK_PRICE)
        cost = price * seen.risk
        worth = gain + seen.saving - CAUTION * seen.learned - cost
        is_enough = gain > FORESIGHT * LEAST
        return asarray(where(is_enough, worth, -np.abs(worth)))

    def _is_enough(self, seen: Seen) -> Array:
        """(n,) bool: the search has had its windows."""
        c = seen.context
        usual = maximum(ROUNDS, ROUNDS_A_SLOT * c.slots)
        most = usual if self.rounds is None else self.rounds
        is_spent = c.round > most - HALF
        return asarray(is_spent & ~seen.is_refining)

    def _what_next(self, seen: Seen, is_best: Array) -> Array:
        """What comes after each of the configs of a slot, (n, N_CONFIGS); ``is_best`` (n, N_CONFIGS): with this config
        nothing is explored in the slot.

        A gain that is proven enough is compared at once. If a table was measured as a whole and would be once more, one
        slot runs alone: that shows which slot does what. If no slot has anything to explore, the table stays the same,
        or the windows are spent, then the best table is compared if it promises a gain, else the search is over. After
        the verdict every config but the current one is a trial.
        """
        c = seen.context
        idle = _column(c.idle)
        is_exploring = _column(c.exploring > HALF)
        is_settled = (idle >= SETTLED) & seen.last
        has_nothing = is_best & ~is_exploring | is_settled
        is_last = _column(seen.is_last_slot & (c.round > 0))
        is_over = is_last & has_nothing | _column(self._is_enough(seen))

        is_alone = ~is_best & ~is_exploring & (idle >= TOGETHER)
        go_on = where(is_alone, RUN, GO_ON)
        has_comparisons = c.comparisons < COMPARISONS - HALF
        may_compare = _column(promises_gain(seen) & has_comparisons)
        end = where(may_compare, COMPARE, LEAVE)
        what = where(is_over, end, go_on)
        must_compare = _column(is_proven(seen)) & is_best
        what = where(must_compare, COMPARE, what)

        of_trial = where(seen.current, GO_ON, RUN)
        is_after = _column(seen.is_refining)
        return where(is_after, of_trial, what)

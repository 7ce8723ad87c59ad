"""The rule on the belief over a job, nothing trained: expected improvement, a slot's turn at a time.

It speaks SB3's ``predict`` on the observations of ``envs.search.turns``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...envs.search import turns
from ...envs.search.normal import expected_improvement

Array = np.ndarray[Any, Any]

#: A config that is likelier than this to make a step far too long is not tried. What is less likely has its price, in
#: windows' time for one that is certain; a dear one after the verdict, where whatever is tried is worth more windows.
RECKLESS = 0.5
PRICE, PRICE_LATER = 0.4, 45.0
#: A saving of the step that is worth a comparison; windows after which one that is sure enough is confirmed before the
#: search goes on; windows running under one table that say that it tells nothing more as a whole, and that nothing
#: else is worth one.
WORTHWHILE, EARLY, TOGETHER, SETTLED = 1e-3, 3, 1, 3
#: Windows, or so many a slot where that is more, and comparisons that a search has: what it leaves is tried after it.
ROUNDS, ROUNDS_A_SLOT, COMPARISONS = 12, 2, 2
#: Windows for which a trial is taken to tell; after the verdict, when it is of one slot and holds up nothing, more.
FORESIGHT, FORESIGHT_LATER = 20.0, 600.0
#: Expected improvement, as a part of the step, below which nothing is tried any more, by so much less after the verdict
#: as the foresight is longer; how many standard deviations worse a config is taken to be.
LEAST, RISK = 2e-4, 0.3
#: What a slot may do beside the table in force that the belief, which adds slots up, does not know (standard deviation,
#: as a part of the step), and the price of a trial for its sake alone: of small slots the belief is too sure (LOG.md).
UNKNOWN, PRICE_UNKNOWN = 0.004, 200.0
#: The score of what is not tried is so far below 0, as a part of the step, and of what has to be above all others.
FEAR = 0.5


def what_next(seen: turns.Seen, at_best: Array, sure: Array, enough: Array) -> Array:
    """What comes after each of the configs of a slot, (n, N_CONFIGS) of ``turns.GO_ON`` ...; ``at_best`` (n, N_CONFIGS)
    bool: with this config nothing is explored in the slot; ``sure``, ``enough`` (n, 1): :func:`is_sure` and
    :func:`is_enough`.

    A gain that is sure enough is compared at once, before the search goes on. Where a table was measured as a whole
    and would be once more, one slot runs alone: that tells which slot does what. When no slot has anything to explore,
    the table stays what it is, or enough was tried, it is compared where it promises something, and the search is over
    where it does not. After the verdict every config but the one in force is a trial.
    """
    c = {name: value[:, None] for name, value in seen.context.items()}
    is_last = np.rint(8 * c["slots"] * (1 - c["place"])) <= 1
    is_settled = (c["idle"] >= SETTLED / 4) & seen.last
    is_alone = ~at_best & (c["exploring"] < 0.5)
    is_done = is_last & (c["round"] > 0) & (at_best & (c["exploring"] < 0.5) | is_settled)
    may_compare = promises(seen)[:, None] & (4 * c["comparisons"] < COMPARISONS - 0.5)
    end = np.where(may_compare, turns.COMPARE, turns.LEAVE)
    go_on = np.where(is_alone & (c["idle"] >= TOGETHER / 4), turns.RUN, turns.GO_ON)
    search = np.where(sure & at_best, turns.COMPARE, np.where(is_done | enough, end, go_on))
    return np.where(c["refining"] > 0.5, np.where(seen.in_force, turns.GO_ON, turns.RUN), search)


def promises(seen: turns.Seen) -> Array:
    """(n,) bool: the table believed best is worth a comparison with what is in force."""
    return np.asarray((seen.context["promised"] >= turns.SCALE * WORTHWHILE) & (seen.context["beaten"] < 0.5))


def is_sure(seen: turns.Seen) -> Array:
    """(n,) bool: the first gain is so sure that it is worth a comparison before the search goes on."""
    c = seen.context
    is_time = (c["place"] == 0) & (16 * c["round"] > EARLY - 0.5) & (c["refining"] < 0.5)
    is_large = c["best_saving"] / 5 > 3 * math.sqrt(2) * c["noise"] / 50
    is_first = (c["confirmed"] < 0.5) & promises(seen)
    return np.asarray(is_time & is_first & is_large & (c["best_saving"] > 2 * c["best_sd"]))


def is_enough(seen: turns.Seen) -> Array:
    """(n,) bool: the search has had its windows."""
    c = seen.context
    most = np.maximum(ROUNDS, ROUNDS_A_SLOT * 8 * c["slots"])
    return np.asarray((16 * c["round"] > most - 0.5) & (c["refining"] < 0.5))


class ExpectedImprovement:
    """Run what promises most: FORESIGHT windows of the expected improvement over the best, less what the trial
    itself is expected to cost (Jones et al. 1998)."""

    def predict(
        self,
        observation: Array,
        state: Any = None,
        episode_start: Array | None = None,
        deterministic: bool = True,
    ) -> tuple[Array, Any]:
        """See ``envs.search.windows.Policy``."""
        seen = turns.seen(observation)
        scores, what = self.decide(seen)
        chosen = scores.argmax(axis=1)
        actions = turns.actions_of(chosen, what[np.arange(len(chosen)), chosen])
        return (actions if np.ndim(observation) == 2 else actions[0]), state

    def worth(self, seen: turns.Seen) -> Array:
        """Of trying each config once more, (n, N_CONFIGS), as a part of the step."""
        later = seen.context["refining"][:, None] > 0.5
        foresight, price = np.where(later, FORESIGHT_LATER, FORESIGHT), np.where(later, PRICE_LATER, PRICE)
        gain, cost = foresight * seen.worth, price * seen.risk
        unknown = FORESIGHT_LATER * expected_improvement(
            np.minimum(seen.ahead, 0.0), np.hypot(seen.learned, UNKNOWN)
        )
        is_unknown = later & ~seen.in_force & (unknown - PRICE_UNKNOWN * seen.risk > gain - cost)
        gain, cost = (
            np.where(is_unknown, unknown, gain),
            np.where(is_unknown, PRICE_UNKNOWN * seen.risk, cost),
        )
        worth = gain + seen.ahead - RISK * seen.learned - cost
        return np.asarray(np.where(gain > FORESIGHT * LEAST, worth, -np.abs(worth)))

    def decide(self, seen: turns.Seen) -> tuple[Array, Array]:
        """Scores (n, N_CONFIGS), of which the largest is chosen, as parts of the step; what comes after each config,
        (n, N_CONFIGS) of ``turns.GO_ON`` ... What is believed best has 0 at least: it is chosen where nothing is worth
        trying, and where it is time to compare it."""
        avoided = ~seen.open | (seen.risk > RECKLESS)
        sure, enough = is_sure(seen)[:, None], is_enough(seen)[:, None]
        later = seen.context["refining"][:, None] > 0.5
        believed = np.where(
            later, seen.in_force, seen.ahead
        )  # after the verdict nothing beats what was confirmed
        at_best = (
            np.arange(seen.open.shape[1]) == np.where(avoided, -np.inf, believed).argmax(axis=1)[:, None]
        )
        scores = np.where(avoided, -FEAR, self.worth(seen))
        first = np.maximum(scores.max(axis=1, keepdims=True), 0.0) + FEAR
        best = np.where(
            sure | enough, first, np.where(later, 0.0, np.maximum(scores, 0.0))
        )  # in force is no trial
        return np.where(seen.open, np.where(at_best, best, scores), -np.inf), what_next(
            seen, at_best, sure, enough
        )

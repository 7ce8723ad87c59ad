"""A small search, for comparison: Thompson sampling on the belief (Thompson 1933), nothing trained, nothing remembered.

In each slot it draws what each setting saves, as the belief may say after one more measurement, and runs the largest
draw among the settings that are worth their price. It has none of the rule's other means: no comparison ahead of time,
no slot alone before the verdict, no neighbours of the table after it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...envs.search.interfaces import COMPARE, GO_ON, LEAVE, RUN, actions_of
from ...envs.search.observation import Seen, decode
from .rule import MOST_RISK, promises_gain

Array = np.ndarray[Any, Any]

#: Measurements for which a gain counts.
FORESIGHT = 600.0
#: Price of a step that is too slow, and the least worth of a measurement; both in steps of a measurement.
RISK_PRICE, LEAST = 3.0, 4e-3


class Thompson:
    """See the module."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def predict(
        self,
        observation: Array,
        state: Any = None,
        episode_start: Array | None = None,
        deterministic: bool = True,
    ) -> tuple[Array, Any]:
        """See ``envs.search.interfaces.Policy``. ``deterministic`` makes no difference: the draws are the policy."""
        seen = decode(observation)
        chosen = self._draw(seen)
        actions = actions_of(chosen, _what_next(seen, chosen))
        return (actions if np.ndim(observation) == 2 else actions[0]), state

    def _draw(self, seen: Seen) -> Array:
        """(n,) the config of each slot."""
        kept = np.where(_column(seen.is_refining), seen.current, _is_best(seen))
        own = kept.argmax(axis=1)
        beyond = seen.saving - np.take_along_axis(seen.saving, _column(own), axis=1)
        worth = FORESIGHT * seen.worth + np.minimum(beyond, 0) - RISK_PRICE * seen.risk
        is_worth_it = seen.open & (seen.risk < MOST_RISK) & (worth > LEAST)
        drawn = seen.saving + seen.learned * self._rng.standard_normal(seen.saving.shape)
        scores = np.where(is_worth_it | kept, drawn, -np.inf)
        return np.asarray(scores.argmax(axis=1))


def _column(x: Array) -> Array:
    return np.asarray(x)[:, None]


def _is_best(seen: Seen) -> Array:
    """(n, N_CONFIGS) bool: the config with the best mean among those that are not too risky."""
    allowed = np.where(seen.open & (seen.risk < MOST_RISK), seen.saving, -np.inf)
    return np.asarray(np.arange(allowed.shape[1]) == _column(allowed.argmax(axis=1)))


def _what_next(seen: Seen, chosen: Array) -> Array:
    """(n,) what comes after the config. Before the verdict a table that explores in no slot is compared if it promises
    a gain, else the search ends; after it each config but the current one is a trial."""
    explores = (seen.context.exploring > 0.5) | ~_at(_is_best(seen), chosen)
    is_over = seen.is_last_slot & ~explores
    end = np.where(promises_gain(seen), COMPARE, LEAVE)
    searching = np.where(is_over, end, GO_ON)
    trying = np.where(_at(seen.current, chosen), GO_ON, RUN)
    return np.where(seen.is_refining, trying, searching)


def _at(figures: Array, chosen: Array) -> Array:
    return np.asarray(figures[np.arange(len(chosen)), chosen])

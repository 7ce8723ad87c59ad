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
from .rule import HALF, MOST_RISK, promises_gain

Array = np.ndarray[Any, Any]

#: Measurements for which a gain counts.
FORESIGHT = 600.0
#: Price of a step that is too slow, and the least worth of a measurement; both in the time of a measurement.
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
        best = _best(seen)
        chosen = self._draw(seen, best)
        actions = actions_of(chosen, _what_next(seen, chosen, chosen == best))
        return (actions if np.ndim(observation) == 2 else actions[0]), state

    def _draw(self, seen: Seen, best: Array) -> Array:
        """(n,) the config of each slot. What it has is a candidate too: ``best`` (n,), after the verdict that of the
        current table."""
        rows = np.arange(len(best))
        own = np.where(seen.is_refining, seen.current.argmax(axis=1), best)
        beyond = seen.saving - seen.saving[rows, own][:, None]
        worth = FORESIGHT * seen.worth + np.minimum(beyond, 0) - RISK_PRICE * seen.risk
        may_run = seen.open & (seen.risk < MOST_RISK) & (worth > LEAST)
        may_run[rows, own] = True
        drawn = seen.saving + seen.learned * self._rng.standard_normal(seen.saving.shape)
        return np.asarray(np.where(may_run, drawn, -np.inf).argmax(axis=1))


def _best(seen: Seen) -> Array:
    """(n,) the config with the best mean among those that are not too risky."""
    allowed = seen.open & (seen.risk < MOST_RISK)
    return np.asarray(np.where(allowed, seen.saving, -np.inf).argmax(axis=1))


def _what_next(seen: Seen, chosen: Array, is_best: Array) -> Array:
    """(n,) what comes after the config. Before the verdict a table that explores in no slot is compared if it promises
    a gain, else the search ends; after it each config but the current one is a trial."""
    explores = (seen.context.exploring > HALF) | ~is_best
    end = np.where(promises_gain(seen), COMPARE, LEAVE)
    searching = np.where(seen.is_last_slot & ~explores, end, GO_ON)
    is_current = seen.current[np.arange(len(chosen)), chosen]
    trying = np.where(is_current, GO_ON, RUN)
    return np.where(seen.is_refining, trying, searching)

"""What each table of a run saved, from windows that lie side by side.

A job drifts, so two windows are compared only where one follows the other, and only by the steps on both sides of the
change. After the verdict what a trial saved against the kept table, and that against the default, add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

#: The rows of a published table.
Rules = tuple[dict[str, Any], ...]

#: Steps on each side of a change of tables that count. A window of the search has 4 to 64.
_NEAR_STEPS = 20


@dataclass(frozen=True)
class SteadyWindow:
    """Consecutive steps of one table, the first step left out."""

    generation: int
    durations_ms: Array  # (n,) of one rank
    first: int  # number of its first step
    last: int
    pid: int  # the process that took them: a life of the job

    @property
    def n_steps(self) -> int:
        """Number of steps."""
        return len(self.durations_ms)

    @property
    def ms(self) -> float:
        """Median step time."""
        return float(np.median(self.durations_ms))


class Saved(NamedTuple):
    """What a table saved."""

    rules: Rules
    saving: float  # part of the default's step time
    n_steps: float  # that were compared


class _Pair(NamedTuple):
    """Two windows side by side, by the numbers of their tables."""

    before: int
    after: int
    log_ratio: float  # of the step times, after to before
    n_steps: float


def savings(windows: Sequence[SteadyWindow], tables: Mapping[int, Rules]) -> list[Saved]:
    """What each table saved against the default; without tables that no chain of neighbours leads to from it.

    ``windows``: in order; ``tables``: by generation. Tables of equal rows are one.
    """
    numbers: dict[tuple[str, ...], int] = {(): 0}  # by content; 0 is the default
    rules_of: list[Rules] = [()]
    by_generation = dict[int, int]()
    for generation, rules in tables.items():
        content = tuple(sorted(str(sorted(row.items())) for row in rules))
        number = numbers.setdefault(content, len(numbers))
        if number == len(rules_of):
            rules_of.append(rules)
        by_generation[generation] = number
    pairs = _pairs(windows, by_generation)
    known = _reached(pairs)
    levels, n_steps = _levels(pairs, known)
    found = []
    for number, level, n in zip(known, levels.tolist(), n_steps.tolist(), strict=True):
        saving = 1.0 - math.exp(level)
        found.append(Saved(rules_of[number], saving, n))
    return found


def _pairs(windows: Sequence[SteadyWindow], by_generation: Mapping[int, int]) -> list[_Pair]:
    """The windows side by side in one life of the job that are under two tables."""
    pairs = []
    for one, other in pairwise(windows):
        before = by_generation.get(one.generation)
        after = by_generation.get(other.generation)
        is_near = one.pid == other.pid and other.first - one.last <= _NEAR_STEPS
        if before is None or after is None or before == after or not is_near:
            continue
        left = one.durations_ms[-_NEAR_STEPS:]
        right = other.durations_ms[:_NEAR_STEPS]
        left_ms, right_ms = float(np.median(left)), float(np.median(right))
        if left_ms <= 0 or right_ms <= 0:  # a damaged trace
            continue
        n_steps = 2.0 / (1.0 / len(left) + 1.0 / len(right))  # the shorter one counts most
        pairs.append(_Pair(before, after, math.log(right_ms / left_ms), n_steps))
    return pairs


def _reached(pairs: Sequence[_Pair]) -> list[int]:
    """The tables that a chain of pairs leads to from the default, without it."""
    reached = {0}
    n_before = 0
    while len(reached) > n_before:
        n_before = len(reached)
        for pair in pairs:
            if pair.before in reached or pair.after in reached:
                reached |= {pair.before, pair.after}
    return sorted(reached - {0})


def _levels(pairs: Sequence[_Pair], known: Sequence[int]) -> tuple[Array, Array]:
    """The tables' log step times against the default's (n,), by least squares, and the steps behind each (n,)."""
    place = {number: i for i, number in enumerate(known)}
    weights = np.zeros((len(known), len(known)))
    right = np.zeros(len(known))
    for pair in pairs:
        before, after = place.get(pair.before), place.get(pair.after)
        for i, sign in ((before, -1.0), (after, 1.0)):
            if i is not None:
                weights[i, i] += pair.n_steps
                right[i] += sign * pair.n_steps * pair.log_ratio
        if before is not None and after is not None:
            weights[before, after] -= pair.n_steps
            weights[after, before] -= pair.n_steps
    n_steps = weights.diagonal().copy()
    return np.linalg.solve(weights, right), n_steps

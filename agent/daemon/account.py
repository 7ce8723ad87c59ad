"""The names of a run's tables, what its windows cost, earlier tuners' too, and how it stands after its verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...envs.search.comparison import Comparison, TimedWindow
from ...envs.search.search import Search
from ...envs.search.state import Account, Milestones
from ...traces.reasons import Happened, Why
from ...traces.records import Decision, Decisions, Slot
from ..report.summary import RunSummary
from ..report.verdict import DEFAULT, rows_text


def speedups(*logs: float) -> list[float]:
    """From logs of the ratio of two times."""
    return [math.exp(log) for log in logs]


#: Letters of the alphabet, from which tables are named.
LETTERS = 26


def row_of(slot: Slot, d: Decision) -> dict[str, Any]:
    """A slot and its decision as a row of the summary."""
    return {
        "func": slot.func,
        "min_bytes": slot.min_bytes,
        "max_bytes": slot.max_bytes,
        "n_ranks": slot.n_ranks,
        "n_nodes": slot.n_nodes,
        "algo": d.algo,
        "proto": d.proto,
        "n_channels": d.n_channels or None,
    }


def letters(n: int) -> str:
    """A, B, ... Z, AA, AB, ..."""
    last = chr(ord("A") + n % LETTERS)
    if n < LETTERS:
        return last
    return letters(n // LETTERS - 1) + last


def _number(letter: str) -> int:
    """The number of :func:`letters`."""
    n = 0
    for one in letter:
        n = n * LETTERS + ord(one) - ord("A") + 1
    return n - 1


class TableNames:
    """Letters of the tables that ran, in the order of their first windows; ``on_new`` hears of each.

    ``known``: rows by letter, of the tables of an earlier tuner that this one goes on with.
    """

    def __init__(
        self,
        on_new: Callable[[str, list[dict[str, Any]]], object] = lambda letter, rows: None,
        known: Mapping[str, list[dict[str, Any]]] | None = None,
    ) -> None:
        self._on_new = on_new
        self.rows = dict(known or {})  # by letter
        self._letters = {_key(rows): letter for letter, rows in self.rows.items()}
        self._next = 1 + max(map(_number, self.rows), default=-1)
        self._described = set[str]()

    def of(self, decisions: Decisions) -> str:
        """The letter of the table with these decisions; DEFAULT if it has none."""
        rows = [row_of(slot, d) for slot, d in decisions.items() if not d.is_auto]
        if not rows:
            return DEFAULT
        key = _key(rows)
        if key not in self._letters:
            letter = self._letters[key] = letters(self._next)
            self._next += 1
            self.rows[letter] = rows
            self._on_new(letter, rows)
        return self._letters[key]

    def describe(self, *names: str) -> list[Why]:
        """One line for each of these tables that was not described before."""
        new = [name for name in names if name in self.rows and name not in self._described]
        self._described.update(new)
        return [Happened.TABLE(table=name, rows=rows_text(self.rows[name])) for name in new]


def _key(rows: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    return frozenset(json.dumps(row, sort_keys=True) for row in rows)


@dataclass
class Costs:
    """What the windows of a run cost."""

    windows: int = 0  # up to the verdict
    search_ms: float = 0.0  # what they lost against the default
    budget_ms: float = 0.0  # what they may lose
    budget_before_ms: float = 0.0  # what those of an earlier tuner of the run were allowed, part of it
    lost_before_ms: float = (
        0.0  # what they lost, until the search of this tuner begins: it goes on with that budget
    )
    trials: int = 0  # windows after the verdict that tried something
    trials_ms: float = 0.0  # what they lost against the current table
    best: tuple[str, float] | None = None  # of single windows: the letter, its time over the default's

    @classmethod
    def after(cls, before: RunSummary, has_table: bool) -> Costs:
        """Of a tuner that goes on where an earlier one of the same run has ended. One whose table is in force gains
        from it, and may lose as much again if the job changes; else the job has one budget."""
        lost_ms = 1e3 * ((before.cost_s or 0.0) + (before.trials_cost_s or 0.0))
        budget_ms = 1e3 * (before.budget_s or 0.0)
        return cls(
            windows=before.windows or 0,
            search_ms=1e3 * (before.cost_s or 0.0),
            budget_ms=budget_ms,
            budget_before_ms=budget_ms if has_table else 0.0,
            lost_before_ms=0.0 if has_table else lost_ms,
            trials=before.trials or 0,
            trials_ms=1e3 * (before.trials_cost_s or 0.0),
        )

    def hand_over(self, account: Account, default_ms: float, steps: int) -> None:
        """Add what an earlier tuner has lost to ``account``, once; the job's ``steps`` until now allow it."""
        if self.lost_before_ms:
            account.lost += self.lost_before_ms / default_ms
            account.steps += steps
        self.lost_before_ms = 0.0

    def better(self, letter: str, ratio: float, noise: float) -> bool:
        """Note a window that took ``ratio`` of the default's time. Returns whether it is the best so far."""
        before = self.best[1] if self.best else 1.0
        is_better = ratio < before - noise
        if is_better:
            self.best = letter, ratio
        return is_better


def comparison_row(comparison: Comparison, table: str, against: str) -> dict[str, Any]:
    """A comparison for the summary: by how much the table is faster, with the interval that holds however often it is
    checked, with a probability of 1 - ``level``, at least 95 %; step times are medians over the windows of its pairs.
    None: not measured."""
    test = comparison.test
    row: dict[str, Any] = {
        "table": table,
        "against": against,
        "trial": comparison.is_trial,
        "outcome": comparison.outcome,
        "pairs": test.n,
        "level": test.level,
        "speedup": None,
        "speedup_ci95": None,
    }
    if test.has_interval:
        row["speedup"], *row["speedup_ci95"] = speedups(test.mean, *test.interval)
    row |= _times("table", comparison.table_windows)
    row |= _times("against", comparison.reference_windows)
    return row | {"steps": comparison.steps}


def _times(side: str, windows: list[TimedWindow]) -> dict[str, Any]:
    times = [window.ms for window in windows]
    middle = float(np.median(times)) if times else None
    return {f"{side}_ms": middle, f"{side}_windows": len(times)}


@dataclass(frozen=True)
class Stand:
    """How a run stands after its verdict: where this has changed the watch says so, and the files follow."""

    marks: Milestones
    is_over: bool
    is_done: bool
    kept: bool | None
    table: Decisions

    @classmethod
    def of(cls, search: Search, kept: bool | None, table: Decisions) -> Stand:
        """Now."""
        return cls(replace(search.marks), search.is_over, search.is_done, kept, table)

"""The comparisons that a run makes, with what they came to and cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import starmap
from typing import Any

import numpy as np

from ...envs.search.sequential import Race
from ...traces.records import Decision, Decisions, Slot
from ..report.summary import RunSummary
from ..report.verdict import DEFAULT, rows_text


def speedups(*logs: float) -> list[float]:
    """From logs of the ratio of two times."""
    return [math.exp(log) for log in logs]


@dataclass
class Paired:
    """A table that ran in turn with another, both by their letters. ``race``: the search's own account of the pairs;
    ``trial``: it was made after the verdict. Times are ms, one a window."""

    table: str
    against: str
    race: Race
    trial: bool
    first_step: int
    last_step: int = 0
    table_ms: list[float] = field(default_factory=list)
    against_ms: list[float] = field(default_factory=list)
    outcome: str = "open"  # then kept (the table took the other's place) or lost

    def told(self) -> dict[str, Any]:
        """For the summary: by how much the table is faster, with the interval that holds however often one looks. What
        was not measured is None."""
        found: dict[str, Any] = {"table": self.table, "against": self.against, "trial": self.trial}
        found |= {"outcome": self.outcome, "pairs": self.race.n, "speedup": None, "speedup_ci95": None}
        if self.race.n:
            found["speedup"], *found["speedup_ci95"] = speedups(self.race.mean, *self.race.interval)
        for name, windows in (("table", self.table_ms), ("against", self.against_ms)):
            found |= {
                f"{name}_ms": float(np.median(windows)) if windows else None,
                f"{name}_windows": len(windows),
            }
        return found | {"steps": [self.first_step, self.last_step]}


class Ledger:
    """What a run tried and compared, in order. Tables have letters, by when they first ran."""

    def __init__(self) -> None:
        self._letters: dict[tuple[Any, ...], str] = {}
        self.tables: dict[str, dict[Slot, Decision]] = {}
        self.paired: list[Paired] = []
        self._named = set[str]()
        self.best: tuple[str, float] | None = (
            None  # of single windows: the letter, its time over the default's
        )
        self.windows = 0  # up to the verdict
        self.search_ms = self.budget_ms = 0.0  # what they lost against the default, and may lose
        self.trials, self.trials_ms = (
            0,
            0.0,
        )  # windows after it, and what they lost against the table in force

    def letter(self, decisions: Decisions) -> str:
        """Of the table with these decisions."""
        rows = {slot: d for slot, d in decisions.items() if not d.is_auto}
        if not rows:
            return DEFAULT
        key = tuple(sorted((str(vars(slot)), str(d)) for slot, d in rows.items()))
        if key not in self._letters:
            self._letters[key] = letters(len(self._letters))
            self.tables[self._letters[key]] = rows
        return self._letters[key]

    def legend(self, *letters: str) -> list[str]:
        """What these tables are, a line for each that was not described before."""
        new = [name for name in letters if name in self.tables and name not in self._named]
        self._named.update(new)
        return [f"{name} = {rows_text(row_of(*row) for row in self.tables[name].items())}" for name in new]

    def of(self, race: Race) -> Paired | None:
        """The comparison that the search keeps in ``race``."""
        return next((one for one in self.paired if one.race is race), None)

    def sum_up(self, outcome: RunSummary) -> RunSummary:
        """The outcome of a search with what it tried, compared and paid."""
        named = {outcome.in_force, *(name for one in self.paired for name in (one.table, one.against))}
        return replace(
            outcome,
            windows=self.windows,
            cost_s=self.search_ms / 1e3,
            budget_s=self.budget_ms / 1e3,
            trials=self.trials,
            trials_cost_s=self.trials_ms / 1e3,
            comparisons=[one.told() for one in self.paired],
            tables={
                name: list(starmap(row_of, self.tables[name].items()))
                for name in self.tables
                if name in named
            },
        )


def row_of(slot: Slot, d: Decision) -> dict[str, Any]:
    """A slot and its decision as a row of the summary."""
    found = {
        "func": slot.func,
        "min_bytes": slot.min_bytes,
        "max_bytes": slot.max_bytes,
        "n_ranks": slot.n_ranks,
    }
    return found | {
        "n_nodes": slot.n_nodes,
        "algo": d.algo,
        "proto": d.proto,
        "n_channels": d.n_channels or None,
    }


def letters(n: int) -> str:
    """A, B, ... Z, AA, AB, ..."""
    return letters(n // 26 - 1) + letters(n % 26) if n >= 26 else chr(ord("A") + n)

"""The course of a run, step by step: the time of each step, the tables, the switches and the verdicts.

It is read from the trace alone, so it is known while the job runs as well.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ....traces.files import Trace
from ....traces.queries.costs import logged_rules, rules_of
from ....traces.queries.lives import last_life
from ....traces.queries.steps import of_one_rank
from ....traces.records import MIXED
from ..summary import VERDICT, Fold
from ..verdict import DEFAULT, ms, side

Array = np.ndarray[Any, Any]

#: The last table, if no step was recorded under it (the run was stopped): its band is this part of the steps wide.
_UNSEEN = 0.04


@dataclass(frozen=True)
class Band:
    """Steps ``first`` to ``last`` in which ``table`` was the current table: a letter, or DEFAULT."""

    first: int
    last: int
    table: str


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step: a switch of the current table, or a verdict."""

    step: int
    text: str
    is_verdict: bool = False


@dataclass(frozen=True)
class Course:
    """All recorded steps of one rank, in order; see :func:`course_of`.

    ``steps`` (n,) are the job's own numbers, ``ms`` (n,) their times, ``on_trial`` (n,) whether another table than the
    current one ran.
    """

    steps: Array
    ms: Array
    on_trial: Array
    bands: list[Band] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


@dataclass(frozen=True)
class _Table:
    """A published table: its number, its name, and whether it was published as a trial."""

    generation: int
    name: str
    is_trial: bool


def course_of(trace: Trace) -> Course:
    """Returns the course of a run, of the job's last life; without any step where the trace has none."""
    trace = last_life(trace)
    steps = of_one_rank(trace.steps).sort_values("index")
    index = steps["index"].to_numpy(int)
    times = steps["duration_ns"].to_numpy(float) / 1e6
    generation = steps["table_generation"].to_numpy(int)
    tables = _tables(trace)
    bands = _bands(index, generation, tables)
    names = {table.generation: table.name for table in tables}
    on_trial = np.zeros(len(index), bool)
    for place, number in enumerate(generation.tolist()):
        ran = names.get(number)
        on_trial[place] = ran != _current(bands, index[place])
    marks = _marks(trace, bands)
    return Course(index, times, on_trial, bands, marks)


def _tables(trace: Trace) -> list[_Table]:
    """All published tables, in order; generation 0 is the default. A table has the letter that the log gives its rows;
    without one (an earlier tuner's) it has the number under which they were published first."""
    letters = {rules_of(rows): letter for letter, rows in Fold.of_trace(trace).named.items()}
    letters[frozenset()] = DEFAULT
    found = [_Table(0, DEFAULT, False)]
    for line in trace.log:
        if line["kind"] == "table":
            table = line["table"]
            number = int(table["generation"])
            name = letters.setdefault(logged_rules(table.get("rules") or ()), str(number))
            found.append(_Table(number, name, bool(table.get("trial_steps"))))
    return found


def _bands(index: Array, generation: Array, tables: Sequence[_Table]) -> list[Band]:
    """The current tables in order. A table is current from the first step that ran under it or a later one."""
    if not index.size:
        return []
    of_one_table = np.where(generation == MIXED, 0, generation)
    newest = np.maximum.accumulate(of_one_table)
    bands = [Band(int(index[0]), int(index[-1]), DEFAULT)]
    for table in tables:
        before = bands[-1]
        place = int(np.searchsorted(newest, table.generation))
        if table.is_trial or place == len(index) or table.name == before.table:
            continue
        first = int(index[place])
        bands[-1] = replace(before, last=first - 1)
        bands.append(Band(first, int(index[-1]), table.name))
    bands = [band for band in bands if band.last >= band.first]
    last = [table for table in tables if not table.is_trial][-1]
    if last.generation > newest[-1] and last.name != bands[-1].table:
        end = int(index[-1])
        bands.append(Band(end + 1, end + max(1, round(_UNSEEN * len(index))), last.name))
    return bands


def _current(bands: Sequence[Band], step: int) -> str:
    """The current table at a step."""
    firsts = [band.first for band in bands]
    place = bisect.bisect_right(firsts, step)
    return bands[place - 1].table


def _marks(trace: Trace, bands: list[Band]) -> list[Mark]:
    """Switches and verdicts, in the order of the steps."""
    marks = []
    for band in bands[1:]:
        marks.append(Mark(band.first, f"switch to {side(band.table)}"))
    verdicts = [int(line["step"]) for line in trace.log if line["kind"] == VERDICT]
    for step in verdicts:
        marks.append(Mark(step, VERDICT, is_verdict=True))
    return sorted(marks, key=lambda mark: mark.step)


def in_words(course: Course) -> list[str]:
    """The course as sentences, one for each current table and each verdict."""
    told = [(band.first, _band_text(course, band)) for band in course.bands]
    told += [(mark.step, f"step {mark.step}: verdict") for mark in course.marks if mark.is_verdict]
    return [text for _, text in sorted(told)]


def _band_text(course: Course, band: Band) -> str:
    after_start = course.steps >= band.first
    is_usual = after_start & (course.steps <= band.last) & ~course.on_trial
    text = f"steps {band.first} to {band.last}: current table {side(band.table)}"
    if band.first > course.steps[-1]:
        return f"after step {course.steps[-1]}: current table {side(band.table)}"
    if not is_usual.any():
        return text
    median = float(np.median(course.ms[is_usual]))
    return f"{text}, median step {ms(median)}"

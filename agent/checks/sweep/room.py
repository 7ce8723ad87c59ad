"""What a sweep's rows say: the best setting of each message, how sure that is, and a table for ``apply``.

A round is one observation: its communicator is its own. The best setting is chosen on one half of the rounds and scored
on the other, so that the luck that chose it is not in its score.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd

from ....envs.live.untouched import class_of, releases_of
from ....envs.nccl.tables import TABLE, to_json
from ....envs.nccl.untouched import Untouched
from ....traces.outside import read_json, write_whole
from ....traces.records import Rule, Slot, Table, decision_from, size_class

Array = np.ndarray[Any, Any]
ROWS, MANIFEST = "rows.csv", "manifest.json"
UNTOUCHED, AGAIN = "untouched", "untouched again"
#: A message has room where its best setting saves more than this.
ROOM = 0.05
#: Rounds below which nothing is judged.
LEAST_ROUNDS = 4
#: Student's t for intervals of 95 %, by degrees of freedom from 1 on.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


@dataclass(frozen=True)
class Saved:
    """Part of NCCL's time that a setting saves, below 0 where it takes longer, with its interval of 95 %."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, logs: Array) -> Saved:
        """From the log ratios untouched / setting, one a round, (n,)."""
        n = len(logs)
        t = _T95[n - 2] if n - 2 < len(_T95) else 2.1
        half = t * float(np.std(logs, ddof=1)) / n**0.5
        middle = float(np.mean(logs))
        return cls(*(float(1 - np.exp(-x)) for x in (middle, middle - half, middle + half)))

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"


@dataclass(frozen=True)
class Judged:
    """One message. ``best``: the setting that all rounds choose; ``saved`` is scored on the other half each time."""

    func: str
    n_bytes: int
    untouched: str
    best: str  # what it runs; "untouched" where nothing is faster
    asked: str
    saved: Saved
    again: Saved  # the A/A

    @property
    def is_sure(self) -> bool:
        """Whether the gain is beyond its own interval and the A/A's."""
        return (
            self.best != UNTOUCHED
            and self.saved.low > 0
            and self.saved.mean > max(-self.again.low, self.again.high)
        )

    @property
    def has_room(self) -> bool:
        """Whether it is sure, and worth a table."""
        return self.is_sure and self.saved.mean > ROOM


def read_rows(folder: Path) -> pd.DataFrame:
    """The rows of a sweep; a last line that was cut off is left out. Raises ValueError."""
    path = folder / ROWS
    try:
        rows = pd.read_csv(path, on_bad_lines="skip", keep_default_na=False)
        rows = rows[rows["load"].astype(str) != ""]
        return rows.astype({"n_bytes": int, "us": float, "round": int})
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path}: no rows of a sweep ({error}): name the folder that it printed") from None


def judged(rows: pd.DataFrame) -> list[Judged]:
    """All messages of a sweep. Raises ValueError where too few rounds are whole."""
    sound = rows[rows["obeyed"].astype(str) == "True"]
    found = []
    for key, of_cell in sound.groupby(["func", "n_bytes"]):
        func, n_bytes = cast(tuple[str, int], key)
        logs = of_cell.pivot_table(index="round", columns="arm", values="us").map(math.log)
        logs = logs.dropna(axis=1, thresh=max(LEAST_ROUNDS, len(logs) - 1)).dropna()
        if len(logs) < LEAST_ROUNDS or not {UNTOUCHED, AGAIN} <= set(logs.columns):
            continue
        ratios = logs.rsub(logs[UNTOUCHED], axis=0)
        arms = [str(arm) for arm in ratios.columns if arm not in (UNTOUCHED, AGAIN)]
        best = _best(ratios, arms)
        asked = of_cell.loc[of_cell["arm"] == best, "asked"].iloc[0]
        own = of_cell.loc[of_cell["arm"] == UNTOUCHED, "ran"].iloc[0]
        scores = Saved.of(_held_out(ratios, arms)), Saved.of(ratios[AGAIN].to_numpy())
        found.append(Judged(func, int(n_bytes), own, best, asked, *scores))
    if not found:
        raise ValueError(f"a sweep is judged from {LEAST_ROUNDS} rounds on, and these rows have fewer")
    return found


def _best(ratios: pd.DataFrame, arms: Sequence[str]) -> str:
    means = ratios[list(arms)].mean()
    return UNTOUCHED if means.empty or means.max() <= 0 else str(means.idxmax())


def _held_out(ratios: pd.DataFrame, arms: Sequence[str]) -> Array:
    """Of each round the log ratio of the setting that the other half of the rounds chose."""
    parts = [ratios.iloc[half::2] for half in (0, 1)]
    scores = []
    for mine, other in (parts, parts[::-1]):
        best = _best(other, arms)
        # Untouched against itself is 0, always.
        scores.append(mine[best].to_numpy() if best != UNTOUCHED else np.zeros(len(mine)))
    return np.concatenate(scores)


def table_of(cells: Sequence[Judged], manifest: dict[str, Any]) -> Table | None:
    """The settings that are sure, each for the sizes of its class; None where there are none. With headroom all other
    calls keep NCCL's own channel counts. Raises ValueError where those cannot be held."""
    shape = manifest["communicator"]["n_ranks"], manifest["communicator"]["n_nodes"]
    of_slots: dict[Slot, Judged] = {}
    for cell in sorted(cells, key=lambda cell: cell.n_bytes):  # of two sizes of a class the larger counts
        of_slots[Slot(*shape, cell.func, size_class(cell.n_bytes))] = cell
    rules = [Rule.of(slot, decision_from(cell.asked)) for slot, cell in of_slots.items() if cell.is_sure]
    if not rules:
        return None
    table = Table(1, tuple(rules))
    if manifest["headroom"] is None:
        return table
    return held(manifest).over(table)


def held(manifest: dict[str, Any]) -> Untouched:
    """NCCL's own channel counts, from what it ran without headroom. Raises ValueError."""
    shape = manifest["communicator"]["n_ranks"], manifest["communicator"]["n_nodes"]
    rows = []
    for (func, n_bytes), ran in manifest["own"]:
        algo, proto, n_channels = ran.split("/")
        rows.append((*shape, func, n_bytes, algo, proto, int(n_channels)))
    columns = ["n_ranks", "n_nodes", "func", "n_bytes", "algo", "proto", "n_channels"]
    events = pd.DataFrame(rows, columns=columns)
    one = class_of("this sweep", shape, events, releases_of(manifest))
    return Untouched(int(manifest["headroom"]), (one,))


@dataclass(frozen=True)
class Result:
    """A judged folder. ``table``: the file, None where there is nothing to apply; ``why``: what keeps it from that."""

    folder: Path
    manifest: dict[str, Any]
    cells: list[Judged]
    table: Path | None
    why: str = ""

    @property
    def line(self) -> str:
        """The result in one line."""
        room = sum(cell.has_room for cell in self.cells)
        of = "emulated times, " if self.manifest["emulated"] else ""
        return f"room: {room} of {len(self.cells)} cells above {100 * ROOM:.0f} % ({of}{self.folder})"

    def as_json(self) -> str:
        """For programs."""
        cells = [
            vars(cell) | {"saved": vars(cell.saved), "again": vars(cell.again), "sure": cell.is_sure}
            for cell in self.cells
        ]
        room = sum(cell.has_room for cell in self.cells)
        found = {
            "folder": str(self.folder),
            "emulated": self.manifest["emulated"],
            "room": room,
            "of": len(cells),
        }
        table = str(self.table) if self.table else None
        return json.dumps(found | {"table": table, "why_no_table": self.why, "cells": cells}, indent=1)


def result_of(folder: Path) -> Result:
    """Judge a folder; its table is written anew. Raises ValueError."""
    try:
        manifest = read_json(folder / MANIFEST)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder / MANIFEST}: no sweep ({error}): name the folder that it printed"
        ) from None
    if not isinstance(manifest, dict) or "communicator" not in manifest:
        raise ValueError(f"{folder / MANIFEST}: the sweep had not begun to measure: run it again")
    cells = judged(read_rows(folder))
    path = folder / TABLE
    path.unlink(missing_ok=True)
    try:
        table = table_of(cells, manifest)
    except ValueError as error:
        return Result(folder, manifest, cells, None, str(error))
    if table is None:
        return Result(folder, manifest, cells, None, "no setting is faster beyond its interval and the A/A")
    write_whole(path, to_json(table))
    return Result(folder, manifest, cells, path)

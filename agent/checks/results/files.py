"""The files that ``lab gpu-check`` leaves: their names and columns, how rows are added, how a folder is read.

Tables are CSV, so that a row is there as soon as it is measured: killing the check at any moment costs the row that was
being written, and no more. ``steps.csv`` stands for the raw steps; nothing has to be packed at the end.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ....traces.outside import atomically, read_json

#: Version of this format, in run.json and in what is submitted.
SCHEMA = 1
#: Columns of each table. Times are microseconds, the maximum over ranks.
COLUMNS: dict[str, tuple[str, ...]] = {
    # One config of one collective. ``comm``: nccl (as NCCL makes it) or raised (more channels). ``asked`` is the
    # table's decision, ``ran`` what the profiler saw. ``calls`` is 0 where the same plan was measured before.
    "sweep": (
        *("comm", "func", "n_bytes", "asked", "ran", "calls", "first_us"),
        *("p10_us", "p50_us", "p90_us", "right", "obeyed", "agreed"),
    ),
    # Compute alone and beside a collective: ``compute_us`` until the compute ended, ``total_us`` until both did.
    "contention": ("compute", "size", "comm", "func", "n_bytes", "asked", "calls", "compute_us", "total_us"),
    # Every timed step. ``race`` names the comparison, ``arm`` one of its sides, ``at`` the step's place in the race.
    "steps": ("race", "arm", "at", "us"),
    # The arms of a race: communicator, table, and the share of collectives in a default step.
    "truth": ("race", "arm", "comm", "table", "share"),
    # Two communicators side by side under a GEMM: the decision of each, and the time until all three ended.
    "joint": ("repeat", "first", "second", "calls", "total_us"),
}
FILES = ("run.json", *(f"{name}.csv" for name in COLUMNS), "tune.tar.gz", "log.txt")


def append(folder: Path, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add rows to a table of the folder; the first write also writes its header. Raises OSError, ValueError."""
    path = folder / f"{name}.csv"
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS[name], lineterminator="\n")
    if not path.exists():
        writer.writeheader()
    writer.writerows(rows)
    with path.open("a") as file:  # in one write: other processes may append as well
        file.write(text.getvalue())


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file at once, so that a reader finds the old one or the new one. Raises OSError."""
    text = json.dumps(value, indent=1) + "\n"
    atomically(path, lambda draft: draft.write_text(text))


@dataclass(frozen=True)
class Results:
    """One folder: ``run`` is run.json, ``tables`` a data frame for each name of :data:`COLUMNS`, perhaps empty."""

    folder: Path
    run: dict[str, Any]
    tables: dict[str, pd.DataFrame]

    @classmethod
    def read(cls, folder: Path) -> Results:
        """What the folder holds; a last line that was cut off is left out. Raises ValueError, naming the file."""
        path = folder / "run.json"
        try:
            run = read_json(path)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path}: no results of gpu-check ({error}): name the folder it printed"
            ) from None
        if not isinstance(run, dict) or run.get("schema") != SCHEMA:
            raise ValueError(f"{path}: not of format {SCHEMA}: read it with the release that wrote it")
        return cls(folder, run, {name: read_table(folder, name) for name in COLUMNS})


def read_table(folder: Path, name: str) -> pd.DataFrame:
    """One table; empty with its columns where there is no file yet. Raises ValueError for other columns."""
    path = folder / f"{name}.csv"
    columns = list(COLUMNS[name])
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if not whole:
        return pd.DataFrame(columns=columns)
    found = pd.read_csv(io.StringIO(whole), keep_default_na=False, na_values=[""])
    if list(found.columns) != columns:
        raise ValueError(
            f"{path}: its columns are {', '.join(map(str, found.columns))}, not {', '.join(columns)}"
        )
    return found

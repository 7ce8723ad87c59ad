"""Traces on disk, read: a folder with a header, Parquet segments and a log, as :mod:`.writer` leaves it.

traces/README.md lists the files. Their columns: EVENT_COLUMNS, STEP_COLUMNS, WAIT_COLUMNS, COMM_COLUMNS, OFFER_COLUMNS.
``windows.jsonl`` is the log, one JSON object a line; every other file is renamed when whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from .assemble import COMPUTE_COLUMNS, WAIT_COLUMNS, empty
from .outside import parse_json
from .segments import IN_PARTS_OF, WHOLE, Segment, read_header, read_parts, read_segments, read_whole
from .segments import TraceError as TraceError


@dataclass
class Trace:
    """A trace in memory. Tables have the columns of :mod:`dynamiccl.traces.assemble`; any may be empty."""

    folder: Path
    header: dict[str, Any]
    events: pd.DataFrame
    steps: pd.DataFrame
    comms: pd.DataFrame
    offers: pd.DataFrame
    compute: pd.DataFrame = field(default_factory=lambda: empty(COMPUTE_COLUMNS))  # of other tools' profiles
    log: list[dict[str, Any]] = field(default_factory=list)  # the lines of windows.jsonl, in order
    warnings: list[str] = field(default_factory=list)  # what could not be read, one line each
    waits: pd.DataFrame = field(default_factory=lambda: empty(WAIT_COLUMNS))  # when emulated jobs stood still
    segments: list[Segment] = field(default_factory=list)  # which tuner wrote what, and what each lacks

    @classmethod
    def read(cls, folder: str | os.PathLike[str], most_events: int | None = None) -> Trace:
        """Read a trace folder, or the run folder whose ``trace/`` it is.

        ``most_events``: of a longer trace only the first and the last parts are read, about so many events; a
        warning says so. Raises TraceError if there is none, if it is of another format, or if a file other than the
        last part of a segment is damaged.
        """
        path = Path(folder)
        if not (path / "header.json").exists() and (path / "trace" / "header.json").exists():
            path = path / "trace"
        header = read_header(path)
        warnings: list[str] = []
        most = {"events": most_events}
        segments = read_segments(path)
        parts = {kind: read_parts(path, segments, kind, warnings, most.get(kind)) for kind in IN_PARTS_OF}
        whole = {kind: read_whole(path, segments, kind) for kind in WHOLE}
        log = _read_log(path / "windows.jsonl", warnings)
        warnings += _what_went(header, log)
        return cls(path, header, **parts, **whole, log=log, warnings=warnings, segments=segments)

    @property
    def all_reduce(self) -> str:
        """The job's option for all_reduce, "" where it is not tuned."""
        return str(self.header.get("all_reduce") or "")

    @property
    def windows(self) -> pd.DataFrame:
        """The measuring windows, one row each, in order; columns as logged."""
        return pd.DataFrame([line for line in self.log if line["kind"] == "window"])

    @property
    def tables(self) -> dict[int, tuple[dict[str, Any], ...]]:
        """Rules of each table that was published to hold in whole steps, by generation; generation 0 (no rule) is
        always there."""
        logged = [line["table"] for line in self.log if line["kind"] == "table"]
        in_steps = [table for table in logged if not table.get("one_of") or table.get("turn_steps")]
        rules = {int(table["generation"]): tuple(table["rules"]) for table in in_steps}
        return {0: (), **rules}


def applies(row: Mapping[str, Any], call: Mapping[Any, Any]) -> bool:
    """Whether a row of a table or of a summary applies to calls, with ``func, n_bytes, n_ranks, n_nodes``."""
    if row["func"] != call["func"]:
        return False
    least = int(row["min_bytes"])
    most = int(row["max_bytes"])
    is_inside = least <= call["n_bytes"] <= most
    return is_inside and is_of(row, call["n_ranks"], call["n_nodes"])


def row_for(rows: Iterable[Mapping[str, Any]], call: Mapping[Any, Any]) -> Mapping[str, Any] | None:
    """The row of a table that a call is answered by, None without one: those of its class come before those of any."""
    found = [row for row in rows if applies(row, call)]
    found.sort(key=lambda row: not row.get("n_ranks"))
    return found[0] if found else None


def is_of(row: Mapping[str, Any], n_ranks: int, n_nodes: int) -> bool:
    """Whether a row is of communicators of so many ranks and nodes; with 0, or without a number: of any."""
    of_ranks = row.get("n_ranks") or n_ranks
    of_nodes = row.get("n_nodes") or n_nodes
    return (of_ranks, of_nodes) == (n_ranks, n_nodes)


def _what_went(header: dict[str, Any], log: list[dict[str, Any]]) -> list[str]:
    """What the writer removed to keep within its space, in words."""
    told = []
    for kind in IN_PARTS_OF:
        if n := header.get(f"{kind}_parts_rotated"):
            told.append(
                f"the trace had reached its space: {n} parts of {kind} after its beginning were removed"
            )
    for line in log:
        if line["kind"] == "left_out":
            is_whole = line.get("tables") == 0
            lost = " (windows only)" if is_whole else ", tables too: which one ran then may be told wrongly"
            told.append(
                f"the log had reached its space: {line.get('lines')} lines of its middle were removed{lost}"
            )
    return told


def _read_log(path: Path, warnings: list[str]) -> list[dict[str, Any]]:
    try:
        texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = parse_json(text)
            lines.append({**line, "kind": str(line["kind"])})
        except (ValueError, KeyError, TypeError):
            warnings.append(f"{path.name} line {number} is not whole and is left out")
    return lines

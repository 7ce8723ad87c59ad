"""Recordings of other tools as ordinary traces: what ``show``, the report, the auditor and a replay can read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from . import importers_flight, importers_inspector, importers_kineto, importers_nccl_tests
from .assemble import COMM_COLUMNS
from .files import TraceError, TraceWriter
from .importers_common import Imported

#: Format -> (reader, what it is).
FORMATS: dict[str, tuple[Callable[[list[Path]], Imported], str]] = {
    "kineto": (importers_kineto.read, "PyTorch profiler traces, one .json or .json.gz a rank"),
    "flight-recorder": (importers_flight.read, "PyTorch Flight Recorder dumps, one a rank"),
    "inspector": (importers_inspector.read, "NCCL Inspector logs, JSON lines"),
    "nccl-tests": (importers_nccl_tests.read, "nccl-tests results: -J JSON, printed text, or CSV"),
}


@dataclass(frozen=True)
class Result:
    """What an import came to."""

    folder: Path
    n_events: int
    n_steps: int
    n_timed: int  # events that have a start and an end
    notes: list[str]  # what the source could not tell


def import_files(source: str, paths: list[Path], out: Path, ranks_per_node: int | None = None) -> Result:
    """Read recordings of format ``source`` (a key of FORMATS) and write them as one trace into ``out``.

    ``ranks_per_node`` gives the number of nodes where the recordings do not tell. Raises TraceError for an unknown
    format, a file that is not of it, one without any collective, and a folder that holds a trace already.
    """
    if source not in FORMATS:
        raise TraceError(f"unknown format {source!r}: give one of {', '.join(FORMATS)}")
    for path in paths:
        if not path.is_file():
            raise TraceError(f"no file {path}: give the files to import, then the folder to make")
    found = FORMATS[source][0](paths)
    events, steps = found.frames(ranks_per_node)
    if events.empty:
        raise TraceError(f"{', '.join(p.name for p in paths)}: no collective in it that NCCL runs, nothing to import")
    # The header tells of the recorded machine; what is not known of it must not be this machine's.
    unknown = {"host": None, "kernel": None, "commit": None}
    header = {**unknown, **found.header, "source": source, "files": [str(p) for p in paths], "emulated": False}
    with TraceWriter(out, {**header, "notes": found.notes}) as writer:
        writer.write(events, steps)
        writer.write_whole("comms", _comms(events))
    n_timed = int(events["start_ns"].notna().sum())
    return Result(Path(out), len(events), len(steps), n_timed, found.notes)


def _comms(events: pd.DataFrame) -> pd.DataFrame:
    """The communicators that the events name."""
    columns = ["comm_id", "n_ranks", "n_nodes", "rank", "pid"]
    seen = events[columns].drop_duplicates(["comm_id", "rank", "pid"])
    return seen.assign(name="")[list(COMM_COLUMNS)].astype(COMM_COLUMNS)

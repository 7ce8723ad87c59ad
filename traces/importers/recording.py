"""Recordings of other tools as ordinary traces: what ``show``, the report, a replay and ``advise`` can read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from ..assemble import COMM_COLUMNS, OFFER_COLUMNS, empty
from ..files import Trace, TraceError
from . import flight, kineto, nsys
from .common import Imported
from .json_stream import Source
from .steps import infer_steps

#: Format -> reader: PyTorch profiler traces, one .json or .json.gz a rank; PyTorch Flight Recorder dumps, one a rank;
#: Nsight Systems' SQLite export.
FORMATS: dict[str, Callable[[list[Path]], Imported]] = {
    "kineto": kineto.read,
    "flight-recorder": flight.read,
    "nsys": nsys.read,
}
#: What tells a format within a file's first bytes, in this order.
_SIGNS = (("kineto", (b'"traceEvents"', b'"deviceProperties"')), ("flight-recorder", (b'"entries"', b'"pg_config"')))


def detect(path: Path) -> str:
    """The format of a file, by its first bytes. Raises TraceError when it is none that is known."""
    with Source(path) as source:
        head = source.read(1 << 16)
    if head[:16] == b"SQLite format 3\0":
        return "nsys"
    if head[:1] == b"\x80":
        return "flight-recorder"
    for name, signs in _SIGNS:
        if any(sign in head for sign in signs):
            return name
    if path.name.endswith(("trace.json", "trace.json.gz")) or head.lstrip()[:2] == b"[{":
        return "kineto"
    raise TraceError(f"{path} is of no format that is known: say which, one of {', '.join(FORMATS)}")


def _format_of_all(files: list[Path]) -> str:
    """The format of the first file. Raises TraceError where another's is one that is known, and not the same."""
    first = detect(files[0])
    for file in files[1:]:
        try:
            other = detect(file)
        except TraceError:  # it does not tell by its first bytes: its reader will
            continue
        if other != first:
            raise TraceError(f"{files[0].name} is {first}, {file.name} is {other}: give the files of one of them")
    return first


def recording_files(paths: list[Path]) -> list[Path]:
    """The files of ``paths``, folders replaced by the files in them. Raises TraceError for what is not there."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
        elif path.is_file():
            found.append(path)
        else:
            raise TraceError(f"there is no file or folder {path}")
    if not found:
        raise TraceError(f"no file in {', '.join(map(str, paths))}")
    return found


def read_recording(paths: list[Path], source: str | None = None, ranks_per_node: int | None = None) -> Trace:
    """A recording as a trace in memory: a trace folder of ours, or files (or folders of them) of another tool.

    ``source`` is a key of FORMATS, None to tell by the files; ``ranks_per_node`` gives the number of nodes where the
    recordings do not tell. The header's ``notes`` say what is not known. Raises TraceError for an unknown format, a
    file that is not of it or is damaged, one without any collective.
    """
    ours = [p for p in paths for name in ("header.json", "trace/header.json") if (p / name).exists()]
    if source is None and ours:
        return Trace.read(ours[0])
    if ranks_per_node is not None and ranks_per_node < 1:
        raise TraceError(f"there is at least 1 rank on a node, not {ranks_per_node}")
    files = recording_files(paths)
    found, events, steps, compute = _read(files, source or _format_of_all(files), ranks_per_node)
    if steps.empty:
        events, steps, period = infer_steps(events)
        found.header["steps_from"] = "period" if period else "none"
        known = f"a step is taken to be {period} calls, which repeat"
        unknown = "no calls repeat, and all are counted as one step"
        found.notes.append(f"no marks of optimizer steps: {known if period else unknown}")
    comms = events.drop_duplicates(["comm_id", "rank", "pid"]).assign(name="")
    comms = comms[list(COMM_COLUMNS)].astype(COMM_COLUMNS)
    # The header tells of the recorded machine; what is not known of it must not be this machine's.
    header = {"host": None, "kernel": None, "commit": None, **found.header, "emulated": False}
    header |= {"files": [str(p) for p in files], "notes": found.notes}
    return Trace(Path(os.path.commonpath(files)), header, events, steps, comms, empty(OFFER_COLUMNS), compute)


def _read(
    files: list[Path], source: str, ranks_per_node: int | None
) -> tuple[Imported, pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """What the importer of a format finds, and its events, steps and compute. Raises TraceError."""
    names = ", ".join(p.name for p in files)
    if source not in FORMATS:
        raise TraceError(f"unknown format {source!r}: give one of {', '.join(FORMATS)}")
    try:
        found = FORMATS[source](files)
        events, steps, compute = found.frames(ranks_per_node)
    except TraceError:
        raise
    except Exception as error:  # wrong types in a file that otherwise parses, or too much of it
        what = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        raise TraceError(f"{names} is no whole {source} recording ({what})") from None
    if events.empty:
        raise TraceError(f"{names}: no collective in it that NCCL runs, nothing to import")
    found.header["source"] = source
    return found, events, steps, compute

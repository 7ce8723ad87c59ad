"""Recordings of other tools as ordinary traces: what ``show``, the report, a replay and ``advise`` can read."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from ..assemble import COMM_COLUMNS, OFFER_COLUMNS, empty
from ..files import Trace, TraceError
from . import flight, kineto
from .common import Imported
from .json_stream import Source
from .steps import infer_steps

#: Format -> reader: PyTorch profiler traces and Flight Recorder dumps, one file a rank.
FORMATS: dict[str, Callable[[list[Path]], Imported]] = {"kineto": kineto.read, "flight-recorder": flight.read}
#: What tells a format within a file's first bytes, in this order.
_SIGNS = (("kineto", (b'"traceEvents"', b'"deviceProperties"')), ("flight-recorder", (b'"entries"', b'"pg_config"')))


def detect(path: Path) -> str:
    """The format of a file, by its first bytes; "" where these do not tell. Raises TraceError for an archive."""
    with Source(path) as source:
        head = source.read(1 << 16)
    if head[:1] == b"\x80":
        return "flight-recorder"
    seen = (name for name, signs in _SIGNS if any(sign in head for sign in signs))
    kineto_alike = path.name.endswith(("trace.json", "trace.json.gz")) or head.lstrip()[:2] == b"[{"
    return next(seen, "kineto" if kineto_alike else "")


def _of_one_format(files: list[Path], named: list[Path]) -> tuple[list[Path], str]:
    """The recordings among files that were named, or lie in a folder, and their format. Raises TraceError."""
    kinds = {file: detect(file) for file in files}
    first = {kind: file.name for file, kind in reversed(kinds.items()) if kind}
    if len(first) != 1:
        told = ", ".join(f"{name} is {kind}" for kind, name in reversed(first.items()))
        raise TraceError(
            f"{told or f'{files[0]} is no recording'}: give the files of one format, of {', '.join(FORMATS)}"
        )
    return [file for file in files if kinds[file] or file in named], next(iter(first))


def recording_files(paths: list[Path]) -> list[Path]:
    """The files of ``paths``, folders replaced by the files in them. Raises TraceError for what is not there."""
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise TraceError(f"there is no file or folder {path}")
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        found += [p for p in inside if p == path or (p.is_file() and not p.name.startswith("."))]
    if not found:
        raise TraceError(f"no file in {', '.join(map(str, paths))}: folders within are not looked into")
    for i, one in enumerate(found):
        if twin := next((other for other in found[:i] if filecmp.cmp(one, other, shallow=False)), None):
            raise TraceError(f"{twin} and {one} are the same: give one file a rank")
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
    used, source = (files, source) if source else _of_one_format(files, paths)
    found, events, steps, compute = _read(used, source, ranks_per_node)
    found.notes += [f"{file.name} is left out: it is no {source} recording" for file in files if file not in used]
    if steps.empty:
        events, steps, period = infer_steps(events)
        found.header["steps_from"] = "period" if period else "none"
        what = f"a step is taken to be {period} calls, which repeat" if period else "no calls repeat, no step is known"
        found.notes.append(f"no marks of optimizer steps: {what}")
    comms = events.drop_duplicates(["comm_id", "rank", "pid"]).assign(name="")[[*COMM_COLUMNS]].astype(COMM_COLUMNS)
    # The header tells of the recorded machine; what is not known of it must not be this machine's.
    header = {"host": None, "kernel": None, "commit": None, **found.header, "emulated": False}
    header |= {"files": [str(p) for p in used], "notes": found.notes}
    return Trace(Path(os.path.commonpath(used)), header, events, steps, comms, empty(OFFER_COLUMNS), compute)


def _read(
    files: list[Path], source: str, ranks_per_node: int | None
) -> tuple[Imported, pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """What the importer of a format finds, and its events, steps and compute. Raises TraceError."""
    if source not in FORMATS:
        raise TraceError(f"unknown format {source!r}: give one of {', '.join(FORMATS)}")
    names = ", ".join(p.name for p in files)
    try:
        found = FORMATS[source](files)
        events, steps, compute = found.frames(ranks_per_node)
    except TraceError:
        raise
    except Exception:  # wrong types in a file that otherwise parses, or too much of it
        raise TraceError(f"{names}: a field is not what {source} writes there: cut or changed? Record again") from None
    if events.empty:
        raise TraceError(f"{names}: no collective in it that NCCL runs, nothing to import")
    found.header["source"] = source
    return found, events, steps, compute

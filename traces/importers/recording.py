"""Recordings of other tools as ordinary traces: what ``show``, the report, a replay and ``advise`` can read.

:mod:`.formats` recognises a file by its first bytes; each format has a reader of its own, which fills a
:class:`.found.Found`.
"""

from __future__ import annotations

import filecmp
import os
from pathlib import Path

import pandas as pd

from ..assemble import COMM_COLUMNS, COMPUTE_COLUMNS, OFFER_COLUMNS, empty, joined
from ..files import Trace, TraceError
from .formats import KINETO, Format, detect, readable, refusal
from .found import Found
from .json_stream import many


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
    return found


def _refuse_twins(files: list[Path]) -> None:
    """Raises TraceError where two files have one content: a rank would count twice."""
    for i, one in enumerate(files):
        if twin := next((other for other in files[:i] if filecmp.cmp(one, other, shallow=False)), None):
            raise TraceError(f"{twin} and {one} are the same: give one file a rank")


def trace_folder(path: Path) -> Path | None:
    """The trace of ours that a path is or holds, None where it is another tool's file or folder."""
    return next((path for name in ("header.json", "trace/header.json") if (path / name).exists()), None)


def is_recording(path: Path) -> bool:
    """True for another tool's file, or a folder that holds one and no trace of ours."""
    if path.is_file():
        return True
    if not path.is_dir() or trace_folder(path):
        return False
    kinds = (detect(file) for file in path.iterdir() if file.is_file())
    return any(known is not None and known.read is not None for known in kinds)


def read_recording(paths: list[Path], ranks_per_node: int | None = None) -> Trace:
    """A recording as a trace in memory: a trace folder of ours, or files (or folders of them) of another tool.

    ``ranks_per_node`` gives the number of nodes, which most tools do not tell. The header's ``notes`` say what is not
    known, ``source`` names the format. Raises TraceError for files of an unknown format or of two formats, for damaged
    files, and where no collective is in them.
    """
    ours = [path for path in paths if trace_folder(path)]
    if ours and len(paths) > 1:
        raise TraceError(f"{ours[0]} is the folder of a run: give it alone, or two folders to compare them")
    if ours:
        return Trace.read(ours[0])
    if ranks_per_node is not None and ranks_per_node < 1:
        raise TraceError(f"there is at least 1 rank on a node, not {ranks_per_node}")
    files = recording_files(paths)
    known, used, left_out = _of_one_format(files, paths)
    _refuse_twins([file for file in files if file in used])
    found, events = _read(known, used, ranks_per_node)
    comms = events.drop_duplicates(["comm_id", "rank", "pid"]).assign(name="")
    # The header tells of the recorded machine; what is not known of it must not be this machine's.
    header = {"host": None, "kernel": None, "commit": None, **found.header}
    header |= {"emulated": False, "source": known.name, "files": [str(file) for file in used]}
    header |= {"notes": found.notes + left_out, "left_out": vars(found.left_out)}
    return Trace(
        _common(used),
        header,
        events,
        found.step_frame(),
        comms[[*COMM_COLUMNS]].astype(COMM_COLUMNS),
        empty(OFFER_COLUMNS),
        joined(found.computes, COMPUTE_COLUMNS),
    )


def _common(files: list[Path]) -> Path:
    """The folder of all files, or the one file; from the root where some paths are and others are not."""
    if any(file.is_absolute() for file in files):
        files = [file.absolute() for file in files]
    return Path(os.path.commonpath(files))


def _of_one_format(files: list[Path], named: list[Path]) -> tuple[Format, list[Path], list[str]]:
    """The format, its files, and which other files of a folder are left out. Raises TraceError."""
    kinds = {file: _kind(file, file in named) for file in files}
    readable_kinds = {file: known for file, known in kinds.items() if known and known.read}
    if not readable_kinds:
        raise TraceError(_why_nothing(kinds, named[0]))
    first = {known.name: f"{file.name} is {known.text}" for file, known in reversed(readable_kinds.items())}
    if len(first) > 1:
        raise TraceError(f"{', '.join(reversed(first.values()))}: give the files of one format")
    chosen = next(iter(readable_kinds.values()))
    used = [*readable_kinds]
    return chosen, used, [_why_left_out(file, kinds[file], chosen) for file in files if file not in used]


def _why_nothing(kinds: dict[Path, Format | None], named: Path) -> str:
    """What to say of files of which none can be read."""
    refused = [(file, known) for file, known in kinds.items() if known]
    if refused:
        return refusal(*refused[0])
    return f"no recording in {named}: give {readable()}"


def _kind(file: Path, is_named: bool) -> Format | None:
    """The format of a file. Raises TraceError for one that was named and is none that we read."""
    known = detect(file)
    if not is_named:
        return known
    if known is None and file.name.endswith((".json", ".json.gz")):
        return KINETO  # its reader says where it stops to be one
    if known is None or known.read is None:
        raise TraceError(refusal(file, known))
    return known


def _why_left_out(file: Path, known: Format | None, chosen: Format) -> str:
    """What to say of a file of a folder that is not read."""
    wanted = chosen.text.partition(" ")[2]
    what = f"it is {known.text}" if known else f"it is no {wanted}"
    return f"{file.name} is left out: {what}"


def _read(known: Format, files: list[Path], ranks_per_node: int | None) -> tuple[Found, pd.DataFrame]:
    """What is in the files, and its events. Raises TraceError."""
    names = ", ".join(file.name for file in files)
    found = Found()
    assert known.read is not None
    try:
        known.read(files, found)
        left_out = found.left_out
        if not found.events and left_out.calls:
            raise TraceError(
                f"{names}: {left_out.calls} calls of NCCL, and none says which collective it is: {found.gaps.calls}"
            )
        if not found.events and found.outside:
            raise TraceError(f"{names}: no step holds a call of NCCL: record whole steps")
        if not found.events:
            raise TraceError(f"{names}: no collective in it that NCCL runs, nothing to import")
        events = found.event_frame(ranks_per_node)
    except TraceError:
        raise
    except Exception:  # wrong types in a file that otherwise parses, or too much of it
        raise TraceError(
            f"{names}: a field is not what {known.text} holds there: cut or changed? Record again"
        ) from None
    _note_gaps(found, events)
    return found, events


def _note_gaps(found: Found, events: pd.DataFrame) -> None:
    """Say what the files do not tell."""
    left_out = found.left_out
    if left_out.calls:
        total = left_out.calls + len(events)
        found.notes.insert(
            0,
            f"{left_out.calls} of {total} calls of NCCL{left_out.share()} do not say which collective they are, "
            f"and are left out: {found.gaps.calls}",
        )
    found.notes += [text.format(many(n, "call")) for text, n in found.outside.items()]
    is_missing = {
        found.gaps.times: not events["start_ns"].notna().any(),
        found.gaps.compute: not found.computes,
        found.gaps.steps: not found.steps,
    }
    found.notes += [note for note, missing in is_missing.items() if note and missing]

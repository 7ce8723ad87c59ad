"""Recordings of other tools as ordinary traces: what ``show``, the report, a replay and ``advise`` can read.

:mod:`.formats` recognises a file by its first bytes; each format has a reader of its own, which fills a
:class:`.found.Found`. :mod:`.whose` then decides whose each call is.
"""

from __future__ import annotations

import filecmp
import os
from pathlib import Path

import pandas as pd

from ..assemble import COMM_COLUMNS, OFFER_COLUMNS, empty
from ..files import Trace
from ..outside import TraceError, said
from .formats import KINETO, Format, detect, readable, refusal
from .found import Found, Reader
from .whose import Job, settle


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
    return any(_is_readable(file) for file in path.iterdir() if file.is_file())


def _is_readable(file: Path) -> bool:
    try:
        known = detect(file)
    except TraceError:
        return False
    return known is not None and known.reader is not None


def read_recording(paths: list[Path], ranks_per_node: int | None = None) -> Trace:
    """A recording as a trace in memory: a trace folder of ours, or files (or folders of them) of another tool.

    ``ranks_per_node`` gives the number of nodes, which most tools do not tell. The header's ``notes`` name what is
    unknown, ``source`` the format. Raises TraceError for unknown or mixed formats, damaged files, and files without a
    collective.
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
    job, read = _read(known, [file for file in files if file in used])
    events, steps, compute = _frames(job, read, ranks_per_node)
    comms = events.drop_duplicates(["comm_id", "rank", "pid"]).assign(name="")
    # The header tells of the recorded machine; what is not known of it must not be this machine's.
    header = {"host": None, "kernel": None, "commit": None, **job.found.header}
    header |= {"emulated": False, "source": known.name, "files": [str(file) for file in read]}
    header |= {"notes": job.notes + left_out, "left_out": vars(job.left_out)}
    comms = comms[[*COMM_COLUMNS]].astype(COMM_COLUMNS)
    return Trace(_common(read), header, events, steps, comms, empty(OFFER_COLUMNS), compute)


def _frames(
    job: Job, files: list[Path], ranks_per_node: int | None
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Events, steps and other kernels. Raises TraceError for numbers that none of a trace can be."""
    try:
        return job.events(ranks_per_node), job.step_frame(), job.compute()
    except (ValueError, TypeError, OverflowError) as error:  # times and numbers of steps may be anything
        raise TraceError(
            f"{_names(files)}: a number does not fit into a trace ({said(error)}): record again"
        ) from None


def _names(files: list[Path]) -> str:
    return ", ".join(file.name for file in files)


def _common(files: list[Path]) -> Path:
    """The folder of all files, or the one file; from the root where some paths are and others are not."""
    if any(file.is_absolute() for file in files):
        files = [file.absolute() for file in files]
    return Path(os.path.commonpath(files))


def _of_one_format(files: list[Path], named: list[Path]) -> tuple[Format, list[Path], list[str]]:
    """The format, its files, and which other files are left out. Raises TraceError."""
    readable_kinds: dict[Path, Format] = {}
    others: dict[Path, Format | None] = {}
    refused: list[TraceError] = []
    for file in dict.fromkeys(files):
        try:
            known = _kind(file, file in named)
        except TraceError as error:
            refused.append(error)
            continue
        if known and known.reader:
            readable_kinds[file] = known
        else:
            others[file] = known
    if not readable_kinds:
        raise refused[0] if refused else TraceError(_why_nothing(others, named[0]))
    first = {known.name: f"{file.name} is {known.text}" for file, known in reversed(readable_kinds.items())}
    if len(first) > 1:
        raise TraceError(f"{', '.join(reversed(first.values()))}: give the files of one format")
    chosen = next(iter(readable_kinds.values()))
    left_out = [_why_left_out(file, known, chosen) for file, known in others.items()]
    return chosen, [*readable_kinds], left_out + [f"left out: {error}" for error in refused]


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
    if known is None or known.reader is None:
        raise TraceError(refusal(file, known))
    return known


def _why_left_out(file: Path, known: Format | None, chosen: Format) -> str:
    """What to say of a file of a folder that is not read."""
    wanted = chosen.text.partition(" ")[2]
    what = f"it is {known.text}" if known else f"it is no {wanted}"
    return f"{file.name} is left out: {what}"


def _read(known: Format, files: list[Path]) -> tuple[Job, list[Path]]:
    """What is in the files, and those that were read; the job's notes name the others. Raises TraceError."""
    found, odd = _read_each(known, list(dict.fromkeys(files)))
    holding = {process.file for process in found.processes if process.holds_calls}
    if odd and not holding:
        raise next(iter(odd.values()))
    _refuse_twins([file for file in files if file in holding])
    job = settle(found, known.gaps)
    whole = [file for file in dict.fromkeys(files) if file not in odd]
    if not job.rows:
        raise TraceError(_why_no_call(job, whole))
    job.say()
    job.notes += [f"left out: {error}" for error in odd.values()]
    return job, whole


def _read_each(known: Format, files: list[Path]) -> tuple[Found, dict[Path, TraceError]]:
    """What is in the files together, and what is wrong with those that cannot be read."""
    assert known.reader is not None
    read, found = known.reader(), Found()
    odd: dict[Path, TraceError] = {}
    for file in files:
        of_file = Found()
        try:
            _read_one(known, read, file, of_file)
        except TraceError as error:
            odd[file] = error
        else:
            found.add(of_file)
    return found, odd


def _why_no_call(job: Job, files: list[Path]) -> str:
    """What to say of files that hold no call, or none that can be read."""
    n, names = job.left_out.calls, _names(files)
    if n:
        return f"{names}: {n} calls of NCCL, and none says which collective it is: {job.gaps.calls}"
    if job.outside:
        return f"{names}: no step holds a call of NCCL: record whole steps"
    return next(iter(job.found.nothing), f"{names}: no collective in it that NCCL runs, nothing to import")


def _read_one(known: Format, read: Reader, file: Path, found: Found) -> None:
    """Read one file. Raises TraceError for whatever is wrong with it, and says what was seen."""
    try:
        read(file, found)
    except TraceError:
        raise
    except Exception as error:  # wrong types in a file that otherwise parses, or too much of it
        raise TraceError(
            f"{file}: a field is not what {known.text} holds there ({said(error)}): cut or changed? Record again"
        ) from None

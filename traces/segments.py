"""The segments of a trace: each is what one tuner has written, and nobody else adds to it.

A segment names the positions of the rings that it covers, and those that it lacks, with the reason. A later one covers
none of these. Rows lie in parts, whole or not at all; parts that it does not name do not count.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from .assemble import (
    COMM_COLUMNS,
    EVENT_COLUMNS,
    MOST_OFFERS,
    OFFER_COLUMNS,
    STEP_COLUMNS,
    WAIT_COLUMNS,
    complete,
    empty,
)
from .header import FORMAT, IN_ONE_FILE, IN_PARTS
from .outside import TraceError as TraceError
from .outside import atomically, parse_json, read_json, said
from .positions import Spans, size_of, union

IN_PARTS_OF = dict(zip(IN_PARTS, (EVENT_COLUMNS, STEP_COLUMNS, WAIT_COLUMNS), strict=True))
#: Part of a trace's space that each of these may take.
SPACE = {"events": 5 / 8, "steps": 1 / 4, "waits": 1 / 8}
WHOLE = dict(zip(IN_ONE_FILE, (COMM_COLUMNS, OFFER_COLUMNS), strict=True))
_KEYS = {"comms": ["comm_id", "rank", "pid"], "offers": ["comm_id", "func", "n_bytes"]}
_ARROW = {
    "bool": pa.bool_(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "Int64": pa.int64(),
    "uint64": pa.uint64(),
    "str": pa.string(),
    "object": pa.list_(pa.float32()),
}

#: How lines of a log begin that say what went, and those of a window; what a line of a table on trial holds.
_LEFT_OUT, _WINDOW, _TRIAL = b'{"kind": "left_out"', b'{"kind": "window"', b'"trial_steps":'
#: Kinds of which each line says something of its own. Of the others, which tell how the run stands, a later line about
#: the same stands for an earlier one.
_OWN = ("table", "event", "verdict")


#: Why a segment lacks positions: no tuner of this trace was there yet, or the records were gone before they were read.
UNWATCHED, LOST = "unwatched", "lost"


@dataclass
class Coverage:
    """Positions of rings, by their keys (``LIFE/RING``)."""

    covers: dict[str, Spans] = field(default_factory=dict)
    gaps: dict[str, dict[str, Spans]] = field(default_factory=dict)  # by reason, then by key
    #: Of each process (``pid`` in tables) which start of the job it is of; "": it was not told.
    starts: dict[int, str] = field(default_factory=dict)

    def named(self, key: str) -> Spans:
        """The positions of one ring of which it says anything."""
        gaps = [of_reason.get(key, []) for of_reason in self.gaps.values()]
        return union(self.covers.get(key, []), *gaps)

    @property
    def n_lost(self) -> int:
        """Records that were gone before they were read."""
        return sum(map(size_of, self.gaps.get(LOST, {}).values()))


@dataclass
class Segment:
    """What one tuner has written. ``name``: a number, by which segments of a trace have their order, and its life."""

    name: str
    parts: dict[str, int] = field(default_factory=dict)  # by kind, how many
    coverage: Coverage = field(default_factory=Coverage)

    def part(self, folder: Path, kind: str, number: int) -> Path:
        """The file of a part."""
        return folder / f"{kind}-{self.name}-{number:05d}.parquet"

    def whole(self, folder: Path, kind: str) -> Path:
        """The file of what lies in one file."""
        return folder / f"{kind}-{self.name}.parquet"

    def write(self, folder: Path) -> None:
        """From now on its parts count. Raises TraceError."""
        text = json.dumps(asdict(self))
        atomically(folder / f"segment-{self.name}.json", lambda draft: draft.write_text(text))


def read_segments(folder: Path) -> list[Segment]:
    """All segments of a trace, in order. Raises TraceError where one is damaged."""
    found = []
    for path in sorted(folder.glob("segment-*.json")):
        try:
            told = read_json(path)
            coverage = Coverage(_spans(told["coverage"]["covers"]))
            coverage.gaps = {why: _spans(gaps) for why, gaps in told["coverage"]["gaps"].items()}
            coverage.starts = {int(pid): str(start) for pid, start in told["coverage"]["starts"].items()}
            parts = {kind: int(told["parts"].get(kind, 0)) for kind in IN_PARTS}
            found.append(Segment(path.stem.removeprefix("segment-"), parts, coverage))
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            cure = "remove it to read the rest of the trace"
            raise TraceError(f"{path} is damaged ({type(error).__name__}: {error}): {cure}") from None
    return found


def _spans(told: dict[str, Any]) -> dict[str, Spans]:
    return {str(key): [(int(start), int(end)) for start, end in spans] for key, spans in told.items()}


def parts_of(folder: Path, segments: list[Segment], kind: str) -> list[Path]:
    """The parts of one kind that count, in order; a trace at its limit of space has removed some."""
    named = (one.part(folder, kind, n) for one in segments for n in range(one.parts[kind]))
    return [path for path in named if path.exists()]


class DamagedError(TraceError):
    """A file of a trace is there and is not whole."""


def write_parquet(path: Path, frame: pd.DataFrame, columns: dict[str, str]) -> None:
    """One file of these columns. Raises TraceError."""
    schema = pa.schema([(name, _ARROW[kind]) for name, kind in columns.items()])
    table = pa.Table.from_pandas(frame[list(columns)], schema=schema, preserve_index=False)

    def write(draft: Path) -> None:
        with draft.open("wb") as file:  # pyarrow takes no path that is no UTF-8
            pq.write_table(table, file, compression="zstd")

    atomically(path, write)


def read_parquet(path: Path, columns: dict[str, str]) -> pd.DataFrame:
    """One file. Raises DamagedError when it is damaged, TraceError when it cannot be read, and FileNotFoundError when a
    running job has removed it."""
    try:
        with path.open("rb") as file:
            # int64 with gaps must not pass through float64: GPU clock values have more digits than that holds.
            # No threads: one that still lets go of a Python file while the program ends aborts it (Arrow issue 34314).
            table = pq.read_table(file, use_threads=False, pre_buffer=False)
            frame = table.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)
        return complete(frame, columns)
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException, KeyError, ValueError, TypeError) as error:
        if (
            isinstance(error, OSError) and error.errno is not None
        ):  # the system's word, not that of the content
            raise TraceError(f"cannot read {path}: {error.strerror}") from None
        raise DamagedError(
            f"{path} is damaged ({said(error)}): remove it to read the rest of the trace"
        ) from None


def read_parts(
    folder: Path, segments: list[Segment], kind: str, warnings: list[str], most_rows: int | None = None
) -> pd.DataFrame:
    """All of one kind, or the first and the last of ``most_rows``; what is left out is told in ``warnings``.

    Raises TraceError when one that is not the last of a segment is damaged.
    """
    columns = IN_PARTS_OF[kind]
    paths = parts_of(folder, segments, kind)
    lasts = [one.part(folder, kind, one.parts[kind] - 1) for one in segments]
    frames, n_gone = [], 0
    for path in _ends(paths, most_rows, warnings) if most_rows is not None else paths:
        try:
            frames.append(read_parquet(path, columns))
        except FileNotFoundError:
            n_gone += 1
        except DamagedError:
            if path not in lasts:
                raise
            warnings.append(f"{path.name} was cut short and is left out: the last {kind} are missing")
    if n_gone:
        warnings.append(f"the running job removed {n_gone} parts of {kind} meanwhile: these are left out")
    if list(folder.glob(f"{kind}-*.tmp")):
        warnings.append(f"the writer was stopped while it wrote: the last {kind} are missing")
    return pd.concat(frames, ignore_index=True) if frames else empty(columns)


def _ends(paths: list[Path], most_rows: int, warnings: list[str]) -> list[Path]:
    """The first and the last of the parts, half of ``most_rows`` each, at least one of either."""
    rows = []
    for path in paths:
        try:
            with path.open("rb") as file:
                rows.append(int(pq.read_metadata(file).num_rows))
        except (OSError, pa.ArrowException):
            rows.append(0)  # told of when it is read
    if sum(rows) <= most_rows:
        return paths
    before, after = np.cumsum(rows), np.cumsum(rows[::-1])[::-1]
    keep = [i for i in range(len(paths)) if before[i] <= most_rows / 2 or after[i] <= most_rows / 2]
    keep = sorted({0, len(paths) - 1, *keep})
    left_out = sum(rows) - sum(rows[i] for i in keep)
    if left_out:
        warnings.append(f"{left_out} of {sum(rows)} events, in the middle of the run, are left out")
    return [paths[i] for i in keep]


def thinned(lines: list[bytes], most_bytes: float) -> list[bytes]:
    """What stays of these lines of a log, and before it a line that says what went.

    Windows go first, and what a later line says anew; then tables on trial; then all but how the run stands: a log must
    end somewhere.
    """
    gone = [line for line in lines if line.startswith(_LEFT_OUT)]
    lines = [line for line in lines if not line.startswith(_LEFT_OUT)]
    state, stand = _state([line for line in lines if not line.startswith(_WINDOW)])
    lasting = [line for line in state if _TRIAL not in line]
    kept = state
    if _size(kept) > most_bytes:
        kept = lasting
    if _size(kept) > most_bytes:
        kept = stand
    n_lines = len(lines) - len(kept)
    n_tables = len(state) - len(kept)
    for line in gone:
        earlier = parse_json(line)
        n_lines += earlier["lines"]
        n_tables += earlier["tables"]
    entry = {"kind": "left_out", "time": round(time.time(), 3), "lines": n_lines, "tables": n_tables}
    said = json.dumps(entry) + "\n"
    return [said.encode(), *kept]


def is_cut(log: Path) -> bool:
    """Whether the last line of a log is not whole: a kill may cut it."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
    return False


def _state(lines: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Of lines without windows those that no later one stands for; and of these what tells how the run stands."""
    own, stand = set[int](), dict[Any, int]()
    for place, text in enumerate(lines):
        with contextlib.suppress(ValueError, TypeError, LookupError):  # a line that is damaged says nothing
            line = parse_json(text)
            if line["kind"] in _OWN:
                own.add(place)
            else:
                stand[line["kind"], line.get("number"), line.get("letter")] = place
    return [lines[one] for one in sorted({*own, *stand.values()})], [
        lines[one] for one in sorted(stand.values())
    ]


def _size(lines: list[bytes]) -> int:
    return sum(map(len, lines))


def read_whole(folder: Path, segments: list[Segment], kind: str) -> pd.DataFrame:
    """Of all segments what lies in one file each: communicators, or offers, of each the newest word."""
    columns, frames = WHOLE[kind], [empty(WHOLE[kind])]
    for one in segments:
        try:
            frames.append(read_parquet(one.whole(folder, kind), columns))
        except FileNotFoundError:  # it told of none
            continue
    rows = pd.concat(frames[1:] or frames, ignore_index=True)
    if len(frames) < 3:  # of one segment
        return rows
    rows = rows.drop_duplicates(_KEYS[kind], keep="last").astype(columns)
    if kind == "offers":
        rows = rows.groupby(["comm_id", "func"], sort=False).tail(MOST_OFFERS)
    return rows.reset_index(drop=True)


def read_header(folder: Path) -> dict[str, Any]:
    """What a trace says of itself. Raises TraceError where there is none, or one of another format."""
    path = folder / "header.json"
    try:
        header = read_json(path)
    except FileNotFoundError:
        cure = (
            "give the folder that holds header.json, e.g. runs/demo/trace, or one that holds other tools' files: "
            "folders within are not looked into"
        )
        raise TraceError(f"no trace in {folder}: {cure}") from None
    except NotADirectoryError:
        raise TraceError(
            f"{folder} is a file, a trace is a folder; `dynamiccl show` and `advise` read other tools' files"
        ) from None
    except (OSError, ValueError) as error:
        raise TraceError(
            f"cannot read {path} ({error}): restore it, the segments beside it are unharmed"
        ) from None
    version = header.get("format") if isinstance(header, dict) else None
    if not isinstance(version, int):
        raise TraceError(f"{path} has no format version: this is not a trace of dynamiccl")
    if version != FORMAT:
        cure = "upgrade dynamiccl" if version > FORMAT else "read it with the release that wrote it"
        raise TraceError(f"{folder} has trace format {version}, this release reads {FORMAT}: {cure}")
    return dict(header)

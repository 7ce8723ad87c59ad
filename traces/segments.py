"""The files of a trace: written whole or not at all, read though the last segment was cut short."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from .assemble import COMM_COLUMNS, EVENT_COLUMNS, OFFER_COLUMNS, STEP_COLUMNS, WAIT_COLUMNS, complete, empty
from .header import FORMAT, IN_ONE_FILE, IN_SEGMENTS
from .outside import TraceError as TraceError
from .outside import atomically, parse_json, read_json, said

SEGMENTED = dict(zip(IN_SEGMENTS, (EVENT_COLUMNS, STEP_COLUMNS, WAIT_COLUMNS), strict=True))
#: Part of a trace's space that each of these may take.
SPACE = {"events": 5 / 8, "steps": 1 / 4, "waits": 1 / 8}
WHOLE = dict(zip(IN_ONE_FILE, (COMM_COLUMNS, OFFER_COLUMNS), strict=True))
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


class DamagedError(TraceError):
    """A file of a trace is there and is not whole."""


def segments(folder: Path, kind: str) -> list[Path]:
    """Of one kind that are whole, in order."""
    return sorted(p for p in folder.glob(f"{kind}-*.parquet") if p.stem.rpartition("-")[2].isdigit())


def next_segment(folder: Path, kind: str) -> int:
    """Number after the last segment; a last segment that a crash cut short is set aside first."""
    paths = segments(folder, kind)
    if not paths:
        return 0
    try:
        read_parquet(paths[-1], SEGMENTED[kind])
    except DamagedError:
        paths[-1].rename(paths[-1].with_suffix(".damaged"))
    return int(paths[-1].stem.rpartition("-")[2]) + 1


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
            frame = pq.read_table(file).to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)
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


def read_segments(folder: Path, kind: str, warnings: list[str], most_rows: int | None = None) -> pd.DataFrame:
    """All of one kind, or the first and the last of ``most_rows``; what is left out is told in ``warnings``.

    Raises TraceError when one that is not the last is damaged.
    """
    columns = SEGMENTED[kind]
    paths = sorted(folder.glob(f"{kind}-*.parquet"))
    frames, n_gone = [], 0
    for path in _ends(paths, most_rows, warnings) if most_rows is not None else paths:
        try:
            frames.append(read_parquet(path, columns))
        except FileNotFoundError:
            n_gone += 1
        except DamagedError:
            if path != paths[-1]:
                raise
            warnings.append(f"{path.name} was cut short and is left out: the last {kind} are missing")
    if n_gone:
        warnings.append(f"the running job removed {n_gone} segments of {kind} meanwhile: these are left out")
    if list(folder.glob(f"{kind}-*.tmp")):
        warnings.append(f"the writer was stopped while it wrote a segment: the last {kind} are missing")
    return pd.concat(frames, ignore_index=True) if frames else empty(columns)


def _ends(paths: list[Path], most_rows: int, warnings: list[str]) -> list[Path]:
    """The first and the last of the segments, half of ``most_rows`` each, at least one of either."""
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

    Windows go first, then tables on trial, then all: a log must end somewhere.
    """
    gone = [line for line in lines if line.startswith(_LEFT_OUT)]
    lines = [line for line in lines if not line.startswith(_LEFT_OUT)]
    state = [line for line in lines if not line.startswith(_WINDOW)]
    lasting = [line for line in state if _TRIAL not in line]
    kept = state
    if _size(kept) > most_bytes:
        kept = lasting
    if _size(kept) > most_bytes:
        kept = []
    n_lines = len(lines) - len(kept)
    n_tables = len(state) - len(kept)
    for line in gone:
        earlier = parse_json(line)
        n_lines += earlier["lines"]
        n_tables += earlier.get("tables", 0)
    entry = {"kind": "left_out", "time": round(time.time(), 3), "lines": n_lines, "tables": n_tables}
    said = json.dumps(entry) + "\n"
    return [said.encode(), *kept]


def _size(lines: list[bytes]) -> int:
    return sum(map(len, lines))


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

"""Traces on disk: a folder with a header, Parquet segments and a log.

::

    trace/
      header.json            format, date, host, versions; what the run adds (cluster, scales, command ...)
      events-00000.parquet   collectives (EVENT_COLUMNS), in segments: a killed process loses at most the last
      steps-00000.parquet    optimizer steps (STEP_COLUMNS), in segments
      comms.parquet          communicators (COMM_COLUMNS)
      offers.parquet         what NCCL offered (OFFER_COLUMNS)
      windows.jsonl          one JSON object a line: measuring windows, tables published, what else was logged

Every file but the log is written under another name and renamed when whole.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from .assemble import COMPUTE_COLUMNS, Assembler, empty
from .header import FORMAT, masked, new_header, plain
from .records import Slot
from .segments import SEGMENTED, WHOLE, atomically, next_segment, read_parquet, read_segments, segments, write_parquet
from .segments import TraceError as TraceError

#: The log may take one part in so many of what a trace may take.
LOG_SHARE = 16
_LEFT_OUT = b'{"kind": "left_out"'
_KEYS = {"comms": ["comm_id", "rank", "pid"], "offers": ["comm_id", "func", "n_bytes"]}


class TraceWriter:
    """Writes a trace into ``folder``; use it as a context manager or call :meth:`close`.

    Args:
        folder: made if missing.
        header: what is known of the run; host, versions and date are added. See :meth:`update_header`.
        existing: what to do if the folder holds a trace already: ``refuse`` (TraceError), ``resume`` (add
            segments to it and keep its header) or ``replace`` (remove its files, and no others).
        segment_rows: a segment is written when so many rows have come,
        segment_seconds: or so much time has passed; up to a minute in a long run, or its files would be too many.
        most_bytes: of all segments together. Beyond it the oldest go, save those of the beginning (a quarter). The
            log may have a sixteenth of it beside them.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        header: dict[str, Any],
        *,
        existing: Literal["refuse", "resume", "replace"] = "refuse",
        segment_rows: int = 50_000,
        segment_seconds: float = 10.0,
        most_bytes: float = float("inf"),
    ) -> None:
        self.folder = Path(folder)
        self.segment_rows, self.segment_seconds, self.most_bytes = segment_rows, segment_seconds, most_bytes
        old: dict[str, Any] = {}
        if (self.folder / "header.json").exists():
            if existing == "refuse":
                raise TraceError(f"{self.folder} already holds a trace: give another folder or remove it first")
            if existing == "resume":
                old = _read_header(self.folder)
            else:
                for path in _own_files(self.folder):
                    path.unlink()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TraceError(f"cannot make the trace folder {self.folder}: {error.strerror}") from None
        self.header = {**new_header(), **old, **_without_secrets(plain(header)), "format": FORMAT}
        self._write_header()
        self._buffers: dict[str, list[pd.DataFrame]] = {kind: [] for kind in SEGMENTED}
        self._next = {kind: next_segment(self.folder, kind) for kind in SEGMENTED}
        self._sizes = {kind: {p: p.stat().st_size for p in segments(self.folder, kind)} for kind in SEGMENTED}
        self._known: tuple[dict[int, dict[int, int]], int] = ({}, 0)
        self._began = self._flushed = time.monotonic()
        self._log = (self.folder / "windows.jsonl").open("a", buffering=1, encoding="utf-8")

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update_header(self, **fields: Any) -> None:
        """Add what became known later (NCCL's version, the communicator's size); rewrites header.json."""
        self.header.update(_without_secrets(plain(fields)))
        self._write_header()

    def drain(
        self, assembler: Assembler, everything: bool = False, thin: bool = False
    ) -> tuple[pd.DataFrame, pd.DataFrame]:
        """``assembler.take(everything)``, written and returned; keeps comms and offers up to date too.

        ``thin``: of the events only those whose kernels were timed are written.
        """
        events, steps = assembler.take(everything)
        self.write(events[events["start_ns"].notna()] if thin else events, steps)
        known = ({c.comm_id: dict(c.ranks) for c in assembler.comms.values()}, len(assembler.offers))
        if known != self._known:
            self._known = known
            self.write_whole("comms", assembler.comms_frame())
            self.write_whole("offers", assembler.offers_frame())
        return events, steps

    def write(self, events: pd.DataFrame | None = None, steps: pd.DataFrame | None = None) -> None:
        """Take in rows; they are on disk when the segment is full or old, or after :meth:`flush`."""
        for kind, frame in (("events", events), ("steps", steps)):
            if frame is not None and len(frame):
                self._buffers[kind].append(frame)
        rows = max(sum(map(len, frames)) for frames in self._buffers.values())
        now = time.monotonic()
        age = max(self.segment_seconds, min(60.0, (now - self._began) / 60))
        if rows >= self.segment_rows or now - self._flushed >= age:
            self.flush()

    def flush(self) -> None:
        """Write the rows taken in so far as segments."""
        for kind, frames in self._buffers.items():
            if frames:
                path = self.folder / f"{kind}-{self._next[kind]:05d}.parquet"
                write_parquet(path, pd.concat(frames, ignore_index=True), SEGMENTED[kind])
                self._sizes[kind][path] = path.stat().st_size
                self._next[kind] += 1
                frames.clear()
                self._rotate(kind)
        self._flushed = time.monotonic()

    def _rotate(self, kind: str) -> None:
        """Steps may have a quarter of the space, events the rest; the first quarter of either stays as it is."""
        sizes = self._sizes[kind]
        most = self.most_bytes / 4 * (1 if kind == "steps" else 3)
        over = sum(sizes.values()) - most
        kept, gone = 0, 0
        for path, size in list(sizes.items())[:-1]:
            if over <= 0:
                break
            kept += size
            if kept <= most / 4:
                continue
            path.unlink(missing_ok=True)
            del sizes[path]
            over -= size
            gone += 1
        if gone:
            name = f"{kind}_segments_rotated"
            self.update_header(**{name: self.header.get(name, 0) + gone})

    def write_whole(self, kind: Literal["comms", "offers"], frame: pd.DataFrame) -> None:
        """Write comms or offers, keeping rows that an earlier life of this trace has written."""
        path = self.folder / f"{kind}.parquet"
        if path.exists():
            both = pd.concat([read_parquet(path, WHOLE[kind]), frame], ignore_index=True)
            frame = both.drop_duplicates(_KEYS[kind], keep="last").astype(WHOLE[kind])
        write_parquet(path, frame, WHOLE[kind])

    def log(self, kind: str, entry: dict[str, Any]) -> None:
        """Append one line to the log, on disk at once.

        ``window`` lines describe measuring windows (index, regime, phase, slot, decision, previous, step_ms,
        default_ms, saving, verdict, reason, generation ...), ``table`` lines a table that was published
        (``{"table": Table}``): by these the report and ``show`` tell default steps from tuned ones. Slot,
        Decision and Table may be passed as they are; NaN becomes null.
        """
        line = {"kind": kind, "time": round(time.time(), 3), **entry}
        self._log.write(json.dumps(plain(line), allow_nan=False) + "\n")
        if self._log.tell() > self.most_bytes / LOG_SHARE:
            self._thin_log()

    def _thin_log(self) -> None:
        """Of a log that has grown too long the first quarter and as much of its end stay; a line says what went."""
        self._log.close()
        path, most = self.folder / "windows.jsonl", self.most_bytes / LOG_SHARE / 4
        lines = path.read_bytes().splitlines(keepends=True)
        ends = np.cumsum([len(line) for line in lines])
        first, last = int(np.searchsorted(ends, most)), int(np.searchsorted(ends, ends[-1] - most)) + 1
        before = (json.loads(line)["lines"] - 1 for line in lines[first:last] if line.startswith(_LEFT_OUT))
        entry = {"kind": "left_out", "time": round(time.time(), 3), "lines": last - first + sum(before)}
        gone = json.dumps(entry).encode() + b"\n"
        atomically(path, lambda tmp: tmp.write_bytes(b"".join([*lines[:first], gone, *lines[last:]])))
        self._log = path.open("a", buffering=1, encoding="utf-8")

    def close(self) -> None:
        """Write what is still held back."""
        self.flush()
        self._log.close()

    def _write_header(self) -> None:
        text = json.dumps(self.header, indent=2, allow_nan=False) + "\n"
        atomically(self.folder / "header.json", lambda tmp: tmp.write_text(text, encoding="utf-8"))


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

    @classmethod
    def read(cls, folder: str | os.PathLike[str], most_events: int | None = None) -> Trace:
        """Read a trace folder, or the run folder whose ``trace/`` it is.

        ``most_events``: of a longer trace only the first and the last segments are read, about so many events; a
        warning says so. Raises TraceError if there is none, if it is of a newer format, or if a file other than the
        last segment is damaged.
        """
        path = Path(folder)
        if not (path / "header.json").exists() and (path / "trace" / "header.json").exists():
            path = path / "trace"
        header = _read_header(path)
        warnings: list[str] = []
        limits = {"events": most_events}
        parts = {kind: read_segments(path, kind, warnings, limits.get(kind)) for kind in SEGMENTED}
        files = {kind: path / f"{kind}.parquet" for kind in WHOLE}
        whole = {k: read_parquet(files[k], of) if files[k].exists() else empty(of) for k, of in WHOLE.items()}
        log = _read_log(path / "windows.jsonl", warnings)
        trace = cls(path, header, **parts, **whole, log=log, warnings=warnings)
        _undo_time_scale(trace)
        return trace

    @property
    def windows(self) -> pd.DataFrame:
        """The measuring windows, one row each, in order; slots as text, columns as logged."""
        rows = [{k: v for k, v in line.items() if k != "kind"} for line in self.log if line["kind"] == "window"]
        for row in rows:
            if isinstance(slot := row.get("slot"), dict):
                place = Slot.from_log(slot)
                row |= {**asdict(place), "slot": str(place)}
        return pd.DataFrame(rows)

    @property
    def tables(self) -> dict[int, tuple[dict[str, Any], ...]]:
        """Rules of each table that was published, by generation; generation 0 (no rule) is always there."""
        logged = [line["table"] for line in self.log if line["kind"] == "table"]
        return {0: (), **{int(t["generation"]): tuple(t["rules"]) for t in logged}}


def _without_secrets(header: dict[str, Any]) -> dict[str, Any]:
    return {key: masked(value) if isinstance(value, str) else value for key, value in header.items()}


def _own_files(folder: Path) -> list[Path]:
    patterns = ("header.json", "windows.jsonl", "*.tmp", "events-*.parquet", "steps-*.parquet")
    return [p for pattern in (*patterns, *(f"{k}.parquet" for k in WHOLE)) for p in folder.glob(pattern)]


def _read_header(folder: Path) -> dict[str, Any]:
    path = folder / "header.json"
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        cure = "give the folder that holds header.json, e.g. runs/demo/trace"
        raise TraceError(f"no trace in {folder}: {cure}") from None
    except NotADirectoryError:
        raise TraceError(
            f"{folder} is a file, a trace is a folder; `dynamiccl show` and `advise` read other tools' files"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TraceError(f"cannot read {path} ({error}): restore it, the segments beside it are unharmed") from None
    version = header.get("format") if isinstance(header, dict) else None
    if not isinstance(version, int):
        raise TraceError(f"{path} has no format version: this is not a trace of dynamiccl")
    if version > FORMAT:
        raise TraceError(f"{folder} has trace format {version}, this release reads up to {FORMAT}: upgrade dynamiccl")
    return dict(header)


def _undo_time_scale(trace: Trace) -> None:
    """Early releases stretched an emulated cluster's times, and told by how much; NCCL's prices were not stretched."""
    scale = float(trace.header.pop("time_scale", None) or 1.0)
    if scale == 1.0:
        return
    trace.header.setdefault("compute_scale", scale)
    first = 0 if trace.events.empty else int(trace.events["enqueue_ns"].min())
    for frame in (trace.events, trace.steps):
        for name in frame.columns.intersection(["enqueue_ns", "start_ns", "end_ns"]):
            frame[name] = first + ((frame[name] - first) / scale).round().astype(frame[name].dtype)
    trace.steps["duration_ns"] = (trace.steps["duration_ns"] / scale).round().astype("int64")
    for line in trace.log:
        line |= {name: line[name] / scale for name in ("step_ms", "default_ms") if line.get(name) is not None}


def _read_log(path: Path, warnings: list[str]) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            line = json.loads(text)
            lines.append({**line, "kind": str(line["kind"])})
        except (json.JSONDecodeError, KeyError, TypeError):
            warnings.append(f"{path.name} line {number} is not whole and is left out")
    return lines

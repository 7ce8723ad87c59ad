"""Writes a segment of a trace: events and steps in parts, a log line by line; who is killed loses a part at most.

:mod:`.files` reads it, and tells of its files.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from .assemble import Assembler
from .header import FORMAT, files_of_trace, masked, new_header, plain
from .outside import atomically
from .segments import (
    IN_PARTS_OF,
    SPACE,
    WHOLE,
    Coverage,
    Segment,
    TraceError,
    is_cut,
    parts_of,
    read_header,
    read_segments,
    thinned,
    write_parquet,
)

#: The log may take one part in so many of what a trace may take.
LOG_SHARE = 16


class TraceWriter:
    """Writes a segment of the trace in ``folder``; use it as a context manager or call :meth:`close`.

    Args:
        folder: made if missing.
        header: see :meth:`update_header`.
        existing: a trace there: ``refuse`` (TraceError), ``resume`` (add a segment) or ``replace`` it.
        part_rows: rows of a part,
        part_seconds: or its age; up to a minute later.
        most_bytes: beyond it the oldest parts go, not the beginning's (a quarter).
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        header: dict[str, Any],
        *,
        existing: Literal["refuse", "resume", "replace"] = "refuse",
        part_rows: int = 50_000,
        part_seconds: float = 10.0,
        most_bytes: float = float("inf"),
    ) -> None:
        self.folder = Path(folder)
        self.part_rows, self.part_seconds, self.most_bytes = part_rows, part_seconds, most_bytes
        old: dict[str, Any] = {}
        if (self.folder / "header.json").exists():
            if existing == "refuse":
                raise TraceError(
                    f"{self.folder} already holds a trace: give another folder or remove it first"
                )
            if existing == "resume":
                old = read_header(self.folder)
            else:
                for path in files_of_trace(self.folder):
                    path.unlink()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TraceError(f"cannot make the trace folder {self.folder}: {error.strerror}") from None
        self.earlier = read_segments(self.folder)  # of the tuners before
        self.segment = Segment(
            f"{len(self.earlier):03d}-{os.urandom(8).hex()}", dict.fromkeys(IN_PARTS_OF, 0)
        )
        self.header = {**new_header(), **old, **_without_secrets(plain(header)), "format": FORMAT}
        self._write_header()
        self.segment.write(self.folder)
        self._told = Coverage()  # of all rows that were taken in
        self._buffers: dict[str, list[pd.DataFrame]] = {kind: [] for kind in IN_PARTS_OF}
        self._sizes: dict[str, dict[Path, int]] = {}
        for kind in IN_PARTS_OF:
            parts = parts_of(self.folder, self.earlier, kind)
            self._sizes[kind] = {path: path.stat().st_size for path in parts}
        self._comms: dict[int, dict[int, int]] = {}
        self._assembler: Assembler | None = None
        self._offers, self._offers_at = (0, 0), float("-inf")  # how many were written, and when
        self._began = self._flushed = time.monotonic()
        log = self.folder / "windows.jsonl"
        begin = "\n" if is_cut(log) else ""
        self._log = log.open("a", buffering=1, encoding="utf-8")
        self._log.write(begin)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update_header(self, **fields: Any) -> None:
        """Add what became known later (NCCL's version, the communicator's size); rewrites header.json."""
        self.header.update(_without_secrets(plain(fields)))
        self._write_header()

    def begin(self, found: Coverage) -> None:
        """What this segment lacks as its tuner looks at the rings first: on disk before any rows, or a later tuner
        could not tell what was gone before the trace began from what went since. Raises TraceError."""
        self._told = Coverage(gaps=found.gaps)
        self.flush()

    def drain(
        self,
        assembler: Assembler,
        everything: bool = False,
        thin: bool = False,
        coverage: Callable[[], Coverage] = Coverage,
    ) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
        """Write and return new events, steps and waits of ``assembler``; keep comms and offers up to date too.

        ``coverage``: what of the rings this segment has by now, but for what ``assembler`` holds back. Offers are
        written with parts, the last by :meth:`close`. ``thin``: only events with kernel times, and no offers before the
        end.
        """
        events, steps = assembler.take(everything)
        written = events[events["start_ns"].notna()] if thin else events
        waits = assembler.take_waits()
        self._told = coverage()
        self.write(written, steps, waits)
        comms = {c.comm_id: dict(c.ranks) for c in assembler.comms.values()}
        if comms != self._comms:
            self._comms = comms
            self.write_whole("comms", assembler.comms_frame())
        self._assembler, now = assembler, time.monotonic()
        if not thin and now - self._offers_at >= self._oldest(now):
            self._write_offers(assembler, now)
        return events, steps, waits

    def _write_offers(self, assembler: Assembler, now: float) -> None:
        """Where there are others than those on disk."""
        offers = len(assembler.offers), assembler.n_new_offers
        if offers != self._offers:
            self._offers, self._offers_at = offers, now
            self.write_whole("offers", assembler.offers_frame())

    def write(
        self,
        events: pd.DataFrame | None = None,
        steps: pd.DataFrame | None = None,
        waits: pd.DataFrame | None = None,
    ) -> None:
        """Take in rows; they are on disk when the part is full or old, or after :meth:`flush`."""
        for kind, frame in (("events", events), ("steps", steps), ("waits", waits)):
            if frame is not None and len(frame):
                self._buffers[kind].append(frame)
        rows = max(sum(map(len, frames)) for frames in self._buffers.values())
        now = time.monotonic()
        if rows >= self.part_rows or now - self._flushed >= self._oldest(now):
            self.flush()

    def _oldest(self, now: float) -> float:
        """Seconds that may be missing on disk."""
        return max(self.part_seconds, min(60.0, (now - self._began) / 60))

    def flush(self) -> None:
        """Write the rows taken in so far as parts, then that they count."""
        parts = dict(self.segment.parts)
        for kind, frames in self._buffers.items():
            if frames:
                path = self.segment.part(self.folder, kind, parts[kind])
                write_parquet(path, pd.concat(frames, ignore_index=True), IN_PARTS_OF[kind])
                self._sizes[kind][path] = path.stat().st_size
                parts[kind] += 1
        now = replace(self.segment, parts=parts, coverage=self._told)
        if now != self.segment:
            now.write(self.folder)
            self.segment = now
        for kind, frames in self._buffers.items():
            frames.clear()
            self._rotate(kind)
        self._flushed = time.monotonic()

    def _rotate(self, kind: str) -> None:
        """Each kind has its part of the space; the first quarter of each stays as it is."""
        sizes = self._sizes[kind]
        most = self.most_bytes * SPACE[kind]
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
            name = f"{kind}_parts_rotated"
            self.update_header(**{name: self.header.get(name, 0) + gone})

    def write_whole(self, kind: Literal["comms", "offers"], frame: pd.DataFrame) -> None:
        """Write comms or offers, in place of those that this segment had."""
        write_parquet(self.segment.whole(self.folder, kind), frame, WHOLE[kind])

    def log(self, kind: str, entry: dict[str, Any]) -> None:
        """Append one line to the log, on disk at once.

        ``table`` lines tell a published table (``{"table": Table}``), ``window`` lines a measuring window: they tell
        default steps from tuned ones. Other kinds: ``agent/report/summary.py``. Slot, Decision, Table and Why may be
        passed as they are; NaN becomes null.
        """
        line = {"kind": kind, "time": round(time.time(), 3), **entry}
        self._log.write(json.dumps(plain(line), allow_nan=False) + "\n")
        if self._log.tell() > self.most_bytes / LOG_SHARE:
            self._thin_log()

    def _thin_log(self) -> None:
        """Of a log that has grown too long the first quarter and as much of its end stay whole, and of the middle what
        is no window: a table holds until the next one. A line says what went."""
        self._log.close()
        path, most = self.folder / "windows.jsonl", self.most_bytes / LOG_SHARE / 4
        lines = path.read_bytes().splitlines(keepends=True)
        ends = np.cumsum([len(line) for line in lines])
        first, last = int(np.searchsorted(ends, most)), int(np.searchsorted(ends, ends[-1] - most)) + 1
        kept = [*lines[:first], *thinned(lines[first:last], most), *lines[last:]]
        atomically(path, lambda tmp: tmp.write_bytes(b"".join(kept)))
        self._log = path.open("a", buffering=1, encoding="utf-8")

    def close(self) -> None:
        """Write what is still held back."""
        self.flush()
        if self._assembler is not None:
            self._write_offers(self._assembler, time.monotonic())
        self._log.close()

    def _write_header(self) -> None:
        text = json.dumps(self.header, indent=2, allow_nan=False) + "\n"
        atomically(self.folder / "header.json", lambda tmp: tmp.write_text(text, encoding="utf-8"))


def _without_secrets(header: dict[str, Any]) -> dict[str, Any]:
    return {key: masked(value) if isinstance(value, str) else value for key, value in header.items()}

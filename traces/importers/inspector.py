"""Logs of NCCL's Inspector (JSON lines, format v4): one or more a process.

A verbose log (NCCL_INSPECTOR_DUMP_VERBOSE=1) tells when each kernel ran. A plain one tells durations only: its calls
are laid end to end in the order of its lines, so that durations are right and starts are made up. It marks no steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from ..files import TraceError
from .found import Found, Gaps, func_of, process_of, whole_bytes
from .json_stream import lines, many

_WRONG = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


class _Log:
    """What is known while the lines of all files are read."""

    def __init__(self, found: Found) -> None:
        self.found = found
        self.context: dict[str, Any] = {}  # of whom the next lines are, where they do not say it themselves
        self.ends: dict[
            tuple[int, int], int
        ] = {}  # (communicator, rank) -> end of its last call without times
        self.calls: dict[tuple[int, int, str, int], Path] = {}  # a call of a rank -> the file that holds it
        self.made_up = False
        self.dropped = 0

    def take(self, file: Path, line: dict[str, Any]) -> None:
        """Take in one line. Raises one of _WRONG where it is none of the Inspector's."""
        self.context = {k: line[k] for k in ("header", "metadata") if k in line} or self.context
        if "dump_stats" in line:
            self.dropped += int(line["dump_stats"].get("coll_dropped_since_last_dump") or 0)
        elif "coll_perf" in line:
            self._call(file, line["coll_perf"])

    def _call(self, file: Path, perf: dict[str, Any]) -> None:
        func = func_of(str(perf["coll"]))
        if func is None:
            return
        header, metadata = self.context["header"], self.context.get("metadata") or {}
        comm_id, rank, n_ranks = int(str(header["id"]), 16), int(header["rank"]), int(header["n_ranks"])
        seq = int(perf["coll_sn"])
        other = self.calls.setdefault((comm_id, rank, func, seq), file)
        if other != file:
            raise TraceError(
                f"{other} and {file} both hold call {seq} of rank {rank}: give each log once, of one run"
            )
        if metadata.get("hostname"):
            self.found.header.setdefault("host", str(metadata["hostname"]))
        duration = round(float(perf["coll_exec_time_us"]) * 1000)
        event = {
            "comm_id": comm_id,
            "rank": rank,
            "n_ranks": n_ranks,
            "n_nodes": int(header.get("nnodes") or 0),
            "pid": process_of(metadata.get("hostname"), int(metadata.get("pid") or rank)),
            "func": func,
            "n_bytes": whole_bytes(func, int(perf["coll_msg_size_bytes"]), n_ranks),
            "seq": seq,
        }
        times = self._times((comm_id, rank), perf.get("event_trace_ts") or {}, metadata, duration)
        self.found.add({**event, **times})

    def _times(
        self, whose: tuple[int, int], trace: dict[str, Any], metadata: dict[str, Any], duration: int
    ) -> dict[str, int]:
        """Times of a call in ns, from its kernels where the log is verbose."""
        kernels = [k for k in trace.get("kernel_events") or [] if k.get("kernel_start_ts")]
        if not kernels:
            self.made_up = True
            start = self.ends.get(whose, 1000 * int(metadata.get("dump_timestamp_us") or 0))
            self.ends[whose] = start + duration
            return {"enqueue_ns": start, "start_ns": start, "end_ns": start + duration}
        start = 1000 * min(int(kernel["kernel_start_ts"]) for kernel in kernels)
        asked = 1000 * int(trace.get("coll_start_ts") or 0) or start
        # The duration is the GPU's own, and better than the host's two time stamps.
        times = {"enqueue_ns": asked, "start_ns": start, "end_ns": start + duration}
        return {**times, "n_channels": len(kernels)}


def read(files: list[Path], found: Found) -> None:
    """Read logs into ``found``. Raises TraceError for files of others, and for one call in two files."""
    found.gaps = Gaps(steps="the Inspector marks no steps: what part of a step calls take is not known")
    log = _Log(found)
    for file in files:
        before, bad = len(found.events), 0
        for text in lines(file):
            if not text.strip():
                continue
            try:
                log.take(file, orjson.loads(text))
            except _WRONG:
                bad += 1
        if bad and len(found.events) == before:
            raise TraceError(
                f"{file} is no whole log of the Inspector: give the .log files of NCCL_INSPECTOR_DUMP_DIR"
            )
        if bad:
            found.notes.append(f"{file.name}: left out {many(bad, 'line')}, not whole")
    if log.made_up:
        found.notes.append(
            "durations are measured, starts are laid end to end: NCCL_INSPECTOR_DUMP_VERBOSE=1 tells them"
        )
    if log.dropped:
        cure = "raise NCCL_INSPECTOR_DUMP_COLL_RING_SIZE"
        found.notes.append(f"the Inspector dropped {log.dropped} calls, which are left out: {cure}")
    found.notes.append(
        "the Inspector leaves out calls below NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES, 8 KiB by default"
    )

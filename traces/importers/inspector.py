"""Logs of NCCL's Inspector (JSON lines, format v4): one or more a process.

A verbose log (NCCL_INSPECTOR_DUMP_VERBOSE=1) tells when each kernel ran. A plain one tells durations only: its calls
are laid end to end in the order of its lines, so that durations are right and starts are made up. It marks no steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from ..outside import TraceError, lines
from .found import Found, Gaps, Process, func_of, many, process_of, whole_bytes

GAPS = Gaps(steps="the Inspector marks no steps: what part of a step calls take is not known")
_MADE_UP = "durations are measured, starts are laid end to end: NCCL_INSPECTOR_DUMP_VERBOSE=1 tells them"
_DROPPED = "the Inspector dropped {n} calls, which are left out: raise NCCL_INSPECTOR_DUMP_COLL_RING_SIZE"
_SMALL = "the Inspector leaves out calls below NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES, 8 KiB by default"
_WRONG = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


class Logs:
    """Reads logs, one after the other: the calls of a process that are laid end to end may lie in several."""

    def __init__(self) -> None:
        self.context: dict[str, Any] = {}  # of whom the next lines are, where they do not say it themselves
        self.ends: dict[
            tuple[int, int], int
        ] = {}  # (communicator, rank) -> end of its last call without times

    def __call__(self, file: Path, found: Found) -> None:
        """Read a log. Raises TraceError for a file of others."""
        processes: dict[int, Process] = {}
        self.context = {}
        bad = 0
        for text in lines(file):
            if not text.strip():
                continue
            try:
                self._take(orjson.loads(text), file, processes, found)
            except _WRONG:
                bad += 1
        if bad and not processes:
            raise TraceError(
                f"{file} is no whole log of the Inspector ({many(bad, 'line')}, none of them a call): "
                "give the .log files of NCCL_INSPECTOR_DUMP_DIR"
            )
        if bad:
            found.notes.append(f"{file.name}: left out {many(bad, 'line')}, not whole")
        found.notes.append(_SMALL)
        found.processes += processes.values()

    def _take(self, line: dict[str, Any], file: Path, processes: dict[int, Process], found: Found) -> None:
        """Take in one line. Raises one of _WRONG where it is none of the Inspector's."""
        self.context = {k: line[k] for k in ("header", "metadata") if k in line} or self.context
        if "dump_stats" in line:
            if dropped := int(line["dump_stats"].get("coll_dropped_since_last_dump") or 0):
                found.counted[_DROPPED] += dropped
        elif "coll_perf" in line:
            call, number, host = self._call(line["coll_perf"], found)
            if call["func"] is not None:
                processes.setdefault(number, Process(file, number=number)).calls.append(call)
            if host:
                found.header.setdefault("host", str(host))

    def _call(self, perf: dict[str, Any], found: Found) -> tuple[dict[str, Any], int, Any]:
        """A call, the number of its process, and its host. Raises one of _WRONG."""
        func = func_of(str(perf["coll"]))
        if func is None:
            return {"func": None}, 0, None
        header, metadata = self.context["header"], self.context.get("metadata") or {}
        comm_id, rank, n_ranks = int(str(header["id"]), 16), int(header["rank"]), int(header["n_ranks"])
        seq = int(perf["coll_sn"])
        duration = round(float(perf["coll_exec_time_us"]) * 1000)
        call = {
            "comm_id": comm_id,
            "rank": rank,
            "n_ranks": n_ranks,
            "n_nodes": int(header.get("nnodes") or 0),
            "func": func,
            "n_bytes": whole_bytes(func, int(perf["coll_msg_size_bytes"]), n_ranks),
            "seq": seq,
            "once": (comm_id, rank, func, seq),
        }
        trace = perf.get("event_trace_ts") or {}
        times = self._times((comm_id, rank), trace, metadata, duration)
        if "n_channels" not in times and _MADE_UP not in found.notes:
            found.notes.append(_MADE_UP)
        number = process_of(metadata.get("hostname"), int(metadata.get("pid") or rank))
        return {**call, **times}, number, metadata.get("hostname")

    def _times(
        self, whose: tuple[int, int], trace: dict[str, Any], metadata: dict[str, Any], duration: int
    ) -> dict[str, int]:
        """Times of a call in ns, from its kernels where the log is verbose."""
        kernels = [k for k in trace.get("kernel_events") or [] if k.get("kernel_start_ts")]
        if not kernels:
            start = self.ends.get(whose, 1000 * int(metadata.get("dump_timestamp_us") or 0))
            self.ends[whose] = start + duration
            return {"enqueue_ns": start, "start_ns": start, "end_ns": start + duration}
        start = 1000 * min(int(kernel["kernel_start_ts"]) for kernel in kernels)
        asked = 1000 * int(trace.get("coll_start_ts") or 0) or start
        # The duration is the GPU's own, and better than the host's two time stamps.
        times = {"enqueue_ns": asked, "start_ns": start, "end_ns": start + duration}
        return {**times, "n_channels": len(kernels)}

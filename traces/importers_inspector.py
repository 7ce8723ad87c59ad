"""Import of NCCL Inspector logs (JSON lines, format v4.0 to v4.3), one or more per process.

A verbose log (NCCL_INSPECTOR_DUMP_VERBOSE=1) tells when each kernel ran. A plain one tells durations only: its calls
are laid end to end, in the order of their sequence numbers, so that durations are right and starts are made up.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from .files import TraceError
from .importers_common import Imported, algo_of, func_of, proto_of
from .json_stream import read_lines


def read(paths: list[Path], on_bytes: Callable[[int], None] = lambda n: None) -> Imported:
    """Read logs. Raises TraceError for files that are not the Inspector's; lines that are not whole are left out."""
    found = Imported()
    made_up, n_bad, n_dropped = False, 0, 0
    for path in paths:
        context: dict[str, Any] = {}
        ends: dict[tuple[int, int, int], int] = {}  # where the next call of a communicator without timestamps begins
        n_before = len(found.events)
        for text in filter(bytes.strip, read_lines(path, on_bytes)):
            try:
                line = orjson.loads(text)
                # From v4.3 on only the marker before a batch says whose calls they are.
                context = {k: line[k] for k in ("header", "metadata") if k in line} or context
                if "dump_stats" in line:
                    n_dropped += int(line["dump_stats"].get("coll_dropped_since_last_dump") or 0)
                elif "coll_perf" in line:
                    made_up |= _add(line["coll_perf"], context, ends, found)
            except (ValueError, KeyError, TypeError, AttributeError):
                n_bad += 1
        if len(found.events) == n_before and n_bad:
            raise TraceError(f"{path} is no NCCL Inspector log: give the .log files of NCCL_INSPECTOR_DUMP_DIR")
    if made_up:
        found.notes.append("not a verbose log: durations are measured, starts are laid end to end")
    if n_bad:
        found.notes.append(f"{n_bad} lines were not whole and are left out")
    if n_dropped:
        found.notes.append(f"the Inspector dropped {n_dropped} calls: raise NCCL_INSPECTOR_DUMP_COLL_RING_SIZE")
    return found


def _add(perf: dict[str, Any], context: dict[str, Any], ends: dict[tuple[int, int, int], int], found: Imported) -> bool:
    """Add one call; True if its start had to be made up. Raises KeyError where the line lacks what it must have."""
    func = func_of(str(perf["coll"]))
    if func is None:
        return False
    header, metadata = context["header"], context.get("metadata") or {}
    if metadata.get("hostname"):
        found.header.setdefault("host", metadata["hostname"])
    found.header.setdefault("inspector", metadata.get("inspector_output_format_version"))
    comm_id, rank, n_ranks = int(str(header["id"]), 16), int(header["rank"]), int(header["n_ranks"])
    duration = round(float(perf["coll_exec_time_us"]) * 1000)
    row: dict[str, Any] = {"comm_id": comm_id, "rank": rank, "n_ranks": n_ranks, "func": func}
    row |= {"n_nodes": int(header.get("nnodes") or 0), "pid": int(metadata.get("pid") or 0)}
    row |= {"seq": int(perf["coll_sn"]), "n_bytes": _whole_bytes(perf, func, n_ranks)}
    row |= {"algo": algo_of(perf.get("coll_algo")), "proto": proto_of(perf.get("coll_proto"))}
    times = perf.get("event_trace_ts") or {}
    kernels = [k for k in times.get("kernel_events") or [] if k.get("kernel_start_ts")]
    if kernels:
        start = 1000 * min(int(k["kernel_start_ts"]) for k in kernels)
        row |= {"n_channels": len(kernels), "enqueue_ns": 1000 * int(times.get("coll_start_ts") or start // 1000)}
        # The GPU's own duration, where there is one, is better than the host's two time stamps.
        row |= {"start_ns": start, "end_ns": start + duration}
    else:
        key = (comm_id, rank, row["pid"])
        start = ends.get(key, 1000 * int(metadata.get("dump_timestamp_us") or 0))
        ends[key] = start + duration
        row |= {"enqueue_ns": start, "start_ns": start, "end_ns": start + duration}
    found.events.append(row)
    return not kernels


def _whole_bytes(perf: dict[str, Any], func: str, n_ranks: int) -> int:
    """Bytes of the whole buffer. The Inspector writes one rank's share for all_gather and reduce_scatter.

    Its bandwidth is that of the whole buffer: where the two disagree with that rule, the bandwidth is believed.
    """
    size = int(perf["coll_msg_size_bytes"])
    if func not in ("all_gather", "reduce_scatter"):
        return size
    moved = float(perf.get("coll_algobw_gbs") or 0) * 1e3 * float(perf["coll_exec_time_us"])
    is_whole = moved and abs(moved - size) < abs(moved - size * n_ranks)
    return size if is_whole else size * n_ranks

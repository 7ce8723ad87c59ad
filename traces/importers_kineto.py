"""Import of PyTorch profiler traces (Kineto's JSON, plain or gzipped): one file per rank.

Used: ``record_param_comms`` operators (what was asked for, when the host enqueued it), NCCL kernels (when it ran, how
many channels), ``ProfilerStep#N`` marks (steps) and ``distributedInfo``. The algorithm and protocol in a kernel's name
are not what ran, NCCL's dispatcher names one kernel for many: they stay unknown.
"""

from __future__ import annotations

import bisect
import gzip
import re
from pathlib import Path
from typing import Any

from .files import TraceError
from .importers_common import Imported, comm_id_of, dtype_of, func_of, rank_in_name, read_json, width_of


def read(paths: list[Path]) -> Imported:
    """Read one trace a rank. Raises TraceError for files that are not Kineto's."""
    found = Imported()
    for order, path in enumerate(paths):
        _read_one(path, order, found)
    if not found.steps:
        found.notes.append("no ProfilerStep marks: all calls are counted as one step (use the profiler's step())")
    if found.events and all(e["start_ns"] is None for e in found.events):
        found.notes.append("no NCCL kernel in the trace (profile CUDA activities too): there are no times")
    return found


def _read_one(path: Path, order: int, found: Imported) -> None:
    document = read_json(path, _text(path))
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise TraceError(f"{path} is no Kineto trace: export one with torch.profiler's export_chrome_trace")
    info = document.get("distributedInfo") or {}
    base = int(document.get("baseTimeNanoseconds") or 0)
    rank = info.get("rank")
    if rank is None:
        rank = rank_in_name(path)
    rank = order if rank is None else int(rank)
    if info.get("nccl_version"):
        found.header["nccl"] = str(info["nccl_version"])
    marks: list[tuple[int, int, int]] = []
    asked: dict[Any, dict[str, Any]] = {}
    kernels: list[dict[str, Any]] = []
    for e in document["traceEvents"]:
        name, args = str(e.get("name", "")), e.get("args") or {}
        if e.get("ph") != "X":
            continue
        if (mark := re.fullmatch(r"ProfilerStep#(\d+)", name)) and e.get("cat") == "user_annotation":
            marks.append((_ns(base, e["ts"]), _ns(0, e["dur"]), int(mark[1])))
        elif name == "record_param_comms" and "Collective name" in args:
            asked[args.get("External id", ("line", len(asked)))] = e
        elif e.get("cat") == "kernel" and name.lower().startswith("nccl"):
            kernels.append(e)
    marks.sort()
    pid = int(info.get("pid") or rank)
    for start, duration, index in marks:
        step = {"index": index, "rank": rank, "end_ns": start + duration, "duration_ns": duration, "pid": pid}
        found.steps.append(step)
    ran = set()
    for kernel in kernels:
        external = (kernel.get("args") or {}).get("External id")
        operator = asked.get(external)
        args = kernel.get("args") or {}
        if "Collective name" not in args and operator is not None:
            args = {**operator["args"], **args}
        row = _row(args, rank, pid)
        if row is None:
            continue
        ran.add(external)
        start = _ns(base, kernel["ts"])
        enqueued = _ns(base, operator["ts"]) if operator else start
        row |= {"enqueue_ns": enqueued, "start_ns": start, "end_ns": start + _ns(0, kernel["dur"])}
        grid = args.get("grid")
        row |= {"n_channels": int(grid[0]) if isinstance(grid, list) and grid else 0}
        found.events.append({**row, "step": _step_at(marks, enqueued)})
    for external, operator in asked.items():
        row = _row(operator["args"], rank, pid)
        if row is not None and external not in ran:
            enqueued = _ns(base, operator["ts"])
            row |= {"enqueue_ns": enqueued, "start_ns": None, "end_ns": None}
            found.events.append({**row, "step": _step_at(marks, enqueued)})


def _row(args: dict[str, Any], rank: int, pid: int) -> dict[str, Any] | None:
    """What a call was, from the arguments of its operator or kernel; None if it is no collective of NCCL's."""
    func = func_of(str(args.get("Collective name", "")))
    if func is None:
        return None
    dtype = dtype_of(str(args.get("dtype", "")))
    elements = max(int(args.get("In msg nelems") or 0), int(args.get("Out msg nelems") or 0))
    group = (args.get("Process Group Name", ""), args.get("Process Group Ranks", ""), args.get("Group size", 0))
    row = {"comm_id": comm_id_of(*group), "rank": rank, "pid": pid, "func": func, "dtype": dtype}
    row |= {"n_bytes": elements * width_of(dtype), "n_ranks": int(args.get("Group size") or 0)}
    if "Seq" in args:
        row["seq"] = int(args["Seq"])
    return row


def _step_at(marks: list[tuple[int, int, int]], ns: int) -> int:
    """The step that was running at a time; before the first mark the one before it, 0 without marks."""
    if not marks:
        return 0
    at = bisect.bisect_right(marks, (ns, float("inf"), 0)) - 1
    return marks[at][2] if at >= 0 else max(0, marks[0][2] - 1)


def _ns(base: int, us: Any) -> int:
    return base + round(float(us) * 1000)


def _text(path: Path) -> str | None:
    if path.suffix != ".gz":
        return None
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return file.read()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read {path} ({error}): is it a whole gzip file?") from None

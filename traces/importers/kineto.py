"""Import of PyTorch profiler traces (Kineto's JSON, plain or gzipped): one file per rank, read in blocks.

Used: ``record_param_comms`` operators (what was asked for, when the host enqueued it), GPU kernels (NCCL's: when it
ran, on how many channels; the others: when something was computed), ``ProfilerStep#N`` marks (steps),
``distributedInfo``. The algorithm and protocol in a kernel's name are not what ran, NCCL's dispatcher names one kernel
for many: they stay unknown.
"""

from __future__ import annotations

import bisect
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..assemble import DTYPE_BYTES
from ..files import TraceError
from .common import Imported, comm_id_of, dtype_of, func_of, rank_in_name, ranks_of
from .json_stream import Source, read_elements

_MARK = re.compile(r"ProfilerStep#(\d+)")


def read(paths: list[Path]) -> Imported:
    """Read one trace a rank. Raises TraceError for files that are not Kineto's, and for a job over gloo."""
    found = Imported()
    for order, path in enumerate(paths):
        _read_one(path, order, found)
    if found.events and not any("start_ns" in e for e in found.events):
        found.notes.append("no NCCL kernel in the trace (profile CUDA activities too): there are no times")
    if not found.computes:
        found.notes.append("no GPU kernels in it: what was computed beside a collective is not known")
    return found


class _File:
    """What is of use in one file's events; times in us, as Kineto has them."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float, int]] = []  # begin, duration, number of the step
        self.asked: dict[Any, tuple[float, dict[str, Any]]] = {}  # External id -> begin, arguments
        self.kernels: list[tuple[float, float, dict[str, Any]]] = []  # NCCL's: begin, duration, arguments
        self.compute = array("d")  # begin and duration of every other kernel, in turn

    def add(self, batch: list[Any]) -> None:
        """Sort a batch of events; what is of no use is dropped at once."""
        for e in batch:
            if type(e) is not dict or e.get("ph") != "X":
                continue
            kind: Any = e.get("cat")
            name: Any = e.get("name")
            if kind == "kernel":
                if name[:4].lower() == "nccl":
                    self.kernels.append((e["ts"], e["dur"], e.get("args") or {}))
                else:
                    self.compute.extend((e["ts"], e["dur"]))
            elif kind == "cpu_op" and name == "record_param_comms":
                args = e.get("args") or {}
                if "Collective name" in args:
                    self.asked[args.get("External id", ("line", len(self.asked)))] = (e["ts"], args)
            elif kind == "user_annotation" and (mark := _MARK.fullmatch(name)):
                self.marks.append((e["ts"], e["dur"], int(mark[1])))

    def calls(self) -> Iterator[tuple[float, dict[str, Any], tuple[float, float] | None]]:
        """Of each collective: when it was asked for, what is said of it, its kernel's begin and duration if it ran."""
        ran = set()
        for ts, dur, args in self.kernels:
            external = args.get("External id")
            ran.add(external)
            asked, said = self.asked.get(external, (ts, {}))
            yield asked, {**said, **args}, (ts, dur)
        for external, (ts, args) in self.asked.items():
            if external not in ran:
                yield ts, args, None


def _read_one(path: Path, order: int, found: Imported) -> None:
    seen = _File()
    with Source(path) as source:
        about = read_elements(source, "traceEvents", seen.add)
    if about is None:
        raise TraceError(f"{path} is no Kineto trace: export one with torch.profiler's export_chrome_trace")
    info = about.get("distributedInfo") or {}
    if info.get("backend") == "gloo" and not seen.kernels:
        raise TraceError(f"{path} is of gloo, whose times say nothing of NCCL: record the job over NCCL")
    if info.get("nccl_version"):
        found.header["nccl"] = str(info["nccl_version"])
    base = int(about.get("baseTimeNanoseconds") or 0)
    rank = info.get("rank")
    rank = rank_in_name(path, order) if rank is None else int(rank)
    who = {"rank": rank, "pid": int(info.get("pid") or rank)}
    marks = sorted((_ns(base, ts), _ns(0, dur), index) for ts, dur, index in seen.marks)
    for start, duration, index in marks:
        found.steps.append({**who, "index": index, "end_ns": start + duration, "duration_ns": duration})
    for asked, args, kernel in seen.calls():
        if (call := _call(args, found)) is None:
            continue
        at = _ns(base, asked)
        if kernel is not None:
            start = _ns(base, kernel[0])
            call |= {"start_ns": start, "end_ns": start + _ns(0, kernel[1])}
        found.events.append({**call, **who, "step": _step_at(marks, at), "enqueue_ns": at})
    if seen.compute:
        begin, lasted = np.rint(1000 * np.asarray(seen.compute).reshape(-1, 2).T).astype(np.int64)
        found.add_compute(rank, base + begin, base + begin + lasted)


def _call(args: dict[str, Any], found: Imported) -> dict[str, Any] | None:
    """What a call was, from the arguments of its operator or kernel; None if it is no collective of NCCL's."""
    func = func_of(str(args.get("Collective name", "")))
    if func is None:
        return None
    dtype = dtype_of(str(args.get("dtype", "")))
    elements = max(int(args.get("In msg nelems") or 0), int(args.get("Out msg nelems") or 0))
    group = (args.get("Process Group Name", ""), args.get("Process Group Ranks", ""), args.get("Group size", 0))
    comm_id, n_ranks = comm_id_of(*group), int(args.get("Group size") or 0)
    if comm_id not in found.groups:
        # A long list ends in "..."; where ranks lie evenly apart PyTorch says their first one and distance.
        stride, first = int(args.get("Global rank stride") or 0), int(args.get("Global rank start") or 0)
        even = tuple(range(first, first + stride * n_ranks, stride)) if stride > 0 else ()
        found.groups[comm_id] = ranks_of(group[1]) or even
    grid = args.get("grid")
    call = {"comm_id": comm_id, "n_ranks": n_ranks, "func": func, "dtype": dtype}
    call["n_bytes"] = elements * DTYPE_BYTES.get(dtype, 1)
    call["n_channels"] = int(grid[0]) if isinstance(grid, list) and grid else 0
    return call | ({"seq": int(args["Seq"])} if "Seq" in args else {})


def _step_at(marks: list[tuple[int, int, int]], ns: int) -> int:
    """The step that was running at a time; before the first mark the one before it, 0 without marks."""
    if not marks:
        return 0
    at = bisect.bisect_right(marks, (ns, float("inf"), 0)) - 1
    return marks[at][2] if at >= 0 else max(0, marks[0][2] - 1)


def _ns(base: int, us: Any) -> int:
    return base + round(float(us) * 1000)

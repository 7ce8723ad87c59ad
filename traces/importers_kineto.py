"""Import of PyTorch profiler traces (Kineto's JSON, plain or gzipped): one file per rank, read in blocks.

Used: ``record_param_comms`` operators (what was asked for, when the host enqueued it), GPU kernels (NCCL's: when it
ran, on how many channels; the others: what was computed meanwhile), ``ProfilerStep#N`` marks (steps),
``distributedInfo``. The algorithm and protocol in a kernel's name are not what ran, NCCL's dispatcher names one kernel
for many: they stay unknown. Of a job over gloo the ``c10d::`` operators tell the sizes (recorded with
``record_shapes=True``) and the ``gloo:`` marks the times.
"""

from __future__ import annotations

import bisect
import math
import re
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .files import TraceError
from .importers_common import Imported, comm_id_of, dtype_of, func_of, rank_in_name, ranks_of, width_of
from .json_stream import Elements, Source

_MARK = re.compile(r"ProfilerStep#(\d+)")
#: PyTorch's operators of the collectives that any backend runs, with (output, input) or (tensors) first.
_C10D = re.compile(r"c10d::_?(allgather|reduce_scatter|allreduce|alltoall|broadcast|reduce|gather|scatter|barrier)")


def read(paths: list[Path], on_bytes: Callable[[int], None] = lambda n: None) -> Imported:
    """Read one trace a rank. Raises TraceError for files that are not Kineto's."""
    found = Imported()
    for order, path in enumerate(paths):
        _read_one(path, order, found, on_bytes)
    if found.events and all(e["start_ns"] is None for e in found.events):
        found.notes.append("no NCCL kernel in the trace (profile CUDA activities too): there are no times")
    if not len(found.compute):
        found.notes.append("no GPU kernels in it: what was computed beside a collective is not known")
    return found


class _File:
    """What one file's events amount to, until the end of the file tells the rest."""

    def __init__(self, names: dict[str, int]) -> None:
        self._names = names
        self.marks: list[tuple[float, float, int]] = []
        self.asked: dict[Any, tuple[float, dict[str, Any]]] = {}
        self.kernels: list[tuple[float, float, dict[str, Any]]] = []
        # Begin and duration in us, number of the name, blocks, stream.
        self.compute: tuple[array[Any], ...] = tuple(array(kind) for kind in "ddqqq")
        self.operators: list[tuple[float, str, dict[str, Any]]] = []
        self.gloo: list[tuple[float, float, str]] = []

    def add(self, batch: list[Any]) -> None:
        """Sort a batch of events; what is of no use is dropped at once."""
        for e in batch:
            if type(e) is not dict or e.get("ph") != "X":
                continue
            kind: Any = e.get("cat")
            name: Any = e.get("name")
            if kind == "kernel":
                args = e.get("args") or {}
                if name[:4].lower() == "nccl":
                    self.kernels.append((e["ts"], e["dur"], args))
                else:
                    number = self._names.setdefault(name, len(self._names))
                    row = (e["ts"], e["dur"], number, math.prod(args.get("grid") or ()), int(args.get("stream") or 0))
                    for column, value in zip(self.compute, row, strict=True):
                        column.append(value)
            elif kind == "cpu_op":
                if name == "record_param_comms":
                    args = e.get("args") or {}
                    if "Collective name" in args:
                        self.asked[args.get("External id", ("line", len(self.asked)))] = (e["ts"], args)
                elif name[:6] == "c10d::" and _C10D.match(name):
                    self.operators.append((e["ts"], name, e.get("args") or {}))
            elif kind == "user_annotation":
                if mark := _MARK.fullmatch(name):
                    self.marks.append((e["ts"], e["dur"], int(mark[1])))
                elif name[:5] == "gloo:":
                    types = (e.get("args") or {}).get("Input type") or ("",)
                    self.gloo.append((e["ts"], e["dur"], str(types[0])))


def _read_one(path: Path, order: int, found: Imported, on_bytes: Callable[[int], None]) -> None:
    seen = _File(found.compute.names)
    with Source(path, on_bytes) as source:
        elements = Elements(source, "traceEvents")
        for batch in elements:
            seen.add(batch)
    if not elements.found:
        raise TraceError(f"{path} is no Kineto trace: export one with torch.profiler's export_chrome_trace")
    info = elements.rest.get("distributedInfo") or {}
    base = int(elements.rest.get("baseTimeNanoseconds") or 0)
    rank = info.get("rank")
    rank = rank_in_name(path, order) if rank is None else int(rank)
    if info.get("nccl_version"):
        found.header["nccl"] = str(info["nccl_version"])
    if device := next(iter(elements.rest.get("deviceProperties") or ()), None):
        found.header["gpu"], found.header["n_sms"] = str(device.get("name")), int(device.get("numSms") or 0)
    pid = int(info.get("pid") or rank)
    marks = sorted((_ns(base, ts), _ns(0, dur), index) for ts, dur, index in seen.marks)
    for start, duration, index in marks:
        step = {"index": index, "rank": rank, "end_ns": start + duration, "duration_ns": duration, "pid": pid}
        found.steps.append(step)
    ran = set()
    for ts, dur, args in seen.kernels:
        external = args.get("External id")
        asked = seen.asked.get(external)
        grid = args.get("grid")
        if "Collective name" not in args and asked is not None:
            args = {**asked[1], **args}
        row = _row(args, rank, pid, found)
        if row is None:
            continue
        ran.add(external)
        start = _ns(base, ts)
        enqueued = _ns(base, asked[0]) if asked else start
        row |= {"enqueue_ns": enqueued, "start_ns": start, "end_ns": start + _ns(0, dur)}
        row["n_channels"] = int(grid[0]) if isinstance(grid, list) and grid else 0
        found.events.append({**row, "step": _step_at(marks, enqueued)})
    for external, (ts, args) in seen.asked.items():
        row = _row(args, rank, pid, found)
        if row is not None and external not in ran:
            enqueued = _ns(base, ts)
            row |= {"enqueue_ns": enqueued, "start_ns": None, "end_ns": None}
            found.events.append({**row, "step": _step_at(marks, enqueued)})
    if not seen.asked and not seen.kernels:
        _from_operators(path, seen, info, base, rank, pid, marks, found)
    began, lasted, *rest = (np.asarray(column) for column in seen.compute)
    start = base + np.rint(began * 1000).astype(np.int64)
    found.compute.add(rank, start, start + np.rint(lasted * 1000).astype(np.int64), *rest)


def _from_operators(
    path: Path, seen: _File, info: dict[str, Any], base: int, rank: int, pid: int, marks: list[Any], found: Imported
) -> None:
    """The collectives of a backend other than NCCL, from PyTorch's own operators; timed by gloo's marks in order."""
    operators, gloo = sorted(seen.operators, key=lambda o: o[0]), sorted(seen.gloo)
    timed = len(gloo) == len(operators)
    world = int(info.get("world_size") or 0)
    for i, (ts, name, args) in enumerate(operators):
        dims, types = args.get("Input Dims"), args.get("Input type")
        func = func_of(name)
        if func is None:
            continue
        if not dims or not types:
            raise TraceError(f"{path} tells no sizes: profile with record_shapes=True")
        kind = gloo[i][2] if timed and str(types[0]) == "TensorList" else str(types[0])
        dtype = dtype_of(kind)
        elements = max(_count(d) for d in dims)
        row = {"comm_id": comm_id_of("world", world), "rank": rank, "pid": pid, "func": func, "dtype": dtype}
        row |= {"n_bytes": elements * width_of(dtype), "n_ranks": world}
        enqueued = _ns(base, ts)
        start = max(_ns(base, gloo[i][0]), enqueued) if timed else None
        end = _ns(base, gloo[i][0] + gloo[i][1]) if timed else None
        row |= {"enqueue_ns": enqueued, "start_ns": start, "end_ns": end, "step": _step_at(marks, enqueued)}
        found.events.append(row)
    note = "over gloo, not NCCL: the times are this network's, the calls are what NCCL would be asked"
    if operators and note not in found.notes:
        found.notes.append(note)


def _count(dims: Any) -> int:
    """Elements of a tensor, or of a list of them, by its dimensions as Kineto writes them."""
    if not dims:
        return 0
    return sum(map(_count, dims)) if isinstance(dims[0], list) else math.prod(dims)


def _row(args: dict[str, Any], rank: int, pid: int, found: Imported) -> dict[str, Any] | None:
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
    row = {"comm_id": comm_id, "rank": rank, "pid": pid, "func": func, "dtype": dtype}
    row |= {"n_bytes": elements * width_of(dtype), "n_ranks": n_ranks}
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

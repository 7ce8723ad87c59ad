"""Profiles of PyTorch (Kineto's JSON, plain or gzipped, a file a rank) as ordinary traces: what ``show``, the report, a
replay and ``advise`` can read.

Used: ``record_param_comms`` operators (what was asked for, when the host enqueued it), GPU kernels (NCCL's: when it
ran, on how many channels; the others: when something was computed), ``ProfilerStep#N`` marks (steps),
``distributedInfo``. The algorithm and protocol in a kernel's name are not what ran, NCCL's dispatcher names one kernel
for many: they stay unknown.
"""

from __future__ import annotations

import bisect
import filecmp
import hashlib
import os
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..assemble import (
    COMM_COLUMNS,
    COMPUTE_COLUMNS,
    DTYPE_BYTES,
    EVENT_COLUMNS,
    OFFER_COLUMNS,
    STEP_COLUMNS,
    complete,
    empty,
    joined,
)
from ..files import Trace, TraceError
from .json_stream import read_elements

_MARK = re.compile(r"ProfilerStep#(\d+)")
#: PyTorch's names of types that are not ours.
_ALIASES = {"char": "int8", "byte": "uint8", "bool": "uint8", "int": "int32", "long": "int64"}
_ALIASES |= {"half": "float16", "float": "float32", "double": "float64"}
#: What a profile does not tell of events and steps is 0.
_NOT_TOLD = dict.fromkeys(("table_generation", "captured", "asked_bytes"), 0)
_NOT_TOLD |= dict.fromkeys(("memory_used", "memory_total", "sampled", "sample_every"), 0)


@dataclass
class Profiles:
    """What the files of a job hold: rows of EVENT_COLUMNS and STEP_COLUMNS, facts for the header, remarks for people.

    An event without a ``seq`` is still to be counted.
    """

    events: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    header: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    groups: dict[int, tuple[int, ...]] = field(default_factory=dict)  # comm_id -> ranks, () where not told
    computes: list[pd.DataFrame] = field(default_factory=list)  # parts of COMPUTE_COLUMNS


def recording_files(paths: list[Path]) -> list[Path]:
    """The files of ``paths``, folders replaced by the files in them. Raises TraceError for what is not there."""
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise TraceError(f"there is no file or folder {path}")
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        found += [p for p in inside if p == path or (p.is_file() and not p.name.startswith("."))]
    if not found:
        raise TraceError(f"no file in {', '.join(map(str, paths))}: folders within are not looked into")
    for i, one in enumerate(found):
        if twin := next((other for other in found[:i] if filecmp.cmp(one, other, shallow=False)), None):
            raise TraceError(f"{twin} and {one} are the same: give one file a rank")
    return found


def read_recording(paths: list[Path], ranks_per_node: int | None = None) -> Trace:
    """A recording as a trace in memory: a trace folder of ours, or profiles of PyTorch (or folders of them).

    ``ranks_per_node`` gives the number of nodes, which profiles do not tell. The header's ``notes`` say what is not
    known. Raises TraceError for a file that is no profile or is damaged, and where no collective or no step is in it.
    """
    ours = [p for p in paths for name in ("header.json", "trace/header.json") if (p / name).exists()]
    if ours:
        return Trace.read(ours[0])
    if ranks_per_node is not None and ranks_per_node < 1:
        raise TraceError(f"there is at least 1 rank on a node, not {ranks_per_node}")
    files = recording_files(paths)
    used = [file for file in files if file in paths or file.name.endswith((".json", ".json.gz"))]
    if not used:
        raise TraceError(f"no profile in {paths[0]}: PyTorch's end in .json or .json.gz")
    found, events, steps = _read(used, ranks_per_node)
    left_out = [
        f"{file.name} is left out: it is no profile of PyTorch's" for file in files if file not in used
    ]
    comms = (
        events.drop_duplicates(["comm_id", "rank", "pid"])
        .assign(name="")[[*COMM_COLUMNS]]
        .astype(COMM_COLUMNS)
    )
    # The header tells of the recorded machine; what is not known of it must not be this machine's.
    header = {
        "host": None,
        "kernel": None,
        "commit": None,
        **found.header,
        "emulated": False,
        "source": "kineto",
    }
    header |= {"files": [str(p) for p in used], "notes": found.notes + left_out}
    compute = joined(found.computes, COMPUTE_COLUMNS)
    return Trace(Path(os.path.commonpath(used)), header, events, steps, comms, empty(OFFER_COLUMNS), compute)


def _read(files: list[Path], ranks_per_node: int | None) -> tuple[Profiles, pd.DataFrame, pd.DataFrame]:
    """What is in the files, its events and steps. Raises TraceError."""
    names = ", ".join(file.name for file in files)
    try:
        found = Profiles()
        for order, file in enumerate(files):
            _read_one(file, order, found)
        if not found.events:
            raise TraceError(f"{names}: no collective in it that NCCL runs, nothing to import")
        if not found.steps:
            raise TraceError(
                f"{names}: no step in it: call the profiler's step() after each step of the optimizer"
            )
        events, steps = _events(found, ranks_per_node), pd.DataFrame(found.steps).assign(**_NOT_TOLD)
    except TraceError:
        raise
    except Exception:  # wrong types in a file that otherwise parses, or too much of it
        raise TraceError(
            f"{names}: a field is not what PyTorch writes there: cut or changed? Record again"
        ) from None
    if not events["start_ns"].notna().any():
        found.notes.append("no NCCL kernel in the trace (profile CUDA activities too): there are no times")
    if not found.computes:
        found.notes.append("no GPU kernels in it: what was computed beside a collective is not known")
    return found, events, complete(steps, STEP_COLUMNS).sort_values(["index", "rank"], ignore_index=True)


def _events(found: Profiles, ranks_per_node: int | None) -> pd.DataFrame:
    """As EVENT_COLUMNS. Without a ``seq`` they are counted by rank, communicator and func, as they were enqueued."""
    # As objects: a column with gaps must not become float64, clock values have more digits than that.
    events = pd.DataFrame(found.events, dtype=object).sort_values(
        "enqueue_ns", kind="stable", ignore_index=True
    )
    events = events.assign(n_nodes=0, algo="unknown", proto="unknown", **_NOT_TOLD)
    counted = events.groupby(["rank", "pid", "comm_id", "func"], sort=False).cumcount()
    events["seq"] = events["seq"].where(events["seq"].notna(), counted)
    if ranks_per_node:
        sizes = events[["comm_id", "n_ranks"]].drop_duplicates("comm_id").itertuples(index=False)
        nodes = {c: len({r // ranks_per_node for r in found.groups[c] or range(n)}) for c, n in sizes}
        events["n_nodes"] = events["comm_id"].map(nodes)
    return complete(events, EVENT_COLUMNS)


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


def _read_one(path: Path, order: int, found: Profiles) -> None:
    seen = _File()
    about = read_elements(path, "traceEvents", seen.add)
    if about is None:
        raise TraceError(f"{path} is no Kineto trace: export one with torch.profiler's export_chrome_trace")
    info = about.get("distributedInfo") or {}
    if info.get("backend") == "gloo" and not seen.kernels:
        raise TraceError(f"{path} is of gloo, whose times say nothing of NCCL: record the job over NCCL")
    if info.get("nccl_version"):
        found.header["nccl"] = str(info["nccl_version"])
    base = int(about.get("baseTimeNanoseconds") or 0)
    rank = info.get("rank")
    rank = _rank_in_name(path, order) if rank is None else int(rank)
    who = {"rank": rank, "pid": int(info.get("pid") or rank)}
    marks = sorted((_ns(base, ts), _ns(0, dur), index) for ts, dur, index in seen.marks)
    for start, duration, index in marks:
        found.steps.append({**who, "index": index, "end_ns": start + duration, "duration_ns": duration})
    for asked, args, kernel in seen.calls():
        if (call := _call(args, found)) is None:
            continue
        at, times = _ns(base, asked), dict[str, int | None](start_ns=None, end_ns=None)
        if kernel is not None:
            start = _ns(base, kernel[0])
            times = {"start_ns": start, "end_ns": start + _ns(0, kernel[1])}
        found.events.append({**call, **who, **times, "step": _step_at(marks, at), "enqueue_ns": at})
    if seen.compute:
        begin, lasted = np.rint(1000 * np.asarray(seen.compute).reshape(-1, 2).T).astype(np.int64)
        part = pd.DataFrame({"rank": rank, "start_ns": base + begin, "end_ns": base + begin + lasted})
        found.computes.append(part.astype(COMPUTE_COLUMNS))


def _call(args: dict[str, Any], found: Profiles) -> dict[str, Any] | None:
    """What a call was, from the arguments of its operator or kernel; None if it is no collective of NCCL's."""
    func = func_of(str(args.get("Collective name", "")))
    if func is None:
        return None
    dtype = dtype_of(str(args.get("dtype", "")))
    elements = max(int(args.get("In msg nelems") or 0), int(args.get("Out msg nelems") or 0))
    group = (
        args.get("Process Group Name", ""),
        args.get("Process Group Ranks", ""),
        args.get("Group size", 0),
    )
    comm_id, n_ranks = _comm_id_of(*group), int(args.get("Group size") or 0)
    if comm_id not in found.groups:
        # A long list ends in "..."; where ranks lie evenly apart PyTorch says their first one and distance.
        stride, first = int(args.get("Global rank stride") or 0), int(args.get("Global rank start") or 0)
        even = tuple(range(first, first + stride * n_ranks, stride)) if stride > 0 else ()
        found.groups[comm_id] = _ranks_of(str(group[1])) or even
    grid = args.get("grid")
    return {
        "comm_id": comm_id,
        "n_ranks": n_ranks,
        "func": func,
        "dtype": dtype,
        "n_bytes": elements * DTYPE_BYTES.get(dtype, 1),
        "n_channels": int(grid[0]) if isinstance(grid, list) and grid else 0,
        "seq": int(args["Seq"]) if "Seq" in args else None,
    }


def _step_at(marks: list[tuple[int, int, int]], ns: int) -> int:
    """The step that was running at a time; before the first mark the one before it, 0 without marks."""
    if not marks:  # such a recording is refused
        return 0
    at = bisect.bisect_right(marks, (ns, float("inf"), 0)) - 1
    return marks[at][2] if at >= 0 else max(0, marks[0][2] - 1)


def _ns(base: int, us: Any) -> int:
    return base + round(float(us) * 1000)


def func_of(name: str) -> str | None:
    """A collective's name as PyTorch or NCCL writes it -> one of FUNCS; None if it is none of them.

    ``_allgather_base``, ``AllGather`` and ``nccl:_all_gather_base`` are all ``all_gather``.
    """
    text = re.sub(r"[^a-z]", "", name.lower().rpartition(":")[2])
    for func in (
        "reduce_scatter",
        "all_gather",
        "all_reduce",
        "send_recv",
        "broadcast",
        "reduce",
        "send",
        "recv",
    ):
        if text.startswith(func.replace("_", "")):
            return func
    return None


def dtype_of(name: str) -> str:
    """A type's name as PyTorch or NCCL writes it -> ours; 'unknown' if NCCL has none such: its counts are bytes."""
    plain = name.lower().removeprefix("torch.").removeprefix("nccl")
    plain = _ALIASES.get(plain, plain)
    return plain if plain in DTYPE_BYTES else "unknown"


def _comm_id_of(*parts: Any) -> int:
    """A 64-bit id for a communicator that the source names instead of numbering; the same on every rank."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _ranks_of(text: str) -> tuple[int, ...]:
    """The ranks of a process group as PyTorch writes them, ``[0, 1]``; () where they end in "..."."""
    return tuple(map(int, re.findall(r"\d+", text))) if "..." not in text else ()


def _rank_in_name(path: Path, otherwise: int) -> int:
    """The rank in a file's name (``trace_rank_3.json``), ``otherwise`` if it tells none."""
    found = re.search(r"rank[-_.]?(\d+)", path.name) or re.search(r"(\d+)(?:\.\w+)*$", path.name)
    return int(found[1]) if found else otherwise

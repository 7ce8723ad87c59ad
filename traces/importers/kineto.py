"""Profiles of PyTorch (Kineto's JSON, plain or gzipped): one file a rank.

Used: ``record_param_comms`` operators (what was asked for, when the host enqueued it), GPU kernels (NCCL's: when it
ran, on how many channels; the others: when something was computed), ``ProfilerStep#N`` marks (steps; without these the
ends of ``Optimizer.step#...``), ``distributedInfo``. The algorithm and protocol in a kernel's name are not what ran,
NCCL's dispatcher names one kernel for many: they stay unknown.
"""

from __future__ import annotations

import bisect
import math
import re
from array import array
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..files import TraceError
from ..names import DTYPE_BYTES
from .found import (
    MOST_RANKS,
    OUTSIDE,
    SYMMETRIC,
    Found,
    Gaps,
    Marks,
    NoRankError,
    algo_in_kernel,
    comm_id_of,
    dtype_of,
    func_of,
    rank_in_name,
)
from .json_stream import Faults, many, read_elements

GAPS = Gaps(
    calls="record with torch.profiler's record_shapes=True and PyTorch 2.3 or newer",
    times="no NCCL kernel in it (record CUDA activities too): there are no times",
    steps="no step in it: call the profiler's step() after each step of the optimizer",
    compute="no GPU kernels in it: what was computed beside a collective is not known",
)
_MARK = re.compile(r"ProfilerStep#(\d+)")
_OPTIMIZER = "Optimizer.step#"
_OUTSIDE_OPTIMIZERS = (
    "steps are told by Optimizer.step marks: {} before the first and after the last are left out"
)
#: Marks of the optimizer are of several optimizers if their distances are of two lengths, one so many times the other,
#: and such a part of them differs in length from the one before.
_APART, _IN_TURN = 1.5, 0.8
#: What we add to a kernel's arguments.
_ALGO = "algorithm in the kernel's name"
#: What reading a field of a type that PyTorch does not write there raises.
_ODD = (KeyError, TypeError, ValueError, OverflowError, IndexError)

#: (begin, duration, arguments) of a kernel or an operator; times in us, as Kineto has them.
_Span = tuple[float, float, dict[str, Any]]


class _File:
    """What is of use in one file's events; times in us."""

    def __init__(self) -> None:
        self.marks: dict[int, tuple[float, float]] = {}  # number of the step -> begin, duration
        self.optimizers: dict[str, list[float]] = {}  # name of the mark -> ends
        self.asked: dict[Any, _Span] = {}  # External id -> operator
        self.kernels: list[_Span] = []  # NCCL's
        self.compute = array("d")  # begin and duration of every other kernel, in turn
        self.in_turn = False  # the optimizers' marks are of several, and tell no steps
        self.symmetric = 0  # kernels that NCCL runs without asking a tuner
        self.is_fsdp2 = False
        self.unsaid = 0  # operators that do not say which collective they ask for
        self.odd = 0  # events whose fields are not what PyTorch writes

    def add(self, batch: list[Any]) -> None:
        """Sort a batch of events; what is of no use is dropped at once."""
        for event in batch:
            if type(event) is not dict or event.get("ph") != "X":
                continue
            try:
                self._add(event)
            except _ODD:
                self.odd += 1

    def _add(self, event: dict[str, Any]) -> None:
        kind, name = event.get("cat"), event.get("name")
        if kind == "kernel":
            if name[:4].lower() == "nccl":  # type: ignore[index]
                begin, duration, args = _span(event)
                algo = algo_in_kernel(str(name))
                self.kernels.append((begin, duration, {**args, _ALGO: algo}))
                self.symmetric += algo == SYMMETRIC
            else:
                self.compute.extend(_span(event)[:2])
        elif name == "record_param_comms":
            operator = _span(event)
            if "Collective name" in operator[2]:
                self.asked[operator[2].get("External id", ("line", len(self.asked)))] = operator
            else:
                self.unsaid += 1
        elif type(name) is str and kind != "gpu_user_annotation":
            self._mark(event, name)

    def _mark(self, event: dict[str, Any], name: str) -> None:
        if mark := _MARK.fullmatch(name):
            begin, duration, _ = _span(event)
            self.marks.setdefault(int(mark[1]), (begin, duration))
        elif name.startswith(_OPTIMIZER):
            begin, duration, _ = _span(event)
            self.optimizers.setdefault(name, []).append(begin + duration)
        elif name.startswith("FSDP::"):  # how FSDP2 names its ranges
            self.is_fsdp2 = True

    def calls(self) -> Iterator[tuple[float, dict[str, Any], tuple[float, float] | None]]:
        """Of each collective: when it was asked for, what is said of it, its kernel's begin and duration if it ran."""
        ran = set()
        for begin, duration, args in self.kernels:
            external = args.get("External id")
            ran.add(external)
            asked, _, said = self.asked.get(external, (begin, 0.0, {}))
            yield asked, {**said, **args}, (begin, duration)
        for external, (asked, _, args) in self.asked.items():
            if external not in ran:
                yield asked, args, None

    def steps(self) -> dict[int, tuple[float, float]]:
        """Number of the step -> begin, duration.

        With the optimizers' marks alone a step lasts from the end of one mark to the end of the next, of the optimizer
        that steps least often. Empty where these lie at two distances in turn: what a step is they do not tell.
        """
        if self.marks or not self.optimizers:
            return self.marks
        ends = min(map(self._step_ends, self.optimizers.values()), key=len)
        self.in_turn = _at_two_distances(ends)
        if self.in_turn:
            return {}
        return {i: (begin, end - begin) for i, (begin, end) in enumerate(pairwise(ends), 1)}

    def _step_ends(self, ends: list[float]) -> list[float]:
        """Of an optimizer's ends those that a call follows before the next: several optimizers of one class, which step
        one after the other, have marks of one name."""
        ends = sorted(ends)
        calls = sorted(begin for begin, _, _ in self.asked.values() or self.kernels)
        before = [bisect.bisect_left(calls, end) for end in ends]
        nexts = [*before[1:], -1]
        return [end for end, n, following in zip(ends, before, nexts, strict=True) if n != following]


def _at_two_distances(ends: list[float]) -> bool:
    """Whether a short and a long distance follow each other in turn, so that two things have happened in turn. Steps of
    two lengths in any other order are steps."""
    gaps = np.diff(ends)
    if len(gaps) < 4:
        return False
    ordered = np.sort(gaps)
    ratios = ordered[1:] / np.maximum(ordered[:-1], 1e-3)
    largest = int(ratios.argmax())
    is_short = gaps <= ordered[largest]
    in_turn = (is_short[1:] != is_short[:-1]).mean()
    return bool(ratios.max() >= _APART) and in_turn >= _IN_TURN


def read(files: list[Path], found: Found) -> None:
    """Read profiles into ``found``. Raises TraceError for a file that is none, and for two files of one step."""
    found.gaps = GAPS
    for file in files:
        try:
            _read_one(file, len(files) == 1, found)
        except NoRankError:
            raise TraceError(
                f"{file} does not say which rank it is of: name the files rank0.json, rank1.json ..., "
                "or record after init_process_group"
            ) from None


def _read_one(file: Path, alone: bool, found: Found) -> None:
    seen, faults = _File(), Faults()
    about = read_elements(file, "traceEvents", seen.add, faults)
    if about is None:
        raise TraceError(f"{file} is no Kineto trace: export one with torch.profiler's export_chrome_trace")
    info = about.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    if info.get("backend") == "gloo" and not seen.kernels:
        raise TraceError(f"{file} is of gloo, whose times say nothing of NCCL: record the job over NCCL")
    _add_notes(file, seen, faults, info, found)
    rank = _rank_of(file, info, seen)
    if rank is None:
        if not alone:
            raise NoRankError
        rank = 0
        found.notes.append(f"{file.name} does not say which rank it is of: taken to be rank 0")
    base = _whole(about.get("baseTimeNanoseconds")) or 0
    steps = seen.steps()
    if seen.in_turn:
        found.notes.append(f"{file.name}: the marks of several optimizers do not tell its steps")
    marks = Marks((_ns(base, begin), _ns(0, lasts), index) for index, (begin, lasts) in steps.items())
    found.claim(file, rank, marks.steps)
    found.add_steps(rank, marks)
    _add_calls(seen, rank, marks, base, found)
    if len(seen.compute):
        begin, lasts = np.rint(1000 * np.asarray(seen.compute).reshape(-1, 2).T).astype(np.int64)
        found.add_compute(rank, base + begin, base + begin + lasts)


def _add_notes(file: Path, seen: _File, faults: Faults, info: dict[str, Any], found: Found) -> None:
    """What a file says of its job, and what was wrong with its events."""
    found.notes += faults.notes(file.name)
    if seen.odd:
        found.notes.append(f"{file.name}: left out {many(seen.odd, 'event')} without a time or a name")
    if info.get("nccl_version"):
        found.header["nccl"] = str(info["nccl_version"])
    if seen.is_fsdp2:
        found.header["framework"] = "FSDP2"
    found.add_symmetric(seen.symmetric)


def _add_calls(seen: _File, rank: int, marks: Marks, base: int, found: Found) -> None:
    """Add a file's collectives; what no step holds is left out."""
    outside = OUTSIDE if seen.marks else _OUTSIDE_OPTIMIZERS
    for asked, args, kernel in seen.calls():
        lasts = _ns(0, kernel[1]) if kernel else 0
        at = _ns(base, asked)
        step = marks.step_at(at)
        if step is None:
            found.outside[outside] += 1
            continue
        try:
            call = _call(args, found)
        except _ODD:
            found.left_out.calls += 1
            found.left_out.ns += lasts
            continue
        if call is None:
            continue
        if kernel:
            call["start_ns"] = _ns(base, kernel[0])
            call["end_ns"] = call["start_ns"] + lasts
            found.left_out.read_ns += lasts
        found.add({**call, "rank": rank, "pid": rank, "step": step, "enqueue_ns": at})
    if not seen.kernels:
        found.left_out.calls += seen.unsaid


def _call(args: dict[str, Any], found: Found) -> dict[str, Any] | None:
    """What a call was, from the arguments of its operator or kernel; None if it is no collective of NCCL's.

    Raises one of _ODD where they do not say which collective it was.
    """
    func = func_of(str(args["Collective name"]))
    if func is None:
        return None
    dtype = dtype_of(str(args.get("dtype", "")))
    elements = max(int(args.get("In msg nelems") or 0), int(args.get("Out msg nelems") or 0))
    name, text = args.get("Process Group Name", ""), args.get("Process Group Ranks", "")
    n_ranks = int(args.get("Group size") or 0)
    comm_id = comm_id_of(name, text, args.get("Group size", 0))
    found.groups.setdefault(comm_id, _members(args))
    grid = args.get("grid")
    return {
        "comm_id": comm_id,
        "n_ranks": n_ranks,
        "func": func,
        "dtype": dtype,
        "algo": args.get(_ALGO, "unknown"),
        "n_bytes": elements * DTYPE_BYTES.get(dtype, 1),
        "n_channels": int(grid[0]) if isinstance(grid, list) and grid else 0,
        "seq": int(args["Seq"]) if "Seq" in args else None,
    }


def _members(args: dict[str, Any]) -> tuple[int, ...]:
    """The ranks of a call's process group; () where they are not told.

    A long list ends in "..."; where ranks lie evenly apart PyTorch says their first one and distance.
    """
    text = str(args.get("Process Group Ranks", ""))
    if "..." not in text and (listed := tuple(map(int, re.findall(r"\d+", text)))):
        return listed
    size = int(args.get("Group size") or 0)
    if args.get("Process Group Description") == "default_pg" and 0 < size <= MOST_RANKS:
        return tuple(range(size))
    stride, first = int(args.get("Global rank stride") or 0), int(args.get("Global rank start") or 0)
    if stride <= 0 or not 0 < size <= MOST_RANKS:
        return ()
    return tuple(range(first, first + stride * size, stride))


def _rank_of(file: Path, info: dict[str, Any], seen: _File) -> int | None:
    """The rank of a file: as it says itself, else as its name says, else as all its calls say; None: not told."""
    told = _whole(info.get("rank"))
    if told is None:
        told = rank_in_name(file)
    if told is not None:
        return told
    spans = [*seen.asked.values(), *seen.kernels]
    ranks = {rank for _, _, args in spans if (rank := _rank_in_call(args)) is not None}
    return ranks.pop() if len(ranks) == 1 else None


def _rank_in_call(args: dict[str, Any]) -> int | None:
    """The rank of the caller: its place in its group, and the group's ranks."""
    place = _whole(args.get("Rank"))
    if place is None:
        return None
    try:
        members = _members(args)
    except _ODD:
        return None
    if place < len(members):
        return members[place]
    return place if args.get("Process Group Description") == "default_pg" else None


def _span(event: dict[str, Any]) -> _Span:
    """Begin, duration and arguments of an event. Raises ValueError or TypeError where they are none."""
    begin, duration = float(event["ts"]), float(event["dur"])
    if not (math.isfinite(begin) and 0 <= duration < math.inf):
        raise ValueError("no time")
    args = event.get("args")
    return begin, duration, args if type(args) is dict else {}


def _whole(value: Any) -> int | None:
    """A whole number that is not negative, None where it is none."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number >= 0 else None


def _ns(base: int, us: float) -> int:
    return base + round(us * 1000)

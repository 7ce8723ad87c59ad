"""Profiles of PyTorch (Kineto's JSON), of one process or of several that were merged into one file.

Used: ``record_param_comms`` operators (calls), GPU kernels (NCCL's: time and channels; others: compute),
``ProfilerStep#N`` marks or else the ends of ``Optimizer.step#...``, ``distributedInfo``. A kernel's name does not tell
algorithm and protocol (one kernel serves many): they stay unknown.
"""

from __future__ import annotations

import bisect
import math
import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..names import DTYPE_BYTES
from ..outside import TraceError
from .found import (
    MOST_RANKS,
    OUTSIDE,
    Found,
    Gaps,
    Marks,
    Process,
    algo_in_kernel,
    comm_id_of,
    dtype_of,
    func_of,
    many,
)
from .json_stream import Faults, read_elements

GAPS = Gaps(
    calls="record with torch.profiler's record_shapes=True and PyTorch 2.3 or newer",
    rank="name the files rank0.json, rank1.json ..., or record after init_process_group",
    times="no NCCL kernel in it (record CUDA activities too): there are no times",
    steps="no step in it: call the profiler's step() after each step of the optimizer",
    compute="no GPU kernels in it: what was computed beside a collective is not known",
)
_MARK = re.compile(r"ProfilerStep#(\d+)")
_OPTIMIZER = "Optimizer.step#"
_MARKED = ("ProfilerStep#", _OPTIMIZER)
#: Collectives whose "Rank" is that of the caller.
_OF_CALLER = ("all_gather", "reduce_scatter", "all_reduce")
_OUTSIDE_OPTIMIZERS = (
    "steps are told by Optimizer.step marks: {calls} before the first and after the last are left out"
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


class _Host:
    """What one process did on its host; times in us."""

    def __init__(self) -> None:
        self.marks: dict[int, tuple[float, float]] = {}  # number of the step -> begin, duration
        self.optimizers: dict[str, list[float]] = {}  # name of the mark -> ends
        self.asked: dict[Any, _Span] = {}  # External id -> operator
        self.unsaid = 0  # operators that do not say which collective they ask for
        self.in_turn = False  # the optimizers' marks are of several, and tell no steps

    def join(self, other: _Host) -> None:
        """Take in what another one did: nothing tells them apart."""
        self.marks = {**other.marks, **self.marks}
        for name, ends in other.optimizers.items():
            self.optimizers.setdefault(name, []).extend(ends)
        self.asked |= other.asked
        self.unsaid += other.unsaid

    def mark(self, event: dict[str, Any], name: str) -> None:
        """Note the step or the optimizer's end that an event marks, if it marks one."""
        if mark := _MARK.fullmatch(name):
            begin, duration, _ = _span(event)
            self.marks.setdefault(int(mark[1]), (begin, duration))
        elif name.startswith(_OPTIMIZER):
            begin, duration, _ = _span(event)
            self.optimizers.setdefault(name, []).append(begin + duration)

    def calls(
        self, kernels: list[_Span]
    ) -> Iterator[tuple[float, dict[str, Any], tuple[float, float] | None]]:
        """Of each collective: when it was asked for, what is said of it, its kernel's begin and duration if it ran."""
        ran = set()
        for begin, duration, args in kernels:
            external = args.get("External id")
            ran.add(external)
            asked, _, said = self.asked.get(external, (begin, 0.0, {}))
            yield asked, {**said, **args}, (begin, duration)
        for external, (asked, _, args) in self.asked.items():
            if external not in ran:
                yield asked, args, None

    def steps(self, kernels: list[_Span]) -> dict[int, tuple[float, float]]:
        """Number of the step -> begin, duration.

        With the optimizers' marks alone a step lasts from the end of one mark to the end of the next, of the optimizer
        that steps least often. Empty where these lie at two distances in turn: what a step is they do not tell.
        """
        if self.marks or not self.optimizers:
            return self.marks
        calls = sorted(begin for begin, _, _ in self.asked.values() or kernels)
        ends = min((_step_ends(ends, calls) for ends in self.optimizers.values()), key=len)
        self.in_turn = _at_two_distances(ends)
        if self.in_turn:
            return {}
        return {i: (begin, end - begin) for i, (begin, end) in enumerate(pairwise(ends), 1)}


def _step_ends(ends: list[float], calls: list[float]) -> list[float]:
    """Of an optimizer's ends those that a call follows before the next: several optimizers of one class, which step one
    after the other, have marks of one name. ``calls``: their begins, in order."""
    ends = sorted(ends)
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


class _Device:
    """The kernels in one row of a file, which are of one process; times in us."""

    def __init__(self) -> None:
        self.kernels: list[_Span] = []  # NCCL's
        self.compute = array("d")  # begin and duration of every other kernel, in turn


class _File:
    """A file's events, apart by the process or the device that they are of."""

    def __init__(self) -> None:
        self.hosts: defaultdict[Any, _Host] = defaultdict(_Host)
        self.devices: defaultdict[Any, _Device] = defaultdict(_Device)
        self.is_fsdp2 = False
        self.n_events = 0
        self.odd = 0  # events whose fields are not what PyTorch writes

    def add(self, batch: list[Any]) -> None:
        """Sort a batch of events; what is of no use is dropped at once."""
        self.n_events += len(batch)
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
            begin, duration, args = _span(event)
            device = self.devices[event.get("pid")]
            if name[:4].lower() == "nccl":  # type: ignore[index]
                device.kernels.append((begin, duration, {**args, _ALGO: algo_in_kernel(str(name))}))
            else:
                device.compute.extend((begin, duration))
        elif name == "record_param_comms":
            operator = _span(event)
            host = self.hosts[event.get("pid")]
            if "Collective name" in operator[2]:
                host.asked[operator[2].get("External id", ("line", len(host.asked)))] = operator
            else:
                host.unsaid += 1
        elif type(name) is str and kind != "gpu_user_annotation":
            if name.startswith(_MARKED):
                self.hosts[event.get("pid")].mark(event, name)
            elif name.startswith("FSDP::"):  # how FSDP2 names its ranges
                self.is_fsdp2 = True

    def processes(self, file: Path) -> list[tuple[_Host, _Device]]:
        """Each process that asked for collectives, with its kernels. Raises TraceError where nothing tells whose
        kernels they are."""
        asking = [host for host in self.hosts.values() if host.asked or host.unsaid]
        if len(asking) > 1:
            return self._apart(file, asking)
        whole = _Host()
        for host in self.hosts.values():
            whole.join(host)
        return [(whole, _joined(list(self.devices.values())))]

    def _apart(self, file: Path, asking: list[_Host]) -> list[tuple[_Host, _Device]]:
        ranks = [_called(host.asked.values()) for host in asking]
        mine: list[list[_Device]] = [[] for _ in asking]
        for device in self.devices.values():
            told = _called(device.kernels)
            same_rank = [i for i, of_host in enumerate(ranks) if told == of_host]
            owners = same_rank if told else _asked_by(device, asking)
            if len(owners) != 1:
                raise TraceError(
                    f"{file} holds {len(asking)} processes that call NCCL, and does not say whose its kernels are: "
                    "give the profiles as they were before they were merged, one a rank"
                )
            mine[owners[0]].append(device)
        return [(host, _joined(devices)) for host, devices in zip(asking, mine, strict=True)]


def _asked_by(device: _Device, asking: list[_Host]) -> list[int]:
    """Numbers of the processes that asked for all of NCCL's kernels in a row."""
    ids = {args.get("External id") for _, _, args in device.kernels}
    return [i for i, host in enumerate(asking) if ids and ids <= host.asked.keys()]


def _joined(devices: list[_Device]) -> _Device:
    """The kernels of several rows as one."""
    if len(devices) == 1:
        return devices[0]
    whole = _Device()
    for device in devices:
        whole.kernels += device.kernels
        whole.compute.extend(device.compute)
    return whole


def read(file: Path, found: Found) -> None:
    """Read a profile. Raises TraceError for a file that is none, or of gloo, and where it holds calls of several ranks
    that cannot be told apart."""
    seen, faults = _File(), Faults()
    about = read_elements(file, "traceEvents", seen.add, faults)
    if about is None:
        raise TraceError(f"{file} is no Kineto trace: export one with torch.profiler's export_chrome_trace")
    info = about.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    processes = seen.processes(file)
    if info.get("backend") == "gloo" and not any(device.kernels for _, device in processes):
        raise TraceError(f"{file} is of gloo, whose times say nothing of NCCL: record the job over NCCL")
    _add_notes(file, seen, faults, info, found)
    found.nothing.append(
        f"{file.name}: {many(seen.n_events, 'event')}, and no collective that NCCL runs among them"
    )
    base = _whole(about.get("baseTimeNanoseconds")) or 0
    for host, device in processes:
        process = _process(file, host, device, base, found)
        if len(processes) == 1:  # of a merged file it is one process's
            process.told = _whole(info.get("rank"))
        found.processes.append(process)


def _process(file: Path, host: _Host, device: _Device, base: int, found: Found) -> Process:
    """A process's calls, steps and other kernels. Raises TraceError for calls of several ranks."""
    called = _called([*host.asked.values(), *device.kernels])
    if len(called) > 1:
        ranks = ", ".join(map(str, sorted(called)[:4]))
        raise TraceError(
            f"{file} holds calls of several ranks ({ranks}), and does not say which process made them: "
            "give the profiles as they were before they were merged, one a rank"
        )
    steps = host.steps(device.kernels)
    if host.in_turn:
        found.notes.append(f"{file.name}: the marks of several optimizers do not tell its steps")
    process = Process(
        file,
        marks=Marks((_ns(base, begin), _ns(0, lasts), index) for index, (begin, lasts) in steps.items()),
        outside=OUTSIDE if host.marks else _OUTSIDE_OPTIMIZERS,
        unsaid=0 if device.kernels else host.unsaid,
        called=called,
    )
    if len(device.compute):
        begin, lasts = np.rint(1000 * np.asarray(device.compute).reshape(-1, 2).T).astype(np.int64)
        process.compute = (base + begin, base + begin + lasts)
    for asked, args, kernel in host.calls(device.kernels):
        call: dict[str, Any]
        try:
            call = _call(args, found)
        except _ODD:
            call = {"untold": True}
        call["enqueue_ns"] = _ns(base, asked)
        if kernel:
            call["start_ns"] = _ns(base, kernel[0])
            call["end_ns"] = call["start_ns"] + _ns(0, kernel[1])
        process.calls.append(call)
    return process


def _add_notes(file: Path, seen: _File, faults: Faults, info: dict[str, Any], found: Found) -> None:
    """What a file says of its job, and what was wrong with its events."""
    found.notes += faults.notes(file.name)
    if seen.odd:
        found.notes.append(f"{file.name}: left out {many(seen.odd, 'event')} without a time or a name")
    if info.get("nccl_version"):
        found.header["nccl"] = str(info["nccl_version"])
    if seen.is_fsdp2:
        found.header["framework"] = "FSDP2"


def _call(args: dict[str, Any], found: Found) -> dict[str, Any]:
    """What a call was, from the arguments of its operator or kernel; ``func`` is None if it is none of FUNCS.

    Raises one of _ODD where they do not say which collective it was.
    """
    func = func_of(str(args["Collective name"]))
    if func is None:
        return {"func": None}
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


def _called(spans: Iterable[_Span]) -> set[int]:
    """The ranks that calls say that they are of."""
    return {rank for _, _, args in spans if (rank := _rank_in_call(args)) is not None}


def _rank_in_call(args: dict[str, Any]) -> int | None:
    """The rank of the caller: its place in its group, and the group's ranks.

    Of other collectives PyTorch writes the root or the peer there.
    """
    place = _whole(args.get("Rank"))
    if place is None or func_of(str(args.get("Collective name", ""))) not in _OF_CALLER:
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

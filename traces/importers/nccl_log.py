"""NCCL's debug log: ``NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,COLL,TUNING``, one file or one a process.

INIT lines tell which rank a communicator's address is, COLL lines the calls, TUNING lines what NCCL chose for them, in
the words of three generations of NCCL. There are no durations and no steps; when a call was made is told only with
NCCL_DEBUG_TIMESTAMP_FORMAT.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from pathlib import Path
from typing import Any

from ..names import DTYPE_BYTES, DTYPES
from ..outside import lines, shown, text_of
from .found import Found, Gaps, Process, algo_of, comm_id_of, func_of, many, process_of, proto_of, whole_bytes

SUBSYSTEMS = "log with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,COLL,TUNING"
GAPS = Gaps(
    calls=SUBSYSTEMS,
    steps="a log of NCCL tells no durations and no steps: what calls cost is not known",
    choice=f"the log does not say what NCCL chose: {SUBSYSTEMS}",
)
_UNMATCHED = f"{{n}} choices of NCCL are of calls that the log does not hold: {SUBSYSTEMS}"
#: What a launcher or a progress bar writes before a line of NCCL may touch the name of the host: it ends in a sign that
#: no name of a host has, or in a terminal's code, which ends in a letter.
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LINE = re.compile(r"(?:^|[^\w.\-])([\w.\-]+):(\d+):(\d+) (?:\[(\d+)\] )?NCCL (?:INFO|TRACE) (.*)$")
_COLL = re.compile(r"(\w+): opCount (\w+) .*?count (\d+) datatype (\d+) .*?comm (0x\w+) \[nranks=(\d+)\]")
#: 2.19 to 2.32: names and channels; before: numbers and a time.
_CHOICE = re.compile(
    r"(?:(\w+): )?(\d+) Bytes -> Algo (\w+) proto (\w+)(?:.*?\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\})?"
)
#: The cost model of 2.31 and later: what it was asked, then what it chose.
_INPUT = re.compile(r"Input: \{.*?\.func = (?:ncclFunc)?(\w+),.*?\.nBytes = (\d+)")
_BEST = re.compile(r"Best tuning \{.*?\.algo = (\w+), \.proto = (\w+),.*?nChannels = (\d+)")
_INIT = re.compile(r"comm (0x\w+) rank (\d+) n[rR]anks (\d+) ")
_NUMBER = re.compile(r"commId (0x\w+)")
#: Of a communicator that was split off another one; 2.18 to 2.20 tell no count, but a number.
_CHILD = re.compile(r"parent (0x\w+) (?:(?:split|child)Count (\d+) )?color (-?\d+)")
_COMPLETE = "Init COMPLETE"
_NODES = re.compile(r"comm (0x\w+) rank \d+ n[rR]anks \d+ nNodes (\d+)")
_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)")


class _Process:
    """What one process has said so far, in any file."""

    def __init__(self, host: str, pid: int) -> None:
        self.number = process_of(host, pid)
        self.comms: dict[str, tuple[int, int]] = {}  # address -> (id, rank)
        self.made: Counter[tuple[int, int]] = Counter()  # communicators of one name and rank
        self.waiting: dict[int, deque[dict[str, Any]]] = {}  # bytes -> calls whose choice was not told yet
        self.asked: tuple[str | None, int] | None = None  # what the cost model was last asked

    def one_of(self, comm_id: int, rank: int) -> int:
        """The id of a new communicator. 2.18 to 2.20 number all splits of one parent and color alike: their order tells
        them apart, which is the same on all ranks."""
        key = comm_id, rank
        n_before = self.made[key]
        self.made[key] += 1
        return comm_id_of(comm_id, n_before) if n_before else comm_id


class Logs:
    """Reads logs, one after the other: what a process says of its communicators may lie in another file than its
    calls."""

    def __init__(self) -> None:
        self.processes: dict[tuple[str, int], _Process] = {}
        self.n_lines = 0

    def __call__(self, file: Path, found: Found) -> None:
        """Read a log. Raises TraceError where it cannot be read."""
        processes: dict[int, Process] = {}
        n_before, n_understood, first = self.n_lines, 0, ""
        for raw in lines(file):
            if b"NCCL" not in raw:
                continue
            self.n_lines += 1
            text = _COLOURS.sub("", text_of(raw[:4000])).rstrip("\r")
            if version := _VERSION.search(text):
                found.header["nccl"] = version[1]
            if said := _LINE.search(text):
                n_understood += 1
                host, pid, _, device, rest = said.groups()
                process = self.processes.setdefault((host, int(pid)), _Process(host, int(pid)))
                calls = processes.setdefault(process.number, Process(file, number=process.number)).calls
                self._take(process, rest, int(device or 0), calls, found)
            else:
                first = first or text
        n = self.n_lines - n_before
        if not n_understood and first:
            told = f"{many(n, 'line')} of NCCL, none understood, the first of them {shown(first[:80])!r}"
        else:
            told = f"{many(n, 'line')} of NCCL, and none tells of a collective: {SUBSYSTEMS}"
        found.nothing.append(f"{file.name}: {told}")
        found.processes += processes.values()

    def _take(
        self, process: _Process, text: str, device: int, calls: list[dict[str, Any]], found: Found
    ) -> None:
        """Take in what a line says."""
        self._announce(process, text, found)
        if call := _COLL.match(text):
            self._call(process, device, call, calls)
        elif chosen := _CHOICE.match(text):
            func, n_bytes, algo, proto, low, high = chosen.groups()
            n_channels = int(high) - int(low) + 1 if low else 0
            choice = {"algo": algo_of(algo), "proto": proto_of(proto), "n_channels": n_channels}
            _choose(process, func_of(func or ""), int(n_bytes), choice, found)
        elif asked := _INPUT.match(text):
            process.asked = func_of(asked[1]), int(asked[2])
        elif (best := _BEST.match(text)) and process.asked:
            choice = {"algo": algo_of(best[1]), "proto": proto_of(best[2]), "n_channels": int(best[3])}
            _choose(process, *process.asked, choice, found)
            process.asked = None

    def _announce(self, process: _Process, text: str, found: Found) -> None:
        """An INIT line: a communicator's address, and who is in it."""
        if init := _INIT.search(text):
            address, rank, n_ranks = init.groups()
            is_complete = _COMPLETE in text
            is_known = is_complete and address in process.comms
            named = _comm_id(process, text, n_ranks)
            if named is not None and not is_known:
                number = int(rank)
                comm_id = process.one_of(named, number)
                process.comms[address] = comm_id, number
        if nodes := _NODES.search(text):
            comm_id, _ = process.comms.get(nodes[1], (0, 0))
            found.nodes[comm_id] = int(nodes[2])

    def _call(self, process: _Process, device: int, call: re.Match[str], calls: list[dict[str, Any]]) -> None:
        """A COLL line: a collective was enqueued."""
        name, count, elements, number, address, size = call.groups()
        func = func_of(name)
        if func is None or int(number) >= len(DTYPES):
            return
        n_ranks = int(size)
        comm_id, rank = process.comms.get(address, (comm_id_of("not announced", n_ranks), device))
        dtype = DTYPES[int(number)]
        n_bytes = whole_bytes(func, int(elements) * DTYPE_BYTES[dtype], n_ranks)
        told = {
            "comm_id": comm_id,
            "rank": rank,
            "n_ranks": n_ranks,
            "func": func,
            "dtype": dtype,
            "n_bytes": n_bytes,
            "enqueue_ns": self.n_lines,
            "once": (process.number, name, count, address),
        }
        calls.append(told)
        process.waiting.setdefault(n_bytes, deque()).append(told)


def _choose(process: _Process, func: str | None, n_bytes: int, choice: dict[str, Any], found: Found) -> None:
    """A TUNING line: what NCCL chose for the earliest of the calls that it fits."""
    waiting = process.waiting.get(n_bytes, deque())
    for call in waiting:
        if func in (None, call["func"]):
            waiting.remove(call)
            call.update(choice)
            return
    found.counted[_UNMATCHED] += 1


def _comm_id(process: _Process, text: str, n_ranks: str) -> int | None:
    """The id that an INIT line gives a communicator, the same on all ranks; None where it tells none.

    An address is of one process alone. So a child is named as NCCL names it: by its parent's id, by the count of its
    parent's children, and by its color.
    """
    if number := _NUMBER.search(text):
        return int(number[1], 16) % (1 << 64)
    if child := _CHILD.search(text):
        parent, count, color = child.groups()
        parent_id, _ = process.comms.get(parent, (parent, 0))
        return comm_id_of(parent_id, count, color, n_ranks)
    return None

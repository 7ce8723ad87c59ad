"""NCCL's debug log: ``NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,COLL,TUNING``, one file or one a process.

INIT lines tell which rank a communicator's address is, COLL lines the calls, TUNING lines what NCCL chose for them, in
the words of three generations of NCCL. There are no durations and no steps; when a call was made is told only with
NCCL_DEBUG_TIMESTAMP_FORMAT.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from pathlib import Path
from typing import Any, NamedTuple

from ..files import TraceError
from ..names import DTYPE_BYTES, DTYPES
from .found import Found, Gaps, algo_of, comm_id_of, func_of, process_of, proto_of, whole_bytes
from .json_stream import lines

SUBSYSTEMS = "log with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,COLL,TUNING"
_LINE = re.compile(r"(?:^|\s)([\w.\-]+):(\d+):(\d+) (?:\[(\d+)\] )?NCCL (?:INFO|TRACE) (.*)$")
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


class _Line(NamedTuple):
    """One line of a process."""

    file: Path
    host: str
    pid: int
    device: int
    text: str


class _Process:
    """What one process has said so far."""

    def __init__(self, host: str, pid: int) -> None:
        self.name = f"{pid} of {host}"
        self.pid = process_of(host, pid)
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


class _Log:
    """What is known while the lines of all files are read."""

    def __init__(self, found: Found) -> None:
        self.found = found
        self.processes: dict[tuple[str, int], _Process] = {}
        self.calls: dict[
            tuple[int, str, str, str], Path
        ] = {}  # a call of a process -> the file that holds it
        self.nodes: dict[int, int] = {}
        self.n_lines = 0
        self.unmatched = 0

    def take(self, line: _Line) -> None:
        """Take in one line. Raises TraceError for a call that is in another file too."""
        who = line.host, line.pid
        process = self.processes.setdefault(who, _Process(*who))
        self._announce(process, line.text)
        if call := _COLL.match(line.text):
            self._call(process, line, call)
        elif chosen := _CHOICE.match(line.text):
            func, n_bytes, algo, proto, low, high = chosen.groups()
            n_channels = int(high) - int(low) + 1 if low else 0
            choice = {"algo": algo_of(algo), "proto": proto_of(proto), "n_channels": n_channels}
            self._choose(process, func_of(func or ""), int(n_bytes), choice)
        elif asked := _INPUT.match(line.text):
            process.asked = func_of(asked[1]), int(asked[2])
        elif (best := _BEST.match(line.text)) and process.asked:
            choice = {"algo": algo_of(best[1]), "proto": proto_of(best[2]), "n_channels": int(best[3])}
            self._choose(process, *process.asked, choice)
            process.asked = None

    def _announce(self, process: _Process, text: str) -> None:
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
            self.nodes[comm_id] = int(nodes[2])

    def _call(self, process: _Process, line: _Line, call: re.Match[str]) -> None:
        """A COLL line: a collective was enqueued."""
        name, count, elements, number, address, size = call.groups()
        func = func_of(name)
        if func is None or int(number) >= len(DTYPES):
            return
        key = (process.pid, name, count, address)
        other = self.calls.setdefault(key, line.file)
        if other != line.file:
            raise TraceError(
                f"{other} and {line.file} both hold calls of process {process.name}: give each log once"
            )
        n_ranks = int(size)
        comm_id, rank = process.comms.get(address, (comm_id_of("not announced", n_ranks), line.device))
        dtype = DTYPES[int(number)]
        n_bytes = whole_bytes(func, int(elements) * DTYPE_BYTES[dtype], n_ranks)
        event = {
            "comm_id": comm_id,
            "rank": rank,
            "n_ranks": n_ranks,
            "func": func,
            "dtype": dtype,
            "n_bytes": n_bytes,
            "pid": process.pid,
            "enqueue_ns": self.n_lines,
        }
        before = len(self.found.events)
        self.found.add(event)
        waiting = process.waiting.setdefault(n_bytes, deque())
        waiting.extend(self.found.events[before:])

    def _choose(self, process: _Process, func: str | None, n_bytes: int, choice: dict[str, Any]) -> None:
        """A TUNING line: what NCCL chose for the earliest of the calls that it fits."""
        waiting = process.waiting.get(n_bytes, deque())
        for event in waiting:
            if func in (None, event["func"]):
                waiting.remove(event)
                event.update(choice)
                return
        self.unmatched += 1


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


def read(files: list[Path], found: Found) -> None:
    """Read logs into ``found``. Raises TraceError where a file cannot be read."""
    found.gaps = Gaps(
        calls=SUBSYSTEMS, steps="a log of NCCL tells no durations and no steps: what calls cost is not known"
    )
    log = _Log(found)
    for file in files:
        for raw in lines(file):
            if b"NCCL" not in raw:
                continue
            log.n_lines += 1
            text = raw[:4000].decode("utf-8", "replace")
            if version := _VERSION.search(text):
                found.header["nccl"] = version[1]
            if said := _LINE.search(text):
                host, pid, _, device, rest = said.groups()
                number = int(device or 0)
                log.take(_Line(file, host, int(pid), number, rest))
    for event in found.events:
        event["n_nodes"] = log.nodes.get(event["comm_id"], 0)
    if log.unmatched:
        found.notes.append(
            f"{log.unmatched} choices of NCCL are of calls that the log does not hold: {SUBSYSTEMS}"
        )
    if found.events and all("algo" not in event for event in found.events):
        found.notes.append(f"the log does not say what NCCL chose: {SUBSYSTEMS}")

"""NCCL's debug log: ``NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,COLL,TUNING``, one file or one a process.

INIT lines tell which rank a communicator's address is, COLL lines the calls, TUNING lines what NCCL chose for them, in
the words of three generations of NCCL. There are no durations and no steps; when a call was made is told only with
NCCL_DEBUG_TIMESTAMP_FORMAT.
"""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from typing import Any

from ..assemble import DTYPE_BYTES, DTYPES
from ..files import TraceError
from .found import PER_RANK, Found, Gaps, algo_of, comm_id_of, func_of, proto_of
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
_INIT = re.compile(
    r"comm (0x\w+) rank (\d+) n[rR]anks (\d+).*?(?:commId (0x\w+)|parent (0x\w+).*?color (-?\d+))"
)
_NODES = re.compile(r"comm (0x\w+) rank \d+ n[rR]anks \d+ nNodes (\d+)")
_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)")


class _Process:
    """What one process has said so far."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.comms: dict[str, tuple[int, int]] = {}  # address -> (id, rank)
        self.waiting: dict[int, deque[dict[str, Any]]] = {}  # bytes -> calls whose choice was not told yet
        self.asked: tuple[str | None, int] | None = None  # what the cost model was last asked


class _Log:
    """What is known while the lines of all files are read."""

    def __init__(self, found: Found) -> None:
        self.found = found
        self.processes: dict[str, _Process] = {}
        self.calls: dict[
            tuple[int, str, str, str], Path
        ] = {}  # a call of a process -> the file that holds it
        self.nodes: dict[int, int] = {}
        self.n_lines = 0
        self.unmatched = 0

    def take(self, file: Path, host: str, pid: str, device: str | None, text: str) -> None:
        """Take in one line of a process. Raises TraceError for a call that is in another file too."""
        process = self.processes.setdefault(f"{host}:{pid}", _Process(int(pid)))
        if init := _INIT.search(text):
            address, rank, n_ranks, number, parent, color = init.groups()
            comm_id = int(number, 16) if number else comm_id_of(parent, color, n_ranks)
            process.comms[address] = comm_id % (1 << 64), int(rank)
        if nodes := _NODES.search(text):
            comm_id, _ = process.comms.get(nodes[1], (0, 0))
            self.nodes[comm_id] = int(nodes[2])
        if call := _COLL.match(text):
            self._call(file, process, device, call)
        elif choice := _CHOICE.match(text):
            func, n_bytes, algo, proto, low, high = choice.groups()
            n_channels = int(high) - int(low) + 1 if low else 0
            self._choose(process, func_of(func or ""), int(n_bytes), algo, proto, n_channels)
        elif asked := _INPUT.match(text):
            process.asked = func_of(asked[1]), int(asked[2])
        elif (best := _BEST.match(text)) and process.asked:
            self._choose(process, *process.asked, best[1], best[2], int(best[3]))
            process.asked = None

    def _call(self, file: Path, process: _Process, device: str | None, call: re.Match[str]) -> None:
        """A COLL line: a collective was enqueued."""
        func = func_of(call[1])
        if func is None or int(call[4]) >= len(DTYPES):
            return
        other = self.calls.setdefault((process.pid, call[1], call[2], call[5]), file)
        if other != file:
            raise TraceError(
                f"{other} and {file} both hold calls of process {process.pid}: give each log once"
            )
        n_ranks = int(call[6])
        fallback = comm_id_of("address not announced", n_ranks), int(device or 0)
        comm_id, rank = process.comms.get(call[5], fallback)
        dtype = DTYPES[int(call[4])]
        n_parts = n_ranks if func in PER_RANK else 1
        whole_bytes = int(call[3]) * DTYPE_BYTES[dtype] * n_parts
        event = {
            "comm_id": comm_id,
            "rank": rank,
            "n_ranks": n_ranks,
            "func": func,
            "dtype": dtype,
            "n_bytes": whole_bytes,
            "pid": process.pid,
            "enqueue_ns": self.n_lines,
        }
        before = len(self.found.events)
        self.found.add(event)
        waiting = process.waiting.setdefault(whole_bytes, deque())
        waiting.extend(self.found.events[before:])

    def _choose(
        self, process: _Process, func: str | None, n_bytes: int, algo: str, proto: str, n_channels: int
    ) -> None:
        """A TUNING line: what NCCL chose for the earliest of the calls that it fits."""
        waiting = process.waiting.get(n_bytes, deque())
        event = next((call for call in waiting if func in (None, call["func"])), None)
        if event is None:
            self.unmatched += 1
            return
        waiting.remove(event)
        event.update(algo=algo_of(algo), proto=proto_of(proto), n_channels=n_channels)


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
            if line := _LINE.search(text):
                host, pid, _, device, said = line.groups()
                log.take(file, host, pid, device, said)
    for event in found.events:
        event["n_nodes"] = log.nodes.get(event["comm_id"], 0)
    if log.unmatched:
        found.notes.append(
            f"{log.unmatched} choices of NCCL are of calls that the log does not hold: {SUBSYSTEMS}"
        )
    if found.events and all("algo" not in event for event in found.events):
        found.notes.append(f"the log does not say what NCCL chose: {SUBSYSTEMS}")

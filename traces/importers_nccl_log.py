"""Import of NCCL's debug log: ``NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,COLL,TUNING``, one file or one a process.

COLL lines tell the calls, TUNING lines what NCCL chose for them, INIT lines which rank a communicator's address is.
There are no durations; when a call was made is told only with ``NCCL_DEBUG_TIMESTAMP_FORMAT``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from .assemble import DTYPES
from .files import TraceError
from .importers_common import Imported, algo_of, comm_id_of, func_of, proto_of, width_of
from .json_stream import read_lines

_LINE = re.compile(r"^(?:\[([\d\-: T.,]+)\]\s*)?(\S+?):(\d+):(\d+)(?: \[(\d+)\])? NCCL INFO (.*)$")
_COLL = re.compile(r"(\w+): opCount (\w+) .*?count (\d+) datatype (\d+) .*?comm (0x\w+) \[nranks=(\d+)\]")
_TUNE = re.compile(r"(\w+): (\d+) Bytes -> Algo (\w+) proto (\w+)(?: channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\})?")
_INIT = re.compile(r"comm (0x\w+) rank (\d+) n[rR]anks (\d+).*?commId (0x\w+)")
_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)")


def read(paths: list[Path], on_bytes: Callable[[int], None] = lambda n: None) -> Imported:
    """Read logs. Raises TraceError for files without a line about a collective."""
    found = Imported()
    comms: dict[tuple[str, str], tuple[int, int]] = {}  # (process, address) -> (rank, id)
    open_calls: dict[tuple[str, str], list[dict[str, Any]]] = {}
    timed = False
    for path in paths:
        n_before, n_line = len(found.events), 0
        for raw in read_lines(path, on_bytes):
            text = raw[:2000].decode("utf-8", "replace")
            if version := _VERSION.search(text):
                found.header["nccl"] = version[1]
            line = _LINE.match(text)
            if line is None:
                continue
            n_line += 1
            stamp, host, pid, tid, device, rest = line.groups()
            process = f"{host}:{pid}"
            if init := _INIT.search(rest):
                comms[process, init[1]] = int(init[2]), int(init[4], 16)
            elif coll := _COLL.match(rest):
                func = func_of(coll[1])
                if func is None or int(coll[4]) >= len(DTYPES):
                    continue
                fallback = int(device or 0), comm_id_of("nranks", coll[6])
                rank, comm_id = comms.get((process, coll[5]), fallback)
                dtype, n_ranks = DTYPES[int(coll[4])], int(coll[6])
                whole = n_ranks if func in ("all_gather", "reduce_scatter") else 1
                at = _ns(stamp) if stamp else None
                timed |= at is not None
                row: dict[str, Any] = {"comm_id": comm_id, "rank": rank, "pid": int(pid), "func": func}
                row |= {"n_ranks": n_ranks, "dtype": dtype, "n_bytes": int(coll[3]) * width_of(dtype) * whole}
                row |= {"enqueue_ns": n_line if at is None else at + n_line % 1000, "start_ns": None, "end_ns": None}
                found.events.append(row | {"algo": "unknown", "proto": "unknown", "n_channels": 0})
                open_calls.setdefault((process, tid), []).append(found.events[-1])
            elif tune := _TUNE.match(rest):
                func, n_bytes = func_of(tune[1]), int(tune[2])
                waiting = open_calls.get((process, tid), [])
                fits = [e for e in waiting if e["func"] == func and e["n_bytes"] == n_bytes]
                for event in fits[:1]:
                    waiting.remove(event)
                    channels = int(tune[6]) - int(tune[5]) + 1 if tune[5] else 0
                    event |= {"algo": algo_of(tune[3]), "proto": proto_of(tune[4]), "n_channels": channels}
        if len(found.events) == n_before:
            raise TraceError(
                f"{path} holds no collective of NCCL's: NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,COLL,TUNING"
            )
    found.notes.append("an NCCL log tells no durations: NCCL's prices stand in for them")
    if not timed:
        found.notes.append("its lines have no times (NCCL_DEBUG_TIMESTAMP_FORMAT): only the order of calls is known")
        found.header["ordered_only"] = True
    return found


def _ns(stamp: str) -> int | None:
    try:
        return round(datetime.fromisoformat(stamp.strip().replace(",", ".")).timestamp() * 1e9)
    except ValueError:
        return None

"""Import of Nsight Systems' SQLite export (``nsys export --type sqlite``): one file for all processes, or one each.

Written after NVIDIA's public description of the export's schema; no real export was at hand. NCCL's own NVTX ranges
(``ncclAllGather`` ...) tell the calls; their message sizes come from the range's payload (``jsonText``, profile with
NVTX payloads as NCCL has them) or from PyTorch's ranges with ``emit_nvtx(record_shapes=True)``. Kernels are matched
to ranges by the launch that they hold. Steps are ranges named like ``step 12``, ``iteration 12``, ``ProfilerStep#12``.
"""

from __future__ import annotations

import bisect
import re
import sqlite3
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .files import TraceError
from .importers_common import Imported, comm_id_of, func_of, rank_in_name

_STEP = re.compile(r"(?i)\s*(?:profilerstep#|step|iteration|iter)[\s_:#=]*(\d+)\s*")
_SIZE = re.compile(r'(?i)"?(?:message[ _]size|size|bytes|count)[^":]*"?\s*[:=]\s*"?(\d+)')
_RANKS = re.compile(r'(?i)"?(?:n_?ranks|no\. of ranks|comm[ _]size|nranks)[^":]*"?\s*[:=]\s*"?(\d+)')
_COMM = re.compile(r'(?i)"?(?:nccl )?(?:comm(?:unicator)?(?: id)?)"?\s*[:=]\s*"?(0x[0-9a-f]+|\d+)')


def read(paths: list[Path], on_bytes: Callable[[int], None] = lambda n: None) -> Imported:
    """Read exports. Raises TraceError for other databases, and where no call's size is told."""
    found = Imported()
    n_ranks = 0
    for path in paths:
        try:
            uri = f"file:{path.resolve()}?mode=ro&immutable=1"
            with sqlite3.connect(uri, uri=True) as base:
                n_ranks = _read_one(path, base, n_ranks, found)
        except sqlite3.Error as error:
            raise TraceError(f"{path} is no whole SQLite export ({error}): nsys export --type sqlite") from None
        on_bytes(path.stat().st_size)
    for row in found.events:
        row["n_ranks"] = row["n_ranks"] or n_ranks
    return found


def _read_one(path: Path, base: sqlite3.Connection, first: int, found: Imported) -> int:
    """Read one database whose processes begin at rank ``first``; the number of ranks so far."""
    tables = {name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "CUPTI_ACTIVITY_KIND_KERNEL" not in tables or "NVTX_EVENTS" not in tables:
        raise TraceError(f"{path} holds no kernels or no NVTX ranges: nsys profile --trace cuda,nvtx")
    columns = {row[1] for row in base.execute("PRAGMA table_info(NVTX_EVENTS)")}
    json = "n.jsonText" if "jsonText" in columns else "NULL"
    text = "COALESCE(n.text, s.value)" if "StringIds" in tables else "n.text"
    join = "LEFT JOIN StringIds s ON s.id = n.textId" if "StringIds" in tables else ""
    calls: dict[int, list[tuple[int, int, str, str]]] = defaultdict(list)  # by thread
    marks: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # by process
    nvtx = f"SELECT n.start, n.end, n.globalTid, {text}, {json} FROM NVTX_EVENTS n {join} WHERE n.end > n.start"
    for start, end, tid, name, payload in base.execute(nvtx):
        if name is None:
            continue
        if step := _STEP.fullmatch(name):
            marks[int(tid) >> 24].append((int(start), int(end), int(step[1])))
        elif name.startswith("nccl") and (func := func_of(name.removeprefix("nccl").split(",")[0].split("(")[0])):
            calls[int(tid)].append((int(start), int(end), func, f"{payload or ''} {name}"))
    for ranges in calls.values():
        ranges.sort()
    launches = {}
    if "CUPTI_ACTIVITY_KIND_RUNTIME" in tables:
        runtime = "SELECT correlationId, globalTid, start FROM CUPTI_ACTIVITY_KIND_RUNTIME"
        launches = {(int(tid) >> 24, int(c)): (int(tid), int(start)) for c, tid, start in base.execute(runtime)}
    name = "COALESCE(s.value, k.shortName)" if "StringIds" in tables else "k.shortName"
    join = "LEFT JOIN StringIds s ON s.id = k.shortName" if "StringIds" in tables else ""
    kernels = f"""SELECT k.start, k.end, k.globalPid, k.deviceId, k.streamId, k.correlationId, {name},
                  k.gridX * k.gridY * k.gridZ FROM CUPTI_ACTIVITY_KIND_KERNEL k {join} ORDER BY k.start"""
    places: dict[tuple[int, int], int] = {}
    compute: dict[int, list[tuple[int, int, int, int, int]]] = defaultdict(list)
    named, unsized = rank_in_name(path), 0
    for start, end, process, device, stream, correlation, kernel, blocks in base.execute(kernels):
        pid, kernel = int(process) >> 24, str(kernel)
        lone = first + len(places)
        rank = places.setdefault((pid, int(device)), lone if named is None or places else named)
        if not kernel.lower().startswith("nccl"):
            number = found.compute.names.setdefault(kernel, len(found.compute.names))
            compute[rank].append((int(start), int(end), number, int(blocks), int(stream)))
            continue
        tid, launched = launches.get((pid, int(correlation)), (None, int(start)))
        call = _around(calls.get(tid, []) if tid is not None else [], launched)
        size = _SIZE.search(call[3]) if call else None
        if call is None or size is None:
            unsized += 1
            continue
        ranks, comm = _RANKS.search(call[3]), _COMM.search(call[3])
        n = int(ranks[1]) if ranks else 0
        n_bytes = int(size[1]) * (n if n and call[2] in ("all_gather", "reduce_scatter") else 1)
        row: dict[str, Any] = {"comm_id": comm_id_of(comm[1] if comm else "nccl", n), "rank": rank, "pid": pid}
        row |= {"func": call[2], "n_bytes": n_bytes, "n_ranks": n, "n_channels": int(blocks), "enqueue_ns": call[0]}
        index = next((k for s, e, k in marks.get(pid, ()) if s <= call[0] < e), 0)
        found.events.append({**row, "start_ns": int(start), "end_ns": int(end), "step": index})
    if unsized:
        found.notes.append(f"{unsized} NCCL kernels whose NVTX range tells no message size are left out")
        if not found.events:
            raise TraceError(
                f"{path}: no NCCL range tells its message size: profile with --trace cuda,nvtx and NCCL 2.20+"
            )
    for rank, rows in compute.items():
        found.compute.add(rank, *(np.array(column) for column in zip(*rows, strict=True)))
    for (pid, _), rank in places.items():
        for start, end, index in marks.get(pid, ()):
            row = {"index": index, "rank": rank, "pid": pid, "end_ns": end, "duration_ns": end - start}
            found.steps.append(row)
    return first + len(places)


def _around(ranges: list[tuple[int, int, str, str]], at: int) -> tuple[int, int, str, str] | None:
    """The last range that begins before ``at`` and holds it."""
    i = bisect.bisect_right(ranges, (at, 2**63, "", "")) - 1
    return ranges[i] if i >= 0 and ranges[i][1] >= at else None

"""Exports of Nsight Systems (``nsys export --type sqlite``): one file for all processes, or one each.

Written after NVIDIA's public description of the schema; no real export was at hand. NCCL's NVTX ranges tell calls and,
by payload, sizes; ``ncclCommInitRank`` tells ranks. Kernels match the launch in a range. Steps: ranges like ``step
12``, ``iteration 12``, ``ProfilerStep#12``.
"""

from __future__ import annotations

import bisect
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pandas as pd

from ..header import OF_ONE_RANK
from ..outside import TraceError, parse_json, said, unpacked
from .found import (
    PER_RANK,
    Found,
    Gaps,
    Marks,
    Member,
    Process,
    algo_in_kernel,
    comm_id_of,
    func_of,
    many,
    whole_bytes,
)

#: The cure for ranges without a payload.
PAYLOADS = "profile with --trace cuda,nvtx, then nsys export --type sqlite --include-json true"
GAPS = Gaps(
    calls=PAYLOADS,
    rank=f"name the files rank0.sqlite, rank1.sqlite ..., one a process, or {PAYLOADS}",
    steps='no step in it: mark each with torch.cuda.nvtx.range_push("step N") and range_pop()',
    compute="no GPU kernels but NCCL's in it: what was computed beside a collective is not known",
)
#: What to say where no range made the communicators.
UNTOLD = (
    "how many ranks calls have: the profile began after init_process_group, and gives the bytes of one rank; "
    "--cluster fills both in"
)
_STEP = re.compile(r"\s*(?:profilerstep#|step|iteration|iter)[\s_:#=]*(\d+)\s*", re.IGNORECASE)
_TABLES = {"NVTX_EVENTS", "StringIds", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"}
#: Entries of NCCL's payloads.
_SIZE, _RANKS, _RANK, _COMM = "Message size [bytes]", "No. of ranks", "Rank", "NCCL communicator ID"

_RANGES = """SELECT n.start, n.end, n.globalTid AS tid, n.globalTid >> 24 AS pid,
                    COALESCE(n.text, s.value) AS name, COALESCE({payload}, '') AS payload
             FROM NVTX_EVENTS n LEFT JOIN StringIds s ON s.id = n.textId
             WHERE n.end >= n.start AND COALESCE(n.text, s.value) LIKE '%' ORDER BY n.start"""
#: With each kernel the thread and the time of its launch, its own begin where that is not known.
_KERNELS = """SELECT k.start, k.end, k.globalPid >> 24 AS pid, k.deviceId AS device, COALESCE(s.value, '') AS name,
                     k.gridX * k.gridY * k.gridZ AS blocks,
                     COALESCE(r.globalTid, -1) AS tid, COALESCE(r.start, k.start) AS launched
              FROM CUPTI_ACTIVITY_KIND_KERNEL k LEFT JOIN StringIds s ON s.id = k.shortName
              LEFT JOIN (SELECT correlationId, globalTid, start FROM CUPTI_ACTIVITY_KIND_RUNTIME
                         GROUP BY correlationId, globalTid >> 24) r
                     ON r.correlationId = k.correlationId AND r.globalTid >> 24 = k.globalPid >> 24
              ORDER BY k.start"""


def read(file: Path, found: Found) -> None:
    """Read an export. Raises TraceError for other databases, and where a process uses several GPUs."""
    try:
        with unpacked(file) as plain:
            uri = f"{plain.resolve().as_uri()}?mode=ro&immutable=1"
            with closing(sqlite3.connect(uri, uri=True)) as base:
                base.text_factory = _text
                _read(file, base, found)
    except (sqlite3.Error, pd.errors.DatabaseError) as error:
        reason = str(error).splitlines()[-1:] or [said(error)]
        raise TraceError(
            f"{file} is no whole SQLite export ({reason[0]}): nsys export --type sqlite"
        ) from None


def _text(data: bytes) -> str:
    """A name as tables of pandas can hold it: without the bytes that are no UTF-8, which they refuse."""
    return data.decode("utf-8", "backslashreplace")


def _read(file: Path, base: sqlite3.Connection, found: Found) -> None:
    tables = {name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables >= _TABLES:
        raise TraceError(f"{file} holds no kernels or no NVTX ranges: nsys profile --trace cuda,nvtx")
    ranges = _ranges(base)
    kernels = pd.read_sql_query(_KERNELS, base)
    comms = _communicators(ranges)
    found.nothing.append(f"{file.name}: {many(len(kernels), 'kernel')}, and none of NCCL among them")
    devices = kernels.groupby("pid")["device"].nunique()
    if (devices > 1).any():
        raise TraceError(f"{file}: a process uses several GPUs, so its ranks cannot be told: start one a GPU")
    for pid, mine in kernels.groupby("pid", sort=True):
        made = comms.get(cast(int, pid), {})
        of_nccl = mine["name"].str.lower().str.startswith("nccl").astype(bool)
        others = mine[~of_nccl]
        process = Process(
            file,
            marks=_marks(ranges[ranges["pid"] == pid]),
            compute=(others["start"].to_numpy(), others["end"].to_numpy()),
            comms=made,
        )
        _add_calls(mine[of_nccl], ranges, process, found)
        found.processes.append(process)


def _ranges(base: sqlite3.Connection) -> pd.DataFrame:
    """All ranges with a name."""
    columns = {row[1] for row in base.execute("PRAGMA table_info(NVTX_EVENTS)")}
    payload = "n.jsonText" if "jsonText" in columns else "NULL"
    return pd.read_sql_query(_RANGES.format(payload=payload), base)


def _communicators(ranges: pd.DataFrame) -> dict[int, dict[int, Member]]:
    """pid -> communicator's id -> its size and this process's rank in it, from the ranges that made them."""
    made: dict[int, dict[int, Member]] = {}
    for row in _rows(ranges[ranges["name"].str.startswith("ncclCommInit")]):
        told = _payload(row.payload)
        if all(type(told.get(name)) is int for name in (_COMM, _RANKS, _RANK)):
            made.setdefault(int(row.pid), {})[told[_COMM]] = Member(told[_RANKS], told[_RANK])
    return made


def _marks(ranges: pd.DataFrame) -> Marks:
    """The steps that a process's ranges mark; of ranges of one number at the same time the first counts.

    Numbers that come again (each epoch counts anew) are further steps: all are then counted through."""
    marks: list[tuple[int, int, int]] = []
    ends: dict[int, int] = {}
    for row in _rows(ranges):
        named = _STEP.fullmatch(str(row.name))
        if named and ends.get(int(named[1]), row.start) <= row.start:
            step = int(named[1])
            ends[step] = row.end
            marks.append((int(row.start), int(row.end) - int(row.start), step))
    if len(ends) < len(marks):
        marks = [(begin, lasts, number) for number, (begin, lasts, _) in enumerate(marks)]
    return Marks(marks)


def _add_calls(kernels: pd.DataFrame, ranges: pd.DataFrame, process: Process, found: Found) -> None:
    """Each of NCCL's kernels with the call that launched it: the last of NCCL's ranges around the launch."""
    for kernel, call in _launched(kernels, ranges):
        start, end = int(kernel.start), int(kernel.end)
        times = {
            "enqueue_ns": int(kernel.launched if call is None else call.start),
            "start_ns": start,
            "end_ns": end,
        }
        told = _payload(call.payload) if call is not None else {}
        size = told.get(_SIZE)
        if call is None or type(size) is not int or end < start:
            process.calls.append({**times, "untold": True})
            continue
        number = told.get(_COMM, 0)
        n_ranks = process.comms[number].n_ranks if number in process.comms else 0
        n_ranks = told.get(_RANKS, n_ranks)
        func = str(func_of(call.name.removeprefix("nccl")))
        process.calls.append(
            {
                **times,
                "comm_id": comm_id_of(number, n_ranks),
                "n_ranks": n_ranks,
                "func": func,
                "algo": algo_in_kernel(kernel.name),
                "n_bytes": whole_bytes(func, size, n_ranks),
                "n_channels": int(kernel.blocks),
            }
        )
        if not n_ranks and func in PER_RANK and UNTOLD not in found.notes:
            found.notes.append(UNTOLD)
            found.header[OF_ONE_RANK] = True


def _launched(kernels: pd.DataFrame, ranges: pd.DataFrame) -> Iterator[tuple[Any, Any]]:
    """Each kernel with the range of a collective in which it was launched, or None."""
    names = ranges["name"].astype(str)
    is_call = names.str.startswith("nccl") & names.str.removeprefix("nccl").map(func_of).notna()
    threads = {tid: [*_rows(rows)] for tid, rows in ranges[is_call].groupby("tid")}
    begins = {tid: [row.start for row in rows] for tid, rows in threads.items()}
    for kernel in _rows(kernels):
        at = bisect.bisect_right(begins.get(kernel.tid, []), kernel.launched) - 1
        around = threads[kernel.tid][at] if at >= 0 else None
        yield kernel, around if around is not None and around.end >= kernel.launched else None


def _rows(frame: pd.DataFrame) -> Iterator[Any]:
    """The rows of a table, with its columns as attributes."""
    return iter(frame.itertuples())


def _payload(text: Any) -> dict[str, Any]:
    """A range's payload by the names of its entries; empty where there is none. NCCL writes whole numbers."""
    try:
        told = parse_json(text) if text else {}
    except ValueError:
        return {}
    if not isinstance(told, dict):
        return {}
    return {name: _number(value) for name, value in told.items()}


def _number(value: Any) -> Any:
    """A number as Nsight Systems writes it, as text too, decimal or not; other values as they are."""
    if isinstance(value, str):
        try:
            return int(value, 0)
        except ValueError:
            return value
    return value

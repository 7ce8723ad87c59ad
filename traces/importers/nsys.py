"""Exports of Nsight Systems (``nsys export --type sqlite``): one file for all processes, or one each.

Written after NVIDIA's public description of the export's schema; no real export was at hand. NCCL's own NVTX ranges
(``ncclAllGather`` ...) tell the calls; the payloads of the ranges tell message sizes, and those of ``ncclCommInitRank``
tell ranks. Kernels are matched to ranges by the launch that the range holds. Steps are ranges named like ``step 12``,
``iteration 12`` or ``ProfilerStep#12``.
"""

from __future__ import annotations

import bisect
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from ..files import TraceError
from ..outside import parse_json
from .found import Found, Gaps, Marks, comm_id_of, func_of, rank_in_name, whole_bytes

#: The cure for ranges without a payload.
PAYLOADS = "profile with --trace cuda,nvtx, then nsys export --type sqlite --include-json true"
GAPS = Gaps(
    calls=PAYLOADS,
    steps='no step in it: mark each with torch.cuda.nvtx.range_push("step N") and range_pop()',
    compute="no GPU kernels but NCCL's in it: what was computed beside a collective is not known",
)
_STEP = re.compile(r"\s*(?:profilerstep#|step|iteration|iter)[\s_:#=]*(\d+)\s*", re.IGNORECASE)
_TABLES = {"NVTX_EVENTS", "StringIds", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"}
#: Entries of NCCL's payloads.
_SIZE, _RANKS, _RANK, _COMM = "Message size [bytes]", "No. of ranks", "Rank", "NCCL communicator ID"

_RANGES = """SELECT n.start, n.end, n.globalTid AS tid, n.globalTid >> 24 AS pid,
                    COALESCE(n.text, s.value) AS name, COALESCE({payload}, '') AS payload
             FROM NVTX_EVENTS n LEFT JOIN StringIds s ON s.id = n.textId
             WHERE n.end >= n.start AND COALESCE(n.text, s.value) IS NOT NULL ORDER BY n.start"""
#: With each kernel the thread and the time of its launch, its own begin where that is not known.
_KERNELS = """SELECT k.start, k.end, k.globalPid >> 24 AS pid, k.deviceId AS device, COALESCE(s.value, '') AS name,
                     k.gridX * k.gridY * k.gridZ AS blocks,
                     COALESCE(r.globalTid, -1) AS tid, COALESCE(r.start, k.start) AS launched
              FROM CUPTI_ACTIVITY_KIND_KERNEL k LEFT JOIN StringIds s ON s.id = k.shortName
              LEFT JOIN (SELECT correlationId, globalTid, start FROM CUPTI_ACTIVITY_KIND_RUNTIME
                         GROUP BY correlationId, globalTid >> 24) r
                     ON r.correlationId = k.correlationId AND r.globalTid >> 24 = k.globalPid >> 24
              ORDER BY k.start"""


class _Comm(NamedTuple):
    """A communicator as one process made it."""

    n_ranks: int
    rank: int


def read(files: list[Path], found: Found) -> None:
    """Read exports into ``found``. Raises TraceError for other databases and for two files of one step."""
    found.gaps = GAPS
    for file in files:
        uri = f"{file.resolve().as_uri()}?mode=ro&immutable=1"
        try:
            with closing(sqlite3.connect(uri, uri=True)) as base:
                _read_one(file, len(files) == 1, base, found)
        except (sqlite3.Error, pd.errors.DatabaseError) as error:
            reason = str(error).splitlines()[-1]
            raise TraceError(
                f"{file} is no whole SQLite export ({reason}): nsys export --type sqlite"
            ) from None


def _read_one(file: Path, alone: bool, base: sqlite3.Connection, found: Found) -> None:
    tables = {name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables >= _TABLES:
        raise TraceError(f"{file} holds no kernels or no NVTX ranges: nsys profile --trace cuda,nvtx")
    columns = {row[1] for row in base.execute("PRAGMA table_info(NVTX_EVENTS)")}
    payload = "n.jsonText" if "jsonText" in columns else "NULL"
    ranges = pd.read_sql_query(_RANGES.format(payload=payload), base)
    kernels = pd.read_sql_query(_KERNELS, base)
    comms = _communicators(ranges)
    devices = kernels.groupby("pid")["device"].nunique()
    if (devices > 1).any():
        raise TraceError(f"{file}: a process uses several GPUs, so its ranks cannot be told: start one a GPU")
    for place, (_, mine) in enumerate(kernels.groupby(["pid", "device"], sort=True)):
        pid = int(mine["pid"].iloc[0])
        rank = _rank_of(file, alone, place, comms.get(pid, {}), found)
        marks = _marks(ranges[ranges["pid"] == pid])
        found.claim(file, rank, marks.steps)
        found.add_steps(rank, pid, marks)
        of_nccl = mine["name"].str.lower().str.startswith("nccl").astype(bool)
        others = mine[~of_nccl]
        found.add_compute(rank, others["start"].to_numpy(), others["end"].to_numpy())
        who = {"rank": rank, "pid": pid}
        _add_calls(mine[of_nccl], ranges, comms.get(pid, {}), marks, who, found)


def _communicators(ranges: pd.DataFrame) -> dict[int, dict[int, _Comm]]:
    """pid -> communicator's id -> its size and this process's rank in it, from the ranges that made them."""
    made: dict[int, dict[int, _Comm]] = {}
    for row in _rows(ranges[ranges["name"].str.startswith("ncclCommInit")]):
        told = _payload(row.payload)
        if all(type(told.get(name)) is int for name in (_COMM, _RANKS, _RANK)):
            made.setdefault(int(row.pid), {})[told[_COMM]] = _Comm(told[_RANKS], told[_RANK])
    return made


def _rank_of(file: Path, alone: bool, place: int, comms: dict[int, _Comm], found: Found) -> int:
    """The rank of a file's process number ``place``: in its largest communicator, else as the file's name says."""
    if comms:
        return max(comms.values()).rank
    named = rank_in_name(file)
    if named is not None and place == 0:
        return named
    if not alone:
        raise TraceError(
            f"{file} does not say which ranks it is of: name the files rank0.sqlite, rank1.sqlite ..., "
            f"or {PAYLOADS}"
        )
    note = f"{file.name} does not say which ranks it is of: they are numbered in the order of its processes"
    if note not in found.notes:
        found.notes.append(note)
    return place


def _marks(ranges: pd.DataFrame) -> Marks:
    """The steps that a process's ranges mark; of a step's ranges the first counts."""
    marks: dict[int, tuple[int, int, int]] = {}
    for row in _rows(ranges):
        if named := _STEP.fullmatch(str(row.name)):
            step = int(named[1])
            marks.setdefault(step, (int(row.start), int(row.end) - int(row.start), step))
    return Marks(marks.values())


def _add_calls(
    kernels: pd.DataFrame,
    ranges: pd.DataFrame,
    comms: dict[int, _Comm],
    marks: Marks,
    who: dict[str, int],
    found: Found,
) -> None:
    """Each of NCCL's kernels with the call that launched it: the last of NCCL's ranges around the launch."""
    for kernel, call in _launched(kernels, ranges):
        start, end = int(kernel.start), int(kernel.end)
        told = _payload(call.payload) if call is not None else {}
        size = told.get(_SIZE)
        if call is None or type(size) is not int or end < start:
            found.left_out.calls += 1
            found.left_out.ns += max(0, end - start)
            continue
        found.left_out.read_ns += end - start
        number = told.get(_COMM, 0)
        n_ranks = comms[number].n_ranks if number in comms else 0
        n_ranks = told.get(_RANKS, n_ranks)
        func = str(func_of(call.name.removeprefix("nccl")))
        begin = int(call.start)
        found.add(
            {
                **who,
                "comm_id": comm_id_of(number, n_ranks),
                "n_ranks": n_ranks,
                "func": func,
                "n_bytes": whole_bytes(func, size, n_ranks),
                "n_channels": int(kernel.blocks),
                "start_ns": start,
                "end_ns": end,
                "enqueue_ns": begin,
                "step": marks.step_at(begin),
            }
        )


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

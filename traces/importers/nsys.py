"""Import of Nsight Systems' SQLite export (``nsys export --type sqlite``): one file for all processes, or one each.

Written after NVIDIA's public description of the export's schema; no real export was at hand. NCCL's own NVTX ranges
(``ncclAllGather`` ...) tell the calls; their message sizes come from the range's payload (``jsonText``, profile with
NVTX payloads as NCCL has them) or from PyTorch's ranges with ``emit_nvtx(record_shapes=True)``. Kernels are matched
to ranges by the launch that they hold. Steps are ranges named like ``step 12``, ``iteration 12``, ``ProfilerStep#12``.
"""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import Any, cast

import pandas as pd

from ..files import TraceError
from .common import Imported, comm_id_of, func_of, rank_in_name

_STEP = r"(?i)^\s*(?:profilerstep#|step|iteration|iter)[\s_:#=]*(\d+)\s*$"
_SIZE = re.compile(r'(?i)"?(?:message[ _]size|size|bytes|count)[^":]*"?\s*[:=]\s*"?(\d+)')
_RANKS = re.compile(r'(?i)"?(?:n_?ranks|no\. of ranks|comm[ _]size|nranks)[^":]*"?\s*[:=]\s*"?(\d+)')
_COMM = re.compile(r'(?i)"?(?:nccl )?(?:comm(?:unicator)?(?: id)?)"?\s*[:=]\s*"?(0x[0-9a-f]+|\d+)')
_TABLES = {"NVTX_EVENTS", "StringIds", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"}

_RANGES = """SELECT n.start, n.end, n.globalTid AS tid, n.globalTid >> 24 AS pid,
                    COALESCE(n.text, s.value) AS name, COALESCE({payload}, '') AS payload
             FROM NVTX_EVENTS n LEFT JOIN StringIds s ON s.id = n.textId
             WHERE n.end > n.start AND COALESCE(n.text, s.value) IS NOT NULL ORDER BY n.start"""
#: With each kernel the thread and the time of its launch, its own begin where that is not known.
_KERNELS = """SELECT k.start, k.end, k.globalPid >> 24 AS pid, k.deviceId AS device, COALESCE(s.value, '') AS name,
                     k.gridX * k.gridY * k.gridZ AS blocks,
                     COALESCE(r.globalTid, -1) AS tid, COALESCE(r.start, k.start) AS launched
              FROM CUPTI_ACTIVITY_KIND_KERNEL k LEFT JOIN StringIds s ON s.id = k.shortName
              LEFT JOIN (SELECT correlationId, globalTid, start FROM CUPTI_ACTIVITY_KIND_RUNTIME
                         GROUP BY correlationId, globalTid >> 24) r
                     ON r.correlationId = k.correlationId AND r.globalTid >> 24 = k.globalPid >> 24
              ORDER BY k.start"""


def read(paths: list[Path]) -> Imported:
    """Read exports. Raises TraceError for other databases, and where no call's size is told."""
    found = Imported()
    n_ranks = 0
    for path in paths:
        try:
            uri = f"file:{path.resolve()}?mode=ro&immutable=1"
            with sqlite3.connect(uri, uri=True) as base:
                n_ranks = _read_one(path, base, n_ranks, found)
        except (sqlite3.Error, pd.errors.DatabaseError) as error:
            raise TraceError(f"{path} is no whole SQLite export ({error}): nsys export --type sqlite") from None
    for row in found.events:
        row["n_ranks"] = row["n_ranks"] or n_ranks
    return found


def _read_one(path: Path, base: sqlite3.Connection, first: int, found: Imported) -> int:
    """Read one database whose processes begin at rank ``first``; the number of ranks so far."""
    tables = {name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables >= _TABLES:
        raise TraceError(f"{path} holds no kernels or no NVTX ranges: nsys profile --trace cuda,nvtx")
    columns = {row[1] for row in base.execute("PRAGMA table_info(NVTX_EVENTS)")}
    ranges = pd.read_sql_query(_RANGES.format(payload="n.jsonText" if "jsonText" in columns else "NULL"), base)
    kernels = pd.read_sql_query(_KERNELS, base)
    place = kernels.groupby(["pid", "device"], sort=False).ngroup()
    kernels["rank"] = first + place
    if (named := rank_in_name(path)) is not None:
        kernels.loc[place == 0, "rank"] = named
    of_nccl = kernels["name"].str.lower().str.startswith("nccl").astype(bool)
    for rank, others in kernels[~of_nccl].groupby("rank"):
        found.add_compute(int(cast(int, rank)), others["start"], others["end"])
    number = ranges["name"].str.extract(_STEP, expand=False)
    marks = ranges[number.notna()].assign(index=number.dropna().astype("int64"))
    for mark in kernels[["pid", "rank"]].drop_duplicates().merge(marks, on="pid").to_dict("records"):
        row = {name: int(mark[name]) for name in ("index", "rank", "pid")}
        found.steps.append({**row, "end_ns": int(mark["end"]), "duration_ns": int(mark["end"] - mark["start"])})
    n_before = len(found.events)
    _calls(kernels[of_nccl], ranges, marks, found)
    if unsized := int(of_nccl.sum()) - len(found.events) + n_before:
        found.notes.append(f"{unsized} NCCL kernels whose NVTX range tells no message size are left out")
    if not found.events and unsized:
        raise TraceError(f"{path}: no NCCL range tells its message size: profile with --trace cuda,nvtx and NCCL 2.20+")
    return first + place.nunique()


def _calls(kernels: pd.DataFrame, ranges: pd.DataFrame, marks: pd.DataFrame, found: Imported) -> None:
    """Each of NCCL's kernels with the call that launched it: the last range of NCCL's around the launch."""
    func = ranges["name"].str.extract(r"^nccl([^,(]*)", expand=False).fillna("").map(func_of)
    ranges = ranges.assign(func=func, text=ranges["payload"] + " " + ranges["name"])[func.notna()]
    ranges = ranges.reset_index(drop=True).rename(columns={"start": "begin", "end": "finish"})
    ranges["row"] = ranges.index
    if ranges.empty or kernels.empty:
        return
    begins = ranges[["begin", "tid", "row"]].rename(columns={"begin": "launched"})
    calls = pd.merge_asof(kernels.sort_values("launched"), begins, on="launched", by="tid")
    calls = calls.merge(ranges[["row", "begin", "finish", "func", "text"]], on="row")
    steps = marks.groupby("pid")[["start", "end", "index"]].apply(lambda rows: rows.to_numpy().tolist())
    for call in calls[calls["finish"] >= calls["launched"]].to_dict("records"):
        size, ranks, comm = (pattern.search(call["text"]) for pattern in (_SIZE, _RANKS, _COMM))
        if size is None:
            continue
        n, begin = int(ranks[1]) if ranks else 0, int(call["begin"])
        event: dict[str, Any] = {name: int(call[name]) for name in ("rank", "pid")}
        event |= {"func": call["func"], "comm_id": comm_id_of(comm[1] if comm else "nccl", n), "n_ranks": n}
        event["n_bytes"] = int(size[1]) * (n if n and call["func"] in ("all_gather", "reduce_scatter") else 1)
        event |= {"n_channels": int(call["blocks"]), "start_ns": int(call["start"]), "end_ns": int(call["end"])}
        event["step"] = next((k for s, e, k in steps.get(call["pid"], []) if s <= begin < e), 0)
        found.events.append({**event, "enqueue_ns": begin})

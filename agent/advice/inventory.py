"""What a recording without steps says: which collectives a job runs and what NCCL chose, not what they cost a step."""

from __future__ import annotations

from typing import Any

import pandas as pd

from ...traces.files import Trace
from ...traces.header import plain
from ...traces.queries.skew import label
from ...traces.queries.slots import SLOT_KEYS, with_sizes
from ...traces.records import Slot
from .alignment import as_dicts, misaligned
from .settings import settings


def inventory(trace: Trace) -> dict[str, Any]:
    """Everything, for JSON and for people; unknown values are None."""
    rows = with_sizes(trace.events)
    slots = [_slot(key, calls) for key, calls in rows.groupby(SLOT_KEYS)]
    slots.sort(key=lambda slot: slot["n_bytes"] * slot["calls"], reverse=True)
    header = trace.header
    most_nodes = int(trace.events["n_nodes"].max()) if len(trace.events) else 0
    told = {
        "verdict": _verdict(slots),
        "predicted": False,
        "recording": str(trace.folder),
        "source": header.get("source") or "dynamiccl",
        "emulated": bool(header.get("emulated")),
        "nccl": header.get("nccl"),
        "steps": 0,
        "slots": slots,
        "misaligned": as_dicts(misaligned(trace)),
        "unknown": [str(note) for note in header.get("notes") or ()],
        "launch": settings({slot["func"] for slot in slots}, most_nodes, header.get("framework")),
    }
    found: dict[str, Any] = plain(told)
    return found


def _slot(key: Any, calls: pd.DataFrame) -> dict[str, Any]:
    """What one slot's calls say; ``calls`` are those of one process in the whole recording: a rank may be one of its
    communicator, which another process has in another."""
    n_ranks, n_nodes, func, klass = key
    timed = calls[calls["us"].notna()]
    known = calls[calls["algo"] != "unknown"]
    choices = known["algo"] + "/" + known["proto"] + "/" + known["n_channels"].astype(str)
    return {
        "slot": str(Slot(int(n_ranks), int(n_nodes), func, int(klass))),
        "func": func,
        "n_ranks": int(n_ranks),
        "n_nodes": int(n_nodes),
        "n_bytes": int(calls["n_bytes"].mode().iloc[0]),
        "calls": len(calls) / calls["pid"].nunique(),
        "call_us": float(timed["us"].median()) if len(timed) else None,
        "timed_by": label(timed["timed_by"]) if len(timed) else None,
        "own": str(choices.mode().iloc[0]) if len(choices) else None,
    }


def _verdict(slots: list[dict[str, Any]]) -> str:
    """What to do, in one line."""
    cure = "record a profile with torch.profiler's step(), or start the job with `dynamiccl tune`"
    if any(slot["call_us"] for slot in slots):
        return f"no step is marked, so no share of the step and no gain can be told: {cure}"
    return f"it says which collectives the job runs, not what they cost: {cure}"

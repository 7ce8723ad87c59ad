"""How runs stand, from what they leave in their folders: nothing is asked of the job, no record is taken from it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..envs.locks import is_locked
from ..envs.nccl.run_folder import TUNER
from ..envs.nccl.shm import TableFile
from ..traces.reasons import names
from .outputs import ROOT
from .tuner import SEARCHED

#: Bytes of a run's log that are read from its end.
_TAIL = 1 << 18


def find_runs(where: Iterable[Path] = ()) -> list[Path]:
    """Folders of results: those given, or in those given, by default in ``runs/tune``; the newest last."""
    found: dict[Path, float] = {}
    for root in list(where) or [ROOT]:
        inside = [root, *(p for p in (root.iterdir() if root.is_dir() else ()) if p.is_dir() and not p.is_symlink())]
        for path in inside:
            with contextlib.suppress(OSError):
                found[path] = (path / "trace" / "header.json").stat().st_mtime
    return sorted(found, key=lambda path: found[path])


def state(out: Path) -> dict[str, Any]:
    """One run: job, step, phase, table, gain with its interval, what the search cost, agreement, losses, heartbeat.

    Unknown values are None. ``search_cost`` is the part of the steps' time, in windows of the search, its comparisons
    and trials so far, that was lost against the default (below 0: won). ``heartbeat_s`` is how long ago the tuner last
    showed that it lives.
    """
    header, summary = _json(out / "trace" / "header.json"), _json(out / "summary.json")
    windows = [line for line in _tail(out / "trace" / "windows.jsonl") if line.get("kind") == "window"]
    last = windows[-1] if windows else {}
    searched = [w for w in windows if w.get("phase") in SEARCHED and w.get("step_ms") and w.get("default_ms")]
    lost = sum(float(w["step_ms"]) - float(w["default_ms"]) for w in searched)
    base = sum(float(w["default_ms"]) for w in searched)
    run = Path(str(header.get("run") or summary.get("run") or ""))
    alive = bool(run.name) and is_locked(run / TUNER)
    interval = summary.get("speedup_ci95")
    agreement = summary.get("agreement") or {}
    why = summary.get("ended") or summary.get("failure") or summary.get("dropped")
    return {
        "run": str(out),
        "job": header.get("job"),
        "emulated": header.get("emulated"),
        "state": "tuning" if alive else "ended" if summary else "no tuner",
        "step": summary.get("steps") or last.get("last_step"),
        # After the verdict only the default is measured in windows: the table's time is what it was confirmed with.
        "step_ms": (summary.get("tuned_step_ms") if summary.get("kept") else None) or last.get("step_ms"),
        "phase": last.get("phase"),
        "window": last.get("index"),
        "windows": last.get("total"),
        "decisions": sum(1 for d in summary.get("decisions") or () if d.get("algo") or d.get("n_channels")),
        "kept": summary.get("kept"),
        "gain": None if summary.get("speedup") is None else 1 - 1 / float(summary["speedup"]),
        "gain_ci95": None if not interval else [1 - 1 / float(x) for x in interval],
        "search_cost": lost / base if base else None,
        "agreement": agreement.get("state"),
        "agreement_text": agreement.get("text"),
        "records_lost": summary.get("records_lost", header.get("records_lost")),
        "mismatches": (summary.get("consistency") or {}).get("mismatches"),
        "heartbeat_s": _heartbeat_s(run) if run.name else None,
        "why": why,
        "reasons": names(str(why or "")),
    }


def _heartbeat_s(run: Path) -> float | None:
    try:
        table = TableFile(run / "table")
    except OSError:
        return None
    try:
        at = table.heartbeat_ns()
    finally:
        table.close()
    return (time.monotonic_ns() - at) / 1e9 if at else None


def _json(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _tail(path: Path) -> list[dict[str, Any]]:
    """The last lines of a log; the first of them may be cut, and one that is being written."""
    lines = []
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        for text in file.read().splitlines():
            with contextlib.suppress(ValueError):
                if isinstance(line := json.loads(text), dict):
                    lines.append(line)
    return lines

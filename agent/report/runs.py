"""How runs stand, from what they leave in their folders: nothing is asked of the job, no record is taken from it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...envs.live.locks import is_locked
from ...envs.nccl.run_folder import TUNER
from ...envs.search.windows import SEARCHED
from ...traces.reasons import names
from .outputs import ROOT
from .summary import RunSummary, read_json

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
    """One run: job, step, phase, table, gain with its interval, what the search cost, agreement, losses.

    Unknown values are None. ``search_cost`` is the part of the steps' time, in windows of the search, its comparisons
    and trials so far, that was lost against the default (below 0: won).
    """
    header, summary = read_json(out / "trace" / "header.json"), RunSummary.read(out)
    windows = [line for line in _tail(out / "trace" / "windows.jsonl") if line.get("kind") == "window"]
    last = windows[-1] if windows else {}
    run = Path(str(header.get("run") or summary.run or ""))
    alive = bool(run.name) and is_locked(run / TUNER)
    agreement = summary.agreement or {}
    why = summary.ended or summary.failure or summary.dropped
    return {
        "run": str(out),
        "job": header.get("job"),
        "emulated": header.get("emulated"),
        "state": "tuning" if alive else "ended" if summary else "no tuner",
        "step": summary.steps or last.get("last_step"),
        # After the verdict only the default is measured in windows: the table's time is what it was confirmed with.
        "step_ms": (summary.tuned_step_ms if summary.kept else None) or last.get("step_ms"),
        "phase": last.get("phase"),
        "window": last.get("index"),
        "windows": last.get("total"),
        "decisions": sum(1 for d in summary.decisions if d.get("algo") or d.get("n_channels")),
        "kept": summary.kept,
        "gain": None if summary.speedup is None else 1 - 1 / summary.speedup,
        "gain_ci95": [1 - 1 / x for x in summary.speedup_ci95] if summary.speedup_ci95 else None,
        "search_cost": _search_cost(windows),
        "agreement": agreement.get("state"),
        "agreement_text": agreement.get("text"),
        "records_lost": header.get("records_lost") if summary.records_lost is None else summary.records_lost,
        "mismatches": summary.consistency.get("mismatches"),
        "why": why,
        "reasons": names(str(why or "")),
    }


def _search_cost(windows: list[dict[str, Any]]) -> float | None:
    searched = [w for w in windows if w.get("phase") in SEARCHED and w.get("step_ms") and w.get("default_ms")]
    base = sum(float(w["default_ms"]) for w in searched)
    return sum(float(w["step_ms"]) for w in searched) / base - 1 if base else None


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

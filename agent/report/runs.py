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
from ...traces.reasons import names
from ...traces.records import decided
from .outputs import ROOT
from .summary import RunSummary, read_json
from .verdict import verdict

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

    Unknown values are None. What the summary says is the summary's; of a run without one its last window tells.
    """
    header, summary = read_json(out / "trace" / "header.json"), RunSummary.read(out)
    windows = [line for line in _tail(out / "trace" / "windows.jsonl") if line.get("kind") == "window"]
    last = windows[-1] if windows else {}
    run = Path(str(_known(header.get("run"), summary.run, "")))
    alive = bool(run.name) and is_locked(run / TUNER)
    agreement = summary.agreement or {}
    why = _known(summary.ended, summary.failure, summary.dropped)
    # After the verdict few windows are measured: the table's time is what it was confirmed with.
    confirmed_ms = summary.tuned_step_ms if summary.kept else None
    return {
        "run": str(out),
        "job": header.get("job"),
        "emulated": header.get("emulated"),
        "state": "tuning" if alive else "ended" if summary else "no tuner",
        "step": _known(summary.steps, last.get("last_step")),
        "step_ms": _known(confirmed_ms, last.get("step_ms")),
        "phase": last.get("phase"),
        "window": last.get("index"),
        "in_force": _known(summary.in_force, last.get("in_force")),
        "decisions": sum(decided(row) != "auto" for row in summary.decisions),
        "kept": summary.kept,
        "verdict": verdict(summary) if summary else None,
        "gain": summary.saved and summary.saved[0],
        "gain_ci95": summary.saved and summary.saved[1:],
        "cost_s": _known(summary.cost_s, last.get("cost_s")),
        "budget_s": _known(summary.budget_s, last.get("budget_s")),
        "agreement": agreement.get("state"),
        "agreement_text": agreement.get("text"),
        "records_lost": _known(summary.records_lost, header.get("records_lost")),
        "mismatches": summary.consistency.get("mismatches"),
        "why": why,
        "reasons": names(str(why or "")),
    }


def _known(*values: Any) -> Any:
    """The first that is there."""
    return next((value for value in values if value is not None), None)


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

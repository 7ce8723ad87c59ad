"""What a run of the tuner came to: the schema of ``summary.json``, which every view of a run reads."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ...traces.segments import atomically

_FILE = "summary.json"


@dataclass
class RunSummary:
    """One run, in the order of ``summary.json``; what is not known, or not yet, is None or empty."""

    cluster: str | None = None
    emulated: bool | None = None
    bytes_scale: float | None = None
    compute_scale: float | None = None
    stage: int | None = None
    n_processes: int | None = None
    n_ranks: int | None = None
    policy: str | None = None
    steps: int | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    regime: str | None = None
    default_step_ms: float | None = None
    tuned_step_ms: float | None = None
    speedup: float | None = None  # this and what stands around it: None without a verdict
    speedup_ci95: list[float] | None = None
    aa_speedup_ci95: list[float] | None = None  # the default against itself
    family: dict[str, float] | None = None  # where an emulated job stands among random ones
    windows: int | None = None
    steps_to_first_gain: int | None = None
    steps_to_verdict: int | None = None
    decisions: list[dict[str, Any]] = field(default_factory=list)
    default_share_after: float | None = None
    searches_begun_anew: int | None = None
    regimes_returned: int | None = None
    kept: bool | None = None
    dropped: str | None = None
    not_obeyed: list[str] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    agreement: dict[str, str] | None = None
    consistency: dict[str, int] = field(default_factory=dict)  # calls_checked, mismatches
    records_lost: int | None = None
    ended: str | None = None
    reasons: dict[str, list[str]] = field(default_factory=dict)  # names of ``traces.reasons`` for the texts in here
    job_status: int | None = None
    memory: dict[str, Any] | None = None
    failure: str | None = None
    run: str | None = None  # the run folder, then what is in the folder of the results
    trace: str | None = None
    table: str | None = None
    report: str | None = None
    log: str | None = None

    def __bool__(self) -> bool:
        """False where a run has left no word."""
        return self != RunSummary()

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> RunSummary:
        """What a JSON object tells, of this release or another: other keys are left out."""
        known = (f.name for f in fields(cls))
        return cls(**{name: found[name] for name in known if found.get(name) is not None})

    @classmethod
    def read(cls, *folders: Path) -> RunSummary:
        """What the first of these folders tells that holds a whole ``summary.json``."""
        return cls.of(next(filter(None, (read_json(folder / _FILE) for folder in folders)), {}))

    def write(self, folder: Path) -> None:
        """Replace the folder's ``summary.json`` at once. Raises TraceError."""
        atomically(folder / _FILE, lambda path: path.write_text(json.dumps(vars(self), indent=2) + "\n"))

    def speedup_text(self) -> str:
        """The speed-up with its interval, and the interval of the default against itself."""
        spread = [("95 %", self.speedup_ci95), ("default against itself", self.aa_speedup_ci95)]
        told = [f"{name} [{ends[0]:.3f}, {ends[1]:.3f}]" for name, ends in spread if ends]
        return "  ".join([f"speed-up {self.speedup:.3f}", *told])


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is none."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}

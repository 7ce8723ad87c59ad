"""What a run of the tuner came to: the schema of ``summary.json``, which every view of a run reads."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ...traces.header import plain
from ...traces.outside import atomically, read_json

_FILE = "summary.json"


@dataclass
class OfJob:
    """The job, and the cluster that it ran on."""

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


@dataclass
class OfVerdict:
    """The verdict: table ``compared`` against NCCL's own choice; None where nothing was compared.

    Step times are medians of so many windows of the comparison itself; where a later table took the place of the first,
    of the comparisons in which the default and the later table ran. The speed-up is that of pairs of windows.
    """

    compared: str | None = None
    default_step_ms: float | None = None
    default_windows: int | None = None
    tuned_step_ms: float | None = None
    tuned_windows: int | None = None
    compared_steps: list[int] | None = None  # first and last
    speedup: float | None = None
    speedup_ci95: list[float] | None = None
    aa_speedup_ci95: list[float] | None = None  # the default against itself
    detectable: float | None = None  # part of the step that a whole comparison would have been sure of


@dataclass
class OfCosts:
    """What the search cost."""

    cost_s: float | None = None  # what the job lost against its default up to the verdict; below 0: won
    budget_s: float | None = None  # what it may lose
    trials: int | None = None  # windows of trials after the verdict ...
    trials_cost_s: float | None = None  # ... and what they lost against the current table


@dataclass
class OfSearch:
    """The tables that were tried, and the comparisons between them."""

    in_force: str | None = None  # the letter of the table, or "default"
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by letter: those compared
    comparisons: list[dict[str, Any]] = field(default_factory=list)  # see ``daemon.account.comparison_row``
    windows: int | None = None
    steps_to_first_gain: int | None = None
    steps_to_verdict: int | None = None
    decisions: list[dict[str, Any]] = field(default_factory=list)
    # Slot, share of the step, exposed part of its time, in default steps; empty: the job does not tell.
    exposed: list[dict[str, Any]] = field(default_factory=list)
    default_share_after: float | None = None


@dataclass
class OfEnd:
    """What holds at the end, and why; what went wrong."""

    kept: bool | None = None
    dropped: str | None = None
    not_obeyed: list[str] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    agreement: dict[str, str] | None = None
    consistency: dict[str, int] = field(default_factory=dict)  # calls_checked, mismatches
    records_lost: int | None = None
    ended: str | None = None
    reasons: dict[str, list[str]] = field(default_factory=dict)  # of ``traces.reasons``, for the texts here
    job_status: int | None = None
    memory: dict[str, Any] | None = None
    failure: str | None = None


@dataclass
class OfFiles:
    """The run folder, then what is in the folder of the results."""

    run: str | None = None
    trace: str | None = None
    table: str | None = None
    report: str | None = None
    log: str | None = None


@dataclass
class RunSummary(OfFiles, OfEnd, OfSearch, OfCosts, OfVerdict, OfJob):
    """One run: all records in one flat object, as in ``summary.json``. What is not known is None or empty."""

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
        return cls.of(next(filter(None, (read_object(folder / _FILE) for folder in folders)), {}))

    def write(self, folder: Path) -> None:
        """Replace the folder's ``summary.json`` at once. Raises TraceError."""
        text = json.dumps(plain(vars(self)), indent=2, allow_nan=False) + "\n"
        atomically(folder / _FILE, lambda path: path.write_text(text, encoding="utf-8"))

    @property
    def is_decided(self) -> bool:
        """The run has come to a verdict, or has confirmed a table before it."""
        return self.detectable is not None or self.speedup is not None or bool(self.kept)

    @property
    def job_failed(self) -> bool:
        """The job ended by an error of its own; a signal that ended it is none."""
        return self.job_status is not None and 0 < self.job_status < 128

    @property
    def saved(self) -> list[float] | None:
        """Part of the step that the table saves, and its interval; None if none is used."""
        if not self.kept or self.speedup is None or not self.speedup_ci95:
            return None
        return [1 - 1 / x for x in (self.speedup, *self.speedup_ci95)]

    @property
    def strength(self) -> str:
        """How firm a gain is: strong where its lower end is half of it or more; weak below a quarter, or where the
        default differs from itself by as much."""
        if self.speedup is None or not self.speedup_ci95:
            return ""
        part = math.log(max(self.speedup_ci95[0], 1e-9)) / math.log(self.speedup) if self.speedup > 1 else 0.0
        is_usual = self.aa_speedup_ci95 is not None and self.speedup <= self.aa_speedup_ci95[1]
        return f"{'weak' if part < 0.25 or is_usual else 'strong' if part >= 0.5 else 'fair'} evidence"

    @property
    def repaid_after(self) -> int | None:
        """Steps under the table after which it has won what the search cost; None where it never will."""
        if self.cost_s is None or self.default_step_ms is None or self.speedup is None or self.speedup <= 1:
            return None
        return math.ceil(max(self.cost_s, 0.0) * 1e3 / (self.default_step_ms * (1 - 1 / self.speedup)))


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is none, or it is damaged."""
    with contextlib.suppress(OSError, ValueError):
        found = read_json(path)
        return found if isinstance(found, dict) else {}
    return {}

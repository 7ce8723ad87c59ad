"""What a run of the tuner came to: the schema of ``summary.json``, which every view of a run reads."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...traces.header import plain
from ...traces.outside import read_json, write_whole
from ...traces.reasons import Why, revived

if TYPE_CHECKING:  # `top` reads summaries, and needs no tables
    from ...traces.files import Trace

_FILE = "summary.json"
#: Fields that are a reason: what another release wrote there is left out.
_WHYS = ("ended", "dropped", "no_table", "failure")


@dataclass
class OfJob:
    """The job, and the cluster that it ran on."""

    #: the emulated cluster
    cluster: str | None = None
    #: times are emulated
    emulated: bool | None = None
    #: emulated bytes for each byte of the job
    bytes_scale: float | None = None
    #: emulated operations for each operation of the job
    compute_scale: float | None = None
    #: ZeRO stage of the built-in job
    stage: int | None = None
    #: of the built-in job
    n_processes: int | None = None
    #: ranks of the largest communicator; on the emulated cluster its GPUs
    n_ranks: int | None = None
    #: its name
    policy: str | None = None
    #: channels that --headroom asked for; the default is NCCL without that option
    headroom: int | None = None
    #: optimizer steps that were seen
    steps: int | None = None
    #: of the built-in job
    loss_first: float | None = None
    #: of the built-in job
    loss_last: float | None = None


@dataclass
class OfVerdict:
    """The verdict: table ``compared`` against NCCL's default; None where nothing was compared.

    Step times are medians over the windows of the comparison (``default_windows``, ``tuned_windows``). If a later table
    replaced the first, they come from the comparisons of the default and of the later table. The speed-up is that of
    pairs of windows.
    """

    #: letter of the table of the verdict; None: nothing was compared
    compared: str | None = None
    #: median step time under the default in that comparison
    default_step_ms: float | None = None
    #: windows of it
    default_windows: int | None = None
    #: median step time under the table in that comparison
    tuned_step_ms: float | None = None
    #: windows of it
    tuned_windows: int | None = None
    #: first and last step of the comparison
    compared_steps: list[int] | None = None
    #: default step time / step time under the table
    speedup: float | None = None
    #: its 95 % interval
    speedup_ci95: list[float] | None = None
    #: the same of the default against itself
    aa_speedup_ci95: list[float] | None = None
    #: smallest gain that a whole comparison would have seen, part of the step
    detectable: float | None = None


@dataclass
class OfCosts:
    """What the search cost."""

    #: seconds lost up to the verdict, compared with the default; negative: saved
    cost_s: float | None = None
    #: seconds that the run may lose
    budget_s: float | None = None
    #: windows of trials after the verdict
    trials: int | None = None
    #: seconds that they lost, compared with the current table
    trials_cost_s: float | None = None


@dataclass
class OfSearch:
    """The tables that were tried, and the comparisons between them."""

    #: letter of the current table, or "default"
    in_force: str | None = None
    #: rows of each table that was compared, by letter
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    #: each: table, against, speedup, speedup_ci95, pairs, steps, outcome, ...
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    #: measuring windows up to the verdict
    windows: int | None = None
    #: steps until the first table was kept
    steps_to_first_gain: int | None = None
    #: steps until the verdict
    steps_to_verdict: int | None = None
    #: rows of the current table, each with the default's setting and the reason
    decisions: list[dict[str, Any]] = field(default_factory=list)
    #: slots on the critical path, with their exposed part; empty: not known
    exposed: list[dict[str, Any]] = field(default_factory=list)
    #: part of the steps after the verdict that ran under the default
    default_share_after: float | None = None


@dataclass
class OfEnd:
    """What holds at the end, and why; what went wrong."""

    #: a kept table is current
    kept: bool | None = None
    #: why a kept table was dropped
    dropped: Why | None = None
    #: why no table is current at the end
    no_table: Why | None = None
    #: rows that NCCL did not follow
    not_obeyed: list[Why] = field(default_factory=list)
    #: settings that are not tried again, each with the reason
    refused: list[dict[str, Any]] = field(default_factory=list)
    #: ``state`` of the ranks' agreement, and ``why`` they change no table
    agreement: dict[str, Any] | None = None
    #: calls_checked, mismatches, ranks_elsewhere (of one communicator, on other hosts: not compared)
    consistency: dict[str, int] = field(default_factory=dict)
    #: records that the rings lost
    records_lost: int | None = None
    #: why tuning is over
    ended: Why | None = None
    #: exit status of the job
    job_status: int | None = None
    #: where the table is stored, and what an earlier run left
    memory: dict[str, Any] | None = None
    #: a fault that withdrew the table
    failure: Why | None = None


@dataclass
class OfFiles:
    """The run folder, then what is in the folder of the results."""

    #: the run folder
    run: str | None = None
    #: the random word of the run folder, by which a later one of the same name is told from it
    run_id: str | None = None
    #: the folder of the trace
    trace: str | None = None
    #: the file of the kept table
    table: str | None = None
    #: the file of the report
    report: str | None = None
    #: the file of the tuner's log
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
        values = {name: revived(found[name]) for name in known if found.get(name) is not None}
        return cls(
            **{name: value for name, value in values.items() if name not in _WHYS or isinstance(value, Why)}
        )

    @classmethod
    def read(cls, *folders: Path) -> RunSummary:
        """What the first of these folders tells that holds a whole ``summary.json``."""
        return cls.of(next(filter(None, (read_object(folder / _FILE) for folder in folders)), {}))

    @classmethod
    def of_trace(cls, trace: Trace) -> RunSummary:
        """What the run of a trace came to. Another tool's recording has none: beside it may lie any run's."""
        if "source" in trace.header:
            return cls()
        folder = trace.folder.resolve()
        folders = [folder, folder.parent] if folder.name == "trace" else [folder]
        return cls.read(*folders)

    def write(self, folder: Path) -> None:
        """Replace the folder's ``summary.json`` at once. Raises TraceError."""
        text = json.dumps(plain(vars(self)), indent=2, allow_nan=False) + "\n"
        write_whole(folder / _FILE, text)

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

"""What a run of the tuner came to: the schema of ``summary.json``, and the one function that gives it: a fold of a log.

Each line of ``trace/windows.jsonl`` is an event: ``kind``, ``time``, ``step`` of the job, facts. The tuner appends to
it and folds it as everybody does, so a killed tuner leaves the summary that it would have written.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...traces.header import plain
from ...traces.outside import parse_json, read_json, write_whole
from ...traces.reasons import RunEnds, Why, revived

if TYPE_CHECKING:  # `top` reads summaries, and needs no tables
    from ...traces.files import Trace

_FILE = "summary.json"
#: Fields that are a reason: what another release wrote there is left out.
_WHYS = ("ended", "dropped", "no_table", "failure")

#: The default in place of a table's letter, in files.
DEFAULT = "default"
#: Where the log of a run lies, in the folder of its results.
LOG_FILE = Path("trace", "windows.jsonl")

# Kinds of events. Beside them a log has those of :data:`FIELDS`, and each ``table`` that was published.
#: A tuner begins, in the folder ``out``; ``before``: the summary of the one whose table and figures it goes on with.
BEGINS = "begins"
#: Another search begins: the comparisons before it are history.
SEARCHES = "searches"
#: The ``rows`` of a table, by its ``letter``.
NAMED = "named"
#: A comparison, by its ``number`` in the search, as a ``row`` of the summary; a later line stands for an earlier one.
COMPARISON = "comparison"
#: A window was measured.
WINDOW = "window"
#: The search has come to a verdict.
VERDICT = "verdict"
#: Something else happened: ``what``, a reason with its facts.
EVENT = "event"


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
    #: what --all-reduce asked for; None: all_reduce was not tuned
    all_reduce: str | None = None
    #: optimizer steps that were seen
    steps: int | None = None
    #: of the built-in job
    loss_first: float | None = None
    #: of the built-in job
    loss_last: float | None = None


@dataclass
class OfVerdict:
    """The verdict: table ``compared`` against NCCL's default; None where nothing was compared.

    Step times are medians over the measurements of the comparison (``default_windows``, ``tuned_windows``). If a later
    table replaced the first, they come from the comparisons of the default and of the later table. The speed-up is that
    of alternations.
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
    #: each: table, against, speedup, speedup_ci95 and its level, pairs, steps, outcome, ...
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
    #: calls_checked, mismatches, ranks_elsewhere (of one communicator, on other hosts: not compared), held_ms (most
    #: that calls of one process were held back while the ranks agreed on tables)
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
        """False where a run has come to nothing yet."""
        # After its verdict the job may have changed, and be searched anew.
        had_verdict = self.steps_to_verdict is not None
        return self.is_decided or had_verdict or any((self.ended, self.dropped, self.failure))

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> RunSummary:
        """What a JSON object tells, of this release or another: other keys are left out."""
        known = (f.name for f in fields(cls))
        values = {name: revived(found[name]) for name in known if found.get(name) is not None}
        return cls(
            **{name: value for name, value in values.items() if name not in _WHYS or isinstance(value, Why)}
        )

    @classmethod
    def read(cls, folder: Path) -> RunSummary:
        """What the run in a folder has come to by now: that of its results, or its run folder."""
        return Fold.read(folder).summary

    @classmethod
    def of_trace(cls, trace: Trace) -> RunSummary:
        """What the run of a trace came to."""
        return Fold.of_trace(trace).summary

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


#: Kind of an event -> the fields of the summary that it sets, each time all of them.
FIELDS: dict[str, tuple[str, ...]] = {
    "stand": ("kept", "in_force", "dropped", "steps_to_first_gain", "steps_to_verdict"),
    "rows": ("decisions", "exposed"),
    "against_default": tuple(one.name for one in fields(OfVerdict)),
    "costs": ("windows", "default_share_after", *(one.name for one in fields(OfCosts))),
    "refusals": ("refused", "not_obeyed"),
    "end": ("ended", "failure"),
    "job": (
        *("steps", "n_processes", "n_ranks", "loss_first", "loss_last", "consistency", "records_lost"),
        *("agreement", "job_status", "memory"),
    ),
}
#: Fields that the header of a trace tells.
_OF_HEADER = ("cluster", "emulated", "stage", "policy", "headroom", "all_reduce", "run", "run_id")


class Fold:
    """What the lines of a log come to, beside the ``header`` of their trace: ``summary``, ``window``, the last one that
    was measured ({}: none), and ``rows``, the search's comparisons by number.

    A line sets what it names. ``left``: folders; the first with a ``summary.json`` tells of a run without a tuner's
    lines.
    """

    def __init__(
        self, header: Mapping[str, Any], lines: Iterable[Mapping[str, Any]] = (), *left: Path
    ) -> None:
        self.window: Mapping[str, Any] = {}
        self._header, self._left = header, left
        self._out: Path | None = None  # the tuner's folder, once one has begun
        self._told: dict[str, Any] = {}  # fields
        self._named: dict[str, list[dict[str, Any]]] = {}  # rows by letter
        self.rows: dict[int, dict[str, Any]] = {}
        self._summary: RunSummary | None = None
        for line in lines:
            self.take_any(line)

    @classmethod
    def read(cls, out: Path) -> Fold:
        """The run whose results lie in a folder. Damaged lines are left out."""
        return Follower(out).fold()

    @classmethod
    def of_trace(cls, trace: Trace) -> Fold:
        """The run of a trace. Another tool's recording has none: beside it may lie any run's."""
        if "source" in trace.header:
            return cls({})
        folder = Path(trace.folder).resolve()
        folders = [folder, folder.parent] if folder.name == "trace" else [folder]
        return cls(trace.header, trace.log, *folders)

    @property
    def named(self) -> Mapping[str, list[dict[str, Any]]]:
        """The rows of each table that was named, by its letter."""
        return self._named if self._out else self.summary.tables

    @property
    def header(self) -> Mapping[str, Any]:
        """Of the trace: it tells what was asked for."""
        return self._header

    @header.setter
    def header(self, header: Mapping[str, Any]) -> None:
        self._header, self._summary = header, None

    def take(self, line: Mapping[str, Any]) -> None:
        """The next line."""
        kind, self._summary = line.get("kind"), None
        if isinstance(line.get("step"), int):
            self._told["steps"] = line["step"]
        if kind == BEGINS:
            self._begin(line)
        elif kind == SEARCHES:
            self.rows.clear()
        elif kind == NAMED:
            self._named[str(line["letter"])] = line["rows"]
        elif kind == COMPARISON:
            self.rows[int(line["number"])] = line["row"]
        elif kind == WINDOW:
            self._measured(line)
        elif kind in FIELDS:
            self._told |= {name: revived(line[name]) for name in FIELDS[kind] if name in line}

    def _measured(self, line: Mapping[str, Any]) -> None:
        self.window = line
        self._told |= {name: line[key] for name, key in _OF_WINDOW.items() if line.get(key) is not None}
        # With a tuner's lines those tell the current table: they outlast windows.
        if self._out is None and line.get("in_force"):
            self._told["in_force"] = line["in_force"]

    def take_any(self, line: Mapping[str, Any]) -> None:
        """A line from a file: one that is damaged says nothing."""
        with contextlib.suppress(LookupError, TypeError, ValueError):
            self.take(line)

    def _begin(self, line: Mapping[str, Any]) -> None:
        """A tuner begins: of those before it only what it goes on with holds."""
        self.window, self._out = {}, Path(str(line["out"]))
        before = RunSummary.of(line.get("before") or {})
        self._told = {name: getattr(before, name) for name in _GOES_ON}
        self._named, self.rows = dict(before.tables), dict(enumerate(before.comparisons))

    @property
    def summary(self) -> RunSummary:
        """What the run has come to. Nobody changes it."""
        if self._summary is None:
            self._summary = self._begun(self._out) if self._out else self._not_begun()
        return self._summary

    def _not_begun(self) -> RunSummary:
        """Of a run without a tuner's lines: what was left of it, and what its windows tell."""
        left = next(filter(None, (read_object(folder / _FILE) for folder in self._left)), {})
        return RunSummary.of(self._told | {name: value for name, value in left.items() if value is not None})

    def _begun(self, out: Path) -> RunSummary:
        header = {name: self.header[name] for name in _OF_HEADER if name in self.header}
        found = RunSummary(**(self._told | header))
        found.emulated = bool(found.emulated)
        found.bytes_scale = self.header.get("bytes_scale", 1.0)
        found.compute_scale = self.header.get("compute_scale", 1.0)
        if not found.kept:
            found.kept, found.in_force = False, DEFAULT
            found.no_table = found.dropped or (RunEnds.NO_GAIN() if found.is_decided else None)
        found.comparisons = [self.rows[number] for number in sorted(self.rows)]
        found.tables = self._tables(found)
        found.table = str(out / "table.json") if found.kept else None
        found.trace, found.report, found.log = (
            str(out / name) for name in ("trace", "report.html", "tuner.log")
        )
        return found

    def _tables(self, found: RunSummary) -> dict[str, list[dict[str, Any]]]:
        """The current table, and those that were compared."""
        named = {found.in_force, *(row[side] for row in found.comparisons for side in ("table", "against"))}
        return {name: rows for name, rows in self._named.items() if name in named}


#: Fields that a window tells -> the names that it has for them.
_OF_WINDOW = {"steps": "last_step", "windows": "index", "cost_s": "cost_s", "budget_s": "budget_s"}
#: Fields of an earlier tuner that hold until the one that goes on with its table searches.
_GOES_ON = tuple(one.name for kind in (OfVerdict, OfCosts, OfSearch) for one in fields(kind))


class Follower:
    """Reads the log of a run again and again: each time the lines that are new."""

    def __init__(self, out: Path) -> None:
        self._out, self._file, self._end = out, (0, 0), 0
        self._fold = Fold({}, (), out)

    def fold(self) -> Fold:
        """The run as it is now. Damaged lines are left out."""
        with contextlib.suppress(OSError), (self._out / LOG_FILE).open("rb") as log:
            found = os.fstat(log.fileno())
            file = found.st_dev, found.st_ino
            if file != self._file or found.st_size < self._end:  # another run's, or some of its lines went
                self._file, self._end = file, 0
                self._fold = Fold({}, (), self._out)
            log.seek(self._end)
            for text in log:
                with contextlib.suppress(ValueError):
                    if isinstance(line := parse_json(text), dict):
                        self._fold.take_any(line)
                self._end += len(text)
                if not text.endswith(b"\n"):  # it is being written: next time it is read whole
                    self._end -= len(text)
        self._fold.header = read_object(self._out / "trace" / "header.json")
        return self._fold


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is none, or it is damaged."""
    with contextlib.suppress(OSError, ValueError):
        found = read_json(path)
        return found if isinstance(found, dict) else {}
    return {}

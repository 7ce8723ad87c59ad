"""How runs stand, from what they leave in their folders: nothing is asked of the job, no record is taken from it.

For people, and as a textfile for Prometheus' node_exporter: names and units follow its conventions (a prefix, base
units, ``_total`` for what only grows). ``grafana.json`` beside this file is a dashboard.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...envs.live.locks import is_locked
from ...envs.nccl.run_folder import TUNER
from ...traces.header import plain
from ...traces.outside import atomically, readable
from ...traces.records import decided
from .outputs import ROOT, run_of
from .summary import LOG_FILE, Fold, RunSummary, read_object
from .verdict import verdict

#: Metric, the key of :func:`state` that it shows, what it is.
METRICS = (
    ("dynamiccl_tuner_up", "state", "1 while a tuner of the run lives"),
    ("dynamiccl_tuner_died", "tuner_died", "1 while the job runs and its tuner has ended without a reason"),
    ("dynamiccl_steps_total", "step", "Optimizer steps of the job that were seen"),
    ("dynamiccl_step_seconds", "step_ms", "Step time under the current table, else in the last window"),
    ("dynamiccl_windows_total", "window", "Measuring windows that were run"),
    ("dynamiccl_table_kept", "kept", "1 while a kept table is current, 0 under NCCL's default"),
    ("dynamiccl_table_rows", "decisions", "Rows of the kept table that set something"),
    (
        "dynamiccl_gain_ratio",
        "gain",
        "Share of the step time that the kept table saves, as the comparison measured it",
    ),
    (
        "dynamiccl_search_cost_seconds",
        "cost_s",
        "Time that the search cost the job, compared with the default. Negative: it gained",
    ),
    ("dynamiccl_search_budget_seconds", "budget_s", "Time that the search may cost the job (--budget)"),
    ("dynamiccl_lost_records_total", "records_lost", "Records of the job that were lost"),
    ("dynamiccl_mismatches_total", "mismatches", "Collectives that two ranks ran with different settings"),
)
#: States of a run whose tuner lives.
ALIVE = ("tuning", "waiting")
#: The file beside a report with its step times in short.
SPARKS_FILE = "steps.json"
#: Seconds after its end in which a run is still in the metrics. Alerts look back by minutes. Without a limit each node
#: would export all runs that were ever left in the folder.
EXPORTED_S = 3600.0
#: A folder of runs holds runs, or folders of a scheduler's jobs that hold runs.
_LEVELS = 3


def find_runs(where: Iterable[Path] = ()) -> list[Path]:
    """Folders of results: those given, or in those given, by default in ``runs/tune``; the newest last.

    A job of a scheduler with several tasks has a folder for each of them, one level further down.
    """
    found: dict[Path, float] = {}
    for root in list(where) or [ROOT]:
        level = [root]
        for _ in range(_LEVELS):
            runs = {path: began for path in level if (began := _began(path)) is not None}
            found |= runs
            level = [
                inside for path in level if path == root or path not in runs for inside in _folders(path)
            ]
    once = {os.path.realpath(path): path for path in found}  # a folder may be given under two paths
    return sorted(once.values(), key=lambda path: found[path])


def _began(out: Path) -> float | None:
    """When a run began, in seconds since 1970; None for a folder that holds no run."""
    with contextlib.suppress(OSError):
        return (out / "trace" / "header.json").stat().st_mtime
    return None


def _folders(path: Path) -> list[Path]:
    """The folders in a folder, without links such as ``latest``."""
    with contextlib.suppress(OSError):
        return [inside for inside in path.iterdir() if inside.is_dir() and not inside.is_symlink()]
    return []


def state(out: Path, fold: Fold | None = None) -> dict[str, Any]:
    """One run, as ``top --json`` prints it. Unknown values are None. The fold of its log may be given.
    ``records_lost`` and ``mismatches`` are 0 from the start, so that an alert sees them grow.

    Keys: ``run`` (results folder), ``job`` (command), ``emulated``, ``state`` (tuning, waiting, ended, no tuner),
    ``tuner_died``, ``step``, ``step_ms``, ``step_times_ms`` (medians), ``phase``, ``window`` (number) of the last
    window, ``in_force`` (letter of the current table, or default), ``decisions`` (rows that set something), ``kept``,
    ``verdict``, ``gain`` (share of the step), ``gain_ci95``, ``cost_s``, ``budget_s``, ``agreement`` (OPEN: the ranks
    switch), ``agreement_why``, ``records_lost``, ``mismatches``, ``why`` (it is over).
    """
    fold = fold or Fold.read(out)
    summary, last, header = fold.summary, fold.window, fold.header
    run = Path(str(header.get("run") or summary.run or ""))
    alive = bool(run.name) and is_locked(run / TUNER)
    agreement = summary.agreement or {}
    return {
        "run": str(out),
        "job": header.get("job"),
        "emulated": header.get("emulated"),
        "state": _state(alive, bool(last), bool(summary)),
        "tuner_died": _has_died(alive, summary, run),
        "step": summary.steps or None,
        "step_ms": _step_ms(summary, last),
        "step_times_ms": _step_times(out),
        "phase": last.get("phase"),
        "window": last.get("index"),
        "in_force": summary.in_force,
        "decisions": _n_decisions(summary),
        "kept": summary.kept,
        "verdict": verdict(summary) if summary else None,
        "gain": summary.saved and summary.saved[0],
        "gain_ci95": summary.saved and summary.saved[1:],
        "cost_s": summary.cost_s,
        "budget_s": summary.budget_s,
        "agreement": agreement.get("state"),
        "agreement_why": plain(agreement.get("why")),
        "records_lost": max(filter(None, (summary.records_lost, header.get("records_lost"))), default=0),
        "mismatches": summary.consistency.get("mismatches", 0),
        "why": plain(next(filter(None, (summary.ended, summary.failure, summary.dropped)), None)),
    }


def _step_ms(summary: RunSummary, last: Mapping[str, Any]) -> Any:
    """After the verdict few windows are measured: the table's time is what it was confirmed with."""
    confirmed_ms = summary.tuned_step_ms if summary.kept else None
    return last.get("step_ms") if confirmed_ms is None else confirmed_ms


def _n_decisions(summary: RunSummary) -> int:
    """Rows of the kept table that set something; 0 where no table is kept."""
    return sum(decided(row) != "auto" for row in summary.decisions) if summary.kept else 0


def _state(alive: bool, has_measured: bool, has_summary: bool) -> str:
    """In one word. The tuner on a node without rank 0 measures nothing: it waits."""
    if alive:
        return "tuning" if has_measured or has_summary else "waiting"
    return "ended" if has_summary else "no tuner"


def beside_rank_0(out: Path) -> Path | None:
    """The results of the same job that the tuner beside rank 0 left, among those of Slurm's tasks; None if ``out`` is
    these, or they are not here."""
    if not out.name.startswith("task-") or has_measured(out):
        return None
    return next((task for task in sorted(out.parent.glob("task-*")) if has_measured(task)), None)


def has_measured(out: Path) -> bool:
    """Whether the tuner of a run has measured a window: the one beside rank 0 does."""
    return bool(Fold.read(out).window)


def _has_died(alive: bool, summary: RunSummary, run: Path) -> bool:
    """Whether the tuner is gone without a reason while its job lives. A table that it dropped is none, nor a failure:
    the tuner goes on after both."""
    has_reason = summary.ended is not None and summary.ended != summary.failure
    return not alive and not has_reason and _job_lives(run)


def _job_lives(run: Path) -> bool:
    """Whether a launcher or a rank holds a file of the run folder; False for a folder that cannot be seen from here."""
    try:
        files = [path for path in run.iterdir() if path.name != TUNER] if run.is_absolute() else []
    except OSError:
        return False
    return any(map(is_locked, files))


def _step_times(out: Path) -> list[float]:
    """Medians of the step times over the run so far, as the last report left them; [] where there are none."""
    found = read_object(out / SPARKS_FILE).get("step_ms")
    values = found if isinstance(found, list) else []
    return [float(value) for value in values if isinstance(value, int | float) and value > 0]


def _is_past(one: dict[str, Any]) -> bool:
    """Whether a run of :func:`state` ended more than EXPORTED_S ago: nothing of it lives, or changes its folder.

    The folder counts because the locks of a pod cannot be seen from its node.
    """
    out = Path(one["run"])
    trace, run = out / "trace", run_of(out)
    if one["state"] in ALIVE or one["tuner_died"] or (run is not None and _job_lives(run)):
        return False
    files = (trace / "header.json", out / LOG_FILE, out / "summary.json", out / SPARKS_FILE)
    return time.time() - max(map(_changed, (trace, *files))) > EXPORTED_S


def _changed(path: Path) -> float:
    """When a file was changed last, in seconds since 1970; 0 where there is none."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def write_metrics(path: Path, states: list[dict[str, Any]]) -> None:
    """The states for node_exporter's textfile collector, replaced at once.

    A run that ended more than EXPORTED_S ago is left out, and so is what is not known of a run. Raises TraceError.
    """
    lines = []
    states = [one for one in states if not _is_past(one)]
    for name, key, text in METRICS:
        lines += [
            f"# HELP {name} {text}",
            f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}",
        ]
        for one in states:
            value = one["state"] in ALIVE if key == "state" else one[key]
            run = readable(one["run"]).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            if value is not None:
                lines.append(f'{name}{{run="{run}"}} {float(value) / (1e3 if key == "step_ms" else 1)}')

    def write(draft: Path) -> None:
        draft.write_text("\n".join([*lines, ""]), encoding="utf-8")
        draft.chmod(0o644)  # node_exporter is another user, and our umask may be 077

    atomically(path, write)

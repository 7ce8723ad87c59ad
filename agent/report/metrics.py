"""Runs as Prometheus sees them: a textfile for node_exporter.

Names and units follow Prometheus' conventions: a prefix, base units, ``_total`` for what only grows. They are read from
the folder that the run leaves: nothing is asked of the job. ``grafana.json`` beside this file is a dashboard.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...traces.segments import atomically

#: Metric, the key of ``runs.state`` that it shows, what it is.
METRICS = (
    ("dynamiccl_tuner_up", "state", "1 while a tuner of the run lives"),
    ("dynamiccl_steps_total", "step", "Optimizer steps of the job that were seen"),
    ("dynamiccl_step_seconds", "step_ms", "Step time under the table in force, else in the last window"),
    ("dynamiccl_windows_total", "window", "Measuring windows that were run"),
    ("dynamiccl_table_kept", "kept", "1 while a table is in force, 0 while NCCL decides"),
    ("dynamiccl_table_rows", "decisions", "Rows of the table that was decided for"),
    ("dynamiccl_gain_ratio", "gain", "Part of the step that the table saves, by what confirmed it"),
    ("dynamiccl_search_cost_seconds", "cost_s", "What the job lost by the search against its default, below 0: won"),
    ("dynamiccl_lost_records_total", "records_lost", "Records of the job that were lost"),
    ("dynamiccl_mismatches_total", "mismatches", "Collectives that two ranks were seen to run differently"),
)


def write_metrics(path: Path, states: list[dict[str, Any]]) -> None:
    """The states for node_exporter's textfile collector, replaced at once; what is not known of a run is left out.
    Raises TraceError."""
    lines = []
    for name, key, text in METRICS:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}"]
        for one in states:
            value = one["state"] == "tuning" if key == "state" else one[key]
            run = one["run"].replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            if value is not None:
                lines.append(f'{name}{{run="{run}"}} {float(value) / (1e3 if key == "step_ms" else 1)}')
    atomically(path, lambda draft: draft.write_text("\n".join([*lines, ""])))

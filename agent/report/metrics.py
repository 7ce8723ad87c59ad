"""Runs as Prometheus sees them: a textfile for node_exporter, and an endpoint of the tuner, off unless asked for.

Names and units follow Prometheus' conventions: a prefix, base units, ``_total`` for what only grows. Both are read from
the folder that the run leaves: a scrape asks nothing of the job. ``grafana.json`` beside this file is a dashboard.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

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
    ("dynamiccl_search_budget_seconds", "budget_s", "What the search may lose"),
    ("dynamiccl_lost_records_total", "records_lost", "Records of the job that were lost"),
    ("dynamiccl_mismatches_total", "mismatches", "Collectives that two ranks were seen to run differently"),
)
#: A state is read anew no more often than this: many scrapers cost no more than one.
_FRESH_S = 0.5


class _Runs:
    """What the registry asks at every scrape."""

    def __init__(self, look: Callable[[], list[dict[str, Any]]]) -> None:
        self._look, self._seen, self._at = look, list[dict[str, Any]](), -_FRESH_S

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """All metrics of all runs; what is not known of a run is left out."""
        if time.monotonic() - self._at >= _FRESH_S:
            self._seen, self._at = self._look(), time.monotonic()
        for name, key, text in METRICS:
            grows = name.endswith("_total")
            family = (CounterMetricFamily if grows else GaugeMetricFamily)(name, text, labels=["run"])
            for one in self._seen:
                value = float(one["state"] == "tuning") if key == "state" else one[key]
                if value is not None:
                    family.add_metric([one["run"]], float(value) / (1e3 if key == "step_ms" else 1))
            yield family


def registry(look: Callable[[], list[dict[str, Any]]]) -> CollectorRegistry:
    """A registry that shows the states that ``look`` gives."""
    made = CollectorRegistry()
    made.register(_Runs(look))
    return made


def write_metrics(path: Path, states: list[dict[str, Any]]) -> None:
    """The states for node_exporter's textfile collector, replaced at once. Raises OSError."""
    write_to_textfile(str(path), registry(lambda: states))


def serve(port: int, address: str, look: Callable[[], list[dict[str, Any]]]) -> tuple[int, Callable[[], None]]:
    """Answer scrapes on ``address``:``port`` (0: any free one) from threads of their own, until the returned function
    is called. Returns the port and that function. Raises OSError where the port is taken."""
    server, thread = start_http_server(port, address, registry(look))

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join(5.0)

    return int(server.server_port), stop

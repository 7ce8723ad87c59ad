"""Metrics: what Prometheus reads of a run, and the dashboard's queries."""

import json
import re

import pytest
from dynamiccl.agent.report.runs import state
from paths import ROOT
from synthetic_trace import write_run

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
from dynamiccl.agent.report.runs import METRICS, write_metrics
from prometheus_client.parser import text_string_to_metric_families

DASHBOARD = ROOT / "agent" / "report" / "grafana.json"
WORDS = {"rate", "increase", "run"}


@pytest.fixture
def run(tmp_path):
    summary, _ = write_run(tmp_path / "a" / "trace", search=4, final=6)
    (tmp_path / "a" / "summary.json").write_text(json.dumps(summary | {"kept": True, "records_lost": 3}))
    return tmp_path / "a"


def test_the_textfile_holds_every_metric_of_the_run(run, tmp_path):
    write_metrics(tmp_path / "d.prom", [state(run)])
    text = (tmp_path / "d.prom").read_text()
    names = {f.name for f in text_string_to_metric_families(text)}
    assert names == {name.removesuffix("_total") for name, *_ in METRICS}
    assert f'dynamiccl_lost_records_total{{run="{run}"}} 3.0' in text


def test_the_budget_of_a_run_stands_beside_its_cost(run, tmp_path):
    """Before: an alert could only compare the cost with a number of seconds, alike for every job."""
    write_metrics(tmp_path / "d.prom", [state(run) | {"cost_s": 30.0, "budget_s": 100.0}])
    text = (tmp_path / "d.prom").read_text()
    assert f'dynamiccl_search_cost_seconds{{run="{run}"}} 30.0' in text
    assert f'dynamiccl_search_budget_seconds{{run="{run}"}} 100.0' in text


def test_a_table_that_was_dropped_has_no_rows_in_the_metrics(run):
    """Before: 4 rows beside "table kept 0", so the dashboard showed a table where there is none."""
    assert state(run)["decisions"] > 0
    told = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(told | {"kept": False}))
    assert state(run)["decisions"] == 0


def test_the_dashboard_asks_for_metrics_that_there_are():
    board = json.loads(DASHBOARD.read_text())
    queries = [t["expr"] for p in board["panels"] for t in p["targets"]]
    queries += [v["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    asked = {name for q in queries for name in re.findall(r"dynamiccl_\w+", q)}
    assert asked == {name for name, *_ in METRICS}
    for panel in board["panels"]:
        (target,) = panel["targets"]
        grows = "_total" in target["expr"]
        assert (
            not grows
            or panel["title"] == "Measuring windows"
            or re.match(r"(rate|increase)\(", target["expr"])
        )
    places = [tuple(p["gridPos"][k] for k in "xy") for p in board["panels"]]
    assert len(set(places)) == len(places)

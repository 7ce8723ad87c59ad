"""The chain behind a decision, and launches beside each other."""

import json

import numpy as np
import pandas as pd
import pytest
from dynamiccl.agent.cli import app
from dynamiccl.agent.launches import launch, side_by_side
from dynamiccl.agent.why import chains, lines
from dynamiccl.traces.assemble import EVENT_COLUMNS, STEP_COLUMNS, complete, empty
from dynamiccl.traces.files import Trace, TraceError, TraceWriter
from synthetic_trace import CALL_US, FINAL, GATHER, LAYER_BYTES, OWN, SCATTER, write_run
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("why")
    summary, trace = write_run(folder / "trace", search=24, final=12)
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder, summary, trace


def test_the_chain_names_prices_trials_and_the_next_best(run):
    _, summary, trace = run
    found = {c["slot"]: c for c in chains(trace, summary)}
    for slot, decision in FINAL.items():
        chain = found[str(slot)]
        assert chain["own"] == "/".join(map(str, OWN)) and chain["prices"]
        assert chain["decided"] == str(decision) and chain["tried"][0]["decision"] == str(decision)
        assert chain["sure"] > 0.95 and chain["in_force"] is bool(summary.get("kept"))
        text = "\n".join(lines(chain))
        assert "NCCL    ring/ll/8" in text and f"decided {decision}" in text and "that it is faster" in text
    gather = found[str(GATHER)]
    # Nine calls of a step take 400 us less: what the trace measured is what was put in.
    step = summary["default_step_ms"] * 1e3
    calls = gather["calls"]
    us = CALL_US["all_gather", LAYER_BYTES]
    put_in = calls * (us[OWN] - us["ring", "simple", 16]) / step
    best = gather["tried"][0]
    assert abs(best["saved"] - put_in) < max(4 * best["error"], 0.02)
    assert gather["next"]["decision"] == "ring/ll128/16"


@pytest.mark.parametrize(
    ("summary", "says"),
    [
        ({}, "decided nothing: the run goes on, or was cut off"),
        ({"ended": "stopped by `dynamiccl stop`"}, "decided nothing: stopped by `dynamiccl stop`"),
        ({"speedup": 1.1, "decisions": []}, "decided nothing: the run left no word of it"),
    ],
)
def test_a_slot_of_which_nothing_was_decided_says_why(run, summary, says):
    assert says in "\n".join(lines(chains(run[2], summary)[0]))


def test_the_command_filters_and_explains(run):
    folder, *_ = run
    text = CliRunner().invoke(app, ["why", str(folder), "reduce_scatter"]).stdout
    assert "reduce_scatter" in text and "all_gather" not in text and str(FINAL[SCATTER]) in text
    told = json.loads(CliRunner().invoke(app, ["why", str(folder), "--json"]).stdout)
    assert len(told) >= 2
    result = CliRunner().invoke(app, ["why", str(folder), "broadcast"])
    assert result.exit_code == 2 and "no slot" in result.stderr


def write_launch(folder, median, n=200, seed=0, **header):
    rng = np.random.default_rng(seed)
    ns = np.round(1e6 * median * np.exp(rng.normal(0, 0.003, n))).astype(int)
    rows = {"index": range(n), "rank": 0, "end_ns": np.cumsum(ns), "duration_ns": ns, "table_generation": 0}
    rows |= {"memory_used": 0, "memory_total": 0, "sm_utilization": np.nan, "power_w": np.nan, "loss": np.nan, "pid": 1}
    with TraceWriter(folder, {"job": "train", **header}) as writer:
        writer.write(empty(EVENT_COLUMNS), complete(pd.DataFrame(rows), STEP_COLUMNS))
    return Trace.read(folder)


def test_a_setting_counts_only_beyond_what_equal_launches_differ_by(tmp_path):
    def made(*medians):
        kinds = [("a", 1), ("b", 1), ("c", 2), ("d", 2)]
        runs = zip(kinds, medians, strict=False)
        folder = tmp_path / "-".join(map(str, medians))
        return [
            launch(write_launch(folder / n, m, seed=i, environment={"NCCL_MIN_CTAS": k}))
            for i, ((n, k), m) in enumerate(runs)
        ]

    steady = side_by_side(made(100.0, 100.05, 98.0, 98.02))
    assert steady["between_equal_launches"] < 0.002
    (row,) = steady["against_the_first"]
    assert row["verdict"] == "faster" and row["differs_in"] == {"NCCL_MIN_CTAS": 2}
    assert row["low"] < row["ratio"] < row["high"] and row["ratio"] == pytest.approx(0.98, abs=0.002)
    (row,) = side_by_side(made(100.0, 103.0, 98.0, 101.0))["against_the_first"]
    assert row["verdict"] == "same"  # launches of one kind are further apart than the kinds
    alone = side_by_side([made(100.0)[0], made(100.01, 1, 98.0)[2]])
    assert alone["between_equal_launches"] is None and alone["against_the_first"][0]["verdict"] == "unknown"


def test_compare_on_the_command_line(tmp_path):
    for name, median in (("a", 100.0), ("b", 99.0)):
        write_launch(tmp_path / name, median)
    result = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert result.exit_code == 0 and "equal launches differ by 0.7" in result.stdout
    assert CliRunner().invoke(app, ["compare", str(tmp_path / "a")]).exit_code == 2
    write_launch(tmp_path / "short", 100.0, n=4)
    with pytest.raises(TraceError, match="8 at least"):
        launch(Trace.read(tmp_path / "short"))

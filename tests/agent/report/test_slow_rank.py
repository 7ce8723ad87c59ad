"""A rank that the others wait for is named, and none where all are alike or too little is known."""

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from command import invoke
from dynamiccl.agent.report.html.report import write_report
from dynamiccl.agent.report.slow_rank import LEAST_CALLS, find, find_in
from dynamiccl.agent.report.summary import RunSummary
from dynamiccl.traces.files import Trace
from synthetic_trace import write_run


def trace(waits, calls=40, ranks=4, generation=0, rank=2):
    """Calls of 100 us in steps of 1 ms, to which ``rank`` comes last by ``waits`` us."""
    rng = np.random.default_rng(0)
    rows = []
    for seq in range(calls):
        came = {r: 1000 * seq + rng.uniform(0, 2) + (waits if r == rank else 0) for r in range(ranks)}
        end = max(came.values()) + 100
        call = {"comm_id": 1, "func": "all_gather", "seq": seq, "step": seq, "table_generation": generation}
        rows += [
            {**call, "rank": r, "start_ns": int(1e3 * at), "end_ns": int(1e3 * end)} for r, at in came.items()
        ]
    steps = pd.DataFrame({"duration_ns": [1_000_000] * calls, "pid": 0, "rank": 0})
    return SimpleNamespace(header={"source": "test"}, events=pd.DataFrame(rows), steps=steps)


def test_a_rank_that_the_others_wait_for_is_named_with_its_price():
    said = find(trace(200.0))
    assert "rank 2, 20% of the step" in said and "your fabric or a slow rank, not your algorithm" in said


@pytest.mark.parametrize("made", [trace(0.0), trace(30.0)], ids=["alike", "less than a setting gives"])
def test_nothing_is_said_where_no_rank_is_to_blame(made):
    assert find(made) == ""


@pytest.mark.parametrize(
    "made",
    [trace(200.0, calls=LEAST_CALLS - 1), trace(200.0, ranks=1, rank=0), trace(200.0, generation=3)],
    ids=["few calls", "one rank", "on trial"],
)
def test_too_little_to_know_is_not_taken_for_no_slow_rank(made):
    assert find(made) is None


def test_where_ranks_come_last_in_turn_none_is_to_blame_and_the_waiting_is_told():
    """Before: "the other ranks wait for no rank", while a fifth of the step was waiting."""
    parts = [trace(200.0, rank=r) for r in range(4)]
    events = pd.concat([part.events.assign(comm_id=n) for n, part in enumerate(parts)])
    said = find_in(events, parts[0].steps)
    assert said.startswith("ranks wait for each other in turn, ") and "data loading" in said


def test_the_rank_is_the_jobs_and_not_its_communicators():
    """Two groups of four ranks, each with its own ranks 0 to 3: rank 6 of the job is slow. Before: rank 2 was named."""
    fine, slow = trace(0.0), trace(200.0)
    pids = {0: fine.events["rank"], 1: 4 + slow.events["rank"]}
    parts = [part.events.assign(comm_id=n, pid=100 + pids[n]) for n, part in enumerate((fine, slow))]
    steps = pd.DataFrame({"pid": np.arange(100, 108), "rank": np.arange(8), "duration_ns": 1_000_000})
    said = find(SimpleNamespace(header={}, events=pd.concat(parts), steps=steps))
    assert "wait for rank 6" in said


def test_jitter_of_short_calls_in_a_long_step_is_not_worth_a_word():
    made = trace(200.0)
    made.steps["duration_ns"] = 1_000_000_000
    assert find(made) == ""


def test_doctor_looks_for_it_in_a_trace(tmp_path):
    write_run(tmp_path / "trace", search=4, final=2)
    told = json.loads(invoke(["doctor", "--trace", tmp_path, "--json"]).stdout)
    assert "no rank" in told["checked"]["ranks' times"]
    refused = invoke(["doctor", "--trace", tmp_path / "none"])
    assert refused.exit_code == 2 and "there is no file or folder" in refused.stderr


def test_the_report_says_it_beside_the_verdict(tmp_path, monkeypatch):
    write_run(tmp_path / "trace", search=4, final=2)
    path = tmp_path / "r.html"
    assert "slow rank" not in write_report(path, RunSummary(), Trace.read(tmp_path / "trace")).read_text()
    monkeypatch.setattr("dynamiccl.agent.report.slow_rank.find", lambda _: find(trace(200.0)))
    assert (
        "slow rank, not your algorithm"
        in write_report(path, RunSummary(), Trace.read(tmp_path / "trace")).read_text()
    )

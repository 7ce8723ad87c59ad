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
    return SimpleNamespace(header={"source": "test"}, events=pd.DataFrame(rows), steps=steps, segments=[])


def test_a_rank_that_the_others_wait_for_is_named_with_its_price():
    said = find(trace(200.0))
    assert "rank 2, 20% of the step" in said and "your fabric or a slow rank, not your algorithm" in said


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_waiting_is_told_alike_for_any_number_of_ranks(ranks):
    """Before: of two ranks half of it, as the median of two durations is their mean."""
    assert "rank 1, 20% of the step" in find(trace(200.0, ranks=ranks, rank=1))
    assert "rank 1, 8% of the step" in find(trace(80.0, ranks=ranks, rank=1))


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
    steps["end_ns"] = steps["duration_ns"]
    said = find(SimpleNamespace(header={}, events=pd.concat(parts), steps=steps, segments=[]))
    assert "wait for rank 6" in said


def groups(waits, ranks=8):
    """Groups of ``ranks`` ranks that run at the same time, in which rank 3 comes last by so many us."""
    parts = []
    for n, wait in enumerate(waits):
        events = trace(wait, ranks=ranks, rank=3).events
        parts.append(events.assign(comm_id=n, rank=events["rank"] + n * ranks))
    return pd.concat(parts, ignore_index=True)


def test_groups_that_wait_at_the_same_time_are_not_summed():
    """Before: "ranks wait for each other in turn, 240% of the step"."""
    said = find_in(groups([300.0] * 8), trace(0.0).steps)
    assert said.startswith("the others wait for ranks 3, 11, 19, 27, 35, 43, 51, 59, 30% of the step: ")
    many = find_in(groups([300.0] * 10, ranks=4), trace(0.0).steps)
    assert "wait for ranks 3, 7, 11, 15, 19, 23, 27, 31 and 2 more, 30% of the step" in many


def test_few_calls_of_each_rank_are_too_few_however_many_groups_there_are():
    few = groups([300.0] * 8)
    assert find_in(few[few["seq"] < LEAST_CALLS - 1], trace(0.0).steps) is None


def test_waiting_of_many_groups_is_not_more_than_that_of_one():
    """A step of 40 ms: 200 us in one group are not worth a word, and no more in eight. Before: "4% of the step"."""
    steps = trace(0.0).steps.assign(duration_ns=40_000_000)
    assert find_in(groups([200.0] * 8), steps) == ""


def test_one_slow_rank_is_found_behind_those_that_it_delays():
    """Rank 6 delays its shard group of four, each rank of which delays its peers in three others. Before: in turn."""
    shards = groups([0.0, 300.0, 0.0, 0.0], ranks=4)
    shards["rank"] = shards["rank"].replace({7: 6, 6: 7})
    peers = []
    for column in range(4):
        events = trace(300.0, rank=1).events
        peers.append(events.assign(comm_id=10 + column, func="all_reduce", rank=events["rank"] * 4 + column))
    said = find_in(pd.concat([shards, *peers], ignore_index=True), trace(0.0).steps)
    assert said.startswith("the others wait for rank 6, 30% of the step")


def test_without_steps_no_part_of_a_step_is_told():
    """Before: "nan% of the step"."""
    made = trace(200.0)
    assert find_in(made.events, made.steps[:0]).startswith("the others wait for rank 2: it is your fabric")


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

"""The auditor finds every call on which ranks differ and invents none."""

import time

import numpy as np
import pandas as pd
import pytest
from dynamiccl.traces.assemble import EVENT_COLUMNS, empty
from dynamiccl.traces.queries.consistency import MUST_AGREE, audit
from synthetic_trace import write_run


def calls(ranks=4, n=50, comm_id=1, func="all_gather", pids=None, seq0=0, t0=0, **more):
    """n calls seen by each rank, a little apart in time, all alike."""
    seq, rank = np.meshgrid(np.arange(seq0, seq0 + n), np.arange(ranks), indexing="ij")
    seq, rank = seq.ravel(), rank.ravel()
    values = dict.fromkeys(EVENT_COLUMNS, 0)
    values |= {"seq": seq, "rank": rank, "pid": (pids or np.arange(100, 100 + ranks))[0] + rank}
    values |= {"comm_id": comm_id, "func": func, "dtype": "bfloat16", "algo": "ring", "proto": "ll"}
    values |= {"n_ranks": ranks, "n_bytes": 4096, "n_channels": 8, "step": seq // 10}
    values |= {"enqueue_ns": t0 + seq * 1000 + rank * 7, "start_ns": pd.NA, "end_ns": pd.NA, **more}
    return pd.DataFrame(values).astype(EVENT_COLUMNS)


def join(*frames, seed=0):
    """Rows of several rings, read in no particular order."""
    return pd.concat(frames).sample(frac=1, random_state=seed).reset_index(drop=True)


def test_agreeing_ranks_of_several_communicators():
    events = join(calls(comm_id=1), calls(comm_id=2, ranks=2), calls(comm_id=1, func="reduce_scatter"))
    assert audit(events) == audit(events.iloc[::-1])
    result = audit(events)
    assert (result.calls_checked, result.mismatches, result.examples) == (150, 0, [])


@pytest.mark.parametrize("name", MUST_AGREE)
def test_one_differing_rank_is_found_in_each_field(name):
    events = calls()
    row = events.index[(events["seq"] == 31) & (events["rank"] == 2)][0]
    events.loc[row, name] = "tree" if name in ("algo", "proto") else int(events.loc[row, name]) + 1
    result = audit(join(events))
    assert (result.calls_checked, result.mismatches) == (50, 1)
    (example,) = result.examples
    assert (example["comm_id"], example["func"], example["seq"]) == (1, "all_gather", 31)
    assert example["ranks"][2][name] != example["ranks"][0][name] == example["ranks"][3][name]


def test_every_mismatch_counts_once_and_examples_are_few():
    events = calls()
    events.loc[events["rank"] > 1, "n_channels"] = 16
    result = audit(events)
    assert result.mismatches == 50 and len(result.examples) == 5


def test_calls_seen_by_one_rank_are_not_checked():
    events = calls()
    assert audit(events[events["rank"] == 0]).calls_checked == 0
    late = events[(events["rank"] == 0) | (events["seq"] >= 20)]
    assert audit(late).calls_checked == 30
    assert audit(empty(EVENT_COLUMNS)).calls_checked == 0


def test_point_to_point_need_not_agree():
    events = calls(func="send")
    events["n_bytes"] = np.arange(len(events))
    assert audit(events).calls_checked == 0


def test_an_elastic_restart_is_a_life_of_its_own():
    """After the restart the numbers begin anew under another table; rank 1 had died some calls before rank 0."""
    first = calls(ranks=2, pids=[100], table_generation=3)
    first = first[~((first["rank"] == 1) & (first["seq"] >= 40))]
    second = calls(ranks=2, pids=[200], t0=10**6, table_generation=0, n=60)
    starts = {pid: f"life {pid // 100}" for rows in (first, second) for pid in rows["pid"].unique()}
    result = audit(join(first, second), starts=starts)
    assert (result.calls_checked, result.mismatches) == (40 + 60, 0)
    second.loc[(second["rank"] == 1) & (second["seq"] == 45), "algo"] = "tree"
    assert audit(join(first, second), starts=starts).mismatches == 1


def test_ranks_of_which_some_were_never_told_of_their_start_are_compared():
    """No agreement had begun there. No rank was seen in two processes, so all calls are of one life."""
    events = calls(ranks=2)
    events.loc[events["rank"] == 1, "algo"] = "tree"
    assert audit(events, starts={100: "life"}).mismatches == 50


def test_a_communicator_made_anew_in_the_same_processes():
    first, second = calls(table_generation=1), calls(t0=10**6, table_generation=2, n=30)
    result = audit(join(first, second))
    assert (result.calls_checked, result.mismatches) == (80, 0)
    second.loc[second["rank"] == 3, "table_generation"] = 1
    assert audit(join(first, second)).mismatches == 30


def test_equal_pids_on_two_hosts_with_unlike_clocks():
    events = calls(ranks=2)
    events["pid"] = 77
    events.loc[events["rank"] == 1, "enqueue_ns"] += 10**15
    result = audit(join(events))
    assert (result.calls_checked, result.mismatches) == (50, 0)


@pytest.mark.timing
def test_a_hundred_thousand_events_take_seconds():
    events = join(*(calls(n=6250, comm_id=c) for c in range(4)))
    began = time.perf_counter()
    assert audit(events).calls_checked == 25_000
    assert time.perf_counter() - began < 10


def test_synthetic_run(tmp_path):
    _, trace = write_run(tmp_path / "t", search=4, final=2)
    result = audit(trace.events)
    assert result.mismatches == 0 and result.calls_checked == len(trace.events) / 2

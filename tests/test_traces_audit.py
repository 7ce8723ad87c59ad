"""The auditor finds every call on which ranks differ and invents none; the regime follows from traffic alone."""

import time

import numpy as np
import pandas as pd
import pytest
from dynamiccl.traces.assemble import EVENT_COLUMNS, empty
from dynamiccl.traces.queries.slots import regime
from synthetic_trace import write_run
from trace_audit import MUST_AGREE, audit


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
    result = audit(join(first, second))
    assert (result.calls_checked, result.mismatches) == (40 + 60, 0)
    second.loc[(second["rank"] == 1) & (second["seq"] == 45), "algo"] = "tree"
    assert audit(join(first, second)).mismatches == 1


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


# Regimes ---------------------------------------------------------------------------------------------------------


def stream(steps, n_steps=4):
    """Events of one rank from the (func, n_bytes[, dtype]) of one step."""
    rows = [(i, *call) for i in range(n_steps) for call in steps]
    events = calls(ranks=1, n=len(rows))
    events["step"], events["func"], events["n_bytes"] = ([r[k] for r in rows] for k in range(3))
    events["dtype"] = [r[3] if len(r) > 3 else "bfloat16" for r in rows]
    return events


M = 1 << 20
GATHERS = [("all_gather", 8 * M)] * 6
SCATTERS = [("reduce_scatter", 8 * M)] * 6
BACKWARD = [("all_gather", 8 * M), ("reduce_scatter", 8 * M)] * 6
SMALL = [("all_reduce", 4)]


@pytest.mark.parametrize(
    ("step", "is_"),
    [
        ([("all_reduce", 25 * M)] * 5, "ddp"),
        ([("all_reduce", 25 * M)] * 5 + [("all_gather", 512)], "ddp"),
        (SCATTERS + GATHERS + SMALL, "zero-1/2"),
        (GATHERS + SCATTERS, "zero-1/2"),  # gathered at the start of the next step
        (SCATTERS * 4 + GATHERS, "zero-1/2"),  # four micro-batches
        ([("all_reduce", 8 * M)] * 6 + GATHERS, "zero-1/2"),
        (GATHERS + BACKWARD + SMALL, "zero-3"),
        ((GATHERS + BACKWARD) * 4, "zero-3"),
        (GATHERS + BACKWARD[1:], "zero-3"),  # the last unit is kept
        ([*GATHERS, *([("all_gather", 8 * M), ("reduce_scatter", 16 * M, "float32")] * 6)], "zero-3"),
        ([("all_gather", 8 * M), ("reduce_scatter", 16 * M, "float32")], "zero-1/2"),
        (GATHERS, "unknown"),
        (SCATTERS, "unknown"),
        (GATHERS * 3 + SCATTERS, "unknown"),
        ([("broadcast", 8 * M)], "unknown"),
        ([], "unknown"),
    ],
)
def test_regime(step, is_):
    assert regime(stream(step)) == is_


def test_regime_reads_one_rank_in_enqueue_order():
    events = stream(GATHERS + BACKWARD)
    both = pd.concat([events, events.assign(rank=1, enqueue_ns=events["enqueue_ns"] + 3)])
    assert regime(both.sample(frac=1, random_state=1)) == "zero-3"


def test_synthetic_run(tmp_path):
    _, trace = write_run(tmp_path / "t", search=4, final=2)
    result = audit(trace.events)
    assert result.mismatches == 0 and result.calls_checked == len(trace.events) / 2
    assert regime(trace.events) == "zero-3"

"""Before and after: which steps were NCCL's own and which were tuned, and what each slot cost in them."""

import pandas as pd
import pytest
from dynamiccl.traces.files import Trace
from dynamiccl.traces.queries.consistency import audit
from dynamiccl.traces.queries.costs import generations, slot_costs, typical_step
from dynamiccl.traces.records import AUTO, Decision, Rule, Slot, Table, decided
from dynamiccl.traces.writer import TraceWriter
from synthetic_trace import FINAL, GATHER, SCATTER, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run") / "trace", search=6, final=4)


def test_a_step_in_which_the_table_changes_is_no_default_step(run):
    """Seen: 2.78 calls a step in one view of a run, 3 in another, as tables change at a call."""
    _, trace = run
    which = generations(trace)
    events, whole = trace.events.copy(), slot_costs(trace.events, which.default, which.tuned)
    step = int(events.loc[events["table_generation"].isin(which.default), "step"].max())
    mine = events.index[events["step"] == step]
    events.loc[mine[len(mine) // 2 :], "table_generation"] = min(which.tuned)
    cut = slot_costs(events, which.default, which.tuned)
    assert dict(zip(cut["slot"], cut["calls"], strict=True)) == dict(
        zip(whole["slot"], whole["calls"], strict=True)
    )
    assert cut["n_default"].sum() < whole["n_default"].sum()


def with_tables(folder, *tables, closing=None):
    with TraceWriter(folder, {}) as writer:
        for table in tables:
            writer.log("table", {"table": table})
        if closing is not None:
            writer.log("window", {"phase": "verify", "generation": closing})
    return Trace.read(folder)


A = Slot(16, 2, "all_gather", 20)
ONE, TWO = Decision("ring", "ll", 8), Decision("ring", "simple", 16)


def test_every_empty_table_is_the_default(tmp_path):
    trace = with_tables(
        tmp_path, Table(1), Table.of(2, {A: ONE}), Table(3), Table.of(4, {A: AUTO}), Table.of(5, {A: TWO})
    )
    which = generations(trace)
    assert which.default == {0, 1, 3, 4} and which.tuned == {5}


def test_the_table_in_question_is_that_of_the_last_comparison(tmp_path):
    trace = with_tables(
        tmp_path, Table.of(1, {A: ONE}), Table.of(2, {A: TWO}), Table.of(3, {A: ONE}), closing=1
    )
    assert generations(trace).tuned == {1, 3}


def test_a_comparison_of_nothing_has_no_tuned_steps(tmp_path):
    """The search kept nothing: the table that was tried last is not what the run came to."""
    trace = with_tables(tmp_path, Table.of(1, {A: ONE}), Table(2), closing=2)
    assert generations(trace).tuned == set() and generations(trace).rules == set()


def test_decisions_name_the_table(tmp_path):
    trace = with_tables(tmp_path, Table.of(1, {A: ONE}), Table.of(2, {A: TWO}))
    decision = {"func": "all_gather", "min_bytes": A.min_bytes, "max_bytes": A.max_bytes}
    decision |= {"n_ranks": A.n_ranks, "n_nodes": A.n_nodes}
    assert generations(trace, [{**decision, "algo": "ring", "proto": "ll", "n_channels": 8}]).tuned == {1}
    assert generations(trace, [{**decision, "algo": None, "proto": None, "n_channels": None}]).tuned == set()


def test_a_trace_without_tables(run):
    trace = run[1]
    bare = Trace(**{**vars(trace), "log": []})
    which = generations(bare)
    assert which.default == {0} and which.tuned == {trace.events["table_generation"].max()}


def test_costs_by_slot(run):
    summary, trace = run
    which = generations(trace, summary["decisions"])
    costs = slot_costs(trace.events, which.default, which.tuned)
    assert costs["slot"].tolist()[:2] == [str(GATHER), str(SCATTER)]  # the dearest first
    ran = {slot: f"{d.algo}/{d.proto}/{d.n_channels}" for slot, d in FINAL.items()}
    assert costs["ran"].tolist()[:2] == [ran[GATHER], ran[SCATTER]]
    # By hand, for one of them.
    mine = trace.events[(trace.events["func"] == "all_gather") & (trace.events["n_bytes"] == 8 << 20)]
    mine = mine[mine["table_generation"].isin(which.tuned)]
    times = (mine["end_ns"] - mine["start_ns"]).dropna() / 1e3
    assert costs["tuned_us"][0] == pytest.approx(float(times.median())) and costs["n_tuned"][0] == len(times)


def test_costs_without_times_without_tuned_steps_and_without_events(run):
    trace = run[1]
    blind = trace.events.assign(start_ns=pd.NA, end_ns=pd.NA).astype({"start_ns": "Int64", "end_ns": "Int64"})
    costs = slot_costs(blind, {0}, set())
    assert len(costs) == 4 and costs["default_us"].isna().all() and costs["ran"].isna().all()
    assert slot_costs(trace.events.iloc[:0], {0}, {1}).empty
    assert slot_costs(trace.events, set(), {1}).empty


def test_the_first_step_is_set_up_unless_it_is_all_there_is(run):
    events = run[1].events
    first = events["step"] == 0
    slow = events.copy()
    slow.loc[first, "end_ns"] = slow["end_ns"][first] + 10**9
    pd.testing.assert_frame_equal(slot_costs(events, {0}, {1}), slot_costs(slow, {0}, {1}))
    assert len(slot_costs(events[first], {0}, {1})) == 4


def test_the_typical_step_is_well_sampled_and_near_the_median(run):
    _, trace = run
    which = generations(trace)
    step = typical_step(trace, which.default)
    events = trace.events[trace.events["table_generation"].isin(which.default) & (trace.events["step"] > 0)]
    per_step = events["start_ns"].notna().groupby(events["step"]).sum()
    assert per_step[step] == per_step.max()
    assert typical_step(trace, {10**6}) is None
    unsampled = trace.events.assign(start_ns=pd.array([pd.NA] * len(trace.events), dtype="Int64"))
    assert typical_step(Trace(**{**vars(trace), "events": unsampled}), which.default) is None


def test_texts():
    assert decided({"algo": "ring", "proto": "ll128", "n_channels": 16}) == "ring/ll128/16"
    assert decided({"algo": None, "proto": None, "n_channels": None}) == "auto"


def test_rules_survive_the_log(tmp_path):
    table = Table(9, (Rule.of(A, ONE),))
    which = generations(with_tables(tmp_path, table))
    assert which.rules == {("all_gather", A.min_bytes, A.max_bytes, 16, 2, "ring/ll/8")} and which.tuned == {
        9
    }


def test_the_synthetic_run_itself_is_consistent(run):
    """What the other tests lean on."""
    check = audit(run[1].events)
    assert check.mismatches == 0 and check.calls_checked == len(run[1].events) / 2

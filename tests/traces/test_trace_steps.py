"""Which steps of a recording count where ranks recorded unequal numbers of them, and where a job began anew."""

import pandas as pd
import pytest
from dynamiccl.agent.commands.show import tell
from dynamiccl.agent.report.summary import RunSummary
from dynamiccl.envs.replay.decisions import load, windows_of
from dynamiccl.traces.queries.costs import typical_step
from dynamiccl.traces.queries.slots import find_slots
from dynamiccl.traces.queries.steps import in_steps, of_one_rank, without_first
from synthetic_trace import write_run
from test_traces_slots import MB, calls, offers


def marks(rank, n, pid=None, first=0, began=0):
    pid = rank if pid is None else pid
    steps = range(first, first + n)
    ends = [1000 * (began + i) for i in range(n)]
    return [
        {"rank": rank, "pid": pid, "index": step, "end_ns": end, "duration_ns": 1000}
        for step, end in zip(steps, ends, strict=True)
    ]


def test_the_rank_with_about_the_most_steps_stands_for_all():
    """Before: the lowest, had it recorded two steps and another one forty."""
    few = pd.DataFrame(marks(0, 2) + marks(1, 40))
    assert set(of_one_rank(few)["rank"]) == {1} and len(of_one_rank(few)) == 40
    equal = pd.DataFrame(marks(0, 39) + marks(1, 40))  # rank 0's last step did not come
    assert set(of_one_rank(equal)["rank"]) == {0}
    assert of_one_rank(few[:0]).empty


def test_two_lives_of_a_job_follow_each_other():
    """Before: their steps, which count from 0 twice, were taken in turn."""
    steps = pd.DataFrame(marks(0, 3, pid=22, began=10) + marks(0, 3, pid=77))
    assert of_one_rank(steps)["pid"].tolist() == [77] * 3 + [22] * 3
    later = without_first(of_one_rank(steps), "index")
    assert later["index"].tolist() == [1, 2, 1, 2]  # each life's first step holds its set-up
    assert len(without_first(steps[:1], "index")) == 1


def test_events_of_a_step_without_a_time_are_of_no_step():
    events = pd.DataFrame({"pid": [1, 1, 2, 2], "step": [4, 5, 4, 5]})
    steps = pd.DataFrame(marks(0, 1, pid=1, first=4) + marks(1, 2, pid=2, first=4))
    assert in_steps(events, steps).index.tolist() == [0, 2, 3]


def test_the_busiest_process_is_that_of_the_busiest_steps():
    """Before: rank 0's forty steps with one call outweighed rank 1's three with eight."""
    events = pd.concat([calls(11, (1,), n=1, steps=40), calls(11, (2,), n=8, steps=3)], ignore_index=True)
    events = events.assign(n_ranks=2)
    (profile,) = find_slots(events, offers((11, "all_gather", MB)), step_us=2000)
    assert profile.calls == 8


def test_a_run_that_began_anew_is_read_life_by_life(tmp_path):
    """Before: windows of one step each, that alternated between the lives."""
    trace = write_run(tmp_path / "trace", search=4, final=4)[1]
    alone = load(trace)
    n_windows = len(windows_of(trace))
    before = trace.steps.assign(pid=trace.steps["pid"] + 50, table_generation=0)
    before["end_ns"] -= 10**12
    before["duration_ns"] = int(1e6 * alone.default_ms)
    trace.steps = pd.concat([trace.steps, before], ignore_index=True)
    both = load(trace)
    assert len(windows_of(trace)) == n_windows + 1
    assert both.n_steps == alone.n_steps + len(before) // 2 - 2
    assert (both.measured == alone.measured).all() and both.default_ms == pytest.approx(
        alone.default_ms, rel=0.02
    )


def test_only_default_steps_count_as_its_steps(tmp_path):
    """Before: "310 steps", of which most ran under tables that were tried."""
    trace = write_run(tmp_path / "trace", search=12, final=8)[1]
    n_steps = load(trace).n_steps
    assert 30 < n_steps < 0.5 * trace.steps["index"].nunique()


def test_shown_steps_are_those_of_the_rank_that_recorded_most(tmp_path):
    trace = write_run(tmp_path / "trace", search=4, final=2)[1]
    n_steps = trace.steps["index"].nunique()
    is_late = (trace.steps["rank"] == 0) & (trace.steps["index"] > 2)
    trace.steps = trace.steps[~is_late]
    shown = tell(trace, RunSummary())["steps"]
    assert shown["n"] == n_steps and shown["last"] == n_steps - 1
    default = {generation for generation, rules in trace.tables.items() if not rules}
    assert typical_step(trace, default) > 2

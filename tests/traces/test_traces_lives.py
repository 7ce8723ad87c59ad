"""A job that is started again counts its steps from 0 again: what is of its last life, and what of earlier ones."""

from dataclasses import replace

import pandas as pd
import pytest
from dynamiccl.traces.queries.lives import last_life, lives
from dynamiccl.traces.segments import Coverage, Segment
from restarted import LIVES, restarted


def test_of_two_lives_the_second_is_left():
    trace = restarted()
    life = last_life(trace)
    assert set(life.steps["pid"]) == set(life.events["pid"]) == {20, 21}
    assert len(life.steps) == 2 * LIVES[1][0]
    assert life.warnings == [
        "the job was started again: its 90 steps before that are left out where steps are counted or drawn"
    ]
    assert [line["kind"] for line in life.log] == ["begins", "named", "table", "table"], (
        "the verdict was of the first"
    )
    assert trace.warnings == [] and len(trace.log) == 5, "the trace itself is as it was"


def test_of_three_lives_the_third_is_left():
    life = last_life(restarted((*LIVES, (7, 90, 9, 22))))
    assert set(life.steps["pid"]) == {30, 31}
    assert "130 steps" in life.warnings[0]


def test_each_process_has_its_life():
    assert lives(restarted()).to_dict() == {10: 0, 11: 0, 20: 1, 21: 1}
    assert lives(replace(restarted(), header={"source": "kineto"})).empty


@pytest.mark.parametrize("pids", [{20}, {20, 21}], ids=["one rank fewer", "as many ranks"])
def test_ranks_of_another_number_are_of_the_last_life(pids):
    """After a restart a node may hold other ranks, or fewer: the last process of each rank says nothing."""
    trace = restarted()
    steps = trace.steps[trace.steps["pid"].isin({10, 11} | pids)]
    steps = steps.assign(rank=steps["rank"].where(steps["pid"] < 20, steps["rank"] + 8))
    assert set(last_life(replace(trace, steps=steps)).steps["pid"]) == pids


def test_one_life_is_the_trace_itself():
    trace = restarted(LIVES[:1])
    assert last_life(trace) is trace
    nothing = replace(trace, steps=trace.steps[:0], events=trace.events[:0])
    assert last_life(nothing) is nothing
    life = last_life(restarted())
    assert last_life(life) is life


def test_ranks_of_another_tools_recording_are_no_lives():
    """Each file has its own clock and its own process."""
    trace = replace(restarted(), header={"source": "kineto"})
    assert last_life(trace) is trace


def test_a_process_that_was_never_told_of_its_start_is_of_the_last_life():
    """No agreement had begun on it: it ended in its first second, or the store never answered."""
    trace = restarted()
    told = trace.segments[0].coverage.starts
    del told[21]
    told[11] = ""
    assert lives(trace).to_dict() == {10: 0, 11: 1, 20: 1, 21: 1}
    told.clear()
    assert last_life(trace) is trace


def test_lives_at_the_same_time_are_told_apart():
    """Before: the processes of a life were those that took steps at the same time."""
    assert lives(restarted(gap_ms=-1000)).to_dict() == {10: 0, 11: 0, 20: 1, 21: 1}


def test_a_later_segment_says_what_an_earlier_one_did_not_know():
    trace = restarted()
    whole = trace.segments[0].coverage.starts
    early = Segment("000-0", coverage=Coverage(starts={**whole, 20: "", 21: ""}))
    trace.segments = [early, Segment("001-0", coverage=Coverage(starts={20: whole[20], 21: whole[21]}))]
    assert lives(trace).to_dict() == {10: 0, 11: 0, 20: 1, 21: 1}


def test_a_rank_that_begins_late_is_of_the_same_life():
    trace = restarted(LIVES[:1])
    late = trace.steps[(trace.steps["rank"] == 0) | (trace.steps["index"] > 80)]
    assert last_life(replace(trace, steps=late)).steps is late


def test_a_verdict_after_the_last_table_of_an_earlier_life_is_of_that_life():
    trace = restarted()
    *named, verdict, first, second = trace.log
    trace.log = [first, *named, verdict, second]
    assert last_life(trace).log == [first, *named, second]


def test_a_verdict_of_the_last_life_stays():
    trace = restarted()
    trace.log.append({"kind": "verdict", "step": 30, "text": "KEPT"})
    kept = pd.DataFrame(last_life(trace).log).query("kind == 'verdict'")
    assert kept["step"].tolist() == [30]

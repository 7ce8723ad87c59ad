"""Exposed time of slots: by what was computed beside their calls, or by when the job stood still."""

import pandas as pd
import pytest
from dynamiccl.traces.assemble import COMPUTE_COLUMNS, WAIT_COLUMNS, Assembler, empty
from dynamiccl.traces.files import Trace
from dynamiccl.traces.queries.exposed import critical, exposed_parts, exposed_parts_of
from dynamiccl.traces.reasons import Happened
from dynamiccl.traces.records import WAIT, WAIT_DTYPE, Slot, size_class
from dynamiccl.traces.writer import TraceWriter
from test_traces_assemble import record, ring
from test_traces_slots import MB, calls

GATHER = Slot(2, 1, "all_gather", size_class(MB))
SCATTER = Slot(2, 1, "reduce_scatter", size_class(MB))
NO_COMPUTE, NO_WAITS = empty(COMPUTE_COLUMNS), empty(WAIT_COLUMNS)


def stretches(columns, *rows):
    return pd.DataFrame(rows, columns=list(columns)).astype(columns)


@pytest.fixture
def events():
    """On each of two processes a gather from 0 to 100 us, then a reduce-scatter from 200 to 300 us."""
    gather = calls(1, (10, 11), n=1, steps=1)
    scatter = calls(1, (10, 11), n=1, steps=1, func="reduce_scatter", start_ns=200_000, end_ns=300_000)
    return pd.concat([gather, scatter], ignore_index=True).astype({"start_ns": "Int64", "end_ns": "Int64"})


def test_a_wait_exposes_the_calls_that_run_meanwhile(events):
    """Process 10 stands still for 62 us of the gather and between the calls, process 11 for all of the gather."""
    waits = stretches(WAIT_COLUMNS, (10, 38_000, 150_000), (11, 0, 100_000), (11, 210_000, 220_000))
    assert exposed_parts(events, NO_COMPUTE, waits) == pytest.approx({GATHER: 0.81, SCATTER: 0.05})


def test_compute_beside_calls_hides_them(events):
    compute = stretches(COMPUTE_COLUMNS, (0, 0, 38_000), (0, 20_000, 30_000), (1, 0, 100_000))
    found = exposed_parts(events, compute, NO_WAITS)
    assert found == pytest.approx({GATHER: 0.31, SCATTER: 1.0})


def test_without_either_nothing_is_said(events):
    assert exposed_parts(events, NO_COMPUTE, NO_WAITS) == {}
    assert critical([{"slot": "all_gather 1 MiB", "share": 0.3, "exposed": None}]) == []


@pytest.mark.parametrize(
    ("exposed", "share", "is_named"), [(0.62, 0.3, True), (0.62, 0.01, False), (0.1, 0.5, False)]
)
def test_only_what_the_step_waits_for_is_on_the_critical_path(exposed, share, is_named):
    (line,) = critical([{"slot": "all_gather 1 MiB", "share": share, "exposed": exposed}])
    named = Happened.CRITICAL(slots="all_gather 1 MiB (exposed: 62 % of its time)")
    assert line == (named if is_named else Happened.NONE_CRITICAL())


def test_waits_go_from_the_ring_into_the_trace(tmp_path, events):
    wait = record(WAIT_DTYPE, kind=WAIT, rank=1, start_ns=38_000, end_ns=150_000)
    assembler = Assembler()
    with TraceWriter(tmp_path / "t", {}) as writer:
        writer.log("table", {"table": {"generation": 1, "rules": [{"func": "all_gather"}]}})
        assembler.add(ring(wait), pid=10)
        assert writer.drain(assembler)[2].to_numpy().tolist() == [[10, 38_000, 150_000]]
        assert len(writer.drain(assembler)[2]) == 0
    trace = Trace.read(tmp_path / "t")
    assert trace.waits.to_numpy().tolist() == [[10, 38_000, 150_000]]
    trace.events = events
    assert exposed_parts_of(trace, {0}) == pytest.approx({GATHER: 0.62, SCATTER: 0.0})
    assert exposed_parts_of(trace, {1}) == {}

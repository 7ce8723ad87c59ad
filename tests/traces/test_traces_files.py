"""Traces on disk: what is written is read back exactly; kills and damaged files cost no more than said."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest
from dynamiccl.traces import segments
from dynamiccl.traces.assemble import (
    COMM_COLUMNS,
    EVENT_COLUMNS,
    STEP_COLUMNS,
    Assembler,
    Communicator,
    Offer,
    complete,
    empty,
)
from dynamiccl.traces.files import Trace, TraceError
from dynamiccl.traces.header import FORMAT
from dynamiccl.traces.records import Decision, Rule, Slot, Table
from dynamiccl.traces.segments import SPACE
from dynamiccl.traces.writer import TraceWriter

CLOCK = 1_763_719_000_000_000_123  # beyond what a float64 holds exactly


def some_events(n=10, first=0):
    seq = np.arange(first, first + n)
    start = pd.array([CLOCK + int(i) if i % 2 else pd.NA for i in seq], dtype="Int64")
    values = {
        "seq": seq,
        "comm_id": np.full(n, 2**63 + 5, np.uint64),
        "rank": 0,
        "n_ranks": 16,
        "n_nodes": 2,
        "func": "all_gather",
        "n_bytes": 1 << 24,
        "dtype": "bfloat16",
        "algo": "ring",
        "proto": "ll128",
        "n_channels": 16,
        "table_generation": 3,
        "enqueue_ns": CLOCK + seq,
        "start_ns": start,
        "end_ns": start + 17,
        "step": seq // 4,
        "pid": 99,
        "captured": False,
        "asked_bytes": 0,
    }
    return complete(pd.DataFrame(values), EVENT_COLUMNS)


def some_steps(n=4):
    return complete(pd.DataFrame({name: np.arange(n) for name in STEP_COLUMNS}), STEP_COLUMNS)


def test_round_trip_is_exact(tmp_path):
    with TraceWriter(
        tmp_path / "t", {"cluster": "h100-2x8", "emulated": True, "noise": np.float32(0.5)}
    ) as writer:
        writer.write(some_events(7), some_steps())
        writer.flush()
        writer.write(some_events(3, first=7))
    trace = Trace.read(tmp_path / "t")
    pd.testing.assert_frame_equal(trace.events, some_events(10))
    pd.testing.assert_frame_equal(trace.steps, some_steps())
    assert trace.header["cluster"] == "h100-2x8" and trace.header["noise"] == 0.5
    assert trace.header["format"] == FORMAT and trace.header["versions"]["pyarrow"]
    assert trace.warnings == [] and trace.windows.empty and trace.comms.empty


def test_drain_keeps_communicators_and_offers(tmp_path):
    assembler = Assembler()
    assembler.comms[7] = Communicator(7, 16, 2, "dp", {0: 11, 1: 12})
    costs = np.arange(21, dtype=np.float32).reshape(7, 3)
    assembler.offers[7, "all_gather", 4096] = Offer(costs, "ring", "ll", 1)
    with TraceWriter(tmp_path / "t", {}) as writer:
        writer.drain(assembler)
        assembler.comms[8] = Communicator(8, 2, 1, "tp", {0: 11})
        writer.drain(assembler, everything=True)
    trace = Trace.read(tmp_path / "t")
    assert trace.comms[["comm_id", "pid", "rank"]].to_numpy().tolist() == [[7, 11, 0], [7, 12, 1], [8, 11, 0]]
    row = trace.offers.iloc[0]
    assert (row.func, row.n_bytes, row.algo, row.proto) == ("all_gather", 4096, "ring", "ll")
    np.testing.assert_array_equal(np.reshape(row.cost_us, (7, 3)), costs)


def test_log_holds_records_and_no_nan(tmp_path):
    slot = Slot(16, 2, "all_gather", 23)
    table = Table(4, (Rule.of(slot, Decision("ring", "simple", 16)),))
    with TraceWriter(tmp_path, {}) as writer:
        writer.log("table", {"table": table})
        writer.log("window", {"index": 0, "slot": slot, "decision": Decision("ring", "ll"), "saving": np.nan})
        writer.log("window", {"index": 1, "slot": None, "step_ms": np.float64(3.5), "phase": "ab"})
    assert "NaN" not in (tmp_path / "windows.jsonl").read_text()
    trace = Trace.read(tmp_path)
    assert trace.windows["index"].tolist() == [0, 1]
    assert trace.windows["decision"][0] == "ring/ll" and pd.isna(trace.windows["saving"][0])
    assert trace.windows["slot"][0]["size_class"] == 23 and trace.windows["step_ms"][1] == 3.5
    rule = trace.tables[4][0]
    assert (
        trace.tables[0] == ()
        and (rule["n_ranks"], rule["n_nodes"]) == (16, 2)
        and rule["decision"] == "ring/simple/16"
    )
    assert (rule["func"], rule["min_bytes"], rule["max_bytes"]) == ("all_gather", 2**22 + 1, 2**23)


def test_segments_follow_rows_and_age(tmp_path):
    writer = TraceWriter(tmp_path, {}, part_rows=10, part_seconds=1e9)
    for i in range(5):
        writer.write(some_events(4, first=4 * i))
    assert len(list(tmp_path.glob("events-*.parquet"))) == 1  # 12 rows; 8 are held back
    writer.close()
    assert len(Trace.read(tmp_path).events) == 20
    aged = TraceWriter(tmp_path / "aged", {}, part_seconds=0.0)
    aged.write(some_events(1))
    assert len(Trace.read(tmp_path / "aged").events) == 1


def test_a_killed_writer_loses_at_most_the_last_segment(tmp_path):
    """SIGKILL at a random moment of a real process that writes as fast as it can."""
    code = """
import sys
sys.path[:] = sys.argv[2:]
from test_traces_files import some_events
from dynamiccl.traces.writer import TraceWriter
writer = TraceWriter(sys.argv[1], {}, part_rows=50)
for i in range(10**6):
    writer.write(some_events(10, first=10 * i))
    writer.log("window", {"index": i})
    print(10 * (i + 1), flush=True)
"""
    args = [sys.executable, "-c", code, str(tmp_path / "t"), *sys.path]
    with subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.5)
        child.send_signal(signal.SIGKILL)
        written = int(child.stdout.read().split()[-1])
    trace = Trace.read(tmp_path / "t")
    assert trace.events["seq"].tolist() == list(range(len(trace.events)))
    assert written - 60 <= len(trace.events) <= written + 10 and len(trace.events) >= 50
    assert abs(len(trace.windows) - written / 10) <= 1


def test_a_cut_last_segment_is_reported_and_skipped(tmp_path):
    writer = TraceWriter(tmp_path, {}, part_rows=5)
    for i in range(3):
        writer.write(some_events(5, first=5 * i))
    writer.close()
    _, middle, last = sorted(tmp_path.glob("events-*.parquet"))
    last.write_bytes(last.read_bytes()[:200])
    with (tmp_path / "windows.jsonl").open("a") as log:
        log.write('{"kind": "window", "index": 0}\n{"kind": "win')
    trace = Trace.read(tmp_path)
    assert trace.events["seq"].tolist() == list(range(10)) and len(trace.windows) == 1
    assert len(trace.warnings) == 2 and last.name in trace.warnings[0]
    # A writer that comes later begins a segment of its own behind it.
    with TraceWriter(tmp_path, {}, existing="resume") as again:
        again.write(some_events(2, first=15))
    assert Trace.read(tmp_path).events["seq"].tolist() == [*range(10), 15, 16]
    middle.write_bytes(b"PAR1")
    with pytest.raises(TraceError, match=rf"{middle.name} is damaged .*remove it"):
        Trace.read(tmp_path)


def test_a_half_written_segment_is_mentioned(tmp_path):
    TraceWriter(tmp_path, {}).close()
    (tmp_path / "steps-00000.parquet.tmp").write_bytes(b"PAR1")
    assert "steps are missing" in Trace.read(tmp_path).warnings[0]


def test_refuse_resume_replace(tmp_path):
    (tmp_path / "notes.txt").write_text("keep me")
    with TraceWriter(tmp_path, {"stage": 3, "date": "2020-01-01"}) as writer:
        writer.write(some_events(3))
    with pytest.raises(TraceError, match="already holds a trace"):
        TraceWriter(tmp_path, {})
    with TraceWriter(tmp_path, {"steps": 9}, existing="resume") as writer:
        writer.write(some_events(3, first=3))
        writer.update_header(nccl="2.28.9")
    trace = Trace.read(tmp_path)
    assert trace.events["seq"].tolist() == list(range(6))
    assert trace.header["stage"] == 3 and trace.header["date"] == "2020-01-01"
    assert trace.header["steps"] == 9 and trace.header["nccl"] == "2.28.9"
    TraceWriter(tmp_path, {}, existing="replace").close()
    assert Trace.read(tmp_path).events.empty and "stage" not in Trace.read(tmp_path).header
    assert (tmp_path / "notes.txt").read_text() == "keep me"


def test_a_run_folder_leads_to_its_trace(tmp_path):
    TraceWriter(tmp_path / "trace", {"stage": 2}).close()
    assert Trace.read(tmp_path).header["stage"] == 2


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda p: (p / "header.json").unlink(), "give the folder that holds header.json"),
        (lambda p: (p / "header.json").write_text("{"), "restore it"),
        (lambda p: (p / "header.json").write_text('{"a": 1}'), "not a trace of dynamiccl"),
        (lambda p: (p / "header.json").write_text(json.dumps({"format": 99})), "upgrade dynamiccl"),
        (
            lambda p: (p / "header.json").write_text(json.dumps({"format": 2})),
            "trace format 2, this release reads 4: read it with the release that wrote it",
        ),
        (lambda p: next(p.glob("comms-*")).write_bytes(b"x"), ".parquet is damaged"),
        (lambda p: next(p.glob("segment-*")).write_text('{"parts": 7}'), "remove it to read the rest"),
        (lambda p: next(p.glob("segment-*")).write_text("{"), "remove it to read the rest"),
    ],
)
def test_errors_are_one_line_with_a_cure(tmp_path, spoil, says):
    with TraceWriter(tmp_path, {}) as writer:
        writer.write_whole("comms", empty(COMM_COLUMNS))
    spoil(tmp_path)
    with pytest.raises(TraceError) as caught:
        Trace.read(tmp_path)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_is_no_trace_and_no_place_for_one(tmp_path):
    path = tmp_path / "kineto.json"
    path.write_text("{}")
    with pytest.raises(TraceError, match="a trace is a folder"):
        Trace.read(path)
    with pytest.raises(TraceError, match="cannot make the trace folder"):
        TraceWriter(path / "t", {})


def test_the_log_of_a_long_run_keeps_its_beginning_and_its_end(tmp_path):
    """Before: a line for every window, for ever."""
    cap = 2**20
    with TraceWriter(tmp_path / "t", {}, most_bytes=cap) as writer:
        for i in range(5000):
            writer.log("window", {"index": i, "reason": "x" * 80})
            if i % 500 == 0:
                assert (tmp_path / "t" / "windows.jsonl").stat().st_size <= cap / 16 + 300
    log = Trace.read(tmp_path / "t").log
    seen = [line["index"] for line in log if line["kind"] == "window"]
    assert (
        seen == sorted(set(seen)) and seen[:50] == list(range(50)) and seen[-50:] == list(range(4950, 5000))
    )
    gone = sum(line["lines"] for line in log if line["kind"] == "left_out")
    assert gone > 3000 and (tmp_path / "t" / "windows.jsonl").stat().st_size <= cap / 16 + 300


def test_a_log_that_is_thinned_keeps_its_tables_and_verdicts(tmp_path):
    """A table holds until the next one. Before: the middle went as a whole, and nobody was told: the report showed the
    table of the beginning for steps under NCCL's default."""
    kept = Table.of(1, {Slot(8, 1, "all_gather", 25): Decision("ring", "simple", 8)})
    default = Table.of(2, {})
    with TraceWriter(tmp_path / "t", {}, most_bytes=2**20) as writer:
        for i in range(5000):
            writer.log("window", {"index": i, "reason": "x" * 80})
            if i == 1000:
                writer.log("table", {"table": kept})
            if i == 2500:
                writer.log("verdict", {"step": i, "text": "KEPT"})
                writer.log("table", {"table": default})
    trace = Trace.read(tmp_path / "t")
    assert set(trace.tables) == {0, 1, 2} and trace.tables[2] == ()
    kinds = [line["kind"] for line in trace.log if line["kind"] != "window"]
    assert "left_out" in kinds and [kind for kind in kinds if kind != "left_out"] == [
        "table",
        "verdict",
        "table",
    ]
    assert trace.warnings and all(text.endswith("removed (windows only)") for text in trace.warnings)


def test_a_log_full_of_trials_keeps_the_tables_that_lasted_and_then_says_what_went(tmp_path):
    slot = Slot(8, 1, "all_gather", 25)
    trials = [Table.of(n, {slot: Decision("ring", "simple", 8)}, 12) for n in range(2, 1500)]
    with TraceWriter(tmp_path / "t", {}, most_bytes=2**20) as writer:
        for trial in trials:
            writer.log("table", {"table": trial})
            if trial.generation == 600:
                writer.log("table", {"table": Table.of(9000, {slot: Decision("ring", "ll", 8)})})
    trace = Trace.read(tmp_path / "t")
    assert (tmp_path / "t" / "windows.jsonl").stat().st_size <= 2**16 + 300
    assert 9000 in trace.tables and 700 not in trace.tables
    assert "which one ran then may be told wrongly" in trace.warnings[0]


def test_a_later_tuner_does_not_write_on_in_a_line_that_a_kill_has_cut(tmp_path):
    with TraceWriter(tmp_path / "t", {}) as writer:
        writer.log("window", {"index": 0})
    with (tmp_path / "t" / "windows.jsonl").open("a") as log:
        log.write('{"kind": "window", "ind')
    with TraceWriter(tmp_path / "t", {}, existing="resume") as writer:
        writer.log("begins", {"out": "x"})
    with TraceWriter(tmp_path / "t", {}, existing="resume") as writer:
        writer.log("begins", {"out": "x"})
    trace = Trace.read(tmp_path / "t")
    assert [line["kind"] for line in trace.log] == ["window", "begins", "begins"]
    assert len(trace.warnings) == 1, "of the line that was cut"


def test_segments_that_a_running_job_removes_meanwhile_are_left_out(tmp_path, monkeypatch):
    """Before: "is damaged: remove it to read the rest", of a trace that was whole."""
    size = TraceWriter(tmp_path / "one", {}, part_rows=1)
    size.write(some_events())
    (part,) = (tmp_path / "one").glob("events-*.parquet")
    n_bytes = part.stat().st_size
    writer = TraceWriter(tmp_path / "t", {}, part_rows=1, most_bytes=6 * n_bytes / SPACE["events"])
    for i in range(6):
        writer.write(some_events(first=10 * i))
    real, seen = segments.read_parquet, []

    def slow(path, columns):
        if not seen:
            for i in range(6, 9):
                writer.write(some_events(first=10 * i))
        seen.append(path)
        return real(path, columns)

    monkeypatch.setattr(segments, "read_parquet", slow)
    trace = Trace.read(tmp_path / "t")
    assert any("meanwhile" in text for text in trace.warnings)
    assert any(
        "parts of events after its beginning were removed" in w for w in Trace.read(tmp_path / "t").warnings
    )
    assert 0 < len(trace.events) < 60

"""Which step a call of another tool's recording is of: marks that repeat, several optimizers' marks, calls in none."""

import json
import sqlite3
from contextlib import closing

import numpy as np
import pytest
import recordings_made as made
from command import invoke
from dynamiccl.traces.files import TraceError
from dynamiccl.traces.importers.kineto import _at_two_distances
from dynamiccl.traces.importers.recording import read_recording

STEP_US = 6000


def optimizers(path, ends, gathers=(1000,), n_steps=12, name="AdamW"):
    """A profile without the profiler's step(), with all-gathers at ``gathers`` us of a step and ends of optimizers."""
    group = {"Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Group size": 2}
    call = {
        **group,
        "Collective name": "all_gather",
        "dtype": "Float",
        "In msg nelems": 8,
        "Out msg nelems": 16,
    }
    events = []

    def add(kind, name, at, dur, **args):
        events.append({"ph": "X", "cat": kind, "name": name, "ts": at, "dur": dur, "args": args})

    for step in range(n_steps):
        now = STEP_US * step
        for n, at in enumerate(gathers):
            args = {**call, "External id": 10 * step + n}
            add("cpu_op", "record_param_comms", now + at, 1, **args)
            add("kernel", "ncclDevKernel_Generic", now + at + 10, 300, **args)
        for end in ends:
            add("user_annotation", f"Optimizer.step#{name}.step", now + end - 200, 200)
    path.write_text(json.dumps({"distributedInfo": {"rank": 0, "backend": "nccl"}, "traceEvents": events}))
    return path


def test_two_optimizers_of_one_class_make_no_further_steps(tmp_path):
    """Before: their marks have one name, and each was a step: half of the steps had no call, none its time."""
    trace = read_recording([optimizers(tmp_path / "rank0.json", ends=(5000, 5300))])
    assert len(trace.steps) == 11 and set(trace.steps["duration_ns"]) == {STEP_US * 1000}
    assert trace.events.groupby("step").size().tolist() == [1] * 11


def test_optimizers_marks_divide_a_profile_that_holds_kernels_only(tmp_path):
    path = optimizers(tmp_path / "rank0.json", ends=(5000, 5300))
    document = json.loads(path.read_text())
    document["traceEvents"] = [e for e in document["traceEvents"] if e["name"] != "record_param_comms"]
    path.write_text(json.dumps(document))
    trace = read_recording([path])
    assert len(trace.steps) == 11 and len(trace.events) == 11


def test_optimizers_that_step_in_turn_tell_no_steps(tmp_path):
    """A GAN's: calls before each of them. What a step is, the profiler's step() has to say."""
    path = optimizers(tmp_path / "rank0.json", ends=(900, 5000), gathers=(300, 3000))
    trace = read_recording([path])
    assert trace.steps.empty and len(trace.events) == 24
    assert any(
        "the marks of several optimizers do not tell its steps" in note for note in trace.header["notes"]
    )
    assert any("call the profiler's step()" in note for note in trace.header["notes"])
    assert json.loads(invoke(["advise", str(path), "--json"]).stdout)["verdict"].startswith(
        "no step is marked"
    )


def test_a_single_mark_of_an_optimizer_divides_nothing(tmp_path):
    trace = read_recording([optimizers(tmp_path / "rank0.json", ends=(5000,), n_steps=1)])
    assert trace.steps.empty and len(trace.events) == 1
    assert not any("several optimizers" in note for note in trace.header["notes"])


def without_marks(path, *steps):
    """The made export of Nsight Systems without the ranges of these steps."""
    made.nsys(path, ranks=(0,))
    with closing(sqlite3.connect(path)) as base:
        for step in steps:
            base.execute("DELETE FROM NVTX_EVENTS WHERE text = ?", (f"step {step}",))
        base.commit()
    return path


@pytest.mark.parametrize("gone", [(0, 1, 2), (3, 4, 5), (2, 3)])
def test_calls_of_no_marked_step_are_in_none(tmp_path, gone):
    """Before: those before the first mark were a step that had no time, those after a mark of the step before."""
    trace = read_recording([without_marks(tmp_path / "rank0.sqlite", *gone)])
    left = set(range(made.N_STEPS)) - set(gone)
    assert set(trace.events["step"]) == set(trace.steps["index"]) == left
    assert trace.events.groupby("step").size().tolist() == [len(made.STEP)] * len(left)
    n = len(gone) * len(made.STEP)
    assert f"left out: {n} calls that no marked step holds" in trace.header["notes"]
    assert trace.header["left_out"]["calls"] == 0


def test_calls_of_no_marked_step_of_a_profile_are_in_none(tmp_path):
    folder = made.kineto(tmp_path / "a")
    for path in folder.iterdir():
        path.write_text(
            path.read_text().replace("ProfilerStep#0", "warm-up").replace("ProfilerStep#3", "saved")
        )
    trace = read_recording([folder])
    assert set(trace.events["step"]) == {1, 2, 4, 5}
    assert "left out: 12 calls that no marked step holds" in trace.header["notes"]  # two files


def test_where_no_marked_step_holds_a_call_it_is_said(tmp_path):
    path = without_marks(tmp_path / "rank0.sqlite", *range(made.N_STEPS))
    with closing(sqlite3.connect(path)) as base:
        row = (made.BASE - 10**9, made.BASE - 10**8, None, "step 0", (500 << 24) + 1, None)
        base.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)", row)
        base.commit()
    with pytest.raises(TraceError, match="no step holds a call of NCCL"):
        read_recording([path])


def test_numbers_of_steps_that_come_again_are_further_steps(tmp_path):
    """Each epoch counts anew. Before: the first ``step 0`` counted, and the calls of the second were of no step."""
    path = made.nsys(tmp_path / "rank0.sqlite", ranks=(0,))
    with closing(sqlite3.connect(path)) as base:
        for step in range(3, made.N_STEPS):
            base.execute(
                "UPDATE NVTX_EVENTS SET text = ? WHERE text = ?", (f"step {step - 3}", f"step {step}")
            )
        begin = made.BASE + 1000  # the same step by another name, as PyTorch marks it
        row = (begin, begin + 10**6, None, "ProfilerStep#0", (500 << 24) + 1, None)
        base.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)", row)
        base.commit()
    trace = read_recording([path])
    assert trace.steps["index"].tolist() == [*range(made.N_STEPS)]
    assert trace.events.groupby("step").size().tolist() == [len(made.STEP)] * made.N_STEPS


def test_symmetric_kernels_of_an_export_are_told_apart(tmp_path):
    """NCCL asks no tuner about them, and their time is not that of an algorithm that it offers."""
    path = made.nsys(tmp_path / "rank0.sqlite", ranks=(0,))
    with closing(sqlite3.connect(path)) as base:
        base.execute(
            "UPDATE StringIds SET value = 'ncclSymkDevKernel_AllGather_LL' WHERE value LIKE 'ncclDevKernel%'"
        )
        base.commit()
    trace = read_recording([path])
    assert set(trace.events["algo"]) == {"symmetric"}
    n = made.N_STEPS * len(made.STEP)
    assert f"{n} calls ran symmetric kernels, which no table reaches" in trace.header["notes"]


def test_steps_of_two_lengths_in_any_order_are_steps():
    """Before: a job with two sizes of batch was said to have several optimizers, and its profile no steps."""
    gaps = [100.0] * 6 + [160.0] * 4
    assert not _at_two_distances(np.cumsum(gaps).tolist())
    assert _at_two_distances(np.cumsum([5.0, 160.0] * 5).tolist())

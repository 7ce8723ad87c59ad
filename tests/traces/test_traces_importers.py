"""The importer: what PyTorch's profiler recorded becomes an ordinary trace, and what it does not know stays unknown."""

import gzip
import json
from dataclasses import dataclass

import pandas as pd
import pytest
from command import invoke
from dynamiccl.agent.commands.show import tell
from dynamiccl.agent.report.html.report import write_report
from dynamiccl.agent.report.summary import RunSummary
from dynamiccl.traces.assemble import EVENT_COLUMNS
from dynamiccl.traces.files import Trace, TraceError
from dynamiccl.traces.importers.found import dtype_of, func_of
from dynamiccl.traces.importers.recording import read_recording
from dynamiccl.traces.queries.consistency import audit
from dynamiccl.traces.writer import TraceWriter

BASE = 1_790_857_026_000_000_000  # Kineto's baseTimeNanoseconds


@dataclass(frozen=True)
class Result:
    n_events: int
    n_steps: int
    n_timed: int  # events that have a start and an end
    notes: list[str]


def import_files(paths, out, ranks_per_node=None):
    """A recording as it is read, written as a trace folder and so made sure to be a whole trace."""
    trace = read_recording(paths, ranks_per_node)
    with TraceWriter(out, trace.header) as writer:
        writer.write(trace.events, trace.steps)
        writer.write_whole("comms", trace.comms)
    n_timed = int(trace.events["start_ns"].notna().sum())
    return Result(len(trace.events), len(trace.steps), n_timed, list(trace.header.get("notes") or ()))


def run_advise(path, out):
    """The command that takes a recording; it writes nothing of what it refuses."""
    words = ["advise", path, "--cluster", "dgx-h100-2x8", "--out", out]
    return invoke([str(word) for word in words])


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("_allgather_base", "all_gather"),
        ("allgather_into_tensor_coalesced", "all_gather"),
        ("nccl:_all_gather_base", "all_gather"),
        ("gloo:all_gather", "all_gather"),
        ("AllGather", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("ReduceScatter", "reduce_scatter"),
        ("nccl:all_reduce", "all_reduce"),
        ("allreduce_coalesced", "all_reduce"),
        ("nccl:reduce", "reduce"),
        ("Broadcast", "broadcast"),
        ("nccl:send 0->1", "send"),
        ("all_to_all", None),
        ("barrier", None),
        ("", None),
    ],
)
def test_names_of_collectives(theirs, ours):
    assert func_of(theirs) == ours


def test_names_of_types():
    assert [
        dtype_of(t) for t in ("BFloat16", "Half", "float", "ncclFloat32", "Long", "torch.int8", "Quint")
    ] == ["bfloat16", "float16", "float32", "float32", "int64", "int8", "unknown"]


def test_rows_keep_large_clock_values_and_get_sequence_numbers(tmp_path):
    clock = 1_763_719_000_000_000_123
    document = {"baseTimeNanoseconds": clock, "distributedInfo": {"rank": 0}, "traceEvents": []}
    call = {
        "Collective name": "AllGather",
        "In msg nelems": 1,
        "Out msg nelems": 8,
        "dtype": "Byte",
        "Group size": 16,
    }
    for at in (5, 0):
        one = {"ph": "X", "ts": at, "dur": 1, "args": {**call, "External id": at}}
        document["traceEvents"].append({**one, "cat": "cpu_op", "name": "record_param_comms"})
    kernel = {"External id": 0, "grid": [4, 1, 1]}
    document["traceEvents"] += [
        {"ph": "X", "cat": "kernel", "name": "ncclDevKernel", "ts": 0, "dur": 3, "args": kernel},
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#0", "ts": 0, "dur": 9},
    ]
    (tmp_path / "a.json").write_text(json.dumps(document))
    events = read_recording([tmp_path / "a.json"], ranks_per_node=8).events
    assert events.dtypes.astype(str).to_dict() == EVENT_COLUMNS
    assert events["seq"].tolist() == [0, 1] and events["start_ns"].tolist() == [clock, pd.NA]
    assert events["n_nodes"].tolist() == [2, 2] and events["algo"].tolist() == ["unknown"] * 2


# Kineto -------------------------------------------------------------------------------------------


def kineto(rank, steps=(7, 8), kernels=True):
    """A trace with the calls of a small ZeRO-3 job in each step, and an operator that is no collective of NCCL's."""
    calls = [
        "_allgather_base",
        "_allgather_base",
        "_reduce_scatter_base",
        "_allgather_base",
        "_allgather_base",
    ]
    calls += ["_reduce_scatter_base", "all_to_all"]
    events, external, seq = [], 10, 100
    for n, step in enumerate(steps):
        began = 4401160000000.0 + n * 5000
        mark = {
            "ph": "X",
            "cat": "user_annotation",
            "name": f"ProfilerStep#{step}",
            "ts": began,
            "dur": 5000.0,
        }
        events.append({**mark, "pid": 4242, "tid": 1})
        for i, name in enumerate(calls):
            external, seq = external + 1, seq + 1
            args = {
                "Collective name": name,
                "In msg nelems": 1024,
                "Out msg nelems": 16384,
                "dtype": "BFloat16",
            }
            if name == "_reduce_scatter_base":
                args |= {"In msg nelems": 16384, "Out msg nelems": 1024}
            args |= {"Group size": 16, "Process Group Name": "0", "Process Group Description": "default_pg"}
            args |= {"Process Group Ranks": "[0, 1, 2, ...]", "Rank": rank, "Seq": seq}
            ts = began + 100 + i * 300 + rank
            operator = {
                "ph": "X",
                "cat": "cpu_op",
                "name": "record_param_comms",
                "pid": 4242,
                "tid": 1,
                "ts": ts,
            }
            events.append({**operator, "dur": 20.0, "args": {**args, "External id": external}})
            if kernels:
                kernel = {
                    "ph": "X",
                    "cat": "kernel",
                    "name": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)",
                }
                grid = {"grid": [24, 1, 1], "block": [544, 1, 1], "stream": 20, "External id": external}
                # Some releases repeat the arguments at the kernel, some do not.
                grid |= args if i % 2 else {}
                events.append({**kernel, "pid": 0, "tid": 20, "ts": ts + 50.25, "dur": 123.5, "args": grid})
    events.append(
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1.0, "dur": 2.0, "args": {"External id": 11}}
    )
    events.append({"ph": "i", "name": "Iteration Start"})
    info = {"backend": "nccl", "rank": rank, "world_size": 16, "nccl_version": "2.28.9"}
    return {"traceEvents": events, "distributedInfo": info, "baseTimeNanoseconds": BASE}


def test_kineto(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(kineto(0)))
    with gzip.open(tmp_path / "b.json.gz", "wt") as file:
        json.dump(kineto(1), file)
    result = import_files([tmp_path / "a.json", tmp_path / "b.json.gz"], tmp_path / "t", ranks_per_node=8)
    assert (result.n_events, result.n_timed, result.n_steps, result.notes) == (24, 24, 4, [])
    trace = Trace.read(tmp_path / "t")
    first = trace.events[trace.events["rank"] == 1].iloc[0]
    assert (first["func"], first["n_bytes"], first["dtype"]) == ("all_gather", 16384 * 2, "bfloat16")
    assert (first["seq"], first["step"], first["n_channels"], first["n_ranks"], first["n_nodes"]) == (
        101,
        7,
        24,
        16,
        2,
    )
    assert first["algo"] == first["proto"] == "unknown"  # the kernel's name does not tell what ran
    enqueued = BASE + (4401160000000 + 101) * 1000
    assert (first["enqueue_ns"], first["start_ns"]) == (enqueued, enqueued + 50_250)
    assert first["end_ns"] - first["start_ns"] == 123_500
    assert (
        sorted(set(trace.events["step"])) == [7, 8] and trace.steps["duration_ns"].tolist() == [5_000_000] * 4
    )
    assert (
        trace.header["nccl"] == "2.28.9"
        and trace.header["host"] is None
        and trace.header["source"] == "kineto"
    )
    check = audit(trace.events)
    assert (check.calls_checked, check.mismatches) == (12, 0)  # the two files name the same communicator


def test_kineto_without_kernels(tmp_path):
    document = kineto(0, kernels=False)
    del document["distributedInfo"]
    (tmp_path / "trace_rank_5.json").write_text(json.dumps(document))
    result = import_files([tmp_path / "trace_rank_5.json"], tmp_path / "t")
    assert result.n_timed == 0 and result.n_events == 12 and any("no NCCL kernel" in n for n in result.notes)
    events = Trace.read(tmp_path / "t").events
    assert set(events["rank"]) == {5} and events["start_ns"].isna().all()


def without_steps(document):
    """The profile of a job that calls no step() of the profiler."""
    events = [e for e in document["traceEvents"] if "ProfilerStep" not in e["name"]]
    return {**document, "traceEvents": events}


def test_a_profile_without_marks_of_steps_says_the_cure(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(without_steps(kineto(0))))
    trace = read_recording([tmp_path / "a.json"])
    assert trace.steps.empty and len(trace.events) == 12
    cure = "no step in it: call the profiler's step() after each step of the optimizer"
    assert cure in trace.header["notes"]
    told = json.loads(invoke(["advise", str(tmp_path / "a.json"), "--json"]).stdout)
    assert told["verdict"].startswith("no step is marked") and cure in told["unknown"]


def test_marks_of_the_optimizer_will_do(tmp_path):
    """Before: refused. The optimizer's ends divide the steps; the calls before the first and after the last are left
    out, so that every step is whole."""
    document = without_steps(kineto(0, steps=range(4)))
    for n in range(4):
        mark = {"ph": "X", "cat": "user_annotation", "name": "Optimizer.step#AdamW.step", "dur": 90.0}
        document["traceEvents"].append({**mark, "ts": 4401160000000.0 + n * 5000 + 4800})
    (tmp_path / "a.json").write_text(json.dumps(document))
    trace = read_recording([tmp_path / "a.json"])
    assert trace.steps["index"].tolist() == [1, 2, 3] and set(trace.steps["duration_ns"]) == {5_000_000}
    assert trace.events.groupby("step").size().to_dict() == {1: 6, 2: 6, 3: 6}
    assert any("7 calls before the first and after the last are left out" in n for n in trace.header["notes"])


# What is read, and what is refused -----------------------------------------------------------------


def profile(folder):
    """A valid file."""
    path = folder / "kineto.json"
    path.write_text(json.dumps(kineto(0)))
    return path


def test_what_was_imported_can_be_shown_and_reported(tmp_path):
    path = profile(tmp_path)
    import_files([path], tmp_path / "t")
    trace = Trace.read(tmp_path / "t")
    story = tell(trace, RunSummary())
    assert story["slots"]
    assert any(s["default_us"] for s in story["slots"])
    assert "What each collective costs" in write_report(tmp_path / "r.html", RunSummary(), trace).read_text()


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1, 2]", b"hello\nworld\n", b"\x80\x04\x95garbage", b'{"traceEvents": []}']
)
def test_files_of_another_kind_are_one_line_and_status_2(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    result = run_advise(tmp_path / "file", tmp_path / "t")
    assert result.exit_code == 2 and not (tmp_path / "t").exists()
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("missing.json",), "no file or folder missing.json"),
        (("FILE", "--ranks-per-node", "0"), "at least 1 rank"),
    ],
)
def test_bad_arguments(tmp_path, words, says):
    path = str(profile(tmp_path))
    words = [path if word == "FILE" else word for word in words]
    result = invoke(["advise", *words, "--cluster", "dgx-h100-2x8"])
    assert result.exit_code == 2 and says in result.stderr and result.stderr.count("\n") == 1


def test_a_folder_that_holds_a_trace_is_not_written_over(tmp_path):
    path = profile(tmp_path)
    import_files([path], tmp_path / "full")
    with pytest.raises(TraceError, match="already holds a trace"):
        import_files([path], tmp_path / "full")

"""Importers: what other tools recorded becomes an ordinary trace, and what they do not know stays unknown."""

import gzip
import json
import pickle
import subprocess
import sys
from dataclasses import dataclass

import pandas as pd
import pytest
from command import invoke
from dynamiccl.agent.commands.show import tell
from dynamiccl.agent.report.report import write_report
from dynamiccl.agent.report.summary import RunSummary
from dynamiccl.traces.assemble import EVENT_COLUMNS
from dynamiccl.traces.files import Trace, TraceError
from dynamiccl.traces.importers.common import Imported, dtype_of, func_of
from dynamiccl.traces.importers.recording import FORMATS, read_recording
from dynamiccl.traces.writer import TraceWriter
from trace_audit import audit

BASE = 1_790_857_026_000_000_000  # Kineto's baseTimeNanoseconds


@dataclass(frozen=True)
class Result:
    n_events: int
    n_steps: int
    n_timed: int  # events that have a start and an end
    notes: list[str]


def import_files(source, paths, out, ranks_per_node=None):
    """A recording as it is read, written as a trace folder and so made sure to be a whole trace."""
    trace = read_recording(paths, source, ranks_per_node)
    with TraceWriter(out, trace.header) as writer:
        writer.write(trace.events, trace.steps)
        writer.write_whole("comms", trace.comms)
    n_timed = int(trace.events["start_ns"].notna().sum())
    return Result(len(trace.events), len(trace.steps), n_timed, list(trace.header.get("notes") or ()))


def run_advise(source, path, out):
    """The command that takes a recording of any format; it writes nothing of what it refuses."""
    words = ["advise", path, "--format", source, "--cluster", "dgx-h100-2x8", "--out", out]
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
    assert [dtype_of(t) for t in ("BFloat16", "Half", "float", "ncclFloat32", "Long", "torch.int8", "Quint")] == [
        "bfloat16",
        "float16",
        "float32",
        "float32",
        "int64",
        "int8",
        "unknown",
    ]


def test_rows_keep_large_clock_values_and_get_sequence_numbers():
    clock = 1_763_719_000_000_000_123
    call = {"comm_id": 2**63 + 1, "rank": 0, "func": "all_gather", "n_bytes": 8, "n_ranks": 16}
    found = Imported(
        [{**call, "enqueue_ns": clock + 5}, {**call, "enqueue_ns": clock, "start_ns": clock, "end_ns": clock + 3}]
    )
    events, steps, compute = found.frames(ranks_per_node=8)
    assert events.dtypes.astype(str).to_dict() == EVENT_COLUMNS and steps.empty and compute.empty
    assert events["seq"].tolist() == [0, 1] and events["start_ns"].tolist() == [clock, pd.NA]
    assert events["n_nodes"].tolist() == [2, 2] and events["algo"].tolist() == ["unknown"] * 2


# Kineto -------------------------------------------------------------------------------------------


def kineto(rank, steps=(7, 8), kernels=True):
    """A trace with the calls of a small ZeRO-3 job in each step, and an operator that is no collective of NCCL's."""
    calls = ["_allgather_base", "_allgather_base", "_reduce_scatter_base", "_allgather_base", "_allgather_base"]
    calls += ["_reduce_scatter_base", "all_to_all"]
    events, external, seq = [], 10, 100
    for n, step in enumerate(steps):
        began = 4401160000000.0 + n * 5000
        mark = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": began, "dur": 5000.0}
        events.append({**mark, "pid": 4242, "tid": 1})
        for i, name in enumerate(calls):
            external, seq = external + 1, seq + 1
            args = {"Collective name": name, "In msg nelems": 1024, "Out msg nelems": 16384, "dtype": "BFloat16"}
            if name == "_reduce_scatter_base":
                args |= {"In msg nelems": 16384, "Out msg nelems": 1024}
            args |= {"Group size": 16, "Process Group Name": "0", "Process Group Description": "default_pg"}
            args |= {"Process Group Ranks": "[0, 1, 2, ...]", "Rank": rank, "Seq": seq}
            ts = began + 100 + i * 300 + rank
            operator = {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 4242, "tid": 1, "ts": ts}
            events.append({**operator, "dur": 20.0, "args": {**args, "External id": external}})
            if kernels:
                kernel = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)"}
                grid = {"grid": [24, 1, 1], "block": [544, 1, 1], "stream": 20, "External id": external}
                # Some releases repeat the arguments at the kernel, some do not.
                grid |= args if i % 2 else {}
                events.append({**kernel, "pid": 0, "tid": 20, "ts": ts + 50.25, "dur": 123.5, "args": grid})
    events.append({"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1.0, "dur": 2.0, "args": {"External id": 11}})
    events.append({"ph": "i", "name": "Iteration Start"})
    info = {"backend": "nccl", "rank": rank, "world_size": 16, "nccl_version": "2.28.9"}
    return {"traceEvents": events, "distributedInfo": info, "baseTimeNanoseconds": BASE}


def test_kineto(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(kineto(0)))
    with gzip.open(tmp_path / "b.json.gz", "wt") as file:
        json.dump(kineto(1), file)
    result = import_files("kineto", [tmp_path / "a.json", tmp_path / "b.json.gz"], tmp_path / "t", ranks_per_node=8)
    assert (result.n_events, result.n_timed, result.n_steps, result.notes) == (24, 24, 4, [])
    trace = Trace.read(tmp_path / "t")
    first = trace.events[trace.events["rank"] == 1].iloc[0]
    assert (first["func"], first["n_bytes"], first["dtype"]) == ("all_gather", 16384 * 2, "bfloat16")
    assert (first["seq"], first["step"], first["n_channels"], first["n_ranks"], first["n_nodes"]) == (101, 7, 24, 16, 2)
    assert first["algo"] == first["proto"] == "unknown"  # the kernel's name does not tell what ran
    enqueued = BASE + (4401160000000 + 101) * 1000
    assert (first["enqueue_ns"], first["start_ns"]) == (enqueued, enqueued + 50_250)
    assert first["end_ns"] - first["start_ns"] == 123_500
    assert sorted(set(trace.events["step"])) == [7, 8] and trace.steps["duration_ns"].tolist() == [5_000_000] * 4
    assert trace.header["nccl"] == "2.28.9" and trace.header["host"] is None and trace.header["source"] == "kineto"
    check = audit(trace.events)
    assert (check.calls_checked, check.mismatches) == (12, 0)  # the two files name the same communicator


def test_kineto_without_kernels_and_without_marks(tmp_path):
    document = kineto(0, kernels=False)
    document["traceEvents"] = [e for e in document["traceEvents"] if "ProfilerStep" not in e["name"]]
    del document["distributedInfo"]
    (tmp_path / "trace_rank_5.json").write_text(json.dumps(document))
    result = import_files("kineto", [tmp_path / "trace_rank_5.json"], tmp_path / "t")
    assert result.n_timed == 0 and result.n_events == 12
    assert any("no NCCL kernel" in n for n in result.notes) and any("calls, which repeat" in n for n in result.notes)
    events = Trace.read(tmp_path / "t").events
    assert set(events["rank"]) == {5} and len(set(events["step"])) > 2 and events["start_ns"].isna().all()


# Flight Recorder ----------------------------------------------------------------------------------


def flight(timing=True):
    entries = []
    for i, name in enumerate(["nccl:_all_gather_base", "nccl:_reduce_scatter_base", "nccl:barrier", "nccl:send 0->1"]):
        small, large = [[1024]], [[16, 1024]]
        scatter = "scatter" in name
        entry = {"record_id": i, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": i + 1}
        entry |= {"p2p_seq_id": 4, "is_p2p": "send" in name, "profiling_name": name, "state": "completed"}
        entry |= {"input_sizes": large if scatter else small, "output_sizes": small if scatter else large}
        entry |= {"input_dtypes": ["Float"], "output_dtypes": ["Float"], "time_created_ns": BASE + i * 1000}
        entry |= {"time_discovered_started_ns": BASE, "time_discovered_completed_ns": BASE + 10**7 if timing else None}
        entries.append({**entry, "duration_ms": 1.5 if timing else None, "frames": []})
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(16)))}}
    return {"version": "2.10", "entries": entries, "pg_config": config, "nccl_version": "2.28.9"}


@pytest.mark.parametrize("as_pickle", [True, False])
def test_flight_recorder(tmp_path, as_pickle):
    paths = [tmp_path / f"nccl_trace_rank_{rank}" for rank in (3, 4)]
    for path in paths:
        dump = {**flight(), "host": path.name}  # no two are the same
        path.write_bytes(pickle.dumps(dump) if as_pickle else json.dumps(dump).encode())
    result = import_files("flight-recorder", paths, tmp_path / "t")
    assert result.n_events == 6 and result.n_timed == 6
    events = Trace.read(tmp_path / "t").events
    mine = events[events["rank"] == 3]
    assert mine["func"].tolist() == ["all_gather", "reduce_scatter", "send"] and mine["seq"].tolist() == [1, 2, 4]
    assert mine["n_bytes"].tolist() == [16 * 1024 * 4] * 3 and set(mine["n_ranks"]) == {16}
    assert (mine["end_ns"] - mine["start_ns"]).tolist() == [1_500_000] * 3 and mine["enqueue_ns"].iloc[0] == BASE
    assert audit(events).calls_checked == 2


def test_flight_recorder_without_timing(tmp_path):
    (tmp_path / "dump0").write_bytes(pickle.dumps(flight(timing=False)))
    result = import_files("flight-recorder", [tmp_path / "dump0"], tmp_path / "t")
    assert result.n_timed == 0 and any("TORCH_NCCL_ENABLE_TIMING" in n for n in result.notes)


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "owned"), "w"))

    (tmp_path / "dump").write_bytes(pickle.dumps({"entries": [Evil()]}))
    with pytest.raises(TraceError, match="not a plain dump"):
        import_files("flight-recorder", [tmp_path / "dump"], tmp_path / "t")
    assert not (tmp_path / "owned").exists() and not (tmp_path / "t").exists()


def test_flight_recorder_of_a_real_job(tmp_path):
    """PyTorch's own dump, of a gloo job: the fields are those that this release writes."""
    code = """
import sys, torch, torch.distributed as dist
import torch._C._distributed_c10d as c10d
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
for _ in range(3):
    dist.all_gather([torch.zeros(1000, dtype=torch.bfloat16)], torch.zeros(1000, dtype=torch.bfloat16))
    dist.all_reduce(torch.zeros(100))
open(sys.argv[1] + "/rank_0.pickle", "wb").write(c10d._dump_fr_trace(True, False, False))
"""
    env = {"TORCH_FR_BUFFER_SIZE": "100", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env, capture_output=True, text=True)
    if not (tmp_path / "rank_0.pickle").exists():
        pytest.skip(f"this PyTorch records no gloo job: {done.stderr[-200:]}")
    import_files("flight-recorder", [tmp_path / "rank_0.pickle"], tmp_path / "t")
    events = Trace.read(tmp_path / "t").events
    assert events["func"].tolist() == ["all_gather", "all_reduce"] * 3
    assert events["n_bytes"].tolist() == [2000, 400] * 3 and events["dtype"].iloc[0] == "bfloat16"


# All of them --------------------------------------------------------------------------------------


def sources(folder):
    """A valid file of each format."""
    made = {"kineto": json.dumps(kineto(0)), "flight-recorder": json.dumps(flight())}
    for name, text in made.items():
        (folder / name).write_text(text)
    return {name: folder / name for name in made}


@pytest.mark.parametrize("source", FORMATS)
def test_what_was_imported_can_be_shown_and_reported(tmp_path, source):
    path = sources(tmp_path)[source]
    assert invoke(["show", str(path)]).exit_code == 0
    import_files(source, [path], tmp_path / "t")
    trace = Trace.read(tmp_path / "t")
    story = tell(trace, RunSummary())
    assert story["slots"]
    assert any(s["default_us"] for s in story["slots"])
    assert "What each collective costs" in write_report(tmp_path / "r.html", RunSummary(), trace).read_text()


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1, 2]", b"hello\nworld\n", b"\x80\x04\x95garbage", b'{"traceEvents": []}']
)
def test_files_of_another_kind_are_one_line_and_status_2(tmp_path, source, content):
    (tmp_path / "file").write_bytes(content)
    result = run_advise(source, tmp_path / "file", tmp_path / "t")
    assert result.exit_code == 2 and not (tmp_path / "t").exists()
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr


def test_formats_are_not_mistaken_for_one_another(tmp_path):
    for name, path in sources(tmp_path).items():
        for source in FORMATS:
            if source != name:
                assert run_advise(source, path, tmp_path / "t").exit_code == 2, (name, source)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("FILE", "--format", "nsight"), "unknown format 'nsight'"),
        (("missing.json",), "no file or folder missing.json"),
        (("FILE", "--ranks-per-node", "0"), "at least 1 rank"),
    ],
)
def test_bad_arguments(tmp_path, words, says):
    path = str(sources(tmp_path)["kineto"])
    words = [path if word == "FILE" else word for word in words]
    result = invoke(["advise", *words, "--cluster", "dgx-h100-2x8"])
    assert result.exit_code == 2 and says in result.stderr and result.stderr.count("\n") == 1


def test_a_folder_that_holds_a_trace_is_not_written_over(tmp_path):
    path = sources(tmp_path)["kineto"]
    import_files("kineto", [path], tmp_path / "full")
    with pytest.raises(TraceError, match="already holds a trace"):
        import_files("kineto", [path], tmp_path / "full")

"""Whose call it is, in one way for all formats: merged profiles, odd files beside good ones, launchers' prefixes."""

import gzip
import json
import pickle

import pytest
import recordings_made as made
from command import invoke
from dynamiccl.traces.importers.recording import read_recording
from dynamiccl.traces.outside import TraceError

COLUMNS = ["rank", "step", "comm_id", "func", "n_bytes", "start_ns", "end_ns"]


def ran(trace):
    """The calls in an order of their own."""
    return sorted(map(tuple, trace.events[COLUMNS].to_numpy().tolist()))


def merged(folder, change=lambda event, rank: None, ranks=True, info=True):
    """The made profiles of two ranks in one file, as tools merge them: each process and device gets a label.

    ``change`` alters an event; ``ranks``: calls say their rank.
    """
    apart = made.kineto(folder / "apart")
    events, other = [], {}
    for rank, path in enumerate(sorted(apart.iterdir())):
        document = json.loads(path.read_text())
        for event in document.pop("traceEvents"):
            event["pid"] = f"[TP0{rank}] {rank if event['cat'] == 'kernel' else 500 + rank}"
            if ranks and "Collective name" in event["args"]:
                event["args"] |= {"Rank": rank, "Process Group Description": "default_pg"}
            change(event, rank)
            events.append(event)
        other = other or document
    if not info:
        other.pop("distributedInfo")
    path = folder / "merged.json"
    path.write_text(json.dumps({**other, "traceEvents": events}))
    return path, apart


def shift(event, rank):
    """External ids that no two processes share."""
    if "External id" in event["args"]:
        event["args"]["External id"] += 100_000 * rank


@pytest.mark.parametrize("info", [True, False])
def test_a_merged_profile_is_split_by_process(tmp_path, info):
    """Before: one rank with twice the calls, 87 % of the step for 44 %, without a word."""
    path, apart = merged(tmp_path, info=info)
    one, two = read_recording([path]), read_recording([apart])
    assert ran(one) == ran(two) and len(one.compute) == len(two.compute)
    assert one.steps[["rank", "index", "duration_ns"]].equals(two.steps[["rank", "index", "duration_ns"]])


def test_a_merged_profile_is_advised_on_as_its_parts_are(tmp_path):
    told = []
    for path in merged(tmp_path):
        result = invoke(["advise", str(path), "--cluster", "dgx-h100-2x8", "--json"])
        told.append(json.loads(result.stdout))
    for key in ("communication", "possible", "step_ms"):
        assert told[0][key] == pytest.approx(told[1][key])
    assert [slot["share"] for slot in told[0]["slots"]] == [slot["share"] for slot in told[1]["slots"]]
    assert all(slot["share"] <= 1 for slot in told[0]["slots"])


def test_processes_that_tell_no_rank_are_numbered(tmp_path):
    path, apart = merged(tmp_path, change=shift, ranks=False)
    trace = read_recording([path])
    assert ran(trace) == ran(read_recording([apart]))
    assert any("they are numbered in the order of its processes" in note for note in trace.header["notes"])


def test_kernels_of_nobody_known_are_refused(tmp_path):
    """Each process sees its GPU as number 0, and nothing else tells whose a kernel is."""

    def one_device(event, rank):
        if event["cat"] == "kernel":
            event["pid"] = 0

    for ranks in (True, False):
        (tmp_path / str(ranks)).mkdir()
        path, _ = merged(tmp_path / str(ranks), change=one_device, ranks=ranks)
        with pytest.raises(TraceError, match=r"merged\.json holds 2 processes .* one a rank"):
            read_recording([path])


def test_calls_of_two_ranks_in_one_process_are_refused(tmp_path):
    """Merged by a tool that leaves no process ids."""
    path, _ = merged(tmp_path, change=lambda event, rank: event.pop("pid"))
    with pytest.raises(TraceError, match=r"holds calls of several ranks \(0, 1\)"):
        read_recording([path])


def test_the_root_of_a_broadcast_is_not_the_caller(tmp_path):
    def broadcast(event, rank):
        if event["args"].get("Collective name") == "reduce_scatter":
            event["args"] |= {"Collective name": "broadcast", "Rank": 1 - rank}

    path, _ = merged(tmp_path, change=broadcast)
    assert set(read_recording([path]).events["rank"]) == {0, 1}


# An odd file beside good ones -----------------------------------------------------------------------------------------


def flight_dump(*entries, **more):
    return json.dumps(
        {"version": "2.10", "pg_status": {}, "pg_config": {}, "entries": [*entries], **more}
    ).encode()


GLOO = {"profiling_name": "gloo:all_reduce", "process_group": ["0", "x"], "time_created_ns": 1}
#: Format -> (maker of good files, odd file's name, its content, what is said of it).
ODD = {
    "coordinator": (
        made.kineto,
        "async_llm.1.json",
        b'{"deviceProperties": [], "traceEvents": []}',
        "without a call",
    ),
    "cut profile": (made.kineto, "rank2.json", b'{"traceEvents": [{"ph": "X", "cat": "ke', "cut short"),
    "profile of gloo": (
        made.kineto,
        "rank2.json",
        b'{"traceEvents": [], "distributedInfo": {"backend": "gloo", "rank": 2}}',
        "is of gloo",
    ),
    "packed profile, cut": (
        made.kineto,
        "a.json.gz",
        gzip.compress(b'{"traceEvents": []}' * 99)[:40],
        "cannot read",
    ),
    "dump without calls": (made.flight, "nccl_trace_rank_2", flight_dump(), "holds no call"),
    "dump without entries": (made.flight, "nccl_trace_rank_2", b'{"pg_status": {}}', "it has no entries"),
    "cut dump": (made.flight, "nccl_trace_rank_2", flight_dump(GLOO)[:-9], "is not JSON"),
    "cut pickle": (made.flight, "nccl_trace_rank_2", pickle.dumps({"entries": [1]})[:-4], "no whole pickle"),
    "dump of gloo": (made.flight, "nccl_trace_rank_2", flight_dump(GLOO), "1 call of gloo"),
    "log of the Inspector": (made.inspector, "x.log", b'{"coll_perf": {"coll": \n', "is no whole log"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_file_is_left_out_and_named_and_the_rest_is_read(tmp_path, name):
    """Before: each of these refused the whole folder. After a crash the odd file is the normal case."""
    make, file, content, says = ODD[name]
    folder = make(tmp_path / "job")
    whole = read_recording([folder])
    (folder / file).write_bytes(content)
    trace = read_recording([folder])
    assert ran(trace) == ran(whole) or trace.events["start_ns"].isna().all()
    assert len(trace.events) == len(whole.events)
    left_out = [note for note in trace.header["notes"] if note not in whole.header["notes"]]
    assert len(left_out) == 1 and file in left_out[0], left_out
    assert "left out" in left_out[0] and (says in left_out[0] or "is left out: it is no" in left_out[0])
    for path in folder.iterdir():
        if path.name != file:
            path.unlink()
    with pytest.raises(TraceError, match=file if name != "coordinator" else "no collective|without a call"):
        read_recording([folder])


def test_one_entry_of_gloo_loses_no_call_of_nccl(tmp_path):
    """Before: the dump was refused, by a message that named no file."""
    folder = made.flight(tmp_path / "dumps", pickled=False)
    path = folder / "nccl_trace_rank_1"
    dump = json.loads(path.read_text())
    path.write_text(json.dumps({**dump, "entries": [GLOO, *dump["entries"]]}))
    trace = read_recording([folder])
    assert trace.events.groupby("rank").size().tolist() == [made.N_STEPS * len(made.STEP)] * 2
    assert "nccl_trace_rank_1: left out 1 call of gloo" in trace.header["notes"]


# What a launcher writes before a line of NCCL -------------------------------------------------------------------------

PREFIXES = {
    "none": "{}",
    "torchrun --tee": "[default0]:{}",
    "torchrun, role and rank": "[trainer3]:{}",
    "Open MPI 4 --tag-output": "[1,0]<stdout>:{}",
    "Open MPI 5": "[prterun-node7-1@1,0]<stdout>: {}",
    "srun --label": "0: {}",
    "a reset of colours": "\x1b[0m{}",
    "colours around": "\x1b[32m{}\x1b[0m",
    "tqdm": "Epoch 0:  50%|#####     | 5/10 [00:01<00:01]{}",
    "tqdm, carriage return": "Epoch 0:  50%|#####     | 5/10\r{}",
    "Docker's json-file": '{{"log":"{}\\n","stream":"stderr","time":"2026-11-29T05:00:00Z"}}',
    "Ray": "(RayTrainWorker pid=500, ip=10.0.0.7) {}",
    "kubectl --prefix": "[pod/train-0/main] {}",
    "compose": "train-1  | {}",
    "pdsh": "node7: {}",
    "Windows line ends": "{}\r",
}


@pytest.mark.parametrize("name", PREFIXES)
def test_launchers_write_before_nccls_lines(tmp_path, name):
    """Before: five of thirteen were "no collective in it that NCCL runs", torchrun's own prefix among them."""
    plain = made.nccl_log(tmp_path / "plain")
    path = tmp_path / "job.log"
    with path.open("w", newline="") as file:
        for line in plain.read_text().splitlines():
            file.write(PREFIXES[name].format(line) + "\n")
    told = [read_recording([one]).events.drop(columns="enqueue_ns") for one in (plain, path)]
    assert told[0].equals(told[1])


def test_lines_that_are_not_understood_are_counted_and_shown(tmp_path):
    path = tmp_path / "job.log"
    path.write_text("".join(f"node7-{n} says NCCL INFO something\n" for n in range(7)))
    with pytest.raises(TraceError, match=r"job\.log: 7 lines of NCCL, none understood, .*'node7-0 says NCCL"):
        read_recording([path])
    path.write_text("node7:500:500 [0] NCCL INFO NET/Socket : Using [0]eth0\n" * 3)
    with pytest.raises(
        TraceError, match=r"3 lines of NCCL, and none tells of a collective: log with NCCL_DEBUG"
    ):
        read_recording([path])


def test_what_follows_a_packed_file_is_no_fault_of_it(tmp_path):
    """Copied as text, or padded by a disk. Before: a line end there refused the file."""
    plain = made.nccl_log(tmp_path / "plain")
    for tail in (b"\r\n", b"\n", b"\x00" * 512):
        (tmp_path / "job.log.gz").write_bytes(gzip.compress(plain.read_bytes()) + tail)
        assert len(read_recording([tmp_path / "job.log.gz"]).events) == 2 * made.N_STEPS * len(made.STEP)


@pytest.mark.parametrize("name", made.MADE)
def test_each_format_is_read_as_well_where_gzip_packed_it(tmp_path, name):
    """Before: "no whole SQLite export (file is not a database)" of an export of Nsight Systems."""
    told = []
    for folder in (tmp_path / "plain", tmp_path / "packed"):
        folder.mkdir()
        path = made.MADE[name][1](folder)
        for file in (path.iterdir() if path.is_dir() else [path]) if folder.name == "packed" else []:
            file.write_bytes(gzip.compress(file.read_bytes()))
        told.append(read_recording([path]).events)
    assert told[0].equals(told[1])


def test_what_is_in_a_file_without_a_call_is_counted(tmp_path):
    """As NCCL's example profiler writes it, or a profile of another process."""
    (tmp_path / "a.json").write_text(
        json.dumps({"traceEvents": [{"ph": "X", "name": "AllReduce", "ts": 1}] * 3})
    )
    with pytest.raises(TraceError, match=r"a\.json: 3 events, and no collective that NCCL runs among them"):
        read_recording([tmp_path / "a.json"])


# Bytes ----------------------------------------------------------------------------------------------------------------


def test_a_text_that_is_no_utf_8_refuses_no_export(tmp_path):
    """Before: "no whole SQLite export (Could not decode to UTF-8 ...)". Kineto's reader mended it always."""
    import sqlite3
    from contextlib import closing

    path = made.nsys(tmp_path / "a.sqlite")
    with closing(sqlite3.connect(path)) as base:
        base.execute("INSERT INTO StringIds VALUES (999, CAST(x'6b65726ee96c' AS TEXT))")
        row = (made.BASE, made.BASE + 5, 999, None, (500 << 24) + 1, None)
        base.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)", row)
        base.commit()
    assert len(read_recording([path]).events) == 2 * made.N_STEPS * len(made.STEP)

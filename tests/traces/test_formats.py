"""The formats of other tools: each is recognised by its first bytes, read as the job was, and survives damage."""

import gzip
import json
import os
import pickle
import sqlite3
from contextlib import closing

import pytest
import recordings_made as made
from command import invoke
from dynamiccl.traces.files import TraceError
from dynamiccl.traces.importers.formats import FORMATS, detect
from dynamiccl.traces.importers.recording import read_recording
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recordings_made import MADE
from test_traces_importers import kineto

KINDS = [(func, n_bytes) for func, n_bytes, *_ in made.STEP]
LASTS = [us for *_, us in made.STEP]


@pytest.mark.parametrize("name", MADE)
def test_each_format_is_read_as_the_job_was(tmp_path, name):
    """Before: all but Kineto's were refused as "is not text" or "is not JSON"."""
    kind, make, knows = MADE[name]
    trace = read_recording([make(tmp_path)], ranks_per_node=8)
    assert trace.header["source"] == kind and sorted(trace.events["rank"].unique()) == [0, 1]
    for _, one in trace.events.groupby("rank"):
        one = one.sort_values("seq") if kind != "kineto" else one
        one = one.sort_values("enqueue_ns", kind="stable")
        assert list(zip(one["func"], one["n_bytes"], strict=True)) == KINDS * made.N_STEPS
        assert set(one["n_ranks"]) == {16} and set(one["n_nodes"]) == {2} and one["comm_id"].nunique() == 1
        lasts = ((one["end_ns"] - one["start_ns"]) / 1000).tolist()
        assert lasts == LASTS * made.N_STEPS if "times" in knows else one["start_ns"].isna().all()
        choice = set(one["algo"] + "/" + one["proto"])
        assert choice == ({"ring/ll128"} if "choice" in knows else {"unknown/unknown"})
        if "channels" in knows:
            assert set(one["n_channels"]) == {made.CHANNELS}
    assert len(trace.steps) == (2 * made.N_STEPS if "steps" in knows else 0)
    assert ("no steps" in " ".join(trace.header["notes"])) == (
        "steps" not in knows
    )  # what is missing is said


@pytest.mark.parametrize("name", [name for name in MADE if "steps" not in MADE[name][2]])
def test_a_recording_without_steps_shows_the_slots_and_says_what_is_missing(tmp_path, name):
    _, make, knows = MADE[name]
    path = make(tmp_path)
    told = json.loads(invoke(["advise", str(path), "--json"]).stdout)
    text = invoke(["advise", str(path)]).stdout
    assert {slot["slot"] for slot in told["slots"]} == {"all_gather 33-64 MiB", "reduce_scatter 33-64 MiB"}
    assert text.startswith(told["verdict"]) and "all_gather 33-64 MiB" in text
    gather = told["slots"][0]
    assert gather["calls"] == 2 * made.N_STEPS
    assert (gather["call_us"] is not None) == ("times" in knows)
    assert ("ring/ll128" in str(gather["own"])) == ("choice" in knows)
    assert "--cluster" not in told["verdict"] and told["unknown"]
    shown = json.loads(invoke(["show", str(path), "--json"]).stdout)
    assert len(shown["slots"]) == 2 and "other tools" not in invoke(["show", str(path)]).stdout


#: What is recognised and not read: content, name, what the line says.
REFUSED = {
    "nccl-tests": (
        b"# nThread 1 nGpus 8 minBytes 8 maxBytes 1073741824\n#\n",
        "f.txt",
        "of nccl-tests: it measures",
    ),
    "nccl-tests json": (
        b'{"version": 1, "results": [{"size": 8, "out_of_place": {}}]}',
        "f",
        "of nccl-tests",
    ),
    "report": (b"\x00\x01", "run.nsys-rep", "nsys export --type sqlite"),
    "execution trace": (
        b'{\n  "schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": []}',
        "f",
        "export_chrome_trace",
    ),
    "zip": (b"PK\x03\x04" + b'"traceEvents": [', "f", "a zip archive: unpack it"),
    "zstd": (b"\x28\xb5\x2f\xfd\x00", "f.json.zst", "unpack it first"),
    "deepspeed": (b"Comm. Op            Message Size        Count\n", "f", "it has sums only"),
    "nothing known": (b"rank 0, second week\n", "notes.txt", "is no recording that we know: give a"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("command", ["advise", "show"])
def test_what_is_recognised_and_not_read_says_the_cure(tmp_path, name, command):
    content, file, says = REFUSED[name]
    (tmp_path / file).write_bytes(content)
    result = invoke([command, str(tmp_path / file)])
    assert result.exit_code == 2 and says in result.stderr and result.stderr.count("\n") == 1, result.stderr


def test_formats_are_told_by_their_first_bytes_not_by_their_names(tmp_path):
    names = {}
    for name, (kind, make, _) in MADE.items():
        (tmp_path / name).mkdir()
        path = make(tmp_path / name)
        file = sorted(path.iterdir())[0] if path.is_dir() else path
        for packed in (False, True):
            other = tmp_path / f"{len(names)}.bin"
            data = file.read_bytes()
            other.write_bytes(gzip.compress(data) if packed else data)
            names[other] = kind
    assert {file: detect(file).name for file in names} == names
    assert {known.name for known in FORMATS if known.reader} == set(names.values())


def test_a_folder_with_one_foreign_file_still_works(tmp_path):
    """Before: one foreign JSON stopped the whole import."""
    folder = made.kineto(tmp_path / "r")
    (folder / "config.json").write_text('{"lr": 0.1}')
    (folder / "table.txt").write_text("# nThread 1 nGpus 8\n")
    trace = read_recording([folder])
    assert len(trace.events) == 2 * made.N_STEPS * len(made.STEP)
    notes = trace.header["notes"]
    assert "config.json is left out: it is no profile of PyTorch" in notes
    assert "table.txt is left out: it is a result of nccl-tests" in notes
    made.nsys(folder / "a.sqlite")
    with pytest.raises(
        TraceError, match=r"a\.sqlite is an export of Nsight Systems, .*: give the files of one"
    ):
        read_recording([folder])


# Ranks and calls of one run, once ---------------------------------------------------------------------------


def test_two_exports_of_one_rank_are_refused_by_name(tmp_path):
    made.nsys(tmp_path / "a.sqlite", ranks=(0,))
    made.nsys(tmp_path / "b.sqlite", ranks=(0,), payloads=False)
    with pytest.raises(TraceError, match=r"a\.sqlite and .*b\.sqlite both hold step 0 of rank 0"):
        read_recording([tmp_path])
    for name in ("c", "d"):
        (tmp_path / name).mkdir()
        made.nsys(tmp_path / name / "x.sqlite", ranks=(0,), told_ranks=False, steps=name == "c")
    with pytest.raises(TraceError, match="does not say which rank it is of: name the files rank0"):
        read_recording([tmp_path / "c" / "x.sqlite", tmp_path / "d" / "x.sqlite"])


@pytest.mark.parametrize("make", [made.inspector, made.flight])
def test_a_call_of_a_rank_in_two_files_is_refused_by_name(tmp_path, make):
    folder = make(tmp_path / "r")
    first = sorted(folder.iterdir())[0]
    data = first.read_bytes()
    other = pickle.dumps({**pickle.loads(data), "version": "2.11"}) if make is made.flight else data + b"\n"
    (folder / f"copy_of_{first.name}").write_bytes(other)
    with pytest.raises(TraceError, match=f"{first.name} .*both hold"):
        read_recording([folder])


def test_a_process_of_several_gpus_is_refused(tmp_path):
    path = made.nsys(tmp_path / "a.sqlite", ranks=(0,))
    with closing(sqlite3.connect(path)) as base:
        base.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = 1 WHERE correlationId % 2")
        base.commit()
    with pytest.raises(TraceError, match="a process uses several GPUs"):
        read_recording([path])


def test_kernels_whose_range_tells_no_size_are_counted_with_the_cure(tmp_path):
    with pytest.raises(TraceError, match=r"36 calls of NCCL, and none says .*--include-json true"):
        read_recording([made.nsys(tmp_path / "a.sqlite", payloads=False)])
    path = made.nsys(tmp_path / "b.sqlite")
    with closing(sqlite3.connect(path)) as base:
        scatters = "(SELECT id FROM StringIds WHERE value = 'ncclReduceScatter')"
        base.execute(f"UPDATE NVTX_EVENTS SET jsonText = NULL WHERE textId = {scatters}")
        base.commit()
    trace = read_recording([path])
    assert len(trace.events) == 24
    assert trace.header["notes"][0].startswith("12 of 36 calls of NCCL, 38% of NCCL's time, do not say")


def test_a_choice_without_its_call_is_counted(tmp_path):
    path = made.nccl_log(tmp_path / "log")
    text = "".join(line for line in path.open() if "opCount 3 " not in line)
    path.write_text(text)
    notes = read_recording([path]).header["notes"]
    assert any(n.startswith("2 choices of NCCL are of calls that the log does not hold") for n in notes)


# Damage and malice --------------------------------------------------------------------------------------------


class Runs:
    """Unpickled by a careless reader it would run a command."""

    def __reduce__(self):
        return os.system, ("touch /tmp/pwned",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"entries": [Runs()]}),
        pickle.dumps({"entries": []})[:-4],
        b"\x80\x04\x95" + b"\xff" * 8,
        b"\x80\x02r\xff\xff\xff\x7f.",  # a place in the memo that takes gigabytes
        b'{"pg_status": {}, "entries": [{"collective_seq_id": ',
        pickle.dumps({"version": "2.10", "entries": 7, "pg_status": {}}),
    ],
)
def test_no_pickle_runs_code_or_takes_the_memory(tmp_path, data):
    (tmp_path / "dump_0").write_bytes(data)
    result = invoke(["advise", str(tmp_path / "dump_0")])
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.stderr


def test_a_pickle_whose_lists_grow_without_end_is_read_in_little_time(tmp_path):
    """Each list holds the one before ten times: as text it would take terabytes."""
    grown = ["x"]
    for _ in range(12):
        grown = [grown] * 10
    entry = {"profiling_name": grown, "process_group": grown, "input_sizes": grown}
    entries = [entry, {**entry, "profiling_name": "nccl:all_reduce"}]
    (tmp_path / "dump_0").write_bytes(pickle.dumps({"entries": entries, "pg_status": {}, "pg_config": {}}))
    result = invoke(["advise", str(tmp_path / "dump_0")])
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.stderr


def small(name):
    """A small file of a format, made once for the property test below."""
    if name not in _SMALL:
        import tempfile
        from pathlib import Path

        with tempfile.TemporaryDirectory() as folder:
            path = MADE[name][1](Path(folder))
            file = sorted(path.iterdir())[0] if path.is_dir() else path
            _SMALL[name] = file.read_bytes()
    return _SMALL[name]


_SMALL = {}


@pytest.mark.parametrize("name", ["kineto", "nsys", "inspector", "log of names", "pickle", "flight json"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    places=st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=6)), min_size=1, max_size=4),
    cut=st.one_of(st.none(), st.floats(0, 1)),
)
def test_damaged_files_are_read_or_refused_in_one_line(tmp_path, name, places, cut):
    """Bytes overwritten at random places, and a random end: a trace or a TraceError, never another error."""
    data = bytearray(small(name))
    for where, new in places:
        at = int(where * (len(data) - len(new)))
        data[at : at + len(new)] = new
    path = tmp_path / "rank0.file"
    path.write_bytes(data if cut is None else data[: int(cut * len(data))])
    try:
        trace = read_recording([path])
    except TraceError as error:
        assert "\n" not in str(error)
    else:
        assert len(trace.events) <= 2 * made.N_STEPS * len(made.STEP)


#: One event that is no JSON, of no interest: how it is written, and whether it can be mended.
BAD = {
    "inf": (b'{"ph": "X", "cat": "gpu_memcpy", "args": {"memory bandwidth (GB/s)": inf}}', True),
    "nan": (b'{"ph": "X", "cat": "gpu_memcpy", "args": {"x": [-nan, Infinity]}}', True),
    "control character": (b'{"ph": "X", "name": "S(1): \x01<module>"}', True),
    "bad UTF-8": (b'{"ph": "X", "name": "kname-\x9f\xff"}', True),
    "unescaped quote": (b'{"ph": "X", "name": "{"device": "cpu", "dtype": "float32"}(12): run"}', False),
    "two quotes": (b'{"ph": "X", "name": "a "},{" b"}', False),
    "open text": (b'{"ph": "X", "name": "C:\\", "pid": 1}', False),
}


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bad=st.lists(st.tuples(st.sampled_from(sorted(BAD)), st.integers(0, 27)), min_size=1, max_size=4),
    block=st.sampled_from([700, 4096, 1 << 21]),
    indent=st.sampled_from([None, 2]),
)
def test_bad_events_anywhere_lose_no_other(tmp_path, bad, block, indent):
    """Before: the whole file was refused, with a hint that misled."""
    from dynamiccl.traces import outside

    document = kineto(0)
    events = document.pop("traceEvents")
    texts = [json.dumps(event, indent=indent).encode() for event in events]
    for kind, at in bad:
        texts.insert(at, BAD[kind][0])
    other = json.dumps(document).encode()[1:]
    path = tmp_path / "rank0.json"
    path.write_bytes(b'{"traceEvents": [' + b", ".join(texts) + b"], " + other)
    before, outside.BLOCK = outside.BLOCK, block
    try:
        trace = read_recording([path])
    finally:
        outside.BLOCK = before
    assert len(trace.events) == 12 and len(trace.steps) == 2 and trace.header["nccl"] == "2.28.9"
    told = " ".join(trace.header["notes"])
    assert ("no JSON" in told) == any(not BAD[kind][1] for kind, _ in bad)
    assert ("inf or nan, control characters or bad UTF-8" in told) == any(BAD[kind][1] for kind, _ in bad)

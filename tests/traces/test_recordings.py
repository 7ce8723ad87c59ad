"""Recordings as they come: of several ranks, damaged, hostile; placed on a cluster, and replayed."""

import gzip
import json
import re
import subprocess
import sys
import tracemalloc
import zipfile

import make_profile
import numpy as np
import pytest
import recordings_made
from dynamiccl.agent.advice.advise import read
from dynamiccl.envs.replay.decisions import load
from dynamiccl.envs.replay.recordings import named, on_cluster
from dynamiccl.envs.replay_env import ReplayEnv
from dynamiccl.envs.search.observation import N_OBSERVATION
from dynamiccl.traces import outside
from dynamiccl.traces.files import TraceError
from dynamiccl.traces.importers import json_stream
from dynamiccl.traces.importers.recording import read_recording
from paths import DATA
from test_traces_importers import kineto, profile, run_advise


def test_a_profile_is_replayed_on_a_named_cluster(tmp_path):
    trace = on_cluster(read_recording([profile(tmp_path)]), named("dgx-h100-2x8"))
    recorded = load(trace)
    assert len(recorded.slots) >= 1 and np.isfinite(recorded.default_ms) and recorded.default_ms > 0
    assert not recorded.measured[:, 1:].any()  # nothing but NCCL's own choice was ever run
    env = ReplayEnv(trace)
    assert env.reset(seed=0)[0].shape == (N_OBSERVATION,) and env.search.open.sum() > 4
    notes = " ".join(trace.header["notes"])
    assert "taken to be NCCL's default" in notes  # it does not tell algorithm and protocol


def alone(path):
    """The recording as if it were of a group of one rank."""
    trace = read_recording([path])
    trace.events = trace.events.assign(n_ranks=1, n_nodes=1)
    return trace


def test_a_replay_needs_a_cluster_and_says_so(tmp_path):
    path = profile(tmp_path)
    with pytest.raises(TraceError, match="--cluster"):
        read([path])
    with pytest.raises(TraceError, match="record all ranks, or the size of their group"):
        on_cluster(alone(path), named("dgx-h100-2x8"))
    with pytest.raises(TraceError, match="16 ranks on 1 nodes do not lie evenly"):
        on_cluster(read_recording([path], ranks_per_node=16), named("dgx-h100-2x8"))


HOSTILE = {
    "nested": lambda: b'{"traceEvents": [{"args": ' + b"[" * 200_000,
    "nested whole": lambda: b'{"entries": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "nested object": lambda: b'{"a": ' * 200_000,
    "bomb": lambda: gzip.compress(b'{"traceEvents": [' + b" " * (200 << 20), 1),
    "bomb of a text": lambda: gzip.compress(b'{"traceEvents": ["' + b"a" * (200 << 20), 1),
    "gzip cut": lambda: gzip.compress(b'{"traceEvents": [{"ph": "X"}]}' * 1000)[:60],
    "wrong types": lambda: (
        b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": 7, "args": 3, "ts": "x", "dur": {}}]}'
    ),
    "quotes": lambda: b'{"traceEvents": [{"a": "' + b'\\"' * 60_000,
    "binary": lambda: bytes(range(256)) * 100,
}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Path of each, made once."""
    made = {}

    def path(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("hostile") / "file"
            made[name].write_bytes(HOSTILE[name]())
        return made[name]

    return path


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_one_line_in_little_memory(tmp_path, hostile, name):
    path = hostile(name)
    tracemalloc.start()
    result = run_advise(path, tmp_path / "t")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert result.exit_code == 2 and not (tmp_path / "t").exists(), name
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert peak < 200 << 20


def test_a_profile_cut_anywhere_is_refused_and_whole_in_any_block_size(tmp_path, monkeypatch):
    document = kineto(0)
    document["traceEvents"][2]["args"]["note"] = 'a "},{" in a text, \\ and ]'
    text = json.dumps(document)
    whole = None
    for block in (1 << 21, 4096, 700, 61):
        monkeypatch.setattr(outside, "BLOCK", block)
        for spaces in (text, json.dumps(document, indent=2)):
            (tmp_path / "f").write_text(spaces)
            trace = read_recording([tmp_path / "f"])
            whole = whole if whole is not None else trace.events
            assert trace.events.equals(whole) and trace.header["nccl"] == "2.28.9"
    end = text.index('"distributedInfo"')
    for cut in (40, 500, end // 2, end - 5):
        (tmp_path / "f").write_text(text[:cut])
        with pytest.raises(TraceError, match=r"cut short|not JSON"):
            read_recording([tmp_path / "f"])


def test_the_made_job_is_read_as_it_was_made(tmp_path):
    trace = on_cluster(
        read_recording([recordings_made.kineto(tmp_path / "recording")]), named("dgx-h100-2x8")
    )
    one = trace.events[trace.events["rank"] == 0]
    kinds = [(func, n_bytes) for func, n_bytes, *_ in recordings_made.STEP]
    assert list(zip(one["func"], one["n_bytes"], strict=True)) == kinds * recordings_made.N_STEPS
    assert set(one["n_ranks"]) == {16} and set(one["n_nodes"]) == {2} and set(one["n_channels"]) == {16}
    lasts = ((one["end_ns"] - one["start_ns"]) / 1000).tolist()
    assert lasts == [us for *_, us in recordings_made.STEP] * recordings_made.N_STEPS
    assert trace.events["rank"].nunique() == 2 and len(trace.compute) == 2 * 20 * recordings_made.N_STEPS
    assert abs(trace.steps["duration_ns"].median() - 1000 * recordings_made.STEP_US) <= 1000
    assert set(one.groupby("step").size()) == {3}


REAL = DATA / "recordings"


@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_pytorchs_own_profile_is_read_whole_and_told_to_be_of_gloo(kind, monkeypatch):
    """Made by ``make_recordings.py``, which has no GPU: its times say nothing of NCCL."""
    path = REAL / f"{kind}-rank0.json.gz"
    whole = json.loads(gzip.decompress(path.read_bytes()))
    events = whole.pop("traceEvents")
    for block in (2 << 20, 20_000, 997):
        monkeypatch.setattr(outside, "BLOCK", block)
        seen = []
        assert json_stream.read_elements(path, "traceEvents", seen.extend) == whole
        assert seen == events
    with pytest.raises(TraceError, match="is of gloo, whose times say nothing of NCCL"):
        read_recording([path])


def test_a_large_profile_is_read_in_little_memory(tmp_path):
    """In a process of its own; ``make_profile.py`` measures a GiB in the same way."""
    n_steps = make_profile.write(tmp_path / "big.json", 48)
    command = [sys.executable, make_profile.__file__, str(tmp_path / "big.json"), "--read"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    events, steps, kernels, _, peak = (float(word) for word in done.stdout.split())
    assert (events, steps) == (n_steps * make_profile.LAYERS, n_steps)
    assert kernels == n_steps * make_profile.LAYERS * make_profile.OPERATORS / 2
    assert peak < 350  # of which the libraries take most; read whole it were over a GiB


def test_the_same_file_twice_is_refused(tmp_path):
    """Before: it was read as two ranks, without a word."""
    document = json.dumps(kineto(0))
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(document)
    for paths in ([tmp_path], [tmp_path / "a.json"] * 2):
        with pytest.raises(TraceError, match=r"are the same: give one file a rank"):
            read_recording(paths)


def test_a_foreign_file_in_a_folder_is_left_out_by_name(tmp_path):
    """Before: it stopped the whole import."""
    (tmp_path / "a.json").write_text(json.dumps(kineto(0)))
    (tmp_path / "README.md").write_text("rank 0, second week\n")
    trace = read_recording([tmp_path])
    assert "README.md is left out: it is no profile of PyTorch" in trace.header["notes"]
    assert trace.header["files"] == [str(tmp_path / "a.json")] and len(trace.events) == 12
    with pytest.raises(TraceError, match=r"README\.md is no recording that we know: give "):
        read_recording([tmp_path / "README.md"])
    (tmp_path / "a.json").unlink()
    with pytest.raises(TraceError, match=r"no recording in .*: give "):
        read_recording([tmp_path])


def test_a_zip_is_refused(tmp_path):
    """Before: "str is not valid UTF-8: surrogates not allowed"."""
    with zipfile.ZipFile(tmp_path / "profiles.zip", "w") as archive:
        archive.writestr("a.json", json.dumps(kineto(0)))
    with pytest.raises(TraceError, match=r"profiles\.zip is a zip archive: unpack it"):
        read_recording([tmp_path / "profiles.zip"])


@pytest.mark.parametrize("name", ["wrong types", "binary"])
def test_what_is_wrong_is_not_said_in_pythons_words(hostile, name):
    """Before: "ValueError: invalid literal for int()", "'list' object has no attribute 'get'"."""
    with pytest.raises(TraceError) as refused:
        read_recording([hostile(name)])
    assert not re.search(r"Error|object|literal|surrogates|NoneType", str(refused.value)), refused.value

"""Every command on what comes from outside: names, files, configuration lines and models that are not as expected.

One property: a result, or one line that names what was seen; never a traceback.
"""

import base64
import gzip
import json
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

import pytest
from command import invoke, start
from dynamiccl.agent.report.html.report import write_report
from dynamiccl.agent.report.summary import RunSummary
from dynamiccl.traces.files import Trace
from dynamiccl.traces.outside import shown
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paths import DATA

DEMO = DATA / "recordings" / "demo"
#: A name in latin-1, one that ends the line, one with the signs of other formats.
NAMES = [b"r\xfcn", b"a\nb", b'x" {}\\%s', b"-x", "\u202e\u2028".encode(), b"\x1b[31m"]
#: What a file may hold in place of what a command expects.
CONTENTS = {
    "nothing": b"",
    "a line end": b"\r\n",
    "bytes": bytes(range(256)),
    "latin-1": b"# f\xfcr alle\n",
    "UTF-16": '{"traceEvents": []}'.encode("utf-16"),
    "a list": b"[1, 2]",
    "an object": b"{}",
    "a deep list": b"[" * 5000,
    "large numbers": b'{"n": 1e999, "m": 1' + b"0" * 400 + b"}",
    "cut, packed": gzip.compress(b'{"traceEvents": []}' * 99)[:50],
    "packed twice": gzip.compress(gzip.compress(b'{"traceEvents": []}')),
    "a tuner's CSV": b"collective_type,min_bytes,max_bytes,algorithm,protocol\nallreduce,0,1,ring,ll\n",
    "Perfetto": b"\n\x9f\x01\x08\x01\x12" * 9,
    "SQLite": b"SQLite format 3\x00" + b"\x10\x00" * 50,
    "a pickle": b"\x80\x04\x95\xff\xff",
    "a log": b"node7-x says NCCL INFO hello\n",
    "a zip": b"PK\x03\x04" + b"\x00" * 40,
    "Parquet": b"PAR1" + b"\x00" * 40 + b"PAR1",
}
#: Commands that take the path of a file or a folder: how it is given.
COMMANDS = {
    "show": lambda path: ["show", path],
    "advise": lambda path: ["advise", path],
    "advise, two": lambda path: ["advise", path, DEMO],
    "doctor --trace": lambda path: ["doctor", "--trace", path],
    "top": lambda path: ["top", "--once", path],
    "stop": lambda path: ["stop", path],
    "plan": lambda path: ["plan", path],
    "apply": lambda path: ["apply", path, "--", "true"],
    "bench --submission": lambda path: ["bench", "--submission", path, "--jobs", "1"],
    "bench --suite": lambda path: ["bench", "--suite", f"{path}.json"],
    "tune --policy, weights": lambda path: ["tune", "--policy", f"{path}.npz", "--", "true"],
    "tune --policy, model": lambda path: ["tune", "--policy", f"{path}.zip", "--", "true"],
    "tune --cluster": lambda path: ["tune", "--cluster", f"{path}.toml", "--", "true"],
    "sweep --judge": lambda path: ["sweep", "--judge", path],
    "sweep --trace": lambda path: ["sweep", "--trace", path, "--cluster", "dgx-h100-2x8"],
    "lab gpu-check": lambda path: ["lab", "gpu-check", path],
    "advise --cluster": lambda path: ["advise", DEMO, "--cluster", f"{path}.toml"],
}


def answers(words):
    """What a command says of odd things: an answer, or one line of an error."""
    told = invoke(words)
    assert told.exit_code in (0, 1, 2), told.output
    assert "Traceback" not in told.output
    if told.exit_code == 2:
        lines = [line for line in told.stderr.split("\n") if not line.startswith(("loading ", "reading "))]
        assert [line[:7] for line in lines] == ["error: ", ""], told.stderr
        assert len(lines[0]) > 20
    return told


@pytest.mark.parametrize("command", COMMANDS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(NAMES),
    content=st.one_of(st.sampled_from(sorted(CONTENTS)), st.binary(max_size=60)),
    as_folder=st.booleans(),
)
def test_every_command_answers_on_odd_names_and_files(command, name, content, as_folder):
    data = CONTENTS.get(content, content) if isinstance(content, str) else content
    with tempfile.TemporaryDirectory() as folder:
        path = Path(os.fsdecode(os.fsencode(folder) + b"/" + name))
        if as_folder:
            path.mkdir()
        names = ("header.json", "rank0.json", "manifest.json", "rows.csv", "run.json", "sweep.csv")
        for file in [path / one for one in names] if as_folder else [path]:
            file.write_bytes(data)
        for ending in (".json", ".toml", ".npz", ".zip"):
            path.with_name(path.name + ending).write_bytes(data)
        before = os.getcwd()
        os.chdir(folder)  # where a command would leave what it makes
        try:
            told = answers(COMMANDS[command](path))
        finally:
            os.chdir(before)
        if told.exit_code == 2:
            seen = (shown(path.name), ascii(path.name)[1:-1], str(DEMO))
            assert any(one in told.stderr for one in seen), told.stderr


# Folders of results below a path that is no UTF-8 ---------------------------------------------------------------------


@pytest.fixture
def below(tmp_path):
    """The results of a run below such a path, and of one below a plain one."""
    found = []
    for name in (b"r\xfcn", b"plain"):
        path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
        shutil.copytree(DEMO, path / "trace")
        found.append(path)
    return found


@pytest.mark.parametrize("words", [("show",), ("advise",), ("doctor", "--trace")])
def test_results_below_such_a_path_read_as_others(below, words):
    """Before: `show` ended in pyarrow's traceback, `advise` and `doctor` said of whole files "damaged: remove it"."""
    texts = [answers([*words, path, "--json"]).stdout for path in below]
    told = [json.loads(text) for text in texts]
    for one in told:
        for key in ("recording", "folder"):
            one.pop(key, None)
        one.get("checked", {}).pop("shared memory", None)  # others use it meanwhile
    assert told[0] == told[1] and "damaged" not in texts[0]


def test_a_trace_is_written_and_reported_below_such_a_path(below):
    """Before: no report.html, "could not be made"."""
    trace = Trace.read(below[0])
    html = write_report(below[0] / "report.html", RunSummary(), trace).read_text(encoding="utf-8")
    assert "r\\xfcn" in html
    frame = trace.events.iloc[:3]
    from dynamiccl.traces.segments import IN_PARTS_OF, read_parquet, write_parquet

    write_parquet(below[0] / "events-00009.parquet", frame, IN_PARTS_OF["events"])
    assert len(read_parquet(below[0] / "events-00009.parquet", IN_PARTS_OF["events"])) == 3


def test_one_name_that_is_no_utf_8_stops_the_metrics_of_no_run(below, tmp_path):
    """Before: a traceback, no metrics of any run, and a draft every 15 s."""
    for path in below:
        (path / "trace" / "header.json").touch()
    metrics = tmp_path / "x.prom"
    before = os.umask(0o077)
    try:
        told = answers(["top", tmp_path, "--once", "--metrics", metrics])
    finally:
        os.umask(before)
    assert told.exit_code == 0, told.output
    text = metrics.read_text(encoding="utf-8")
    assert (
        f'dynamiccl_tuner_up{{run="{tmp_path}/r\\\\xfcn"}} 0.0' in text and f'run="{tmp_path}/plain"' in text
    )
    assert not list(tmp_path.glob("*.tmp")) and metrics.stat().st_mode & 0o777 == 0o644


def test_a_folder_that_is_given_under_two_paths_is_one(below, tmp_path):
    (tmp_path / "link").symlink_to(below[1])
    told = answers(["top", below[1], tmp_path / "link", "--once", "--json"])
    assert told.stdout.count('"job"') == 1


def test_the_terminal_gets_no_byte_that_is_no_utf_8(below):
    done = start("show", below[0])
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


# Configuration lines --------------------------------------------------------------------------------------------------

#: Lines of NCCL_CONF_FILE -> names of what `doctor` must say, what its words must hold.
CONF = {
    "first wins": (b"NCCL_PROTO=Simple\nNCCL_PROTO=LL\n", {"narrowed offer"}, "NCCL_PROTO=Simple takes"),
    "comment behind": (
        b"NCCL_PROTO=Simple # safe here\n",
        {"more than a value"},
        "NCCL_PROTO=Simple # safe here",
    ),
    "DOS line end": (b"NCCL_PROTO=Simple\r\n", {"more than a value"}, "NCCL_PROTO=Simple\\x0d"),
    "space before": (b" NCCL_PROTO=LL\n NCCL_CTA_POLICY=2\n", set(), ""),
    "latin-1 in a comment": (
        b"# f\xfcr alle\nNCCL_ALGO=Tree\nNCCL_PROFILER_PLUGIN=other\n",
        {"nothing offered", "NCCL_PROFILER_PLUGIN"},
        "NCCL_ALGO=Tree",
    ),
    "no text": (bytes(range(256)) * 3, set(), ""),
}


@pytest.mark.parametrize("name", CONF)
def test_doctor_reads_conf_lines_as_nccl_does(tmp_path, monkeypatch, name):
    """Before: the last line won, comments behind a value were cut off, and one byte in latin-1 hid the whole file."""
    text, names, words = CONF[name]
    (tmp_path / "nccl.conf").write_bytes(text)
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "nccl.conf"))
    told = json.loads(answers(["doctor", "--json"]).stdout)
    found = {one["name"]: one["what"] for one in told["findings"]}
    assert names <= found.keys() and (names or not found), found
    assert not words or any(words in what for what in found.values()), found
    assert answers(["doctor"]).stdout.count("\n") < 30


# Models ---------------------------------------------------------------------------------------------------------------


def edited(source, target, change):
    """A copy of a model of stable-baselines3 whose settings are changed."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name == "data":
                data = json.dumps(change(json.loads(data))).encode()
            new.writestr(name, data)
    return target


def of_another_python(told):
    """Schedules as another Python pickles them: this one raises TypeError."""
    odd = {
        ":type:": "<class 'function'>",
        ":serialized:": base64.b64encode(b"cbuiltins\nint\n(I1\nI2\nI3\ntR.").decode(),
    }
    return told | {name: odd for name in ("clip_range", "learning_rate", "lr_schedule") if name in told}


@pytest.mark.parametrize("name", ["PPO", "RecurrentPPO"])
def test_models_of_another_python_load_as_stable_baselines_loads_them(tmp_path, name):
    """Before: "is a model of none of RecurrentPPO, MaskablePPO, PPO, A2C (its policy class is ActorCriticPolicy)"."""
    import gymnasium
    import numpy as np
    from dynamiccl.agent.policies.choosing import make_chooser
    from sb3_contrib import RecurrentPPO
    from stable_baselines3 import PPO

    env = gymnasium.make("dynamiccl/Sim-v0")
    made, policy = (PPO, "MlpPolicy") if name == "PPO" else (RecurrentPPO, "MlpLstmPolicy")
    made(policy, env, n_steps=16, batch_size=16, device="cpu").save(tmp_path / "model.zip")
    path = edited(tmp_path / "model.zip", tmp_path / "other.zip", of_another_python)
    found = [make_chooser(str(file)) for file in (tmp_path / "model.zip", path)]
    assert type(found[0]) is type(found[1])
    observation, _ = env.reset(seed=0)
    actions = [one.predict(observation[None], None, np.array([True]), True)[0] for one in found]
    assert np.array_equal(*actions)


# The help -------------------------------------------------------------------------------------------------------------


def test_an_image_that_optimizes_python_keeps_the_help():
    """PYTHONOPTIMIZE=2 takes docstrings away. Before: 68 lines for 101."""
    for words in (["--help"], ["doctor", "--help"]):
        whole, bare = (start(*words, PYTHONOPTIMIZE=level).stdout for level in ("", "2"))
        assert whole == bare and len(whole) > 500

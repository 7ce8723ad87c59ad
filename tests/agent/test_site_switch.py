"""The site's switch: what it is, and that the launcher, the probe and the tuner obey it.

A running tuner that is switched off: ``tests/envs/live/test_live.py`` and ``tests/agent/daemon/test_daemon.py``.
"""

import json
import os
import subprocess
import sys

import pytest
from cli_process import run
from command import invoke
from dynamiccl.envs.nccl import site_switch
from dynamiccl.envs.nccl.site_switch import switched_off

OFF = {"DYNAMICCL_OFF": "1"}
SHOWS = """
import os
ours = ("DYNAMICCL_RUN", "DYNAMICCL_TABLE", "DYNAMICCL_PLUGIN", "NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN")
print([name for name in ours if name in os.environ])
raise SystemExit(7)
"""
JOB = ["--", sys.executable, "-c", SHOWS]


@pytest.mark.parametrize(
    ("value", "text", "found"),
    [
        (None, None, None),
        ("", None, None),
        ("0", None, None),
        ("1", None, "DYNAMICCL_OFF=1"),
        (None, "", "FILE"),
        (None, "ticket 12\nmore", "FILE: ticket 12"),
        ("0", "", "FILE"),
        (None, "x" * 10_000, "FILE: " + "x" * 200),
        (None, "folder", "FILE"),
    ],
)
def test_either_the_file_or_the_variable_is_enough(tmp_path, monkeypatch, value, text, found):
    """The variable cannot undo the file; a file that cannot be read counts."""
    path = tmp_path / "off"
    monkeypatch.setattr(site_switch, "FILE", str(path))
    monkeypatch.delenv("DYNAMICCL_OFF", raising=False)
    if value is not None:
        monkeypatch.setenv("DYNAMICCL_OFF", value)
    if text == "folder":
        path.mkdir()
    elif text is not None:
        path.write_text(text)
    assert switched_off() == (found and found.replace("FILE", str(path)))


@pytest.mark.parametrize(
    "words",
    [
        ("tune", "--force"),
        ("tune", "--cluster", "dgx-h100-2x8"),
        ("apply", "no-such-table.json"),
        ("apply", "no-such-table.json", "--no-gate"),
    ],
)
def test_the_launcher_becomes_the_job_alone(tmp_path, words):
    """Nothing of ours is in the job's environment, and what would stop the tuner does not stop the job."""
    done = run(*words, *JOB, env=OFF)
    assert done.returncode == 7 and done.stdout == "[]\n"
    (line,) = done.stderr.splitlines()
    assert line == "dynamiccl: the tuner is switched off here (DYNAMICCL_OFF=1): the job runs without it"


@pytest.mark.parametrize(
    "words", [("tune", "--headroom", "32"), ("apply", "no-such-table.json", "--headroom", "32")]
)
def test_the_channels_of_headroom_stay_since_other_nodes_may_be_tuned(words):
    """Ranks of one communicator with different channels hang. Before: they were set on the tuned nodes alone."""
    shows = [sys.executable, "-c", "import os; print(os.environ.get('NCCL_MIN_NCHANNELS'))"]
    assert run(*words, "--", *shows, env=OFF).stdout == "32\n"
    refused = "--policy=alchemy" if words[0] == "tune" else "--no-gate"
    assert run(*words, refused, "--or-untuned", "--", *shows).stdout == "32\n"


def test_a_program_gets_a_summary_that_says_so(tmp_path):
    """The job's output is on stderr, as it is with a tuner."""
    done = run("tune", "--json", *JOB, env=OFF)
    assert done.returncode == 7 and "[]" in done.stderr
    assert json.loads(done.stdout)["ended"]["facts"] == {"why": "DYNAMICCL_OFF=1"}


@pytest.mark.parametrize("words", [("tune",), ("tune", "--attach", "runs/tune/latest"), ("demo",)])
def test_what_only_tunes_is_refused(words):
    done = run(*words, env=OFF)
    assert done.returncode == 2 and "ask the operators" in done.stderr.splitlines()[-1]


def test_env_gives_no_variables(monkeypatch):
    monkeypatch.setenv("DYNAMICCL_OFF", "1")
    done = invoke(["env"])
    assert (done.exit_code, done.stdout) == (0, "") and "switched off" in done.stderr
    assert json.loads(invoke(["env", "--json"]).stdout) == {}
    assert invoke(["env", "--headroom", "32"]).stdout == "export NCCL_MIN_NCHANNELS=32\n"


@pytest.mark.parametrize("theirs", ["", "/opt/site/libnccl-tuner.so"])
def test_a_rank_attaches_to_nothing_and_loads_what_it_would_load_without_us(theirs):
    """Its variables are from before: the site was switched off while the job waited in the queue."""
    ask = (
        "import dynamiccl_autoload as a, json, os, sys; a.autoload();"
        "print(json.dumps([sorted(m for m in sys.modules if 'probe' in m), dict(os.environ)]))"
    )
    plugin = "/x/libnccl-tuner-dynamiccl.so"
    ours = {"DYNAMICCL_RUN": "/x", "NCCL_TUNER_PLUGIN": plugin, "NCCL_PROFILER_PLUGIN": plugin}
    ours |= {"DYNAMICCL_NEXT_TUNER": theirs} if theirs else {}
    environment = {**os.environ, **ours, **OFF}
    done = subprocess.run(
        [sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True
    )
    probes, left = json.loads(done.stdout)
    assert (probes, done.stderr) == ([], "")
    assert not {"DYNAMICCL_RUN", "DYNAMICCL_NEXT_TUNER"} & set(left)
    assert left.get("NCCL_TUNER_PLUGIN", "") == theirs
    assert "NCCL_PROFILER_PLUGIN" not in left


def test_a_plugin_of_theirs_in_a_folder_of_our_name_stays():
    """Before: it was deleted, and the rank ran without the profiler that it has without us."""
    ours, theirs = "/x/libnccl-tuner-dynamiccl.so", "/venvs/dynamiccl/lib/libnccl-profiler-site.so"
    environment = {"NCCL_TUNER_PLUGIN": ours, "NCCL_PROFILER_PLUGIN": theirs}
    site_switch.leave(environment)
    assert environment == {"NCCL_PROFILER_PLUGIN": theirs}

"""``doctor`` and what is not its own environment: another Python, a site's environment plugin; and how it ends."""

import json
import os
import sys

import pytest
import recordings_made
from command import invoke
from dynamiccl.agent.advice.outlook import NOTHING, SWEEP, UNKNOWN, of_advice, of_machine
from dynamiccl.agent.checks.doctor import examine
from dynamiccl.agent.checks.facts import Facts
from dynamiccl.agent.checks.interpreter import Interpreter, of_command
from dynamiccl.traces.reasons import NotTuning
from paths import DATA


def other_python(folder, torch=False, probe=False, wheel=None):
    """A Python that answers as one whose packages these are."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {"torch": torch, "probe": probe, "wheels": {"nvidia-nccl-cu12": wheel}}
    path = folder / "python3.12"
    path.write_text(f"#!/bin/sh\nprintf '%s' '{json.dumps(told)}'\n")
    path.chmod(0o755)
    return path


def script(path, *lines):
    path.write_text("\n".join([*lines, ""]))
    path.chmod(0o755)
    return path


def test_the_commands_own_python_is_looked_at(tmp_path):
    """`uv run torchrun` finds another. Before: "PyTorch loads the probe", 0 traps, of our own Python."""
    python = other_python(tmp_path / "other")
    torchrun = script(tmp_path / "torchrun", f"#!{python}", "import torch")
    told = json.loads(invoke(["doctor", "--json", "--", torchrun, "train.py"]).stdout)
    assert told["checked"]["Python"] == f"{python} (that of torchrun)"
    assert told["checked"]["PyTorch"] == "no PyTorch and no dynamiccl among this Python's packages"
    (found,) = [one for one in told["findings"] if one["name"] == "other Python"]
    assert str(python) in found["what"] and not found["must_change"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("#!{python}", ""),
        ("#!{python} -s", ""),
        ("#!/usr/bin/env {name}", ""),
        ("#!/bin/sh", '\'\'\'exec\' "{python}" "$0" "$@"'),
    ],
)
def test_first_lines_that_name_a_python(tmp_path, monkeypatch, first, second):
    python = other_python(tmp_path / "bin", torch=True, probe=True, wheel="2.27.5")
    monkeypatch.setenv("PATH", f"{python.parent}{os.pathsep}{os.environ['PATH']}")
    words = {"python": python, "name": python.name}
    program = script(tmp_path / "torchrun", first.format(**words), second.format(**words))
    found = of_command([str(program)])
    assert found == Interpreter(
        str(python), False, "torchrun", torch=True, probe=True, wheels={"nvidia-nccl-cu12": "2.27.5"}
    )
    assert of_command([str(python), "train.py"]).path == str(python)


@pytest.mark.parametrize(
    "command", [None, ["sh", "run.sh"], ["no-such-program"], [sys.executable, "train.py"]]
)
def test_other_commands_are_looked_at_in_our_own_python(command):
    """A shell or a launcher may start any Python: none is guessed."""
    found = of_command(command)
    assert found.is_ours and found.path == sys.executable
    is_known = command is None or command[0] == sys.executable
    assert ("does not say its own" in found.text) == (not is_known)


def test_a_python_that_does_not_answer_is_not_vouched_for(tmp_path):
    silent = script(tmp_path / "python3", "#!/bin/sh", "exit 3")
    told = json.loads(invoke(["doctor", "--json", "--", silent]).stdout)
    assert told["checked"]["PyTorch"] == "not known" and str(silent) in told["checked"]["Python"]


def test_an_environment_plugin_is_a_trap(tmp_path):
    """NCCL 2.28.9's library was seen to load a site's profiler, no tuner, and nothing of ours. Before: 0 traps."""
    for env in ({"NCCL_ENV_PLUGIN": "/site/libnccl-env-site.so"}, {"LD_LIBRARY_PATH": f"/none:{tmp_path}"}):
        (tmp_path / "libnccl-env.so").touch()
        (found,) = [one for one in examine(Facts(env)) if one.name == "NCCL_ENV_PLUGIN"]
        assert (
            next(iter(env.values())).rpartition(":")[2] in found.what and "NCCL_ENV_PLUGIN=none" in found.cure
        )
    for facts in (Facts({"NCCL_ENV_PLUGIN": "none"}), Facts({"NCCL_ENV_PLUGIN": "x"}, nccl=(2, 27, 7))):
        assert not any(one.name == "NCCL_ENV_PLUGIN" for one in examine(facts))
    assert "NCCL_ENV_PLUGIN" in str(NotTuning.NOT_LOADED())


# How it ends ----------------------------------------------------------------------------------------------------------


def advice(**changes):
    told = {"communication": 0.4, "left_out": 0.0, "steps": 100, "unseen": False, "all_reduce": ""}
    return {**told, "possible": {"low": 0.01, "median": 0.05, "high": 0.2}, **changes}


@pytest.mark.parametrize(
    ("told", "answer"),
    [
        (advice(), SWEEP),
        (advice(steps=6), UNKNOWN),
        (advice(communication=0.004, steps=6), NOTHING),
        (advice(communication=0.1, left_out=0.3), UNKNOWN),
        (advice(possible={"low": -0.01, "median": 0.002, "high": 0.006}), NOTHING),
    ],
)
def test_the_answer_follows_from_the_advice(told, answer):
    found = of_advice(told)
    assert found.answer == answer and found.reason


def test_doctor_and_advise_end_with_one_answer(monkeypatch):
    answers = (NOTHING, SWEEP, UNKNOWN)
    for words in (
        ["doctor"],
        ["doctor", "--trace", DATA / "recordings/demo"],
        ["advise", DATA / "recordings/demo"],
    ):
        told = invoke(words)
        last = told.stdout.rstrip().rpartition("\n")[2]
        assert sum(last.startswith(f"{answer} (") for answer in answers) == 1, told.output
        outlook = json.loads(invoke([*words, "--json"]).stdout)["outlook"]
        assert f"{outlook['answer']} ({outlook['reason']})" == last
    nothing = Facts({"NCCL_ALGO": "Tree"})
    assert of_machine(nothing, examine(nothing)).answer == NOTHING
    assert of_machine(Facts(), []).answer == UNKNOWN


@pytest.mark.parametrize(("n_steps", "answer"), [(6, UNKNOWN), (40, SWEEP)])
def test_a_profile_is_judged_by_what_the_collectives_take(tmp_path, monkeypatch, n_steps, answer):
    monkeypatch.setattr(recordings_made, "N_STEPS", n_steps)
    path = recordings_made.kineto(tmp_path / "profiles")
    outlook = json.loads(invoke(["doctor", "--trace", path, "--json"]).stdout)["outlook"]
    assert outlook["answer"] == answer, outlook
    assert answer != SWEEP or outlook["reason"].startswith(
        "all_gather and reduce_scatter take 43.7% of the step"
    )


def test_a_job_without_the_two_calls_has_nothing_to_win(tmp_path):
    path = recordings_made.kineto(tmp_path / "profiles")
    for file in path.iterdir():
        file.write_text(
            file.read_text().replace("all_gather", "all_reduce").replace("reduce_scatter", "all_reduce")
        )
    outlook = json.loads(invoke(["doctor", "--trace", path, "--json"]).stdout)["outlook"]
    assert outlook["answer"] == NOTHING and "reaches no other call" in outlook["reason"]

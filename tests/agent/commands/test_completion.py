"""``completion`` and ``demo``: the first minutes of a new user."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from command import COMMANDS, NAMES, invoke, named
from paths import ROOT

COMPLETES = """
eval "$(dynamiccl completion bash)"
COMP_WORDS=(dynamiccl $1)
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_dynamiccl_completion dynamiccl
echo "${COMPREPLY[@]}"
"""


def offered(typed):
    *before, last = typed.split(" ")
    found = ShellComplete(COMMANDS, {}, "dynamiccl", "_DYNAMICCL_COMPLETE").get_completions(before, last)
    return {item.value if item.type == "plain" else item.type for item in found}


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("to", {"top"}),
        ("lab g", {"gpu-check"}),
        ("tune --clus", {"--cluster"}),
        ("show --win", {"--windows"}),
        ("show ", {"file"}),
        ("stop ", {"file"}),
        ("tune --attach ", {"file"}),
        ("tune --nonsense x --clus", {"--cluster"}),
        ("tune train.py -- ", set()),
    ],
)
def test_a_press_of_tab_completes(typed, found):
    assert offered(typed) == found


def test_the_shell_asks_the_program_at_a_press_of_tab():
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    bash = ["bash", "-c", COMPLETES, "bash", "tune --clus"]
    done = subprocess.run(bash, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "--cluster\n", done.stderr


def test_every_parameter_that_is_a_path_completes_files():
    """Before: three of another name did not."""
    for name in NAMES:
        for param in named(name).params:
            if param.name in ("out", "run", "attach", "trace", "untouched", "submission", "runs", "metrics"):
                assert isinstance(param.type, click.Path), (name, param.name)


@pytest.mark.parametrize(
    ("shell", "begins"), [("zsh", "#compdef dynamiccl"), ("fish", "function _dynamiccl")]
)
def test_other_shells_are_served_too(shell, begins):
    assert invoke(["completion", shell]).stdout.startswith(begins)


def test_shells_without_completion_are_refused():
    refused = invoke(["completion", "fishy"])
    assert refused.exit_code == 2 and "'bash', 'zsh', 'fish'" in refused.stderr


def test_a_demo_without_torch_names_the_cure(tmp_path):
    code = "import importlib.util as u; real = u.find_spec\n"
    code += "u.find_spec = lambda name, *rest: None if name == 'torch' else real(name, *rest)\n"
    code += "from dynamiccl.agent.cli import run; run(['demo'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "pip install '.[train,plot]'" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_demo_runs_from_a_wheel_without_a_checkout(tmp_path):
    """The wheel's files alone, with the packages that it needs; its results lie where it was called."""
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "-q", "-w", str(tmp_path)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    packages = Path(pytest.__file__).parents[1]
    path = f"{tmp_path / 'installed'}:{packages}"
    env = {**os.environ, "PYTHONPATH": path, "DYNAMICCL_MEMORY": "off"}
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    where = [sys.executable, "-c", "import dynamiccl; print(dynamiccl.__file__)"]
    loaded = subprocess.run(where, env=env, cwd=folder, capture_output=True, text=True, check=True).stdout
    assert loaded.startswith(str(tmp_path / "installed"))
    demo = [sys.executable, "-m", "dynamiccl.agent.cli", "demo", "--steps", "120"]
    done = subprocess.run(demo, env=env, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (folder / "runs" / "demo" / "report.html").exists() and "emulated" in done.stderr

"""``completion`` and ``demo``: the first minutes of a new user."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from command import invoke
from dynamiccl.agent import completion
from dynamiccl.agent.cli import NAMES, options_of
from paths import ROOT

COMPLETES = """
source "$1"
COMP_WORDS=(dynamiccl $2)
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_shtab_dynamiccl
echo "${COMPREPLY[@]}"
"""


def printed(shell):
    command = [sys.executable, "-m", "dynamiccl.agent.cli", "completion", shell]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "dynamiccl.bash"
    path.write_text(printed("bash"))
    return path


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("to", {"top"}),
        ("lab g", {"gpu-check"}),
        ("tune --clus", {"--cluster"}),
        ("show --win", {"--windows"}),
    ],
)
def test_a_press_of_tab_completes(script, typed, offered):
    bash = ["bash", "-c", COMPLETES, "bash", str(script), typed]
    done = subprocess.run(bash, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == offered


def test_every_parameter_that_is_a_path_completes_files():
    """Before: three of another name did not."""
    for name in NAMES:
        parser = completion._parser(f"dynamiccl {name}")
        paths = {key for key, kind in parser.kinds.items() if kind is Path}
        with_files = {action.dest for action in parser._actions if hasattr(action, "complete")}
        assert paths <= with_files, name
        assert with_files - paths <= {"run", "attach"}


def test_every_command_and_option_is_known(script):
    text = script.read_text()
    for name in NAMES:
        key = re.sub(r"\W", "_", name)
        found = re.search(rf"_shtab_dynamiccl_{key}_option_strings=\((.*)\)", text)
        assert found and options_of(name) <= set(found[1].split())


def test_zsh_is_served_and_other_shells_are_refused():
    assert printed("zsh").startswith("#compdef dynamiccl")
    refused = invoke(["completion", "fishy"])
    assert refused.exit_code == 2 and "bash, zsh, tcsh" in refused.stderr


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

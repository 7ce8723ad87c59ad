"""The wheel: the same bytes from the same sources; one for every Python, without a compiler where it is installed."""

import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from dynamiccl.envs.nccl.plugin import build
from paths import ROOT

PLAIN = {
    k: v for k, v in os.environ.items() if not k.startswith(("DYNAMICCL_", "NCCL_", "PYTHON", "SOURCE_DATE"))
}
LOOKS = """
import os, sys
import dynamiccl_autoload
from dynamiccl.envs.nccl.plugin import build, bindings as plugin
from dynamiccl.envs.sim.step import Steps
dynamiccl_autoload.autoload()
from dynamiccl.agent.checks.doctor import examine, gather
assert "compiler" not in {trap.name for trap in examine(gather())}
from dynamiccl.agent.cli import run
run(["env", "--json"])
assert build.plugin_path().parent == build.INSTALLED and build.library_path(build.STEP).parent == build.INSTALLED
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "pandas", "gymnasium", "numpy"}))
"""


def call(*command, **env):
    done = subprocess.run(command, env=PLAIN | env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    return done.stdout


def made_in(folder):
    """A wheel that is made in this folder from what git knows, by the setuptools that is here."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(
        b"\0"
    )
    for name in filter(None, map(os.fsdecode, files)):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    call(*pip, "-w", str(folder / "made"), str(folder))
    (path,) = (folder / "made").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return made_in(tmp_path_factory.mktemp("source"))


def test_the_samples_are_in_the_wheel(made):
    """A new user's first commands read them: `dynamiccl advise --sample`, `dynamiccl show --sample`."""
    samples = [path for path in (ROOT / "agent" / "samples").rglob("*") if path.is_file()]
    names = {f"dynamiccl/{path.relative_to(ROOT)}" for path in samples}
    assert names <= set(zipfile.ZipFile(made).namelist()) and len(names) > 10
    assert sum(path.stat().st_size for path in samples) < 300_000


def made_with(cc, folder):
    """The wheel that a compiler makes: its name, and the plugin in it."""
    call(sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "-q", "-w", str(folder), CC=cc)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        return path.name, wheel.read(f"dynamiccl/envs/nccl/plugin/lib/{build.LIBRARY}")


@pytest.mark.slow
def test_the_wheel_is_of_the_machine_that_the_compiler_compiles_for(tmp_path):
    """A stand-in for a cross compiler: the real one's name for its machine, this machine's code."""
    cc = tmp_path / "aarch64-linux-gnu-gcc"
    cc.write_text('#!/bin/sh\n[ "$1" = -dumpmachine ] && echo aarch64-linux-gnu && exit\nexec cc "$@"\n')
    cc.chmod(0o755)
    name, _ = made_with(str(cc), tmp_path)
    assert name.endswith("-py3-none-linux_aarch64.whl")


@pytest.mark.slow
def test_a_cross_compiler_makes_the_wheel_of_another_machine(tmp_path):
    if shutil.which("aarch64-linux-gnu-gcc") is None or platform.machine() != "x86_64":
        pytest.skip("a cross compiler from x86-64 to aarch64 is not installed")
    name, plugin = made_with("aarch64-linux-gnu-gcc", tmp_path)
    assert name.endswith("-linux_aarch64.whl") and plugin[:4] == b"\x7fELF"
    assert int.from_bytes(plugin[18:20], "little") == 183  # EM_AARCH64


@pytest.mark.slow
def test_the_same_sources_make_the_same_bytes(made, tmp_path):
    """Each in a folder of its own."""
    one, other = made, made_in(tmp_path)
    assert one.name == other.name and one.name.split("-")[2:4] == ["py3", "none"]
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("release", ["3.11", "3.12", "3.13"])
def test_it_works_on_every_python_without_a_compiler(made, tmp_path, release):
    by_pyenv = (Path.home() / ".pyenv" / "versions").glob(f"{release}.*/bin/python")
    found = [path for path in (shutil.which(f"python{release}"), *map(str, by_pyenv)) if path]
    python = next(
        (p for p in found if not subprocess.run([p, "-c", ""], capture_output=True).returncode), None
    )
    if python is None:
        pytest.skip(f"no Python {release} here")
    call(python, "-m", "venv", str(tmp_path))
    own = str(tmp_path / "bin" / "python")
    call(own, "-m", "pip", "install", "-q", "--disable-pip-version-check", str(made))
    brought = {
        line.split("==")[0].lower() for line in call(own, "-m", "pip", "list", "--format=freeze").splitlines()
    }
    assert brought <= {"click", "dynamiccl", "numpy", "pip", "setuptools"}
    said = call(own, "-c", LOOKS, PATH=str(tmp_path / "bin"), CC="none", HOME=str(tmp_path)).splitlines()
    assert json.loads(said[0])["DYNAMICCL_PLUGIN"].startswith(str(tmp_path)) and said[1:] == ["numpy"]
    assert "dynamiccl doctor" in call(own, "-m", "dynamiccl", "doctor", "--help")

"""The wheel: the same bytes from the same sources; one for every Python, without a compiler where it is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLAIN = {k: v for k, v in os.environ.items() if not k.startswith(("DYNAMICCL_", "NCCL_", "PYTHON", "SOURCE_DATE"))}
LOOKS = """
import os, sys
import dynamiccl_autoload
from dynamiccl.envs.nccl.plugin import build, bindings as plugin
from dynamiccl.envs.sim.step import Op, Steps
dynamiccl_autoload.autoload()
from dynamiccl.agent.checks.doctor import examine, gather
assert "compiler" not in {trap.name for trap in examine(gather())}
assert build.plugin_path().parent == build.INSTALLED and build.step_path().parent == build.INSTALLED
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "pandas", "gymnasium", "numpy"}))
"""


def call(*command, **env):
    done = subprocess.run(command, env=PLAIN | env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Two wheels, each made in a folder of its own from what git knows."""
    made = []
    for _ in range(2):
        folder = tmp_path_factory.mktemp("source")
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
        for name in filter(None, map(os.fsdecode, files)):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
        call(sys.executable, "-m", "pip", "wheel", str(folder), "--no-deps", "-q", "-w", str(folder / "made"))
        made += (folder / "made").glob("*.whl")
    return made


@pytest.mark.slow
def test_the_same_sources_make_the_same_bytes(wheels):
    one, other = wheels
    assert one.name == other.name and one.name.split("-")[2:4] == ["py3", "none"]
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("release", ["3.11", "3.12", "3.13"])
def test_it_works_on_every_python_without_a_compiler(wheels, tmp_path, release):
    by_pyenv = (Path.home() / ".pyenv" / "versions").glob(f"{release}.*/bin/python")
    found = [path for path in (shutil.which(f"python{release}"), *map(str, by_pyenv)) if path]
    python = next((p for p in found if not subprocess.run([p, "-c", ""], capture_output=True).returncode), None)
    if python is None:
        pytest.skip(f"no Python {release} here")
    call(python, "-m", "venv", str(tmp_path))
    own = str(tmp_path / "bin" / "python")
    call(own, "-m", "pip", "install", "-q", "--disable-pip-version-check", str(wheels[0]))
    brought = {line.split("==")[0].lower() for line in call(own, "-m", "pip", "list", "--format=freeze").splitlines()}
    assert brought <= {"dynamiccl", "numpy", "pip", "setuptools"}
    assert call(own, "-c", LOOKS, PATH=str(tmp_path / "bin"), CC="none", HOME=str(tmp_path)).split() == ["numpy"]

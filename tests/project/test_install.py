"""What an installation does to an environment: next to nothing, and nothing that could break it."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from paths import ROOT

import dynamiccl_autoload

#: What `pip install dynamiccl` alone does not bring, nor torch.
HEAVY = ["fsspec", "gymnasium", "orjson", "pandas", "pyarrow", "rich", "sb3_contrib", "stable_baselines3"]
PLAIN = {k: v for k, v in os.environ.items() if not k.startswith(("DYNAMICCL_", "NCCL_"))} | {
    "OMP_NUM_THREADS": "1"
}
TRAINS = """
import torch
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(4):
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("trained")
"""


def python(program, *options, **env):
    done = subprocess.run(
        [sys.executable, *options, "-c", program],
        env=PLAIN | env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done


def autoloaded():
    """Without a run: milliseconds that our part of ``import torch`` takes, and the modules that it brings."""
    program = (
        "import os, sys, time; sys.path.append(sys.argv[1]); before = set(sys.modules); begun = time.perf_counter()\n"
        "import dynamiccl_autoload; dynamiccl_autoload.autoload()\n"
        "print(1e3 * (time.perf_counter() - begun), *(set(sys.modules) - before))"
    )
    command = [sys.executable, "-I", "-S", "-c", program, str(Path(dynamiccl_autoload.__file__).parent)]
    ms, *modules = subprocess.run(
        command, env=PLAIN, capture_output=True, text=True, check=True
    ).stdout.split()
    return float(ms), modules


def test_without_a_run_import_torch_meets_one_small_module():
    """Before: 79 modules in every process of the environment.

    Seen at 679c0ae, 55 to 85 ms and 79 modules in every ``import torch``: 79 modules more (1,117 to 1,196); 0.2 s more
    CPU of 2.6 s, on a busy machine.
    """
    assert autoloaded()[1] == ["dynamiccl_autoload"]


def test_an_empty_variable_counts_as_not_set(monkeypatch):
    """Before: ``DYNAMICCL_RUN= python ...`` attached to the job's current folder, and wrote files into it."""
    installed = []
    for name, call in (("nccl.probe.probe", "install"), ("sim.emulated.backend", "register")):
        fake = SimpleNamespace(**{call: lambda name=name: installed.append(name)})
        monkeypatch.setitem(sys.modules, f"dynamiccl.envs.{name}", fake)
    for value, n in (("", 0), ("/x", 2)):
        for name in ("DYNAMICCL_RUN", "DYNAMICCL_CLUSTER"):
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("DYNAMICCL_WITHIN", raising=False)
        dynamiccl_autoload.autoload()
        assert len(installed) == n, installed
    looks = "import sys, dynamiccl; print('dynamiccl.envs.registration' in sys.modules)"
    assert python(looks, DYNAMICCL_RUN="", DYNAMICCL_CLUSTER="").stdout == "True\n"
    assert python(looks, DYNAMICCL_RUN="/x").stdout == "False\n"


@pytest.mark.timing
def test_without_a_run_import_torch_takes_less_than_a_millisecond_more():
    """Before: 55 to 85 ms."""
    assert min(autoloaded()[0] for _ in range(5)) < 1.0


@pytest.mark.slow
def test_nothing_of_ours_can_fail_import_torch(tmp_path):
    """Before: a broken gymnasium made every `import torch` fail, run or no run.

    Seen at 679c0ae, a broken gymnasium fails ``import torch``: ``RuntimeError: Failed to load the backend extension``
    without any run.
    """
    for name in ("gymnasium", "pandas"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('broken')")
    assert python(TRAINS, PYTHONPATH=str(tmp_path)).stdout == "trained\n"
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('numpy is broken')")  # torch can do without
    done = python("import torch; print('there')", PYTHONPATH=str(tmp_path), DYNAMICCL_RUN=str(tmp_path))
    assert done.stdout == "there\n" and "not attached: ModuleNotFoundError: numpy is broken" in done.stderr


@pytest.mark.slow
def test_a_checkout_that_is_not_mounted_does_not_fail_import_torch():
    """Before: an editable installation on a compute node without the checkout failed every `import torch`.

    Seen at 679c0ae, a checkout that is not mounted fails it too: ``RuntimeError: Failed to load the backend extension``
    without any run.
    """
    installed = [
        p for p in sys.path if p.endswith("site-packages") and list(Path(p).glob("__editable___dynamiccl*"))
    ]
    if not installed:
        pytest.skip("not an editable installation")
    (found,) = Path(installed[0]).glob("__editable___dynamiccl*.py")
    lost = f"import {found.stem} as f\nfor k in f.MAPPING: f.MAPPING[k] = '/not/mounted/' + k\n"
    for env in ({}, {"DYNAMICCL_RUN": "/nowhere"}):
        done = python(lost + TRAINS, "-P", **env)
        assert done.stdout == "trained\n" and ("not attached" in done.stderr) == bool(env)
    copy = Path(installed[0], "dynamiccl_autoload.py")
    assert copy.read_bytes() == (ROOT / "dynamiccl_autoload.py").read_bytes(), "run `make setup` again"


@pytest.mark.slow
def test_the_probe_needs_torch_and_numpy_alone(tmp_path):
    tmp_path.chmod(0o700)
    loaded = "import sys\nprint(*(m for m in sys.modules if m.startswith('dynamiccl.') or '.' not in m))\n"
    done = python(TRAINS + loaded, DYNAMICCL_RUN=str(tmp_path), DYNAMICCL_CLUSTER="dgx-h100-2x8")
    assert "not attached" not in done.stderr and "Traceback" not in done.stderr
    names = set(done.stdout.split())
    assert {
        "dynamiccl.envs.nccl.probe.probe",
        "dynamiccl.envs.sim.emulated.backend",
    } <= names and not names & {*HEAVY, "click"}


def test_the_package_and_its_python_api_import_no_command_line():
    """Beside a job it would be one more package that could be missing or old."""
    names = "import dynamiccl, dynamiccl.agent.api, dynamiccl_autoload, sys; print(*sys.modules)"
    assert "click" not in python(names).stdout.split()


def test_a_command_that_lacks_a_package_names_the_extra():
    for missing, words, extra in (("pandas", ["show", "x"], "tuner"), ("torch", ["lab", "train"], "train")):
        done = without([missing], words)
        assert (
            done.returncode and f"pip install '.[{extra}]'" in done.stderr and "Traceback" not in done.stderr
        )


def without(missing, words):
    """A command where packages are not installed."""
    program = f"import sys; sys.modules |= dict.fromkeys({missing!r}); sys.argv = ['dynamiccl', *{words!r}]\n"
    program += "from dynamiccl.agent.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program], env=PLAIN, capture_output=True, text=True, timeout=60
    )


def test_the_nodes_of_a_job_have_the_commands_that_they_need_with_numpy_alone(tmp_path):
    """Before: `doctor`, `apply`, `env`, even `--help`, answered only "the command line needs more than the probe"."""
    table, bare = tmp_path / "t.json", [*HEAVY, "torch", "pynvml"]
    rule = {"func": "all_gather", "max_bytes": 65536, "algo": "ring", "proto": "simple", "n_channels": 4}
    table.write_text(json.dumps({"dynamiccl_table": 1, "rules": [rule]}))
    for words in (["--help"], ["tune", "--help"], ["doctor"]):
        assert without(bare, words).returncode == 0
    done = without(bare, ["env", "--json"])
    run = json.loads(done.stdout)["DYNAMICCL_RUN"]
    assert json.loads(without(bare, ["stop", run, "--wait", "0", "--json"]).stdout)["run"] == run
    for gate in ([], ["--no-gate"]):
        done = without(bare, ["apply", str(table), *gate, "--", "echo", "here"])
        assert done.returncode == 0 and done.stdout == "here\n", done.stderr
    shutil.rmtree(run)


def test_a_jobs_image_gets_click_and_numpy_and_no_pin_on_torch():
    """Before: the trainer's packages, and a range of torch for which pip replaces a vendor's build. click is a few
    files of Python that need nothing; the command line is made of it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [word.partition(">")[0] for word in project["dependencies"]] == ["click", "numpy"]
    assert not any(word.startswith("torch") for word in project["optional-dependencies"]["tuner"])


def test_the_package_knows_its_version_and_its_environments():
    """Before: a namespace without either. Gymnasium itself is imported by nobody but who wants it."""
    program = "import dynamiccl, sys; print(dynamiccl.__version__, 'gymnasium' in sys.modules)"
    assert python(program).stdout == f"{version('dynamiccl')} False\n"
    for first, second in (("dynamiccl", "gymnasium"), ("gymnasium", "dynamiccl")):
        made = f"import {first}, {second}; print(gymnasium.make('dynamiccl/Sim-v0').spec.id)"
        assert python(made).stdout == "dynamiccl/Sim-v0\n"

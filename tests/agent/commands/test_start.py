"""How soon a job starts under ``dynamiccl tune``, and what the command line imports on the way."""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

DYNAMICCL = ["-m", "dynamiccl.agent.cli"]
ENV = {k: v for k, v in os.environ.items() if not k.startswith(("DYNAMICCL_", "NCCL_"))} | {
    "DYNAMICCL_MEMORY": "off"
}
#: Beside the standard library, what may be imported before the job is started: click, which needs nothing, and NVML.
SMALL = {"click", "dynamiccl", "pynvml", "sitecustomize", "org"}
#: What no command needs that does not compute.
HEAVY = {"pandas", "torch", "pyarrow", "gymnasium"}


def imported(*words):
    """Names of the packages that a command imports; what it says otherwise goes to stdout. Not of its children."""
    command = [sys.executable, "-X", "importtime", *DYNAMICCL, *map(str, words)]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=120)
    lines = [
        line.rpartition("|")[2].strip()
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    ]
    return {name.partition(".")[0] for name in lines if not name.startswith("_")}, done


@pytest.mark.parametrize(
    "more",
    [
        ["--cluster", "dgx-h100-2x8"],
        *(
            pytest.param(more, marks=pytest.mark.slow)
            for more in ([], ["--policy", "random"], ["--policy", "lstm"])
        ),
    ],
)
def test_nothing_large_is_imported_before_the_job_is_started(tmp_path, more):
    """Before: numpy, pandas, pyarrow, gymnasium and rich, ten seconds of processor time."""
    found, done = imported(
        "tune", "--out", tmp_path / "out", *more, "--", sys.executable, "-S", "-c", "print('here')"
    )
    assert done.returncode == 0 and done.stdout == "here\n", done.stderr[-2000:]
    assert found - set(sys.stdlib_module_names) - {"imported package"} <= SMALL


@pytest.mark.parametrize("command", [[], ["tune"], ["stop"], ["env"], ["doctor"], ["apply"]], ids=" ".join)
def test_help_computes_nothing(command):
    found, done = imported(*command, "--help")
    assert done.returncode == 0 and done.stdout.startswith("Usage: ")
    assert not found & (HEAVY | {"numpy"})


@pytest.mark.parametrize("words", [["env", "--json"], ["doctor", "--json"], ["apply", "{}", "--", "true"]])
def test_a_job_is_prepared_without_what_only_the_tuner_needs(tmp_path, words):
    (tmp_path / "table.json").write_text('{"dynamiccl_table": 1, "rules": []}')
    found, done = imported(*[word.format(tmp_path / "table.json") for word in words])
    assert done.returncode in (0, 1), done.stderr[-2000:]
    assert not found & HEAVY


def test_the_off_switch_is_at_hand_at_once():
    """Before: it imported the tuner, seconds of processor time, before it said a word to it."""
    _, done = imported("env", "--json")
    folder = json.loads(done.stdout)["DYNAMICCL_RUN"]
    found, done = imported("stop", folder, "--wait", "0", "--json")
    assert Path(folder, "stop").exists() and json.loads(done.stdout)["run"] == folder
    assert not found & HEAVY
    shutil.rmtree(folder)


@pytest.mark.timing
@pytest.mark.parametrize(
    ("words", "most_s"),
    [
        (["--help"], 0.3),
        (["--version"], 0.3),
        (["doctor"], 0.5),
        (["env"], 0.5),
        (["stop", "/none"], 0.5),
        (["top", "--once"], 1.0),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_what_computes_nothing_answers_at_once(words, most_s):
    """Before: 1.4 s of processor time for `--version`, 3.5 to 6 s for the others. The least of five is the command's
    own; what is compiled to bytecode is there from the first."""
    took = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *DYNAMICCL, *words], env=ENV, capture_output=True, timeout=120)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    print(f"{' '.join(words)}: {min(took):.2f} s of processor time")
    assert min(took) < most_s


@pytest.mark.timing
def test_a_job_starts_within_a_second(tmp_path):
    """Before: 3 to 5 seconds on a quiet machine, over a minute on a busy one."""
    env = {
        k: v for k, v in ENV.items() if k != "PYTHONDONTWRITEBYTECODE"
    }  # as installed: compiled, by the first run
    env["PYTHONPYCACHEPREFIX"] = str(tmp_path / "compiled")
    took = []
    for number in range(5):
        begun = time.time()
        job = [sys.executable, "-S", "-c", "import time; print(time.time())"]
        command = [sys.executable, *DYNAMICCL, "tune", "--out", str(tmp_path / str(number)), "--", *job]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
        took.append(float(done.stdout) - begun)
    print(f"the job's first line after {min(took):.2f} to {max(took):.2f} s")
    assert min(took) < 1.0


#: A job that looks for the tuner beside it until that gives way, and prints by how much each does.
LOOKS = """
import os, pathlib, sys, time
me, end = os.getppid(), time.monotonic() + 60
def nices():
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            words = path.with_name("cmdline").read_text(errors="replace")
        except OSError:
            continue
        if int(fields[1]) == me and "--attach" in words:
            yield int(fields[16])
while not (found := max(nices(), default=0)) > os.nice(0) and time.monotonic() < end:
    time.sleep(0.02)
print(os.nice(0), found)
"""


def test_the_tuner_gives_way_to_the_job_and_the_job_to_nobody(tmp_path):
    """Before: both had the same priority, and the tuner's start the job's processors."""
    command = [
        sys.executable,
        *DYNAMICCL,
        "tune",
        "--out",
        str(tmp_path),
        "--",
        sys.executable,
        "-S",
        "-c",
        LOOKS,
    ]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=120, check=True)
    job, tuner = map(int, done.stdout.split())
    assert job == os.nice(0) and tuner > job

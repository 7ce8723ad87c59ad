"""The command lines of the guides run as they stand there, in a folder with the files that they name."""

import gzip
import os
import re
import shutil
import subprocess
import sys

import pytest
import recordings_made
from dynamiccl.envs.nccl.tables import to_json
from dynamiccl.traces.records import Decision, Rule, Table
from paths import DATA, ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RECORDINGS = DATA / "recordings"
#: Commands that have tests of their own, which take minutes or need a running job.
ELSEWHERE = {
    "bench": "test_docs.py::test_the_entrant_of_the_environments_plays",
    "demo": "test_completion.py::test_the_demo_runs_from_a_wheel_without_a_checkout",
    "stop": "test_words_on_terminals.py::test_stop_before_the_first_table_answers_at_once",
}


def snippets():
    """Each command line of ours in a block of code: (page, line), once."""
    found = {}
    for page in PAGES:
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text("utf-8"), re.S | re.M):
            for line in re.findall(r"^dynamiccl .*$", block, re.M):
                command = re.split(r"\s+#", line)[0].strip()
                if command.split()[1] not in ELSEWHERE:
                    found.setdefault(command.replace(" ...", " train.py"), page.name)
    return sorted(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder: a finished run, profiles, two recordings of a job, and a launcher that starts nothing."""
    made = tmp_path_factory.mktemp("user")
    for name in ("runs/tune/latest", "last-week", "today"):
        shutil.copytree(RECORDINGS / "demo", made / name / "trace")
    table = Table(1, (Rule(0, 0, "all_gather", 0, 1 << 20, Decision("ring", "ll128", 8)),))
    (made / "runs" / "tune" / "latest" / "table.json").write_text(to_json(table))
    for profile in recordings_made.kineto(made / "profiles").iterdir():
        name = profile.name.replace(".trace", "") + ".gz"
        (made / name).write_bytes(gzip.compress(profile.read_bytes()))
    programs = made / "bin"
    programs.mkdir()
    (programs / "torchrun").write_text('#!/bin/sh\necho "job $*"\n')
    (programs / "dynamiccl").write_text(f'#!/bin/sh\nexec {sys.executable} -m dynamiccl.agent.cli "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    (made / "train.py").write_text("")
    return made


def test_there_are_snippets_of_every_kind():
    named = {line.split()[1] for line in snippets()}
    assert named >= {"tune", "show", "apply", "advise", "doctor"}


@pytest.mark.parametrize("line", snippets())
def test_a_line_of_the_guides_runs(folder, line):
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "DYNAMICCL_MEMORY": "off", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    findings = 1 if line.startswith("dynamiccl doctor") else 0  # it found something to change here
    assert done.returncode in (0, findings), done.stderr[-2000:]
    assert done.stdout and "Traceback" not in done.stderr

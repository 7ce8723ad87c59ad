"""``--or-untuned``: the job runs although the tuner cannot start. And root's commands on a user's run."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from cli_process import run
from command import refused
from dynamiccl.envs.nccl.run_folder import RUN_ID, STOP, TABLE, TABLE_FILE_BYTES
from test_site_switch import JOB

NOBODY = 65534


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("tune", "--policy", "alchemy"), "lstm"),
        (("tune", "--cluster", "dgx-h1000"), "dgx-h100"),
        (("tune", "--out", "{file}/out"), "no run can be left in"),
        (("tune", "--memory", "nothing://x"), "nothing"),
        (("apply", "no-such-table.json"), "cannot be read"),
        (("apply", "no-such-table.json", "--cluster", "dgx-h1000"), "dgx-h100"),
        (("apply", "no-such-table.json", "--no-gate"), "cannot be read"),
    ],
)
def test_the_job_runs_untuned_and_the_reason_is_said(tmp_path, words, why):
    """Nothing of ours is in its environment, its exit status is its own, and without the option it does not start."""
    file = tmp_path / "file"
    file.touch()
    words = [word.format(file=file) for word in words]
    done = run(*words, "--or-untuned", *JOB)
    assert done.returncode == 7 and done.stdout == "[]\n", done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("dynamiccl: dynamiccl cannot start here (") and why in last
    assert last.endswith("): the job runs without it")
    without = refused([*words, *JOB])
    assert without.exit_code == 2 and without.stdout == "", without.stderr


def test_a_plugin_that_cannot_be_built_and_a_program_that_reads_the_summary(tmp_path):
    env = {"CC": "no-such-cc", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = run("tune", "--json", "--or-untuned", "--cluster", "dgx-h100-2x8", *JOB, env=env)
    assert done.returncode == 7 and "[]" in done.stderr
    assert "install gcc" in json.loads(done.stdout)["ended"]["text"]


def test_it_needs_a_command():
    done = refused(["tune", "--or-untuned"])
    assert done.exit_code == 2 and "needs a COMMAND" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="not run as root")
@pytest.mark.parametrize("is_readable", [True, False])
def test_root_stops_a_run_as_its_user(is_readable):
    """Root's process becomes the user before it opens anything, so the files that it leaves are the user's. If the user
    may not read root's installation, the cure is said."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        (folder / TABLE).write_bytes(bytes(TABLE_FILE_BYTES))
        (folder / RUN_ID).write_text("an id")
        for path in (folder / TABLE, folder / RUN_ID, folder):
            os.chown(path, NOBODY, NOBODY)
        script = (
            "import os, sys\nfrom dynamiccl.agent.cli import main\n"
            f"os.access = lambda *a: {is_readable}\n"
            f"sys.argv = ['dynamiccl', 'stop', {str(folder)!r}, '--wait', '0.2']\nmain()"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
        )
        if is_readable:
            assert "no table has been used yet" in done.stdout, done.stderr
            assert (folder / STOP).stat().st_uid == NOBODY
        else:
            assert done.returncode == 2 and f"sudo -u '#{NOBODY}'" in done.stderr
            assert not (folder / STOP).exists()
    finally:
        shutil.rmtree(folder)

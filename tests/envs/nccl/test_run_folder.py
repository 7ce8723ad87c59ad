"""The run folder: private, cleared when dead."""

import ctypes
import fcntl
import os
import shutil
import subprocess
import sys
import time

import pytest
from dynamiccl.envs.live.job import Job
from dynamiccl.envs.nccl.plugin.build import job_env
from dynamiccl.envs.nccl.shm import RunFolder, TableFile, decode_table, trial_of
from dynamiccl.traces.records import COLL_DTYPE, RECORD_BYTES, Table
from test_shm import table_of


def test_folder_is_private_and_goes_away(folder):
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o077 for p in folder.path.iterdir() if p.name == "table"} == {0}
    env = job_env(folder.path)
    assert (
        env["DYNAMICCL_RUN"] == str(folder.path) and env["NCCL_TUNER_PLUGIN"] == env["NCCL_PROFILER_PLUGIN"]
    )
    folder.close()
    assert not folder.path.exists()


def test_folders_in_which_nobody_lives_are_cleared_others_stay(folder):
    """Process ids say nothing where containers share /dev/shm: a live folder of another one was deleted.

    Seen at 679c0ae, ``env`` in a container that shares /dev/shm deletes a live run folder: the folder of the job that
    runs is gone, only the new one is there.
    """
    root = folder.path.parent
    paths = {
        name: root / f"test-{os.getpid()}-{name}" for name in ("dead", "job", "daemon", "waits", "forgotten")
    }
    held = []
    for name, path in paths.items():
        path.mkdir(mode=0o700)
        for file in ("daemon", *(["ring-0-5"] if name not in ("waits", "forgotten") else [])):
            (path / file).write_text("999999999\n")
            if (name == "job" and file == "ring-0-5") or name == "daemon" == file:
                held.append(os.open(path / file, os.O_RDONLY))
                fcntl.flock(held[-1], fcntl.LOCK_EX)
    two_days_ago = time.time() - 2 * 86400
    os.utime(paths["forgotten"], (two_days_ago, two_days_ago))
    RunFolder.create(f"test-{os.getpid()}-new").close()
    assert {name for name, path in paths.items() if path.exists()} == {"job", "daemon", "waits"}
    assert folder.path.exists()
    for fd in held:
        os.close(fd)
    for path in paths.values():
        shutil.rmtree(path, ignore_errors=True)


def test_env_of_a_job_that_has_not_begun_outlives_other_commands(tmp_path):
    """`eval "$(dynamiccl env --name big)"`, then any other command before the job's first ring: the folder was gone.

    Seen at 679c0ae, a named folder that has no ring yet is deleted by the next command: gone after another ``env``.
    """
    name = f"test-{os.getpid()}-big"
    command = [sys.executable, "-m", "dynamiccl.agent.cli", "env"]
    subprocess.run([*command, "--name", name], capture_output=True, check=True)
    other = RunFolder.create()
    other.close()
    path = other.path.with_name(name)
    assert path.exists()
    RunFolder(path).close()
    assert not path.exists()


def test_only_a_private_folder_is_opened(tmp_path, folder):
    RunFolder(folder.path).close(remove=False)
    tmp_path.chmod(0o770)
    for bad in (tmp_path, tmp_path / "none", "/dev/null"):
        with pytest.raises(ValueError, match="not a run folder"):
            RunFolder(bad)


def test_table_file_that_was_truncated(tmp_path):
    file = TableFile(tmp_path / "table", write=True)
    file.publish(table_of(1))
    os.truncate(tmp_path / "table", 100)
    assert file.read() is None and file.generation() == 1
    os.truncate(tmp_path / "table", 0)
    assert file.read() is None and file.generation() == 0
    assert ctypes.sizeof(ctypes.c_uint64) == 8 and COLL_DTYPE.itemsize == RECORD_BYTES


def test_how_long_a_trial_lasts_reaches_the_probe(tmp_path):
    daemon, probe = TableFile(tmp_path / "table", write=True), TableFile(tmp_path / "table")
    assert probe.read() is None
    daemon.publish(Table(3, trial_steps=40))
    message = probe.read()[1]
    assert trial_of(message).trial_steps == 40 and decode_table(message).trial_steps == 40
    daemon.publish(table_of(4))
    assert trial_of(probe.read()[1]).trial_steps == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        probe.publish(table_of(5))  # rank 0 only reads


@pytest.mark.parametrize(
    "fault", ["folder of another", "folder open to others", "file of another", "file open to others"]
)
def test_what_others_could_have_written_is_not_obeyed(tmp_path, fault):
    """A table of uid 65534 in a folder with a predictable name was obeyed.

    Seen at 679c0ae, a table of another user is obeyed: read and in force, from a folder that everybody may write to.
    """
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    TableFile(folder / "table", write=True).publish(table_of(666))
    bad = folder if "folder" in fault else folder / "table"
    if "another" in fault:
        if os.geteuid():
            pytest.skip("only root can give a file away")
        os.chown(bad, 65534, 65534)
    else:
        bad.chmod(0o777)
    with pytest.raises(PermissionError, match="another user"):
        TableFile(folder / "table")
    with pytest.raises(PermissionError, match="another user"):
        TableFile(folder / "table", write=True)


@pytest.mark.parametrize("n_written", [0, 8, 16, 17, 20, 23])
def test_a_daemon_that_died_in_the_middle_of_a_table_goes_on_with_the_next_number(
    folder, monkeypatch, n_written
):
    """SIGKILL after any byte of a publication: the daemon that comes back never uses a number twice."""
    job = Job(folder)
    job.publish({})
    real = os.pwrite

    def dies(fd: int, data: bytes, offset: int) -> int:
        real(fd, data[:n_written], offset)
        raise InterruptedError("killed")

    monkeypatch.setattr(os, "pwrite", dies)
    with pytest.raises(InterruptedError):
        job.publish({})
    monkeypatch.undo()
    assert (folder.table.read() or (0,))[0] in (0, 1)  # nobody sees half a table
    back = Job(RunFolder(folder.path))
    assert back.publish({}) == (2 if n_written <= 16 else 3)
    assert folder.table.read()[0] == back.generation
    back.run.close(remove=False)

"""The run folder: private, cleared when dead; and the event path at full rate."""

import ctypes
import os
import shutil
import subprocess
import sys
import time

import pytest
from dynamiccl.envs.live import Job
from dynamiccl.envs.nccl.shm import RunFolder, TableFile
from dynamiccl.traces.records import COLL_DTYPE, RECORD_BYTES
from test_shm import table_of


def test_folder_is_private_and_goes_away(folder):
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o077 for p in folder.path.iterdir() if p.name == "table"} == {0}
    env = folder.env()
    assert env["DYNAMICCL_RUN"] == str(folder.path) and env["NCCL_TUNER_PLUGIN"] == env["NCCL_PROFILER_PLUGIN"]
    folder.close()
    assert not folder.path.exists()


def test_folders_of_dead_runs_are_cleared_others_stay(folder):
    root = folder.path.parent
    dead, orphan = root / "test-dead", root / "test-orphan"
    for path, ring in ((dead, None), (orphan, f"ring-{os.getpid()}")):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=0o700)
        (path / "daemon").write_text("1 0\n")  # pid 1 lives, but did not start at that time
        if ring:
            (path / ring).write_bytes(b"")  # the job still runs
    RunFolder.create("test-new").close()
    assert not dead.exists() and orphan.exists() and folder.path.exists()
    shutil.rmtree(orphan)


def test_only_a_private_folder_is_opened(tmp_path, folder):
    assert RunFolder.open(folder.path).path == folder.path
    tmp_path.chmod(0o770)
    for bad in (tmp_path, tmp_path / "none", "/dev/null"):
        with pytest.raises(ValueError, match="not a run folder"):
            RunFolder.open(bad)


def test_table_file_that_was_truncated(tmp_path):
    file = TableFile(tmp_path / "table", create=True)
    file.publish(table_of(1))
    os.truncate(tmp_path / "table", 100)
    assert file.read() is None and file.sequence() > 0
    os.truncate(tmp_path / "table", 0)
    assert file.read() is None and file.sequence() == 0
    assert ctypes.sizeof(ctypes.c_uint64) == 8 and COLL_DTYPE.itemsize == RECORD_BYTES


# -- the event path ---------------------------------------------------------------------------------------------------

TRAINER = """
import sys, time
from dynamiccl.envs.nccl.plugin import Plugin
from dynamiccl.traces.records import COLL
import struct
plugin = Plugin.load()
plugin.open()
record = struct.pack("<QB7x14Q", 0, COLL, *([1] * 14))
start = time.perf_counter()
worst = 0.0
for burst in range(int(float(sys.argv[1]) * 100)):  # 200 every 10 ms: 20,000 a second
    begin = time.perf_counter()
    for _ in range(200):
        plugin.emit(record)
    worst = max(worst, time.perf_counter() - begin)
    time.sleep(max(0.0, start + (burst + 1) * 0.01 - time.perf_counter()))
print((burst + 1) * 200, time.perf_counter() - start)
"""


def test_twenty_thousand_collectives_a_second_are_all_seen(folder):
    """The daemon polls ten times a second; one that sleeps for long loses some, knows how many, and costs nothing."""
    env = {**os.environ, "DYNAMICCL_RUN": str(folder.path)}
    job = subprocess.Popen([sys.executable, "-c", TRAINER, "3"], env=env, stdout=subprocess.PIPE, text=True)
    seen = 0
    while job.poll() is None:
        time.sleep(0.1)
        seen += sum(len(ring.drain()) for ring in folder.rings())
    seen += sum(len(ring.drain()) for ring in folder.rings())
    sent = int(job.communicate()[0].split()[0])
    assert sent == 60_000 and seen == sent and sum(ring.lost for ring in folder.rings()) == 0


def test_a_daemon_that_stopped_loses_events_and_says_how_many(folder):
    env = {**os.environ, "DYNAMICCL_RUN": str(folder.path)}
    out = subprocess.run([sys.executable, "-c", TRAINER, "5"], env=env, capture_output=True, text=True, check=True)
    sent = int(out.stdout.split()[0])
    (ring,) = folder.rings()
    assert sent == 100_000 > ring.capacity
    assert len(ring.drain()) + ring.lost == sent and ring.lost > 0


@pytest.mark.parametrize("n_written", [0, 1, 2, 3])
def test_a_daemon_that_died_in_the_middle_of_a_table_goes_on_with_the_next_number(folder, monkeypatch, n_written):
    """SIGKILL between any two writes of a publication: the daemon that comes back never uses a number twice."""
    job = Job(folder)
    job.publish({})
    real = os.pwrite
    left = iter(range(n_written))

    def dies(fd: int, data: bytes, offset: int) -> int:
        if next(left, None) is None:
            raise InterruptedError("killed")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", dies)
    with pytest.raises(InterruptedError):
        job.publish({})
    monkeypatch.undo()
    assert (folder.table.read() or (0,))[0] in (0, 1)  # nobody sees half a table
    back = Job(RunFolder.open(folder.path))
    assert back.publish({}) == (2 if n_written < 2 else 3)
    assert folder.table.read()[0] == back.generation

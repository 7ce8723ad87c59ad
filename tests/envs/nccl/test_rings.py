"""Rings beside the records in them: what stays known, how large they are, who holds them, what is left of them."""

import errno
import os
import shutil
import subprocess
import sys
import time

import pytest
from dynamiccl.envs.live.job import Job
from dynamiccl.envs.nccl.plugin.build import plugin_path
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.traces.records import COMM, FLAG_REGISTERED, FUNCS, OFFER
from dynamiccl.traces.writer import TraceWriter
from nccl_releases import REACH

TALKS = """
import sys, struct, numpy as np
from dynamiccl.envs.nccl.plugin.bindings import Plugin
from nccl_releases import Communicator
from dynamiccl.traces.records import COLL
plugin = Plugin.load()
comms = [Communicator(plugin.path, 70 + i, 8, 1, i) for i in range(2)]
for comm in comms:
    for n_bytes in (4096, 8192):
        comm.get_coll_info("all_gather", n_bytes, np.full((7, 3), 5, np.float32))
record = struct.pack("<QB7x14Q", 0, COLL, *([1] * 14))
for _ in range(int(sys.argv[1])):
    plugin.emit(record)
print("ready", flush=True)
sys.stdin.read()
"""


def process(program, run, *args, **env):
    """A process of the run, once it has said that it is ready."""
    environment = {**os.environ, "DYNAMICCL_RUN": str(run.path), **env}
    child = subprocess.Popen(
        [sys.executable, "-c", REACH + program, *map(str, args)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    line = child.stdout.readline()
    assert line == "ready\n", line + child.stderr.read()
    return child


def test_a_daemon_that_comes_after_200_000_records_knows_communicators_and_offers(folder):
    """It said: the job runs no all_gather or reduce_scatter that a tuner can reach. So none could be restarted.

    Seen at 679c0ae, a tuner that joins late: "the job runs no all_gather or reduce_scatter that a tuner can reach", of
    a job whose first 179,283 records had been written over.
    """
    child = process(TALKS, folder, 200_000)
    (ring,) = folder.rings()
    assert [int(k) for k in ring.known()["kind"]] == [COMM, COMM, OFFER, OFFER, OFFER, OFFER]
    job = Job(folder)
    job.poll()
    child.communicate()
    assert ring.lost > 100_000
    assert {c.comm_id: (c.n_ranks, list(c.ranks)) for c in job.assembler.comms.values()} == {
        70: (8, [0]),
        71: (8, [1]),
    }
    assert set(job.assembler.offers) == {(c, "all_gather", n) for c in (70, 71) for n in (4096, 8192)}


LIVES = """
import sys, struct
from dynamiccl.envs.nccl.plugin.bindings import Plugin
from dynamiccl.traces.records import COLL
plugin = Plugin.load()
plugin.open()
for _ in range(3):
    plugin.emit(struct.pack("<QB7x14Q", 0, COLL, *([1] * 14)))
print("ready", flush=True)
sys.stdin.read()
"""


def look(job):
    """At all rings, until what they hold is on disk."""
    for _ in range(3):
        job.poll()
        job.take()


def test_rings_of_dead_processes_go_once_others_have_replaced_them(folder, tmp_path):
    """Before: each restart of 8 ranks left up to 64 MiB in shared memory, and 8 open files, for good."""
    job, beside = Job(folder, writer=TraceWriter(tmp_path, {}, part_rows=1)), Job(RunFolder(folder.path))
    for _ in range(2):
        for rank in range(2):
            process(LIVES, folder, RANK=str(rank)).communicate()
        beside.run.rings()  # another reader, such as `dynamiccl stop`, has them open
    look(job)
    assert len(list(folder.path.glob("ring-*"))) == 4  # no process lives: they tell that the job had begun
    again = process(LIVES, folder, RANK="0")
    look(job)
    (ring,) = folder.rings()
    assert ring.pid == again.pid and [path.name for path in folder.path.glob("ring-*")] == [ring.name]
    assert list(job.lost.values()) == [0] * 5
    beside.poll()
    assert list(beside.lost.values()) == [0] * 5  # it has read all of them
    assert sorted(folder.gone().values()) == [3] * 4
    again.communicate()
    job.poll()
    job.poll()
    assert folder.rings() == [ring] and job.is_alive()
    beside.run.close(remove=False)


def test_a_ring_that_cannot_be_opened_now_is_tried_again(folder, monkeypatch):
    """Before: a tuner that had too many files open never read the rings that came meanwhile."""
    process(LIVES, folder).communicate()
    opened = os.open

    def full(*args, **kwargs):
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "open", full)
    assert not folder.rings() and "too many open files" in next(iter(folder.refused.values()))
    monkeypatch.setattr(os, "open", opened)
    assert len(folder.rings()) == 1 and not folder.refused


MANY_SIZES = """
import sys, numpy as np
from dynamiccl.envs.nccl.plugin.bindings import Plugin
from nccl_releases import Communicator
plugin = Plugin.load()
comm = Communicator(plugin.path, 70, 8, 1, 0)
for n in range(1000):  # no table has a row for these
    comm.get_coll_info("all_reduce", 8 * n, np.full((7, 3), 5, np.float32))
for _ in range(2):
    for n in range(3000):
        comm.get_coll_info("all_gather", 8 * n, np.full((7, 3), 5, np.float32))
comm.tuner.ask("all_gather", 8, np.full((7, 3), 5, np.float32), is_registered=True)
Communicator(plugin.path, 71, 8, 1, 0)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_job_of_ever_new_sizes_leaves_room_for_communicators(folder):
    child = process(MANY_SIZES, folder)
    (ring,) = folder.rings()
    known = ring.known()
    child.communicate()
    is_offer = known["kind"] == OFFER
    offers = [int(n) for n in known["n_bytes"][is_offer]]
    assert set(known["func"][is_offer]) == {FUNCS.index("all_gather")}
    assert len(offers) - 1 == len(set(offers)) > 800
    assert offers[-1] == 8 and list(known["flags"][known["flags"] > 0]) == [FLAG_REGISTERED], (
        "and for registered buffers"
    )
    assert [int(c) for c in known["comm_id"][known["kind"] == COMM]] == [70, 71]


def test_a_ring_is_held_by_its_process_not_named_by_its_number(folder):
    """A process id says nothing where the job lives in another container, and two containers may have the same one."""
    child = process(TALKS, folder, 0, RANK="3")
    (ring,) = folder.rings()
    assert ring.name.startswith("ring-3-") and ring.pid == child.pid and ring.is_alive()
    forked = process(FORKS, folder, RANK="4")
    grandchild = int(forked.stdout.readline())
    theirs = next(r for r in folder.rings() if r is not ring)
    child.kill()
    child.wait()
    assert not ring.is_alive() and theirs.is_alive()
    forked.kill()
    forked.wait()
    # Its child, which sleeps on, does not hold it, as soon as it has run at all.
    assert any(not theirs.is_alive() or time.sleep(0.05) for _ in range(200))
    os.kill(grandchild, 9)


FORKS = """
import os, sys, time
from dynamiccl.envs.nccl.plugin.bindings import Plugin
Plugin.load().open()
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print("ready", flush=True)
print(child, flush=True)
time.sleep(60)
"""


def test_two_processes_of_one_number_are_two(folder):
    for i in range(2):
        child = process(TALKS, folder, 0, RANK=str(i))
        child.communicate()
    first, second = sorted(folder.path.glob("ring-*"))
    with second.open("r+b") as file, first.open("rb") as other:
        file.seek(24)
        other.seek(24)
        file.write(other.read(4))
    locks = [path.open("rb") for path in (first, second)]
    import fcntl

    for lock in locks:
        fcntl.flock(lock, fcntl.LOCK_EX)
    rings = folder.rings()
    assert len({ring.pid for ring in rings}) == 1
    assert len({ring.life for ring in rings}) == len({ring.process for ring in rings}) == 2
    for lock in locks:
        lock.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small /dev/shm needs root")
@pytest.mark.parametrize(
    ("mib", "ranks", "records"), [(64, 8, 4096), (64, 1, 32768), (16, 8, 0), (1024, 2, 65536)]
)
def test_rings_take_an_eighth_of_what_is_free(tmp_path, mib, ranks, records):
    """Docker gives 64 MiB: 8 rings took 57 of them, and NCCL's own segments and data loaders died of it.

    Seen at 679c0ae, rings take 57 of 64 MiB of /dev/shm: 57 MiB in 7 rings, the eighth rank has none and nothing says
    so.
    """
    mount = tmp_path / "shm"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=700", "x", mount], capture_output=True
    )
    if done.returncode:
        pytest.skip("this machine does not let us mount")
    try:
        run = RunFolder(mount)
        children = [
            process(TALKS, run, 0, RANK=str(r), LOCAL_WORLD_SIZE=str(ranks)) for r in range(min(ranks, 3))
        ]
        rings, refused = run.rings(), list(run.refused.values())
        said = [child.communicate()[1] for child in children]
        assert [ring.capacity for ring in rings] == [records] * len(rings)
        used = sum(path.stat().st_blocks * 512 for path in mount.glob("ring-*"))
        assert used <= mib * 2**20 / 8 / ranks * len(children) + 2**16
        if records == 0:
            assert len(refused) == len(children) and all(
                "too little for a ring" in text for text in (*refused, *said)
            )
        else:
            assert not refused and ("in place of 65536" in said[0]) == (records < 65536) and not any(said[1:])
        run.close(remove=False)
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


@pytest.mark.parametrize(
    ("limit", "error"),
    [("FSIZE, (1 << 20, 1 << 20)", "File too large"), ("NOFILE, (free, free)", "Too many open")],
)
def test_why_there_is_no_ring_is_said(limit, error):
    """It is reserved at once: no signal later. Before: "no room in shared memory" in each case, or nothing."""
    program = f"""
import os, resource
from dynamiccl.envs.nccl.plugin.bindings import Plugin
p = Plugin.load()
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
free = os.open("/dev/null", 0) + 1  # one file more may be open: the folder
os.close(free - 1)
resource.setrlimit(resource.RLIMIT_{limit})
print(p.open())
p.emit(bytes(128))
"""
    run = RunFolder.create()
    try:
        env = {**os.environ, "DYNAMICCL_RUN": str(run.path)}
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == ["False"] and f"could not be made: {error}" in done.stderr
        assert not run.rings()
        if "FSIZE" in limit:  # else there can be no file that tells the daemon
            assert error in next(iter(run.refused.values()))
        assert not list(run.path.glob(".*"))
    finally:
        run.close()


UNLOADS = """
import ctypes, os, shutil, sys
from nccl_releases import Communicator
import _ctypes
for _ in range(3):
    handle = _ctypes.dlopen(sys.argv[1], os.RTLD_NOW | os.RTLD_LOCAL)
    comm = Communicator(sys.argv[1], 70, 8, 1, 0)
    comm.finalize()
    library = ctypes.CDLL(sys.argv[1])._handle
    while any(sys.argv[1] in line for line in open("/proc/self/maps")):
        _ctypes.dlclose(handle)
print("ready", flush=True)
print(sum("/ring-" in line for line in open("/proc/self/maps")), flush=True)
sys.stdin.read()
"""


def test_nothing_stays_mapped_when_the_plugin_is_unloaded(folder, tmp_path):
    copy = tmp_path / "plugin.so"
    shutil.copy(plugin_path(), copy)
    child = process(UNLOADS, folder, copy)
    assert child.stdout.readline() == "0\n"
    assert not any(ring.is_alive() for ring in folder.rings())
    child.communicate()


RACES = """
import sys, threading
from dynamiccl.envs.nccl.plugin.bindings import Plugin
from nccl_releases import Communicator
plugin = Plugin.load()
ready = threading.Barrier(8)
def make(i):
    ready.wait()
    Communicator(plugin.path, 100 + i, 8, 1, i)
threads = [threading.Thread(target=make, args=(i,)) for i in range(8)]
for t in threads: t.start()
for t in threads: t.join()
print("ready", flush=True)
sys.stdin.read()
"""


def test_communicators_made_while_the_ring_is_made_are_announced(folder):
    """The second thread found the ring being opened, and its communicator was never heard of."""
    for _ in range(3):
        process(RACES, folder).communicate()
    known = [ring.known() for ring in folder.rings()]
    assert [sorted(int(c) for c in k["comm_id"]) for k in known] == [list(range(100, 108))] * 3

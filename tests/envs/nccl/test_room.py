"""Kernel times only where NCCL finds the room for them, and jobs in narrow containers that do what they do without us.

That NCCL crashes where it does not was seen with the real one, and is not shown here: what is asserted is the mask.
"""

import json
import os
import re
import subprocess
import sys

import pytest
from dynamiccl.envs.nccl.plugin.build import compiler, plugin_path
from paths import HELPERS

MIB = 2**20
#: A stand-in for NCCL's library: its number, and a mask that lies in it.
NCCL = "int mask; int ncclGetVersion(int* number) { *number = NUMBER; return 0; }"
#: Prints what the plugin asks for in a process of its own.
ASKS = """
import ctypes, json, sys
from dynamiccl.envs.nccl.plugin.bindings import Plugin
from dynamiccl.envs.sim.emulated import nccl_caller
from nccl_releases import Communicator
plugin_at, nccl_at, shapes, gone, used, fill_mib = json.loads(sys.argv[1])
plugin = Plugin.load(plugin_at)
assert plugin.open()
if nccl_at:
    nccl_caller.MASKS[plugin.shared_object._name] = ctypes.c_int.in_dll(ctypes.CDLL(nccl_at), "mask")
comms = [Communicator(plugin_at, 7 + i, n_ranks, n_nodes, 0, "2.29.7") for i, (n_ranks, n_nodes) in enumerate(shapes)]
for comm in comms[:gone]:
    comm.finalize()
plugin.sample(True)
first = comms[-1].profiler.mask
for comm in comms[:used]:
    comm.stop(comm.start_coll("all_gather", 0, 4096, "float32", 1, 16, "ring", "ll"))
plugin.sample(False)
if fill_mib:
    with open("/dev/shm/more", "wb") as file:
        file.write(bytes(fill_mib << 20))
    plugin.sample(True)
print(json.dumps([first, comms[-1].profiler.mask]))
"""


def in_narrow(command, shm_mib, prepare="true"):
    """The command, with /dev/shm of so many MiB, in a mount namespace of its own."""
    mount = f'mount -t tmpfs -o size={shm_mib}m tmpfs /dev/shm && {prepare} && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", mount, "sh", *command]


@pytest.fixture(scope="module")
def mounts():
    if subprocess.run(in_narrow(["true"], 1), capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a small /dev/shm (needs root and mount namespaces)")


@pytest.fixture
def asks(tmp_path, mounts):
    """asks(MiB, shapes, ...) -> the mask while kernel times are sampled, and after.

    ``used``: so many communicators run a collective with times. Then ``fill_mib`` fills /dev/shm, and times are asked
    for again.
    """

    def ask(shm_mib, shapes, number=0, gone=0, files=1024, used_mib=0, pids=(), used=0, fill_mib=0, **env):
        library = ""
        if number:
            source, library = tmp_path / "nccl.c", str(tmp_path / f"libnccl-{number}.so")
            source.write_text(NCCL)
            command = [*compiler(), "-shared", "-fPIC", f"-DNUMBER={number}", str(source), "-o", library]
            subprocess.run(command, check=True)
        run = tmp_path / "run"
        run.mkdir(mode=0o700, exist_ok=True)
        told = json.dumps([str(plugin_path()), library, shapes, gone, used, fill_mib])
        program = [sys.executable, "-c", ASKS, told]
        fill = f"head -c {used_mib}M /dev/zero > /dev/shm/full && ulimit -n {files}"
        for folder, most, now in pids:
            at = f"/sys/fs/cgroup{folder}"
            fill += f" && mount -t tmpfs tmpfs /sys/fs/cgroup && mkdir -p {at}"
            fill += f" && echo {most} > {at}/pids.max && echo {now} > {at}/pids.current"
        every = {"DYNAMICCL_RUN": str(run), "PYTHONPATH": str(HELPERS), **env}
        done = subprocess.run(
            in_narrow(program, shm_mib, fill), env={**os.environ, **every}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return ask


ON, OFF = [2 + 64, 2], [2, 2]
EIGHT = [8, 1]  # ranks, nodes


@pytest.mark.parametrize(
    ("shm_mib", "shapes", "more", "mask"),
    [
        (2 * 34, [[1, 1]], {}, ON),  # half of what is free stays the job's
        (2 * 34 - 1, [[1, 1]], {}, OFF),
        (64, [[2, 1]], {}, OFF),  # Docker's default, as in NVIDIA/nccl#2326
        (100, [[2, 1]], {}, OFF),  # before: 32 MiB were left, and a data loader's batch of 40 MB had no room
        (2 * 8 * 34, [EIGHT], {}, ON),
        (2 * 8 * 34 - 1, [EIGHT], {}, OFF),
        (2 * 8 * 34 + 100, [EIGHT], {"used_mib": 101}, OFF),  # what is free counts, not what there is
        (2 * 8 * 34, [[16, 2]], {}, ON),  # of 16 ranks eight are here
        (2 * 8 * 34, [[2, 2]], {"LOCAL_WORLD_SIZE": "8"}, ON),
        # Seven more communicators of this kind are on the node.
        (2 * 8 * 34 - 1, [[2, 2]], {"LOCAL_WORLD_SIZE": "8"}, OFF),
        (2 * 8 * 34, [EIGHT, EIGHT], {}, OFF),  # each communicator needs its own
        (4 * 8 * 34, [EIGHT, EIGHT], {}, ON),
        (2 * 8 * 34, [EIGHT, EIGHT], {"gone": 1}, ON),
        (64, [EIGHT], {"number": 22907}, OFF),
        (64, [EIGHT], {"number": 23102}, OFF),
        (64, [EIGHT], {"number": 23203}, ON),  # goes on without kernel times by itself
        (1024, [EIGHT], {"files": 64}, OFF),  # a few are open: less than twice 32 are free
        (1024, [EIGHT], {"files": 128}, ON),
        (2 * 8 * 34, [EIGHT], {"pids": [("", 116, 100)]}, ON),  # eight threads, and as many that stay free
        (2 * 8 * 34, [EIGHT], {"pids": [("", 115, 100)]}, OFF),
        (2 * 8 * 34, [EIGHT], {"pids": [("", "max", 100)]}, ON),
        (2 * 8 * 34, [EIGHT], {"pids": [("/pids", 115, 100)]}, OFF),  # cgroups of version 1
        (64, [EIGHT], {"DYNAMICCL_CLUSTER": "dgx-h100-2x8"}, ON),
    ],
)
def test_kernel_times_are_asked_for_only_where_there_is_room(asks, shm_mib, shapes, more, mask):
    """Before: always, and a rank of a container with Docker's 64 MiB died at its first collective; then wherever they
    fitted, and what the job wrote to /dev/shm afterwards failed."""
    launched = 2048  # asked for wherever NCCL has it; it takes no memory
    assert [found & ~launched for found in asks(shm_mib, shapes, **more)] == mask


def test_a_communicator_that_comes_to_its_first_times_late_still_needs_room(asks):
    """Before: room was looked for once, and a /dev/shm that filled up meanwhile killed the rank."""
    launched, room = 2048, 4 * 8 * 34
    for used, mask in ((1, [ON[0], OFF[0]]), (2, [ON[0], ON[0]])):
        found = asks(room, [EIGHT, EIGHT], used=used, fill_mib=room - 2 * 8 * 34 + 1)
        assert [one & ~launched for one in found] == mask, used


#: Loaded before the C library: what is free in /dev/shm is what the environment says, in MiB.
FREE = """
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
int statvfs(const char* path, struct statvfs* found) {
  if (strcmp(path, "/dev/shm") != 0) abort();
  *found = (struct statvfs){.f_frsize = 1 << 20, .f_bavail = (fsblkcnt_t)atoi(getenv("FREE_MIB"))};
  return 0;
}
"""


@pytest.mark.parametrize(("free_mib", "mask"), [(2 * 8 * 34, ON), (2 * 8 * 34 - 1, OFF)])
def test_without_root_the_mask_follows_what_is_free(tmp_path, free_mib, mask):
    """The tests above mount a small /dev/shm: an ordinary user has none of them."""
    source, library = tmp_path / "free.c", tmp_path / "free.so"
    source.write_text(FREE)
    subprocess.run([*compiler(), "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    (run := tmp_path / "run").mkdir(mode=0o700)
    told = json.dumps([str(plugin_path()), "", [EIGHT], 0, 0, 0])
    env = {k: v for k, v in os.environ.items() if k not in ("LOCAL_WORLD_SIZE", "DYNAMICCL_CLUSTER")}
    env |= {"DYNAMICCL_RUN": str(run), "PYTHONPATH": f"{HELPERS}{os.pathsep}{env.get('PYTHONPATH', '')}"}
    env |= {"LD_PRELOAD": str(library), "FREE_MIB": str(free_mib)}
    done = subprocess.run([sys.executable, "-c", ASKS, told], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [found & ~2048 for found in json.loads(done.stdout)] == mask


# -- whole jobs --------------------------------------------------------------------------------------------------------


LITTLE_MEMORY = "ulimit -v 6000000"  # KiB of addresses; PyTorch alone takes most of them
SIZE = ["--steps", "30", "--layers", "2", "--width", "32", "--heads", "4"]
JOB = ["--stage", "3", *SIZE, "--backend", "gloo", "--log"]


@pytest.mark.slow
@pytest.mark.usefixtures("mounts")
@pytest.mark.parametrize(("shm_mib", "prepare"), [(64, "true"), (64, "ulimit -n 64"), (64, LITTLE_MEMORY)])
def test_a_job_in_a_narrow_container_does_what_it_does_without_us(tmp_path, shm_mib, prepare):
    """Status, output but for its times, and losses of a job of two ranks: alone, and tuned on an emulated cluster."""
    said = {}
    tune = [sys.executable, "-m", "dynamiccl.agent.cli", "tune", "--cluster", "dgx-h100-2x8", "--no-memory"]
    for name, before in {"alone": [], "tuned": [*tune, "--out", str(tmp_path / "out"), "--"]}.items():
        log = tmp_path / name
        job = [*before, sys.executable, "-m", "dynamiccl.zero_workload", *JOB, str(log)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            in_narrow(job, shm_mib, prepare), env=env, capture_output=True, text=True, timeout=300
        )
        assert log.exists(), done.stderr[-2000:]
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        losses = [row["loss"] for row in rows if "loss" in row]
        said[name] = done.returncode, losses, re.sub(r" +\d+ ms", "", done.stdout)
    assert said["alone"] == said["tuned"]
    assert said["alone"][0] == 0 and len(said["alone"][1]) == 30

"""The tuner that the job has without us: asked first, changed by nothing but a row, and left out when it fails."""

import ctypes
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from both_modes import tells
from dynamiccl.envs.nccl.plugin.bindings import Plugin
from dynamiccl.envs.nccl.plugin.build import HERE, cache_folder, compiler, nccl_env, plugin_path
from dynamiccl.envs.nccl.shm import RunFolder, encode_table
from dynamiccl.traces.records import ALGOS, OFFER, OFFER_DTYPE, PROTOS, Decision, Slot, Table
from nccl_releases import REACH, Communicator, choose

__all__ = ["tells"]  # a fixture: each test runs in both modes

MB = 2**20
RELEASES = {3: "2.23.4", 4: "2.26.2", 5: "2.29.7", 6: "2.30.7"}

# Forces ring/ll128 with 6 channels for an all_gather, prices pat at 7, and counts. VERSION, FAIL.
SOURCE = """
#include <string.h>
#include "abi.h"
__attribute__((visibility("default"))) struct { int init, asked, end, chunk; } seen;
static int mine;
static int info(void* c, int func, float* cost, int* n_channels) {
  seen.asked += c == &mine;
  if (func != FUNC_ALL_GATHER) return 0;
  cost[ALGO_RING * N_PROTOS + 1] = 0.0f;
  if (cost[ALGO_PAT * N_PROTOS + 2] >= 0) cost[ALGO_PAT * N_PROTOS + 2] = 7.0f;
  *n_channels = 6;
  return FAIL & 2;
}
#if VERSION <= 4
static int init(size_t r, size_t n, nccl_logger l, void** c) {
  (void)l;
#else
static int init(void** c, uint64_t id, size_t r, size_t n, nccl_logger l, struct nccl_nvl_domains* d, void* k) {
  (void)l; (void)d; (void)k;
  if (id != 42) return 5;
#endif
  seen.init++;
  *c = &mine;
  return r == 8 && n == 1 ? FAIL & 1 : 5;
}
#if VERSION == 3
static int ask(void* c, int f, size_t b, int p, float** t, int na, int np, int* ch) {
  (void)b; (void)p; (void)na; (void)np;
#else
static int ask(void* c, int f, size_t b, int p, float** t, int na, int np, int r, int* ch) {
  (void)b; (void)p; (void)na; (void)np; (void)r;
#endif
  return info(c, f, (float*)t, ch);
}
static int end(void* c) { seen.end += c == &mine; return 0; }
#if VERSION == 6
static int chunk(void* c, int f, size_t b, int a, int p, int n, size_t* size) {
  (void)f; (void)a; (void)p; (void)n;
  seen.chunk += c == &mine;
  *size = b / 2;
  return FAIL & 4;
}
#define LAST , chunk
#else
#define LAST
#endif
#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)
__attribute__((visibility("default"))) const struct CAT(nccl_tuner_v, VERSION) CAT(ncclTunerPlugin_v, VERSION) = {
    "theirs", init, ask, end LAST};
"""


def their_tuner(folder, version, fail=0, name="libnccl-tuner-theirs.so"):
    """Builds the other tuner; its path."""
    source, library = folder / "theirs.c", folder / name
    source.write_text(SOURCE)
    defines = [f"-DVERSION={version}", f"-DFAIL={fail}"]
    command = [
        *compiler(),
        "-shared",
        "-fPIC",
        "-std=c11",
        "-w",
        f"-I{HERE}",
        *defines,
        source,
        "-o",
        library,
    ]
    subprocess.run(list(map(str, command)), check=True)
    return library


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """beside(their path) -> (our plugin with it beside, its counters, the run folder)."""
    run = RunFolder.create()

    def load(theirs):
        monkeypatch.setenv("DYNAMICCL_RUN", str(run.path))
        monkeypatch.setenv("DYNAMICCL_NEXT_TUNER", str(theirs))
        copy = tmp_path / f"ours-{len(list(tmp_path.iterdir()))}.so"
        shutil.copy(plugin_path(), copy)
        ours = Plugin.load(copy)
        numbers = (ctypes.c_int * 4).in_dll(ctypes.CDLL(str(theirs)), "seen")
        return ours, numbers, run

    yield load
    run.close()


def offer(**cells):
    cost = np.full((len(ALGOS), len(PROTOS)), -1, np.float32)
    for name, us in {"ring_ll": 30, "ring_ll128": 20, "ring_simple": 10, **cells}.items():
        algo, _, proto = name.rpartition("_")
        cost[ALGOS.index(algo), PROTOS.index(proto)] = us
    return cost


def named(cell):
    return f"{ALGOS[cell[0]]}/{PROTOS[cell[1]]}"


@pytest.mark.parametrize("version", RELEASES)
def test_it_is_asked_first_and_an_empty_table_changes_nothing(beside, tmp_path, version):
    """Seen at 679c0ae, the job's own tuner is replaced: ``NCCL_TUNER_PLUGIN=libnccl-ofi-tuner.so dynamiccl env`` names
    ours alone.
    """
    ours, seen, _ = beside(their_tuner(tmp_path, version))
    comm = Communicator(ours.path, 42, 8, 1, 0, RELEASES[version])
    cost = offer(pat_simple=99)
    assert (
        comm.get_coll_info("all_gather", MB, cost) == 6
    )  # before, it was never heard of: ring/simple, NCCL's count
    assert np.array_equal(cost, offer(ring_ll128=0, pat_simple=7))
    cost = offer()
    assert comm.get_coll_info("reduce_scatter", MB, cost) == 0 and np.array_equal(cost, offer())
    # It has no row of ours for the reduce_scatter; the all_gather's row goes before its word.
    table = {
        Slot(8, 1, "all_gather", 20): Decision("ring", "ll", 3),
        Slot(8, 1, "all_gather", 21): Decision("ring", "ll"),
    }
    table[Slot(8, 1, "all_gather", 22)] = Decision(None, None, 2)
    table[Slot(8, 1, "all_gather", 23)] = Decision("ring", "ll128")
    ours.activate(encode_table(Table.of(1, table)))
    said = {}
    for k in range(19, 24):
        cost = offer(pat_simple=99)
        n_channels = comm.get_coll_info("all_gather", 2**k, cost)
        said[k] = (named(choose(cost)), n_channels)
    assert said == {
        19: ("ring/ll128", 6),  # theirs
        20: ("ring/ll", 3),  # ours
        21: ("ring/ll", 0),  # ours: its 6 channels were meant for its own choice
        22: ("ring/ll128", 2),  # our channels for its choice
        23: ("ring/ll128", 6),  # the same pair: its channels stand
    }
    comm.finalize()
    assert list(seen)[:3] == [1, 7, 1]


@pytest.mark.parametrize(
    ("theirs", "nccl", "works"), [(3, 6, True), (4, 5, True), (6, 5, False), (5, 4, False)]
)
def test_it_is_called_in_a_version_that_both_speak(beside, tmp_path, capfd, theirs, nccl, works):
    ours, seen, _ = beside(their_tuner(tmp_path, theirs))
    comm = Communicator(ours.path, 42, 8, 1, 0, RELEASES[nccl])
    assert comm.get_coll_info("all_gather", MB, offer()) == (6 if works else 0)
    comm.finalize()
    assert list(seen)[:3] == ([1, 1, 1] if works else [0, 0, 0])
    assert ("no version that this NCCL calls" in capfd.readouterr().err) != works


@pytest.mark.parametrize("fail", [1, 2], ids=["at init", "when asked"])
@pytest.mark.parametrize("version", RELEASES)
def test_its_failure_is_said_once_and_leaves_nccl_to_itself(beside, tmp_path, capfd, version, fail):
    ours, _, _ = beside(their_tuner(tmp_path, version, fail))
    comm = Communicator(ours.path, 42, 8, 1, 0, RELEASES[version])
    for _ in range(3):
        cost = offer()
        assert comm.get_coll_info("all_gather", MB, cost, n_channels=4) == 4 and np.array_equal(cost, offer())
    comm.finalize()
    assert capfd.readouterr().err.count("it is left out") == 1


def test_the_offer_tells_what_the_job_does_without_us(beside, tmp_path):
    ours, _, run = beside(their_tuner(tmp_path, 5))
    comm = Communicator(ours.path, 42, 8, 1, 0)
    comm.get_coll_info("all_gather", MB, offer(pat_simple=99, nvls_simple=1.7e38))
    comm.finalize()
    (ring,) = run.rings()
    (row,) = (lambda known: known[known["kind"] == OFFER].view(OFFER_DTYPE))(ring.known())
    assert (ALGOS[row["algo"]], PROTOS[row["proto"]]) == ("ring", "ll128")  # its choice, at NCCL's price
    assert np.array_equal(row["cost_us"], offer(pat_simple=7))


def test_chunk_sizes_stay_nccls_and_that_is_said_once(beside, tmp_path, capfd):
    ours, seen, _ = beside(their_tuner(tmp_path, 6, 0, "libnccl-tuner-chunks.so"))
    for _ in range(2):
        Communicator(ours.path, 42, 8, 1, 0, RELEASES[6]).finalize()
    table = (ctypes.c_void_p * 5).in_dll(ours.shared_object, "ncclTunerPlugin_v6")
    assert table[4] is None and seen[3] == 0
    assert capfd.readouterr().err.count("is not asked for sizes of chunks") == 1


SEARCHES = """
import numpy as np
from dynamiccl.envs.nccl.plugin.build import plugin_path
from nccl_releases import Communicator
comm = Communicator(plugin_path(), 42, 8, 1, 0, sys.argv[1])
cost = np.full((7, 3), -1, np.float32)
cost[1] = 30, 20, 10
print(comm.get_coll_info("all_gather", 4096, cost))
"""


@pytest.mark.parametrize("tells", ["at once"], indirect=True)  # it asks, and runs no collective
@pytest.mark.parametrize(
    ("built", "env", "found"),
    [
        ("libnccl-net.so", {"NCCL_TUNER_PLUGIN": "NONE"}, False),
        ("libnccl-net.so", {"NCCL_NET_PLUGIN": ""}, False),
        ("libnccl-net.so", {"NCCL_NET_PLUGIN": "None"}, False),
        # Before 2.28 "none" was a name like any other, and the tuner of AWS stayed.
        ("libnccl-net.so", {"NCCL_TUNER_PLUGIN": "none", "RELEASE": "2.27.7"}, True),
        ("libnccl-net-x.so", {"NCCL_TUNER_PLUGIN": "none", "RELEASE": "2.27.7"}, False),
        ("libnccl-net-fabric.so", {"NCCL_NET_PLUGIN": "fabric"}, True),  # AWS, Google: inside the net plugin
        ("libnccl-net-fabric.so", {"NCCL_NET_PLUGIN": "none,fabric"}, True),
        ("libnccl-net.so", {}, True),
        ("libnccl-tuner.so", {}, True),
        ("libnccl-net-fabric.so", {}, False),
        ("libnccl-tuner-theirs.so", {"NCCL_TUNER_PLUGIN": "theirs"}, True),
        ("libnccl-net.so", {"NCCL_TUNER_PLUGIN": "nowhere"}, True),
        ("libnccl-net.so", {"NCCL_TUNER_PLUGIN": "none"}, False),
    ],
)
def test_it_is_found_where_nccl_would_find_it(tmp_path, monkeypatch, built, env, found):
    """On AWS and Google Cloud the job lost the tuner that it had: what was compared with was not its default."""
    release = env.get("RELEASE", "2.29.7")
    their_tuner(tmp_path, 5 if release > "2.28" else 4, name=built)
    for name in list(os.environ):
        if name.startswith("NCCL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder().parent))  # ours is built there already
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    job = {**os.environ, **nccl_env(plugin_path())}
    done = subprocess.run(
        [sys.executable, "-c", REACH + SEARCHES, release], env=job, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["6" if found else "0"] and done.stderr == ""

"""Another profiler beside ours: both see every event, and one that is broken is left out and said so once."""

import ctypes
import shutil
import subprocess

import numpy as np
import pytest
from dynamiccl.envs.nccl.plugin.bindings import Plugin
from dynamiccl.envs.nccl.plugin.build import HERE, compiler, nccl_env, plugin_path
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.envs.sim.emulated.nccl_caller import Communicator
from dynamiccl.traces import records as rec

# A profiler that keeps its events in memory of its own, checks what comes back, and counts. VERSION, MASK, FAIL_INIT.
SOURCE = """
#include <stdlib.h>
#include "abi.h"
struct seen { int init, coll, kernel, stop, state, finalize, alien_handle, alien_parent, alien_context; };
__attribute__((visibility("default"))) struct seen seen;
struct event { int magic; };
static int context_of_mine;
static int is_mine(void* p) { return p == NULL || ((struct event*)p)->magic == 0x5EED; }
#if VERSION == 4
#define EVENT nccl_event_v4
#define PROFILER nccl_profiler_v4
static int init(void** c, int* mask, const char* n, uint64_t id, int nn, int nr, int r, nccl_logger log) {
#else
#define EVENT nccl_event_v5
#define PROFILER nccl_profiler_v5
static int init(void** c, uint64_t id, int* mask, const char* n, int nn, int nr, int r, nccl_logger log) {
#endif
  (void)n; (void)id; (void)nn; (void)nr; (void)r; (void)log;
  seen.init++;
  *mask = MASK;
  *c = &context_of_mine;
  return FAIL_INIT;
}
static int start(void* c, void** handle, struct EVENT* e) {
  seen.alien_context += c != &context_of_mine;
  seen.alien_parent += !is_mine(e->parent);
#if VERSION > 4
  if (e->type == EVENT_COLL) seen.alien_parent += !is_mine(e->parent_group);
#endif
  seen.coll += e->type == EVENT_COLL;
  seen.kernel += e->type == EVENT_KERNEL_CH;
  struct event* mine = malloc(sizeof *mine);
  mine->magic = 0x5EED;
  *handle = mine;
  return 0;
}
static int stop(void* h) { seen.stop++; seen.alien_handle += !is_mine(h); return 0; }
static int state(void* h, int s, union nccl_event_state* a) {
  (void)s; (void)a;
  seen.state++;
  seen.alien_handle += !is_mine(h);
  return 0;
}
static int finalize(void* c) { seen.finalize++; seen.alien_context += c != &context_of_mine; return 0; }
#define NAME_(v) ncclProfiler_v##v
#define NAME(v) NAME_(v)
__attribute__((visibility("default"))) const struct PROFILER NAME(VERSION) = {
    "counts", init, start, stop, STATE, finalize};
"""
FIELDS = ("init", "coll", "kernel", "stop", "state", "finalize", "alien_handle", "alien_parent", "alien_context")
BOTH, COLL_ONLY, KERNEL_ONLY = 66, 2, 64


def other(folder, version: int, mask: int, fail_init: int = 0, state: str = "state"):
    """Builds the other profiler; its path."""
    source, library = folder / "other.c", folder / "libnccl-profiler-other.so"
    source.write_text(SOURCE)
    defines = [f"-DVERSION={version}", f"-DMASK={mask}", f"-DFAIL_INIT={fail_init}", f"-DSTATE={state}"]
    command = [*compiler(), "-shared", "-fPIC", "-std=c11", "-w", f"-I{HERE}", *defines, source, "-o", library]
    subprocess.run(list(map(str, command)), check=True)
    return library


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """beside(profiler) -> (our plugin with the profiler beside it, its counters, the run folder)."""
    run = RunFolder.create()

    def load(profiler, *, counters: bool = True):
        monkeypatch.setenv("DYNAMICCL_RUN", str(run.path))
        monkeypatch.setenv("DYNAMICCL_NEXT_PROFILER", str(profiler))
        copy = tmp_path / "ours.so"
        shutil.copy(plugin_path(), copy)
        ours = Plugin.load(copy)
        assert ours.open()
        if not counters:
            return ours, None, run
        numbers = (ctypes.c_int * len(FIELDS)).in_dll(ctypes.CDLL(str(profiler)), "seen")
        return ours, lambda: dict(zip(FIELDS, numbers, strict=True)), run

    yield load
    run.close()


def one_step(comm: Communicator) -> None:
    """Three collectives of two channels, as NCCL reports them: channels long after their collective was stopped."""
    handles = []
    for seq in range(3):
        handles.append(comm.start_coll("all_gather", seq, 1000, "bfloat16", 2, 16, "ring", "simple"))
        comm.stop(handles[-1])
    for seq, handle in enumerate(handles):
        if comm.profiler.mask & 64:
            channels = [comm.profiler.start_kernel(handle, c, 1000 * seq + c) for c in (0, 1)]
            for c, channel in enumerate(channels):
                comm.profiler.stop_kernel(channel, 1000 * seq + 500 + c)


def our_records(run: RunFolder) -> list[tuple[int, int, int]]:
    (ring,) = run.rings()
    records = ring.drain()
    kernels = records[records["kind"] == rec.KERNEL].view(rec.KERNEL_DTYPE)
    assert np.count_nonzero(records["kind"] == rec.COLL) == 3
    return [(int(k["seq"]), int(k["start_ns"]), int(k["end_ns"])) for k in kernels]


@pytest.mark.parametrize("mask", [BOTH, COLL_ONLY, KERNEL_ONLY])
@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize(("release", "version"), [("2.28.9", 5), ("2.30.7", 6), ("2.29.7", 5)])
def test_both_see_what_they_ask_for(beside, tmp_path, release, version, sampled, mask):
    ours, seen, run = beside(other(tmp_path, version, mask))
    ours.sample(sampled)
    comm = Communicator(ours.path, 9, 8, 1, 3, release)
    assert comm.profiler.mask == mask | 2 | (64 if sampled else 0)
    one_step(comm)
    comm.finalize()
    got = seen()
    coll, kernel = 3 * bool(mask & 2), 6 * bool(mask & 64)
    if mask == KERNEL_ONLY and not sampled:
        kernel = 0  # NCCL's collectives had no handle then, so this caller reports no channels
    assert got == {
        **dict.fromkeys(FIELDS, 0),
        **{"init": 1, "finalize": 1, "coll": coll, "kernel": kernel, "stop": coll + kernel, "state": kernel},
    }
    assert our_records(run) == ([(s, 1000 * s, 1000 * s + 501) for s in range(3)] if sampled else [])


GROUPS, CALLS = 1, 512


@pytest.mark.parametrize(("release", "version"), [("2.28.9", 5), ("2.30.7", 6)])
@pytest.mark.parametrize("mask", [COLL_ONLY, COLL_ONLY + GROUPS, COLL_ONLY + CALLS, COLL_ONLY + GROUPS + CALLS])
@pytest.mark.parametrize("captured", [False, True])
def test_handles_that_we_make_for_nccl_reach_nobody_else(beside, tmp_path, release, version, mask, captured):
    """Of captured calls. The other's own come back to it, as parents too."""
    ours, seen, run = beside(other(tmp_path, version, mask))
    comm = Communicator(ours.path, 9, 8, 1, 3, release)
    for seq in range(3):
        comm.get_coll_info("all_gather", 8000, np.full((7, 3), 10, np.float32), captured=captured)
        comm.stop(comm.start_coll("all_gather", seq, 1000, "int8", 2, 16, "ring", "simple"))
    comm.finalize()
    got = seen()
    groups, calls = 3 * bool(mask & GROUPS), 3 * bool(mask & CALLS)
    assert (got["coll"], got["stop"]) == (3, 3 + groups + calls)
    assert got["alien_handle"] == got["alien_parent"] == got["alien_context"] == 0
    (ring,) = run.rings()
    colls = ring.drain()
    flags = colls[colls["kind"] == rec.COLL]["flags"] & rec.FLAG_CAPTURED
    assert list(flags) == [rec.FLAG_CAPTURED * captured] * 3


@pytest.mark.parametrize(
    ("release", "version", "options", "said"),
    [
        ("2.28.9", 4, {}, "has no whole interface of version 5 or 6"),
        ("2.27.7", 6, {}, "is told of nothing by NCCL 2.27"),
        ("2.29.7", 5, {"state": "0"}, "has no whole interface"),
        ("2.29.7", 6, {"fail_init": 3}, "refuses a communicator"),
    ],
)
def test_a_profiler_that_does_not_fit_is_left_out(beside, tmp_path, capfd, release, version, options, said):
    ours, seen, run = beside(other(tmp_path, version, BOTH, **options))
    ours.sample(True)
    comms = [Communicator(ours.path, 9 + i, 8, 1, 3, release) for i in range(2)]
    one_step(comms[0])
    for comm in comms:
        comm.finalize()
    assert len(our_records(run)) == 3
    assert seen()["coll"] == seen()["stop"] == seen()["finalize"] == 0
    words = capfd.readouterr().err
    assert words.count("dynamiccl:") == 1 and said in words and "left out" in words


@pytest.mark.parametrize("content", [None, b"no library"])
def test_a_profiler_that_cannot_be_loaded(beside, tmp_path, capfd, content):
    path = tmp_path / "libnccl-profiler-broken.so"
    if content:
        path.write_bytes(content)
    ours, _, run = beside(path, counters=False)
    comm = Communicator(ours.path, 9, 8, 1, 3, "2.29.7")
    one_step(comm)
    comm.finalize()
    assert our_records(run) == []
    assert capfd.readouterr().err.count("cannot be loaded") == 1


def test_we_do_not_forward_to_ourselves(beside, tmp_path, capfd):
    ours, _, run = beside(tmp_path / "ours.so", counters=False)
    comm = Communicator(ours.path, 9, 8, 1, 3, "2.29.7")
    one_step(comm)
    comm.finalize()
    assert our_records(run) == []
    assert "has no whole interface" in capfd.readouterr().err


def test_the_launcher_keeps_what_the_user_named(monkeypatch):
    path = plugin_path()
    monkeypatch.setenv("NCCL_PROFILER_PLUGIN", "inspector")
    assert nccl_env(path)["DYNAMICCL_NEXT_PROFILER"] == "inspector"
    for nothing in ("", "none", str(path), "dynamiccl"):
        monkeypatch.setenv("NCCL_PROFILER_PLUGIN", nothing)
        assert "DYNAMICCL_NEXT_PROFILER" not in nccl_env(path)

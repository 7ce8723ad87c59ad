"""The stand-in for NCCL calls what six released libraries were recorded to call, call by call."""

import ctypes
import json
import shutil
import subprocess

import numpy as np
import pytest
from dynamiccl.envs.nccl.plugin.bindings import Plugin
from dynamiccl.envs.nccl.plugin.build import HERE, compiler, plugin_path
from dynamiccl.envs.sim.emulated.nccl_caller import Communicator
from nccl_groups import Groups
from nccl_releases import DTYPE_BYTES, Call
from paths import DATA

RECORDED = json.loads((DATA / "nccl_calls.json").read_text())["calls"]

# A tuner and a profiler that want everything, answer every event (but a group's, if ANSWER is 0) and write it down.
SOURCE = """
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "abi.h"
#define SHOWN __attribute__((visibility("default")))
SHOWN char seen[1 << 16];
SHOWN int answer_groups = 1;
struct event { const char* name; };
static const char* const funcs[] = {"broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce"};
static void say(const char* text) { strcat(strcat(seen, *seen ? ", " : ""), text); }
static int say_number(const char* what, int n) { char t[32]; sprintf(t, "%s %d", what, n); say(t); return 0; }

static int ask(void* c, int func, size_t n, int pipe, float** cost, int a, int p, int reg, int* channels) {
  char text[80];
  sprintf(text, "ask %s %zu%s", funcs[func], n, pipe ? "" : " aside");
  (void)c; (void)cost; (void)a; (void)p; (void)reg; (void)channels;
  say(text);
  return 0;
}
static int chunk(void* c, int func, size_t n, int a, int p, int channels, size_t* size) {
  (void)c; (void)func; (void)n; (void)a; (void)p; (void)channels; (void)size;
  say("chunk");
  return 0;
}
static int tuner_v4(size_t n, size_t m, nccl_logger l, void** c) {
  (void)n; (void)m; (void)l; (void)c;
  return say_number("tuner", 4);
}
#define TUNER(v) static int tuner_v##v(void** c, uint64_t i, size_t n, size_t m, nccl_logger l, \
  struct nccl_nvl_domains* d, void* k) { (void)c; (void)i; (void)n; (void)m; (void)l; (void)d; (void)k; \
  return say_number("tuner", v); }
TUNER(5)
TUNER(6)
static int end(void* c) { (void)c; return 0; }

static void start(void** handle, uint64_t type, const struct nccl_coll_event* e) {
  const char* name = type == 1 ? "group" : type == 2 ? "coll" : type == 4 ? "p2p" : type == 256 ? "group_api"
    : type == 512 ? "call" : type == 1024 ? "p2p_call" : type == 2048 ? "launch" : "?";
  char text[120], func[40] = "", *to = func;
  for (const char* f = type == 2 ? e->func : ""; *f; f++) {
    if (isupper(*f) && to != func) *to++ = '_';
    *to++ = (char)tolower(*f);
  }
  if (type == 2) sprintf(text, "+coll %s %zu #%d", func, e->count, (int)e->seq);
  else sprintf(text, "+%s", name);
  say(text);
  struct event* mine = malloc(sizeof *mine);
  mine->name = name;
  *handle = type == 1 && !answer_groups ? NULL : mine;
}
static int start_v4(void* c, void** h, struct nccl_event_v4* e) { (void)c; start(h, e->type, &e->coll); return 0; }
static int start_v5(void* c, void** h, struct nccl_event_v5* e) { (void)c; start(h, e->type, &e->coll); return 0; }
static int stop(void* handle) {
  char text[40];
  sprintf(text, "-%s", ((struct event*)handle)->name);
  say(text);
  return 0;
}
static int state(void* h, int s, union nccl_event_state* a) { (void)h; (void)s; (void)a; return 0; }
static int init_v4(void** c, int* mask, const char* n, uint64_t id, int nn, int nr, int r, nccl_logger l) {
  (void)c; (void)n; (void)id; (void)nn; (void)nr; (void)r; (void)l;
  *mask = 0xfbf;
  return say_number("profiler", 4);
}
#define INIT(v) static int init_v##v(void** c, uint64_t id, int* mask, const char* n, int nn, int nr, int r, \
  nccl_logger l) { (void)c; (void)n; (void)id; (void)nn; (void)nr; (void)r; (void)l; *mask = 0xfbf; \
  return say_number("profiler", v); }
INIT(5)
INIT(6)

SHOWN const struct nccl_tuner_v4 ncclTunerPlugin_v4 = {"w", tuner_v4, ask, end};
SHOWN const struct nccl_tuner_v5 ncclTunerPlugin_v5 = {"w", tuner_v5, ask, end};
SHOWN const struct nccl_tuner_v6 ncclTunerPlugin_v6 = {"w", tuner_v6, ask, end, chunk};
SHOWN const struct nccl_profiler_v4 ncclProfiler_v4 = {"w", init_v4, start_v4, stop, state, end};
SHOWN const struct nccl_profiler_v5 ncclProfiler_v5 = {"w", init_v5, start_v5, stop, state, end};
SHOWN const struct nccl_profiler_v5 ncclProfiler_v6 = {"w", init_v6, start_v5, stop, state, end};
"""
COST = np.full((7, 3), 10, np.float32)
BIG, SMALL = Call("all_gather", 2**21, n_channels=22), Call("all_gather", 2**18, n_channels=3)
SUM = Call("reduce_scatter", 2**20, "bfloat16", n_channels=22)
ALL = Call("all_reduce", 2**20, "bfloat16", n_channels=22)
#: What the recorded job did, in its order; the calls of each of its groups. "new" is made between two of them.
CASES = {
    "all_gather": [BIG],
    "reduce_scatter sum": [SUM],
    "reduce_scatter avg": [SUM],
    "all_reduce": [ALL],
    "broadcast": [Call("broadcast", 2**21, n_channels=22)],
    "group of two all_gathers of one size": [BIG, BIG],
    "group of all_gathers of 2 MiB and 256 KiB": [BIG, SMALL],
    "send and recv": [],
    "new_group and all_gather on it": [BIG],
    "all_gather on the first again": [BIG],
    "barrier": [Call("all_reduce", 1, "float32")],
}


@pytest.fixture(scope="module")
def recorder(tmp_path_factory):
    """recorder() -> what was called since it was last asked; its ``path`` is the plugin's."""
    folder = tmp_path_factory.mktemp("recorder")
    source, library = folder / "recorder.c", folder / "recorder.so"
    source.write_text(SOURCE)
    command = [
        *compiler(),
        "-shared",
        "-fPIC",
        "-std=c11",
        "-w",
        f"-I{HERE}",
        str(source),
        "-o",
        str(library),
    ]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
    seen = (ctypes.c_char * 2**16).in_dll(loaded, "seen")

    def called() -> str:
        text = seen.value.decode()
        seen.value = b""
        return text

    called.path, called.answer_groups = library, ctypes.c_int.in_dll(loaded, "answer_groups")
    return called


def run_job(release, recorder, one_by_one):
    """The recorded job: {case: what was called}. Single calls are made in a group of one, or one after the other."""
    first = comm = Groups(recorder.path, 7, 2, 1, 0, release)
    said, n_told = {"init": recorder()}, {}
    for case, calls in CASES.items():
        if case.startswith("new"):
            comm = Groups(recorder.path, 8, 2, 1, 0, release)
        if not calls:
            comm.send_recv()
        elif one_by_one and len(calls) == 1 and calls[0].func != "broadcast":
            (call,) = calls
            seq = n_told.get((comm, call.func), 0)
            comm.get_coll_info(call.func, comm.n_bytes(call), COST.copy())
            how = (call.count, call.datatype, call.n_channels, 16, call.algo, call.proto)
            comm.stop(comm.start_coll(call.func, seq, *how))
        else:
            comm.group(calls, COST)
        for call in calls:
            n_told[comm, call.func] = n_told.get((comm, call.func), 0) + 1
        said[case], comm = recorder(), first
    return said


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("release", list(RECORDED))
def test_the_stand_in_calls_what_nccl_was_recorded_to_call(recorder, release, one_by_one):
    assert set(RECORDED[release]) == {"init", *CASES}
    assert run_job(release, recorder, one_by_one) == RECORDED[release]


@pytest.mark.parametrize("case", ["all_gather", "reduce_scatter sum", "all_reduce"])
def test_the_emulated_backend_asks_and_tells_as_nccl_2_29_was_recorded_to(recorder, case):
    """But for what our profiler does not listen to: the end of a call's group and launch, and NCCL's own groups."""
    comm = Communicator(recorder.path, 7, 2, 1, 0)
    made, (call,) = recorder(), CASES[case]
    size = DTYPE_BYTES[call.datatype]
    n_bytes = call.count * size * (1 if call.func == "all_reduce" else 2)
    comm.get_coll_info(call.func, n_bytes, COST.copy())
    comm.stop(comm.start_coll(call.func, 0, call.count, size, call.n_channels, call.algo, call.proto))
    heard = ("ask", "+group_api", "+call", "-call", "+launch", "+coll", "-coll")
    told = [word for word in RECORDED["2.29.7"][case].split(", ") if word.startswith(heard)]
    assert made == RECORDED["2.29.7"]["init"]
    assert recorder().partition("#")[0] == ", ".join(told).partition("#")[0]


def test_nccl_2_27_tells_of_no_collective_whose_group_has_no_handle(recorder):
    """So 0 of 96 were seen, on 2.27.3 and 2.27.7. Later releases tell all the same."""
    recorder.answer_groups.value = 0
    try:
        told = {release: "+coll" in run_job(release, recorder, False)["all_gather"] for release in RECORDED}
    finally:
        recorder.answer_groups.value = 1
    assert told == {release: not release.startswith("2.27") for release in RECORDED}


@pytest.mark.parametrize("release", [release for release in RECORDED if release > "2.28"])
def test_of_the_recorded_job_all_gathers_and_reduce_scatters_count(tmp_path, monkeypatch, release):
    """Before: the all-reduces, too."""
    monkeypatch.setenv("DYNAMICCL_RUN", str(tmp_path / "of another node"))
    plugin = Plugin.load(shutil.copy(plugin_path(), tmp_path / "plugin.so"))

    def counted():
        return [comm.made for comm in plugin.comms().values()]

    counted.path = plugin.path
    assert run_job(release, counted, False) == {
        "init": [0],
        "all_gather": [1],
        "reduce_scatter sum": [2],
        "reduce_scatter avg": [3],
        "all_reduce": [3],
        "broadcast": [3],
        "group of two all_gathers of one size": [5],
        "group of all_gathers of 2 MiB and 256 KiB": [7],
        "send and recv": [7],
        "new_group and all_gather on it": [7, 1],
        "all_gather on the first again": [8, 1],
        "barrier": [8, 1],
    }

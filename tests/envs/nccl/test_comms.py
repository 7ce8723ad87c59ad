"""What the plugin knows of the communicators of its process, and what the probe is told of it."""

import os
import subprocess
import sys

import pytest
from both_modes import tells
from dynamiccl.envs.nccl.plugin.build import build_of
from dynamiccl.envs.nccl.shm import encode_table
from dynamiccl.traces import records as rec
from dynamiccl.traces.records import PROTOS, TABLE_VERSION, Decision, Rule, Table
from nccl_groups import Groups
from nccl_releases import REACH, Call, Communicator, choose
from plugin_run import MB, RELEASES, drained, offer, plugin, run

__all__ = ["plugin", "run", "tells"]  # fixtures


COUNTED = """
import os, numpy as np
from dynamiccl.envs.nccl.plugin.bindings import Plugin
from nccl_releases import Communicator
plugin = Plugin.load()
print(plugin.tuners(), plugin.asked(), *plugin.abi, {i: comm.made for i, comm in plugin.comms().items()})
comms = [Communicator(plugin.path, 40 + i, 8, 1, 0, os.environ["RELEASE"]) for i in range(2)]
for n in range(5):
    comms[n % 2].get_coll_info("all_gather", 4096, np.full((7, 3), 1, np.float32))
    comms[n % 2].start_coll("all_gather", n, 10, 4, 1, 16, "ring", "ll")
comms[0].start_coll("send_recv", 9, 10, 4, 1, 16, "ring", "ll")
comms[1].finalize()
print(plugin.tuners(), plugin.asked(), *plugin.abi, {i: comm.made for i, comm in plugin.comms().items()})
print(plugin.identity())
"""


@pytest.mark.parametrize(
    ("release", "abi", "counts"),
    [("2.22.3", (3, 0), {}), ("2.27.7", (4, 4), {40: 0}), ("2.32.3", (6, 6), {40: 3})],
)
def test_what_nccl_has_done_with_the_plugin_is_told(tmp_path, release, abi, counts):
    """That Python can load the library says nothing of NCCL. Counted also on nodes without a run folder, so no ring."""
    env = {**os.environ, "RELEASE": release, "DYNAMICCL_RUN": str(tmp_path / "of another node")}
    out = subprocess.check_output([sys.executable, "-c", REACH + COUNTED], env=env, text=True).splitlines()
    assert out == ["0 0 0 0 {}", f"2 5 {abi[0]} {abi[1]} {counts}", out[2]]
    assert out[2] == f"{build_of()} table {TABLE_VERSION} tuner {abi[0]} profiler {abi[1]}"


MANY = """
import numpy as np
from dynamiccl.envs.nccl.plugin.bindings import Plugin
from nccl_releases import Communicator
plugin = Plugin.load()
comms = [Communicator(plugin.path, 40 + i, 8, 1, 0, "2.29.7") for i in range(258)]
for comm in comms:
    comm.get_coll_info("all_gather", 4096, np.full((7, 3), 1, np.float32))
    comm.stop(comm.start_coll("all_gather", 0, 10, 4, 1, 16, "ring", "ll"))
print(sum(comm.made for comm in plugin.comms().values()))
"""


def test_a_job_with_more_communicators_than_there_are_seats_runs_on(tmp_path):
    env = {**os.environ, "DYNAMICCL_RUN": str(tmp_path / "of another node")}
    assert subprocess.check_output([sys.executable, "-c", REACH + MANY], env=env, text=True) == "256\n"


def test_a_collective_says_what_nccl_asked_about(run, plugin, tells):
    """Grouped calls are asked about once, with the sum of their sizes. Who is told later may not know any more."""
    drained(run)
    comm = Groups(plugin.path, 99, 8, 1, 0, "2.28.9")
    small, large = Call("all_gather", MB // 8), Call("all_gather", 4 * MB)
    scattered = Call("reduce_scatter", MB // 8)
    for calls in ([small], [*[small] * 4, *[large] * 2, *[scattered] * 2], [large]):
        comm.group(calls, offer(ring_ll=10))
    comm.finalize()
    got = drained(run)
    colls = got[got["kind"] == rec.COLL]
    asked = colls["asked_bytes"] // MB
    expected = [1, 4, 4, 4, 4, 64, 64, 2, 2, 32]
    assert all(
        n == sum_of or (n == 0 and tells == "later") for n, sum_of in zip(asked, expected, strict=True)
    )


@pytest.mark.parametrize("release", [release for release in RELEASES if release > "2.28"])
def test_sends_count_no_collective_that_was_not_launched(run, plugin, release):
    """One that runs as a symmetric kernel or by copy engine is told and never launched; a launch of sends is told.

    Only some ranks make them: their counts ran ahead of the others'.
    """
    comm = Groups(plugin.path, 98, 8, 1, 0, release)
    call = [Call("all_gather", 4096)]
    counts = []
    for kind in ("one", "not launched", "sends", "sends", "one", "sends"):
        if kind == "sends":
            comm.send_recv()
        else:
            comm.group(call, offer(ring_ll=10), runs=kind == "one")
        counts.append(plugin.comms()[98].made)
    comm.finalize()
    assert counts == [1, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("release", ["2.27.3", "2.27.7", *RELEASES[3:]])
def test_every_release_tells_of_its_collectives(run, plugin, release):
    """Before: 2.27, whose groups had no handle of ours, told of none, and the job seemed to run none.

    Seen at 679c0ae, NCCL 2.27 tells of no collective whose group has no handle: 0 of 96 collectives seen: "runs no
    all_gather or reduce_scatter".
    """
    drained(run)
    comm = Groups(plugin.path, 99, 8, 1, 0, release)
    comm.group([Call("all_gather", 4096), Call("all_gather", 2**20)], offer(ring_ll=10))
    comm.get_coll_info("reduce_scatter", 8 * 4096, offer(ring_ll=10))
    comm.stop(comm.start_coll("reduce_scatter", 0, 4096, 1, 1, 16, "ring", "ll"))
    comm.finalize()
    got = drained(run)
    assert sorted(got[got["kind"] == rec.COLL]["n_bytes"]) == [8 * 4096, 8 * 4096, 8 * 2**20]


@pytest.mark.parametrize("release", RELEASES[3:])
def test_calls_under_graph_capture_are_left_to_nccl_flagged_and_not_counted(run, plugin, release):
    """A graph would replay a trial for ever; and NCCL tells of replays, not on each rank of all."""
    drained(run)
    everything = Table(1, (Rule(0, 0, "all_gather", 0, 2**40, Decision("ring", "simple", 4)),))
    plugin.activate(encode_table(everything))
    comm = Communicator(plugin.path, 99, 8, 1, 0, release)
    obeyed, before = [], plugin.comms()[99].made
    for seq, captured in enumerate([False, True, False, True]):
        cost = offer(ring_ll=10, ring_simple=30)
        n_channels = comm.get_coll_info("all_gather", 80, cost, captured=captured)
        comm.stop(comm.start_coll("all_gather", seq, 10, 1, 1, 16, "ring", "ll"))
        obeyed.append((n_channels, PROTOS[choose(cost)[1]]))
    counted = plugin.comms()[99].made - before
    comm.finalize()
    assert obeyed == [(4, "simple"), (0, "ll")] * 2
    assert counted == 2
    got = drained(run)
    assert list(got[got["kind"] == rec.COLL]["flags"] & rec.FLAG_CAPTURED) == [0, 2, 0, 2]


def test_no_table_changes_under_nccl_2_27_and_a_fixed_one_holds_from_the_first_call(run, plugin):
    """It tells of collectives alone, at times later and from another thread: 46 of 3,120 calls ran two ways.

    Before: its collectives were counted, and what told late was found out afterwards.
    """
    drained(run)
    row = Rule(0, 0, "all_gather", 0, 2**40, Decision("ring", "simple", 4))
    plugin.activate(encode_table(Table(1, (row,))))
    comm = Communicator(plugin.path, 99, 8, 1, 0, "2.27.7")
    plugin.stage(1, encode_table(Table(2)))
    plugin.switch(1, 99, 1, 0)
    assert plugin.limit(1, 99, 1) == 0, "no call is held"
    answers = []
    for seq in range(20):
        answers.append(comm.get_coll_info("all_gather", 80, offer(ring_ll=10, ring_simple=30)))
        comm.stop(comm.start_coll("all_gather", seq, 10, 1, 1, 16, "ring", "simple"))
    view = plugin.comms()[99]
    comm.finalize()
    assert answers == [4] * 20
    assert (view.made, view.marks, view.no_clock) == (0, {}, "its NCCL is older than 2.28.3")
    got = drained(run)
    assert list(got[got["kind"] == rec.COLL]["generation"]) == [1] * 20


@pytest.mark.parametrize("release", RELEASES[3:])
def test_a_communicator_of_all_reduces_has_no_word_in_what_the_ranks_agree_on(plugin, release):
    """That of DDP, or of the copies of shards: no table is made for it, so none waits for its ranks."""
    comm = Groups(plugin.path, 99, 8, 1, 0, release)
    for _ in range(40):
        comm.group([Call("all_reduce", 4096)] * 2, offer(ring_ll=10))
    view = plugin.comms()[99]
    comm.finalize()
    assert (view.made, view.marks, view.no_clock) == (0, {}, "")


def test_what_2_32_prices_aside_is_nobodys_size(run, plugin):
    """Before: the sizes that 2.32 asks about with 0 pipe operations were taken for the collectives' own."""
    drained(run)
    comm = Groups(plugin.path, 98, 8, 1, 0, "2.32.3")
    comm.group([Call("all_gather", 2**18), Call("all_gather", 2**21)], offer(ring_ll=10))
    comm.finalize()
    got = drained(run)
    assert set(got[got["kind"] == rec.COLL]["asked_bytes"]) == {8 * (2**18 + 2**21)}
    assert set(got[got["kind"] == rec.OFFER]["n_bytes"]) == {8 * (2**18 + 2**21)}

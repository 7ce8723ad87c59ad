"""What the real plugin writes of what NCCL tells its profiler, at once or later."""

import numpy as np
import pytest
from both_modes import tells
from dynamiccl.envs.nccl.plugin.bindings import Span
from dynamiccl.envs.nccl.shm import encode_table
from dynamiccl.traces import records as rec
from dynamiccl.traces.records import ALGOS, PROTOS, Table
from nccl_releases import Communicator
from plugin_run import drained, offer, plugin, run

__all__ = ["plugin", "run", "tells"]  # fixtures


@pytest.mark.parametrize("release", ["2.27.7", "2.28.9", "2.29.7", "2.30.7"])
def test_what_ran_is_in_the_ring(run, plugin, release):
    drained(run)
    plugin.activate(encode_table(Table(5)))
    plugin.boundary(None, 17, False)
    comm = Communicator(plugin.path, 99, 8, 2, 3, release, "dp")
    counts = 2 if release == "2.27.7" else 2 + 2048  # collectives, and where they are launched
    assert comm.profiler.mask == counts
    plugin.sample(True)
    assert comm.profiler.mask == counts + 64
    cost = offer(ring_ll=10, ring_ll128=30)
    comm.get_coll_info("reduce_scatter", 8 * 4000, cost)
    comm.get_coll_info("reduce_scatter", 8 * 4000, cost)  # the same message: no second offer
    handle = comm.start_coll("reduce_scatter", 6, 1000, "float32", 2, 16, "ring", "ll")
    comm.stop(handle)
    channels = [comm.profiler.start_kernel(comm.handle_of(handle), c, 1000 - c) for c in (0, 1)]
    comm.profiler.stop_kernel(channels[1], 5000)
    comm.profiler.stop_kernel(channels[0], 4000)
    plugin.sample(False)
    comm.start_coll("all_gather", 7, 500, "bfloat16", 1, 16, "nvls", "simple")
    comm.finalize()
    got = drained(run)
    assert list(got["kind"]) == [rec.COMM, rec.OFFER, rec.COLL, rec.KERNEL, rec.COLL]
    assert set(got["comm_id"]) == {99} and set(got["step"]) == {17}
    assert list(got["generation"]) == [0, 0, 5, 5, 5], (
        "of the table that answered last; none before the first question"
    )
    comm_record = got[:1].view(rec.COMM_DTYPE)[0]
    assert (comm_record["rank"], comm_record["n_ranks"], comm_record["n_nodes"]) == (3, 8, 2)
    assert comm_record["name"] == b"dp"
    offered = got[1:2].view(rec.OFFER_DTYPE)[0]
    assert (ALGOS[offered["algo"]], PROTOS[offered["proto"]]) == ("ring", "ll")
    assert (
        np.array_equal(offered["cost_us"], offer(ring_ll=10, ring_ll128=30)) and offered["n_bytes"] == 32000
    )
    first, last = got[2], got[4]
    assert (first["n_bytes"], first["seq"], first["n_channels"], first["rank"]) == (8 * 4000, 6, 2, 3)
    assert (rec.ALGOS[first["algo"]], rec.PROTOS[first["proto"]], first["dtype"]) == ("ring", "ll", 7)
    assert (last["n_bytes"], rec.ALGOS[last["algo"]], last["dtype"]) == (8 * 1000, "nvls", 0)
    kernel = got[3:4].view(rec.KERNEL_DTYPE)[0]
    assert (kernel["start_ns"], kernel["end_ns"], kernel["seq"], kernel["func"]) == (999, 5000, 6, 3)


def test_kernel_times_end_with_a_trial_of_few_calls_though_no_switch_follows(plugin):
    """Before: where the tuner died in it, NCCL took times of all kernels for the rest of the job."""
    comm = Communicator(plugin.path, 97, 8, 1, 0)
    plugin.stage(1, encode_table(Table(2)))
    plugin.switch(1, 97, *Span(8, 24, length=1, one_of=4))
    times = []
    for step in range(8):
        plugin.ended()
        plugin.boundary(None, step, False)
        times.append(bool(comm.profiler.mask & 64))
        for _ in range(4):
            comm.get_coll_info("all_gather", 4096, offer(ring_ll=10))
            comm.stop(comm.start_coll("all_gather", 0, 128, "float32", 1, 16, "ring", "ll"))
    comm.finalize()
    assert times == [True] * 6 + [False] * 2


def test_stale_and_foreign_handles_are_ignored(run, plugin):
    drained(run)
    comm = Communicator(plugin.path, 99, 8, 1, 0)
    plugin.sample(True)
    old = comm.handle_of(comm.start_coll("all_gather", 1, 10, 4, 1, 16, "ring", "ll"))
    for seq in range(4096):  # the whole pool: the first entry is someone else's now
        comm.start_coll("all_gather", 2 + seq, 10, 4, 1, 16, "ring", "ll")
    comm.catches_up()
    for handle in (old, 1, 2**40, 2**63 - 1, 4095):
        comm.profiler.kernel(handle, 0, 1, 2)
        comm.profiler.stop_kernel(handle, 5)
        comm.stop(handle)
    plugin.sample(False)
    comm.finalize()
    assert not (drained(run)["kind"] == rec.KERNEL).any()


def test_names_of_other_releases(run, plugin):
    drained(run)
    comm = Communicator(plugin.path, 99, 8, 1, 0)
    for algo in ("NVLSTree", "CollNetDirect", "ring", "SomethingNew"):
        comm.start_coll("all_gather", 1, 10, 4, 1, 16, algo, "Simple")
    comm.finalize()
    got = drained(run)
    colls = got[got["kind"] == rec.COLL]
    assert list(colls["algo"]) == [5, 2, 1, rec.UNSET] and set(colls["proto"]) == {2}

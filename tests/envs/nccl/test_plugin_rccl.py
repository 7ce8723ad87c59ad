"""RCCL loads the same symbols, with eight algorithms, larger constants and events that NCCL does not have.

No claim beyond that: nothing of ours has met an AMD GPU, and the unit of its kernels' clock is not known here.
"""

import ctypes
import shutil
from ctypes import byref, c_int, c_uint64, c_void_p

import numpy as np
import pytest
from both_modes import tells
from dynamiccl.envs.nccl.plugin.bindings import Plugin
from dynamiccl.envs.nccl.plugin.build import plugin_path
from dynamiccl.envs.nccl.shm import RunFolder, encode_table
from dynamiccl.envs.sim.emulated.nccl_caller import pointers
from dynamiccl.traces import records as rec
from dynamiccl.traces.assemble import Assembler
from dynamiccl.traces.records import ALGOS, PROTOS, Decision, Slot, Table
from nccl_halves import _TUNER_INIT
from nccl_releases import Communicator

__all__ = ["tells"]  # a fixture: each test runs in both modes

MB, DIRECT_A2A = 2**20, 7
RING_LL, RING_SIMPLE = ((ALGOS.index("ring"), PROTOS.index(proto)) for proto in ("ll", "simple"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    copy = tmp_path_factory.mktemp("plugin") / "plugin.so"
    shutil.copy(plugin_path(), copy)
    folder = RunFolder.create()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DYNAMICCL_RUN", str(folder.path))
        plugin = Plugin.load(copy)
        assert plugin.open()
    yield folder, plugin
    folder.close()


def ask(comm, cost, n_channels=0):
    """As RCCL asks: the table has eight rows. The channels that it is told."""
    channels = c_int(n_channels)
    head = (comm.tuner.context, 2, MB, 1, cost.ctypes.data, len(cost), cost.shape[1])
    assert comm.tuner._info(*head, 0, byref(channels)) == 0
    return channels.value


def prices(cells):
    cost = np.full((8, 3), -1, np.float32)
    for cell, us in cells.items():
        cost[cell] = us
    return cost


def test_a_cost_table_of_eight_algorithms_is_read_by_its_own_width(run):
    folder, plugin = run
    comm = Communicator(plugin.path, 77, 8, 1, 0, "2.28.9")
    plugin.activate(encode_table(Table.of(1, {Slot(8, 1, "all_gather", 20): Decision("ring", "simple", 4)})))
    cost = prices({RING_LL: 10, RING_SIMPLE: 30, (DIRECT_A2A, 2): 5})
    assert ask(comm, cost) == 4
    assert (
        cost[RING_SIMPLE] == 0 and cost[DIRECT_A2A, 2] == 5 and cost[RING_LL] == 10
    )  # nothing else was touched
    plugin.activate(encode_table(Table.of(2, {Slot(8, 1, "all_gather", 20): Decision("tree", "ll", 4)})))
    cost = prices({RING_LL: 10, (DIRECT_A2A, 2): 5})
    assert ask(comm, cost) == 0 and np.array_equal(cost, prices({RING_LL: 10, (DIRECT_A2A, 2): 5}))
    plugin.activate(encode_table(Table()))
    comm.finalize()
    (ring,) = folder.rings()
    records = ring.drain()
    offers = records[records["kind"] == rec.OFFER].view(rec.OFFER_DTYPE)
    # NCCL's own choice is the eighth, of which our records have no name and no price; whoever reads them lives.
    assert offers["algo"][0] == DIRECT_A2A and offers["cost_us"].shape[1:] == (7, 3)
    assembler = Assembler()
    assembler.add(records, pid=1)
    assert len(assembler.offers) == 1 and assembler.offers_frame()["algo"].tolist() == ["7"]


def test_a_longer_block_of_constants_is_left_as_it_is(run):
    library = ctypes.CDLL(str(run[1].path))
    _, init, _, finalize = pointers(library, "ncclTunerPlugin_v5", 4)
    domains, constants, context = (c_int * 3)(1, 8, 8), (ctypes.c_uint8 * 4096)(*[0xA5] * 4096), c_void_p()
    given = ctypes.addressof(domains), ctypes.addressof(constants)
    assert _TUNER_INIT[5](init)(byref(context), 78, 8, 1, None, *given) == 0 and context
    assert set(constants) == {0xA5} and ctypes.CFUNCTYPE(c_int, c_void_p)(finalize)(context) == 0


@pytest.mark.parametrize("release", ["2.27.7", "2.29.7"])
def test_events_that_nobody_asked_for_and_times_of_another_unit_break_nothing(run, release):
    folder, plugin = run
    (ring,) = folder.rings()
    ring.drain()
    comm = Communicator(plugin.path, 79, 8, 1, 0, release)
    plugin.sample(True)
    handle = comm.start_coll("all_gather", 1, 10, 4, 1, 16, "DIRECT_A2A", "simple")
    told = comm.profiler
    kernel = told.start_kernel(handle, 0, 900)
    for kind in (4, 128 if release == "2.27.7" else 1 << 15):  # of RCCL's own
        event = told.event(kind, parent=handle)
        found = c_void_p()
        assert told._start(told._context, byref(found), byref(event)) == 0 and found.value is None
    for state in (31, 10_000, -1):
        assert told._record_state(handle, state, byref(c_uint64(7))) == 0
    told.stop_kernel(kernel, 90)  # ticks of another clock, and before the start
    comm.stop(handle)
    plugin.sample(False)
    comm.finalize()
    records = ring.drain()
    (coll,) = records[records["kind"] == rec.COLL]
    assert coll["algo"] == rec.UNSET and (records["kind"] == rec.KERNEL).sum() <= 1

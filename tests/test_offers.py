"""What counts as an offer of NCCL, and how many channels a row may ask for."""

import pytest
from dynamiccl.envs.nccl.shm import encode_table
from dynamiccl.envs.sim.nccl_caller import Communicator, choose
from dynamiccl.traces.records import ALGOS, Decision, Slot, Table
from test_plugin import MB, offer, plugin, run

__all__ = ["plugin", "run"]  # fixtures


@pytest.mark.parametrize(("algo", "n_nodes", "sets"), [("nvls", 1, 8), ("nvls", 2, 0), ("collnet_direct", 2, 0)])
def test_channels_are_left_alone_where_nccl_would_not_clip_them(plugin, algo, n_nodes, sets):
    """24 channels for CollNet, or NVLS over nodes, which have 16: channels that are not connected hang."""
    slot = Slot(16, n_nodes, "all_gather", 20)
    comm = Communicator(plugin.path, 42, 16, n_nodes, 0)
    for decision, others in ((Decision(algo, "simple", 8), 10), (Decision(None, None, 8), 50)):
        plugin.activate(encode_table(Table.of(1, {slot: decision})))
        cost = offer(ring_ll=others, **{f"{algo}_simple": 20})
        assert comm.get_coll_info("all_gather", MB, cost) == sets
        assert ALGOS[choose(cost)[0]] == algo
    comm.finalize()


def test_a_price_of_ten_to_the_thirty_is_no_offer(plugin):
    """2.32 offers PAT at 1.7e38 where it has none."""
    plugin.activate(encode_table(Table.of(1, {Slot(0, 0, "all_gather", 20): Decision("pat", "simple", 8)})))
    comm = Communicator(plugin.path, 42, 8, 1, 0, "2.32.3")
    cost = offer(ring_ll=10, pat_simple=1.7e38)
    assert comm.get_coll_info("all_gather", MB, cost) == 0 and choose(cost) == (1, 0)
    comm.finalize()

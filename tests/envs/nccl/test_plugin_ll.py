"""Never hang: what NCCL can hang on is closed to every table, on all ranks alike."""

import pytest
from dynamiccl.envs.nccl.shm import encode_table
from dynamiccl.traces import records as rec
from dynamiccl.traces.records import Decision, Rule, Table
from nccl_releases import Communicator, choose
from test_plugin import MB, RELEASES, drained, offer
from test_plugin import plugin as plugin
from test_plugin import run as run


@pytest.mark.parametrize("release", RELEASES)
def test_no_table_has_ll_over_nodes_where_that_can_hang(run, plugin, release):
    """NVIDIA/nccl#2389: LL before a Simple with registered buffers hangs, over nodes, since 2.24. Each rank answers by
    the table, the size of the communicator and NCCL's interface alone, so all answer alike."""
    plugin.activate(encode_table(Table(3, (Rule(0, 0, "all_gather", 0, 2**40, Decision("ring", "ll", 4)),))))
    for n_ranks, n_nodes in ((8, 1), (16, 2)):
        drained(run)
        ranks = [Communicator(plugin.path, 7, n_ranks, n_nodes, rank, release) for rank in (0, n_ranks - 1)]
        told = []
        for comm in ranks:
            cost = offer(ring_ll=50, ring_ll128=20, ring_simple=30)
            told.append((comm.get_coll_info("all_gather", MB, cost), choose(cost)))
            kept = offer(ring_ll=10, ring_simple=30)  # where it is NCCL's own choice it runs anyway
            assert comm.get_coll_info("all_gather", 2 * MB, kept) == 4 and choose(kept) == (1, 0)
            comm.finalize()
        closed = n_nodes > 1 and release != "2.22.3"
        assert told == [(0, (1, 1)) if closed else (4, (1, 0))] * 2
        offered = drained(run)
        offered = offered[offered["kind"] == rec.OFFER].view(rec.OFFER_DTYPE)[0]
        assert offered["cost_us"][1].tolist() == [
            -1 if closed else 50,
            20,
            30,
        ]  # nobody is to try what is closed

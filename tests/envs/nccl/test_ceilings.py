"""Ceilings in the real plugin: the count that NCCL itself gives a message on a communicator of fewer channels."""

import numpy as np
import pandas as pd
import pytest
from dynamiccl.envs.live.untouched import own_limit
from dynamiccl.envs.nccl.shm import encode_table
from dynamiccl.envs.nccl.untouched import FUNCS, ClassChannels, Untouched
from dynamiccl.traces.records import Decision, Rule, Table
from nccl_releases import Communicator
from plugin_run import MB, offer, plugin, run

__all__ = ["plugin", "run"]  # fixtures
TWO = ClassChannels(2, 2, 2, 256)
SIZES = sorted({2**k + d for k in range(8, 27) for d in (-1, 0, 1)} | {3 * 2**k for k in range(8, 25)})


@pytest.mark.parametrize("release", ["2.28.9", "2.32.3"])
@pytest.mark.parametrize("one", [TWO, ClassChannels(8, 1, 24, 512)], ids=["2 channels", "24 channels"])
@pytest.mark.parametrize("algo", ["ring", "tree", "pat"])
def test_the_plugin_counts_as_the_model_does(plugin, release, one, algo):
    plugin.activate(encode_table(Untouched(32, (one,)).over(Table(1))))
    comm = Communicator(plugin.path, 42, one.n_ranks, one.n_nodes, 0, release)
    for proto in ("simple",) if algo == "pat" else ("ll", "ll128", "simple"):
        rows = pd.DataFrame({"n_bytes": SIZES, "algo": algo, "proto": proto, "n_ranks": one.n_ranks})
        expected = own_limit(rows, one.n_channels, one.threads)
        for func in FUNCS:
            asked = []
            for n_bytes in SIZES:
                cost = offer(**{f"{algo}_{proto}": 10, "nvls_simple": 30})
                asked.append(comm.get_coll_info(func, n_bytes, cost))
                assert np.array_equal(cost, offer(**{f"{algo}_{proto}": 10, "nvls_simple": 30}))
            assert asked == expected.tolist()
    comm.finalize()


def test_a_ceiling_leaves_nvls_other_classes_and_another_tuners_count_alone(plugin):
    plugin.activate(encode_table(Untouched(32, (TWO,)).over(Table(1))))
    comm, other = (Communicator(plugin.path, n, 2, n_nodes, 0, "2.28.9") for n, n_nodes in ((42, 2), (43, 1)))
    cells = {"ring_simple": 10.0}
    assert comm.get_coll_info("all_gather", MB, offer(**cells)) == 2
    assert comm.get_coll_info("all_gather", MB, offer(**cells), n_channels=5) == 5
    assert comm.get_coll_info("all_gather", MB, offer(nvls_simple=10)) == 0
    assert comm.get_coll_info("all_gather", MB, offer()) == 0
    assert other.get_coll_info("all_gather", MB, offer(**cells)) == 0
    comm.finalize()
    other.finalize()


def test_a_row_goes_before_a_ceiling(plugin):
    plugin.activate(
        encode_table(
            Untouched(32, (TWO,)).over(
                Table(1, (Rule(2, 2, "all_gather", MB, MB, Decision("ring", "simple", 8)),))
            )
        )
    )
    comm = Communicator(plugin.path, 42, 2, 2, 0, "2.28.9")
    counts = [
        comm.get_coll_info("all_gather", n_bytes, offer(ring_simple=10)) for n_bytes in (MB - 1, MB, MB + 1)
    ]
    assert counts == [2, 8, 2]
    comm.finalize()


@pytest.mark.parametrize(
    ("threads", "pair", "n"), [(300, (None, None), 2), (256, ("ring", "simple"), 2), (256, (None, None), 0)]
)
def test_the_plugin_refuses_what_is_no_ceiling(plugin, threads, pair, n):
    bad = Rule(2, 2, "all_gather", 0, MB, Decision(*pair, n), threads)
    with pytest.raises(ValueError):
        plugin.activate(encode_table(Table(1, (bad,))))

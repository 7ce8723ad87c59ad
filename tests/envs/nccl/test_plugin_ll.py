"""Never hang: what NCCL can hang on is closed to every table, on all ranks alike."""

import subprocess
import sys

import pytest
from both_modes import tells
from command import start
from dynamiccl.envs.nccl.shm import encode_table
from dynamiccl.envs.nccl.tables import to_json
from dynamiccl.traces import records as rec
from dynamiccl.traces.records import Decision, Rule, Table
from nccl_releases import REACH, Communicator, choose
from plugin_run import MB, RELEASES, drained, offer
from test_plugin import plugin as plugin
from test_plugin import run as run

__all__ = ["tells"]  # a fixture: each test runs in both modes


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


@pytest.mark.parametrize("release", RELEASES)
def test_no_table_has_simple_over_nodes_where_nccl_runs_ll(run, plugin, release):
    """The other direction of NVIDIA/nccl#2389: before, a table's Simple followed NCCL's own LL of the same message."""
    plugin.activate(
        encode_table(Table(3, (Rule(0, 0, "all_gather", 0, 2**40, Decision("ring", "simple", 4)),)))
    )
    for n_ranks, n_nodes in ((8, 1), (16, 2)):
        drained(run)
        comm = Communicator(plugin.path, 7, n_ranks, n_nodes, 0, release)
        said = []
        for others in (30, 5):  # NCCL's own choice is LL, then LL128
            cost = offer(ring_ll=10, ring_ll128=others, ring_simple=20)
            said.append((comm.get_coll_info("all_gather", others * MB, cost), choose(cost)))
        comm.finalize()
        closed = n_nodes > 1 and release != "2.22.3"
        assert said == [(0, (1, 0)) if closed else (4, (1, 2)), (4, (1, 2))]
        offered = drained(run)
        offered = offered[offered["kind"] == rec.OFFER].view(rec.OFFER_DTYPE)[0]
        assert offered["cost_us"][1].tolist() == [10, 30, -1 if closed else 20]


MACHINE = """#include <string.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>
int uname(struct utsname* name) {
  const int error = (int)syscall(SYS_uname, name);
  strcpy(name->machine, "aarch64");
  return error;
}
"""
ASK = """
import numpy as np, sys
from dynamiccl.envs.nccl.plugin.build import plugin_path
from nccl_releases import Communicator, choose
for release in sys.argv[1:]:
    for n_ranks, n_nodes in (8, 1), (16, 2):
        for others in 50, 10:  # NCCL's own choice is LL128, then Simple
            comm = Communicator(plugin_path(), 5, n_ranks, n_nodes, 0, release)
            cost = np.full((7, 3), -1, np.float32)
            cost[1] = -1, 20, others
            n_channels = comm.get_coll_info("all_gather", 4096, cost)
            print(release, n_nodes, others, n_channels, choose(cost)[1])
            comm.finalize()
"""


@pytest.mark.parametrize("is_grace", [True, False])
def test_no_table_has_ll128_over_nodes_on_grace(tmp_path, is_grace):
    """NVIDIA/nccl#2001, #2053: LL128 corrupts data there. Where NCCL itself takes it, it runs as without us."""
    table = Table(1, (Rule(0, 0, "all_gather", 0, 2**40, Decision("ring", "ll128", 4)),))
    (tmp_path / "t.json").write_text(to_json(table))
    (tmp_path / "machine.c").write_text(MACHINE)
    library = tmp_path / "machine.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "machine.c"], check=True)
    job = [sys.executable, "-c", REACH + ASK, *RELEASES]
    env = {"LD_PRELOAD": str(library)} if is_grace else {}
    done = start("apply", tmp_path / "t.json", "--no-gate", "--force", "--", *job, **env)
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) == 4 * len(RELEASES), done.stderr
    for release, n_nodes, others, n_channels, proto in rows:
        closed = is_grace and n_nodes == "2" and release != "2.22.3" and others == "10"
        assert (n_channels, proto) == (("0", "2") if closed else ("4", "1")), (release, n_nodes, others)

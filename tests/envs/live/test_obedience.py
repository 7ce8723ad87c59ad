"""While a job runs: ranks that run one collective two ways, and tables that NCCL does not follow, are found out."""

import numpy as np
import pytest
from dynamiccl.envs.live.obedience import CallAudit, Obedience
from dynamiccl.traces.assemble import Communicator
from dynamiccl.traces.reasons import RowRefused
from dynamiccl.traces.records import ALGOS, COLL, COLL_DTYPE, FUNCS, PROTOS, Decision, Slot, Table

SLOT = Slot(4, 2, "all_gather", 20)
COMMS = {7: Communicator(7, 4, 2, "dp"), 8: Communicator(8, 2, 1, "tp")}


def calls(
    rank, seqs, config="ring/simple/16", generation=1, comm_id=7, func="all_gather", n_bytes=2**20, asked=None
):
    """``asked``: what NCCL asked about; their own bytes if nothing is said."""
    algo, proto, n_channels = config.split("/")
    rows = np.zeros(len(seqs), COLL_DTYPE)
    rows["kind"], rows["rank"], rows["seq"], rows["comm_id"] = COLL, rank, seqs, comm_id
    rows["func"], rows["n_bytes"], rows["generation"] = FUNCS.index(func), n_bytes, generation
    rows["algo"], rows["proto"], rows["n_channels"] = ALGOS.index(algo), PROTOS.index(proto), int(n_channels)
    rows["asked_bytes"] = n_bytes if asked is None else asked
    return rows


def test_calls_are_compared_over_ranks_whatever_the_order_in_which_rings_are_read():
    audit = CallAudit()
    for start in range(0, 1000, 100):
        for rank in (2, 0, 1):
            audit.add(calls(rank, np.arange(start, start + 100 - 10 * rank)), pid=rank)
            audit.add(calls(rank, np.arange(start + 100 - 10 * rank, start + 100)), pid=rank)
    assert (audit.calls_checked, audit.mismatches) == (1000, 0)
    assert len(audit._waiting) <= 100  # those that were complete before the last rank was known


@pytest.mark.parametrize(
    "other", [{"config": "ring/ll/16"}, {"config": "ring/simple/8"}, {"n_bytes": 2**19}, {"generation": 2}]
)
def test_one_call_that_differs_is_found_and_told(other):
    audit = CallAudit()
    audit.add(calls(0, np.arange(50)), pid=10)
    audit.add(calls(1, np.arange(20)), pid=11)
    audit.add(calls(1, [20], **other), pid=11)
    audit.add(calls(1, np.arange(21, 50)), pid=11)
    assert audit.mismatches == 1 and "all_gather 20: rank 0: ring/simple/16" in audit.example


def test_a_restart_and_a_communicator_made_anew_are_no_mismatch():
    audit = CallAudit()
    audit.add(calls(0, np.arange(10)), pid=10)  # rank 1 dies before it runs them
    for rank, pid in ((0, 20), (1, 21)):
        audit.add(calls(rank, np.arange(10), "ring/ll/4", generation=5), pid=pid)
    assert (audit.calls_checked, audit.mismatches) == (10, 0)
    for rank, pid in ((0, 20), (1, 21)):  # the same numbers again, by the same processes
        audit.add(calls(rank, np.arange(10), "ring/ll128/4", generation=6), pid=pid)
    assert audit.mismatches == 0


def test_point_to_point_calls_and_single_ranks_wait_for_nobody():
    audit = CallAudit()
    audit.add(calls(0, np.arange(1000), func="send"), pid=1)
    assert len(audit._waiting) == 0
    for start in range(300):
        audit.add(calls(0, [start]), pid=1)
    assert len(audit._waiting) == 0 and audit.calls_checked == 0


def test_what_waits_is_bounded():
    audit = CallAudit(window=500)
    audit.add(calls(1, [0]), pid=2)
    for start in range(0, 20_000, 1000):
        audit.add(calls(0, np.arange(start, start + 1000)), pid=1)
    assert len(audit._waiting) <= 500 and audit.mismatches == 0


@pytest.mark.parametrize(
    ("decision", "ran", "obeyed"),
    [
        (Decision("ring", "ll", 8), "ring/ll/8", True),
        (Decision("ring", "ll", 8), "ring/ll/4", True),  # a message too small for all channels
        (Decision("ring", "ll", 8), "ring/ll/16", False),
        (Decision("ring", "ll", 8), "ring/simple/8", False),
        (Decision("nvls", "simple"), "ring/simple/16", False),
        (Decision(None, None, 4), "ring/simple/2", True),
        (Decision(None, None, 4), "ring/simple/16", False),
    ],
)
def test_a_row_that_is_not_followed_is_named(decision, ran, obeyed):
    """Before: 214 steps under trial tables, none obeyed, reported as results."""
    check = Obedience()
    check.expect(Table.of(3, {SLOT: decision}))
    check.add(calls(0, np.arange(100), ran, generation=3))
    check.add(calls(0, np.arange(100), "ring/simple/1", generation=3, comm_id=8))  # another class
    found = check.verdict(3, COMMS)
    assert (found == ()) == obeyed
    if not obeyed:
        assert found[0].why == RowRefused.NOT_OBEYED(ran=ran, decision=decision, slot=SLOT)


def test_grouped_calls_stand_for_the_row_of_their_sum():
    """NCCL asks with the sum of a group and reports its parts."""
    check = Obedience()
    check.expect(Table.of(3, {SLOT: Decision("ring", "ll")}))
    check.expect(Table.of(4, {SLOT: Decision("ring", "ll128")}))
    for generation in (3, 4):
        parts = {"generation": generation, "n_bytes": 2**18, "asked": 2**20}
        check.add(calls(0, np.arange(100), "ring/ll/8", **parts))
    assert check.verdict(3, COMMS) == () and len(check.verdict(4, COMMS)) == 1


@pytest.mark.parametrize("sizes", [{"n_bytes": 2**27}, {"n_bytes": 2**20, "asked": 2**22}, {"asked": 0}])
def test_calls_of_other_sizes_are_no_verdict_on_a_row(sizes):
    """A job's messages change size, or nobody knows what NCCL asked. Before: NCCL was said not to obey the row."""
    check = Obedience()
    check.expect(Table.of(3, {SLOT: Decision("ring", "ll128", 4)}))
    check.add(calls(0, np.arange(100), "ring/simple/16", generation=3, **sizes))
    assert check.verdict(3, COMMS) == ()
    check.add(calls(0, np.arange(100), "ring/simple/16", generation=3))
    assert len(check.verdict(3, COMMS)) == 1


def test_nothing_is_said_of_what_was_not_seen():
    check = Obedience(generations=2)
    for generation in range(1, 6):
        check.expect(Table.of(generation, {SLOT: Decision("ring", "ll")}))
    assert check.verdict(5, COMMS) == () and check.verdict(1, COMMS) == () and len(check._tables) == 2

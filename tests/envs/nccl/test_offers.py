"""What counts as an offer of NCCL, and how many channels a row may ask for."""

import numpy as np
import pytest
from both_modes import tells
from dynamiccl.envs.nccl.shm import encode_table
from dynamiccl.traces.assemble import Assembler
from dynamiccl.traces.queries.slots import find_slots
from dynamiccl.traces.records import ALGOS, PROTOS, Decision, Rule, Slot, Table
from nccl_releases import Communicator, choose
from plugin_run import MB, drained, offer, plugin, run

__all__ = ["plugin", "run", "tells"]  # fixtures


@pytest.mark.parametrize(
    ("algo", "n_nodes", "sets"), [("nvls", 1, 8), ("nvls", 2, 0), ("collnet_direct", 2, 0)]
)
def test_channels_are_left_alone_where_nccl_would_not_clip_them(plugin, algo, n_nodes, sets):
    """24 channels for CollNet, or NVLS over nodes, which have 16: channels that are not connected hang."""
    slot = Slot(16, n_nodes, "all_gather", 20)
    comm = Communicator(plugin.path, 42, 16, n_nodes, 0)
    for decision, others in ((Decision(algo, "simple", 8), 10), (Decision(None, None, 8), 50)):
        plugin.activate(encode_table(Table.of(1, {slot: decision})))
        cost = offer(ring_ll128=others, **{f"{algo}_simple": 20})
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


def test_a_stand_in_that_asks_with_four_times_the_size_is_obeyed(run, plugin):
    """From the records of a job to its slots, to a table, to what NCCL is answered.

    Seen at 679c0ae, grouped calls: the tuner is asked about their sum: 113 steps under trials, none obeyed, reported as
    "looked best of 4".
    """
    drained(run)
    comm = Communicator(plugin.path, 77, 8, 1, 0)
    assembler = Assembler()

    def group(step: int) -> tuple[int, int]:
        plugin.boundary(None, step, False)
        cost = offer(ring_ll=20, ring_simple=10)
        n_channels = comm.get_coll_info("all_gather", 4 * MB, cost) or 16
        algo, proto = choose(cost)
        for seq in range(4):
            ran = (n_channels, 16, ALGOS[algo], PROTOS[proto])
            comm.start_coll("all_gather", 4 * step + seq, MB // 8 // 2, "bfloat16", *ran)
        comm.catches_up()
        return proto, n_channels

    for step in range(5):
        assert group(step) == (PROTOS.index("simple"), 16)
    assembler.add(np.concatenate([ring.known() for ring in run[0].rings()]), pid=1)
    assembler.add(drained(run), pid=1)
    events, _ = assembler.take(everything=True)
    (profile,) = find_slots(events, assembler.offers, step_us=1000)
    assert (profile.slot, profile.calls) == (Slot(8, 1, "all_gather", 22), 1)
    plugin.activate(encode_table(Table.of(9, {profile.slot: Decision("ring", "ll", 4)})))
    assert group(5) == (PROTOS.index("ll"), 4)
    comm.finalize()


@pytest.mark.parametrize(
    ("asked_for", "shape", "taken"),
    [("", (16, 2), False), ("1", (16, 2), True), ("1", (8, 1), False), ("1", (2, 2), False)],
)
def test_pat_at_a_price_that_nothing_takes_is_had_on_request_alone(
    run, plugin, monkeypatch, asked_for, shape, taken
):
    """From 2.31.2 on NCCL prices PAT so over nodes of several GPUs; its channels stay NCCL's."""
    monkeypatch.setenv("DYNAMICCL_TRY_PAT", asked_for)
    row = Rule(0, 0, "all_gather", 0, 2**40, Decision("pat", "simple", 4))
    plugin.activate(encode_table(Table(3, (row,))))
    comm = Communicator(plugin.path, 7, *shape, 0, "2.32.3")
    cost = offer(ring_simple=30, pat_simple=1.7e38)
    channels = comm.get_coll_info("all_gather", MB, cost)
    comm.finalize()
    assert (channels, choose(cost)) == (0, (6, 2) if taken else (1, 2))
    assert (" pat" in plugin.identity()) == (asked_for == "1")


def test_a_buffer_that_is_registered_later_is_told_and_never_forgotten(run, plugin):
    """NVIDIA/nccl#2389. Eager steps ask about a message without registered buffers, a CUDA graph's with them. Before:
    the first question stood for all, so the guard let Simple follow LL."""
    drained(run)
    comm = Communicator(plugin.path, 88, 16, 2, 0, "2.30.7")
    beside = Communicator(plugin.path, 89, 16, 2, 0, "2.30.7")
    third = Communicator(plugin.path, 90, 16, 2, 0, "2.30.7")

    def ask(of, func, n_bytes, is_registered):
        of.tuner.ask(func, n_bytes, offer(ring_ll=20, ring_simple=10), is_registered=is_registered)

    for is_registered in (False, True, False, True):
        ask(comm, "all_gather", MB, is_registered)
    ask(comm, "reduce_scatter", MB, False)
    ask(beside, "all_gather", MB, False)
    for is_registered in (False, True):  # whichever function it is, it may run LL
        ask(third, "all_reduce", MB, is_registered)
        ask(third, "all_gather", MB, False)
    ring, assembler = run[0].rings()[0], Assembler()
    assembler.add(drained(run), pid=1)
    assembler.add(ring.known(), pid=1)  # as after a loss of records: the oldest come again
    told = {key[:2]: one.is_registered for key, one in assembler.offers.items() if key[0] in (88, 89, 90)}
    assert told == {
        (88, "all_gather"): True,
        (88, "reduce_scatter"): True,
        (89, "all_gather"): False,
        (90, "all_gather"): True,
        (90, "all_reduce"): True,
    }
    late = Assembler()
    late.add(ring.known(), pid=1)
    assert late.offers[88, "all_gather", MB].is_registered
    for each in (comm, beside, third):
        each.finalize()


def test_a_communicator_after_many_others_is_known_with_its_offers(run, plugin):
    """A job that makes its groups anew again and again. Before: once 1,024 records were told nothing more was known."""
    last, kept = 5000, 4999
    other = Communicator(plugin.path, kept, 8, 1, 0)
    other.get_coll_info("all_gather", MB, offer(ring_ll=20, ring_simple=10))
    for comm_id in range(1000, 1300):
        comm = Communicator(plugin.path, comm_id, 8, 1, 0)
        for size in range(1, 5):
            comm.get_coll_info("all_gather", size * MB, offer(ring_ll=20, ring_simple=10))
        comm.finalize()
    comm = Communicator(plugin.path, last, 8, 1, 0)
    comm.get_coll_info("all_gather", MB, offer(ring_ll=20, ring_simple=10))
    late = Assembler()
    late.add(run[0].rings()[0].known(), pid=1)
    drained(run)
    for comm_id in (kept, last):
        assert comm_id in late.comms and (comm_id, "all_gather", MB) in late.offers
    for each in (other, comm):
        each.finalize()

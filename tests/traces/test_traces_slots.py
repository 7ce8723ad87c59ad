"""Slots: one for all communicators of a class, as one process feels them."""

import numpy as np
import pandas as pd
import pytest
from dynamiccl.traces.assemble import Offer
from dynamiccl.traces.queries.slots import find_slots, outside_the_offer, with_sizes
from dynamiccl.traces.records import ALGOS, PROTOS, Slot

MB = 2**20
COST = np.full((len(ALGOS), len(PROTOS)), -1, np.float32)
COST[1] = (900, 400, 300)


def calls(comm_id, pids, n_bytes=MB, n=4, steps=5, func="all_gather", us=100.0, **more):
    """``n`` calls a step of one communicator, on each of the processes ``pids``."""
    rows = [
        {"comm_id": comm_id, "pid": pid, "rank": rank, "step": step, "seq": step * n + i, "n_bytes": n_bytes}
        | {
            "func": func,
            "n_ranks": len(pids),
            "n_nodes": 1,
            "algo": "ring",
            "proto": "simple",
            "n_channels": 8,
        }
        | {"start_ns": 0, "end_ns": int(us * 1e3), "table_generation": 0}
        | more
        for step in range(steps)
        for rank, pid in enumerate(pids)
        for i in range(n)
    ]
    return pd.DataFrame(rows).astype({"start_ns": "Int64", "end_ns": "Int64"})


def offers(*keys):
    return {(comm, func, n_bytes): Offer(COST, "ring", "simple", 1) for comm, func, n_bytes in keys}


def test_shard_groups_of_a_job_are_one_slot():
    """HSDP on 2 x 2 ranks: two shard groups on this node. They were two slots, each tuned alone, which gains nothing:
    the slower half decides the step."""
    events = pd.concat([calls(11, (1, 2)), calls(22, (3, 4), us=120.0)], ignore_index=True)
    known = offers((11, "all_gather", MB), (22, "all_gather", MB))
    (profile,) = find_slots(events, known, step_us=2000)
    assert profile.slot == Slot(2, 1, "all_gather", 20)
    # Of one process, not of the node: it takes part in one of the groups.
    assert (profile.calls, profile.n_bytes) == (4, MB) and profile.share == pytest.approx(4 * 100 / 2000)


def test_a_process_waits_for_each_of_its_communicators_of_a_class():
    events = pd.concat([calls(11, (1, 2)), calls(22, (1, 2), n=2, n_bytes=MB - 64)], ignore_index=True)
    (profile,) = find_slots(events, offers((11, "all_gather", MB), (22, "all_gather", MB - 64)), step_us=2000)
    assert profile.calls == 6 and profile.share == pytest.approx(6 * 100 / 2000) and profile.n_bytes == MB


def test_roles_of_other_shapes_and_sizes_stay_apart():
    events = [calls(11, (1, 2)), calls(33, (1, 2), n_bytes=64 * MB), calls(44, (1, 2), n_nodes=2)]
    known = offers((11, "all_gather", MB), (33, "all_gather", 64 * MB), (44, "all_gather", MB))
    found = {p.slot for p in find_slots(pd.concat(events, ignore_index=True), known, step_us=2000)}
    assert found == {Slot(2, 1, "all_gather", 20), Slot(2, 1, "all_gather", 26), Slot(2, 2, "all_gather", 20)}


def test_a_class_that_rank_0_is_no_part_of_is_found():
    """A pipeline's later stage: its collectives run on other processes of the node."""
    events = pd.concat([calls(11, (1, 2)), calls(22, (3, 4), n_bytes=64 * MB)], ignore_index=True)
    found = find_slots(events, offers((11, "all_gather", MB), (22, "all_gather", 64 * MB)), step_us=2000)
    assert {p.slot.size_class: p.calls for p in found} == {20: 4, 26: 4}


def test_a_communicator_that_was_never_announced_has_no_class():
    assert (
        find_slots(calls(11, (1, 2), n_ranks=0, n_nodes=0), offers((11, "all_gather", MB)), step_us=2000)
        == []
    )


def test_channels_are_those_that_every_communicator_of_the_class_has():
    events = pd.concat([calls(11, (1, 2), n_channels=16), calls(22, (3, 4), n_channels=8)], ignore_index=True)
    (profile,) = find_slots(events, offers((11, "all_gather", MB), (22, "all_gather", MB)), step_us=2000)
    assert profile.fingerprint.comm_channels.tolist() == [8]


def test_grouped_calls_are_one_message_of_their_sum():
    """DeepSpeed and coalesced all_gathers: NCCL asks with 4 MiB and reports 4 x 1 MiB. Rows were made from the parts:
    214 steps under trial tables, none of them obeyed, and reported as results."""
    events = calls(11, (1, 2), n=8).assign(asked_bytes=4 * MB)
    (profile,) = find_slots(events, offers((11, "all_gather", 4 * MB)), step_us=2000)
    assert profile.slot == Slot(2, 1, "all_gather", 22) and profile.n_bytes == 4 * MB
    assert (profile.calls, profile.call_us) == (2, 400) and profile.share == pytest.approx(800 / 2000)
    # A recording that does not tell: NCCL made no offer for the parts, so no row could reach them.
    assert find_slots(calls(11, (1, 2), n=8), offers((11, "all_gather", 4 * MB)), step_us=2000) == []


def test_a_collective_that_no_tuner_was_asked_about_is_no_slot():
    events = pd.concat(
        [calls(11, (1, 2)).assign(asked_bytes=MB), calls(11, (1, 2), n_bytes=8 * MB)], ignore_index=True
    )
    (profile,) = find_slots(events.fillna({"asked_bytes": 0}), offers((11, "all_gather", MB)), step_us=2000)
    assert profile.slot.size_class == 20


def test_calls_that_no_tuner_was_asked_about_count_for_no_slot():
    """A symmetric kernel ran some of a slot's calls: no table reaches them, so they are no part of what is to gain."""
    asked = calls(11, (1, 2)).assign(asked_bytes=MB)
    events = pd.concat([asked, calls(11, (1, 2), n=2, us=900.0).assign(asked_bytes=0)], ignore_index=True)
    (profile,) = find_slots(events, offers((11, "all_gather", MB)), step_us=2000)
    assert (profile.calls, profile.call_us) == (4, 100)


def test_the_size_of_a_call_that_nccl_did_not_ask_about_is_its_own():
    asked = calls(11, (1, 2)).assign(asked_bytes=4 * MB)
    events = pd.concat([asked, calls(11, (1, 2), n_bytes=8 * MB).assign(asked_bytes=0)], ignore_index=True)
    assert set(with_sizes(events)["size_class"]) == {22, 23}


def test_a_price_that_is_no_price_is_no_offer():
    """2.32 writes 1.7e38 for the PAT that it does not have."""
    cost = COST.copy()
    cost[ALGOS.index("pat"), PROTOS.index("simple")] = 1.7e38
    known = {(11, "all_gather", MB): Offer(cost, "ring", "simple", 1)}
    (profile,) = find_slots(calls(11, (1, 2)), known, step_us=2000)
    assert profile.fingerprint.offered.tolist() == [[True, True, True, False, False, False]]


@pytest.mark.parametrize(
    ("ran", "outside"),
    [
        ({}, ""),
        ({"algo": "auto", "proto": "auto"}, "a kernel of another kind"),  # a name that no algorithm has
        ({"algo": "nvls", "proto": "simple"}, "nvls/simple"),  # not in the offer
        ({"algo": "ring", "proto": "ll128"}, ""),  # offered, though not the cheapest: another tuner's choice
    ],
)
def test_a_slot_that_nccl_runs_otherwise_than_it_offers_is_known(ran, outside):
    """Before: a table claimed such calls, with the best of a list that does not hold what NCCL runs there."""
    mostly = pd.concat([calls(11, (1, 2), n=1), calls(11, (1, 2), n=3, **ran)], ignore_index=True)
    known = offers((11, "all_gather", MB))
    found = outside_the_offer(mostly, known)
    assert found == ({Slot(2, 1, "all_gather", 20): outside} if outside else {})
    assert outside_the_offer(mostly, {}) == {}  # what is offered is not known
    rare = pd.concat([calls(11, (1, 2), n=19), calls(11, (1, 2), n=1, **ran)], ignore_index=True)
    assert outside_the_offer(rare, known) == {}

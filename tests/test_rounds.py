"""Rounds of one rank, driven by hand: what must outlive the network they run over."""

import pytest
from dynamiccl.envs.nccl.agreement.job_store import JobStore
from dynamiccl.envs.nccl.agreement.place import Report
from dynamiccl.envs.nccl.agreement.protocol import Stop
from dynamiccl.envs.nccl.agreement.published import TableMailbox
from dynamiccl.envs.nccl.agreement.rounds import RankState, Rounds
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.envs.nccl.steps.steps import Steps
from dynamiccl.traces.records import Decision, Lease, Slot, Table
from light_ranks import StandIn
from light_store import Store, StoreServer

LEASE = Lease(100, 5000)
TRIAL = {Slot(2, 1, "all_gather", 20): Decision("ring", "ll", 4)}


class NoRanks:
    """The network of a rank that has nobody below it; it may break as soon as something is sent."""

    children = ()

    def __init__(self, breaks=False):
        self.breaks = breaks

    def down(self, *_message):
        if self.breaks:
            raise ConnectionError("lost")


class Rank0:
    """Rank 0 alone, its two threads taking turns."""

    def __init__(self, folder, before=None):
        server = StoreServer()
        self.store = JobStore(lambda: (Store(server.port), "127.0.0.1"), 0)
        self.store.connect()
        self.steps = Steps()
        self.desk = RankState(0, 1, StandIn(), self.steps, TableMailbox(folder.path / "table"), before)
        self.connects()

    def connects(self, breaks=False):
        with self.desk.lock:
            self.desk.member.disconnected()
            self.desk.leader.disconnected()
        self.rounds = Rounds(self.desk, NoRanks(), self.store, lambda *said: None)
        self.breaks = breaks

    def steps_once(self):
        self.steps.ended += 1
        stop = self.desk.member.boundary(self.desk.here())
        if stop is Stop.MEET:
            self.rounds._tree.breaks = self.breaks
            self.rounds._decide(self.desk.leader, self.desk.leader.attempt, Report.of(self.desk.here(), {}))
            self.desk.member.flipped()
        self.rounds._lead(self.desk.leader)


@pytest.fixture
def folder():
    made = RunFolder.create()
    made.table.beat()
    yield made
    made.close()


def leased(desk):
    """What it would say of the trial when its steps are over."""
    return desk.keeper.over(10_000)


def test_a_trial_that_was_announced_before_the_network_was_lost_has_its_lease(folder):
    """Before: it was in force without one, and stayed for good when the tuner died."""
    rank = Rank0(folder)
    rank.steps_once()
    folder.table.publish(Table.of(1, TRIAL, LEASE))
    rank.steps_once()
    assert rank.desk.leader.wanted_trial and not rank.desk.leader.trial
    rank.connects()
    for _ in range(5):
        rank.steps_once()
    assert rank.desk.leader.trial and "a trial table was in force for 100 steps" in leased(rank.desk)


def test_a_lease_begins_though_the_network_is_lost_in_the_same_moment(folder):
    rank = Rank0(folder)
    rank.connects(breaks=True)
    folder.table.publish(Table.of(1, TRIAL, LEASE))
    with pytest.raises(ConnectionError):
        for _ in range(9):
            rank.steps_once()
    assert rank.desk.leader.trial and leased(rank.desk)


def test_a_group_that_is_made_anew_takes_up_what_was_wanted_with_its_lease(folder):
    rank = Rank0(folder)
    folder.table.publish(Table.of(1, TRIAL, LEASE))
    for _ in range(9):
        rank.steps_once()
    assert rank.desk.leader.trial
    other = Rank0(folder, before=rank.desk)
    for _ in range(9):
        other.steps_once()
    assert other.desk.leader.trial and leased(other.desk)

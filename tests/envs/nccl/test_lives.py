"""Lives of one job on one store: the farewell of the old one, and the beginning of the new one."""

import time
from types import SimpleNamespace

import pytest
from dynamiccl.envs.nccl import life as process
from dynamiccl.envs.nccl.agreement import agreement as agreements
from dynamiccl.envs.nccl.agreement import lookout as lookouts
from dynamiccl.envs.nccl.agreement.agreement import Agreement
from dynamiccl.envs.nccl.agreement.plans import Report
from dynamiccl.envs.nccl.agreement.store import Parted, Proposal, RoundStore
from memory_store import MemoryStore


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(lookouts, "shared_roots", lambda: iter([tmp_path]))
    return MemoryStore()


def life(store):
    """Rank 0 of two, in a life that it has begun."""
    first = RoundStore(lambda: store, 0, 2)
    first.connect()
    return first


def test_an_old_life_takes_nothing_back_from_the_new_one(store):
    """Before: where rank 0's old thread was inside a round it parted after the new life had begun, and all stopped."""
    old, new = life(store), life(store)
    before = dict(store.values)
    old.part(1)
    with pytest.raises(Parted):
        old.propose(Proposal(2, b"table", 1))
    assert store.values["now"] == f"{new.life} 0".encode() and store.values["begun"] == before["begun"]
    new.propose(Proposal(1, b"table", 1))
    new.part(2)
    assert store.values["now"].split()[:2] == f"{new.life} 2".encode().split()
    for one in (old, new):
        one.close()


@pytest.mark.parametrize("is_there_before", [False, True])
def test_a_rank_waits_for_the_life_that_follows_one_that_is_over(store, monkeypatch, is_there_before):
    """Before: on rank 0's node, whoever came to a group made anew before rank 0 heard the old farewell, and stopped."""
    monkeypatch.setattr(agreements, "IDLE_S", 0.01)
    old = life(store)
    stays = RoundStore(lambda: store, 1, 2)  # of the old group: the farewell stays to be read
    stays.connect()
    assert stays.has_changed() and stays.now() == (True, 0)

    def parts():
        old.part(1)
        old.close()

    if not is_there_before:
        parts()
    started = []
    stub = SimpleNamespace(
        join=lambda: 1,
        started=started.append,
        hold=lambda s: None,
        part=lambda owner: None,
        tuners=lambda: 1,
        comms=dict,
        identity=str,
    )
    steps = SimpleNamespace(ended=0)
    agreement = Agreement(1, 2, stub, steps, None, lambda: store)
    wait_until(lambda: agreement._store.life == old.life)
    if is_there_before:
        parts()
    wait_until(lambda: agreement._store.lookout._path is None)  # it has heard of it
    agreement._acted = 50  # rounds of the old life prove nothing in the new one
    new = life(store)
    wait_until(lambda: store.check([f"{new.life}/vote/1"]))
    assert new.reports([1]) == {1: Report(0, {})}
    assert agreement.stopped is None and new.has_news()
    assert started == [process.own()] * 2, "both lives of the group are of one start of the job"
    agreement.close()
    agreement.join()
    for one in (stays, new):
        one.close()


def wait_until(true):
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)

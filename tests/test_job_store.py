"""The job's store as the agreement uses it: connections that die, stores that are gone, what another life has left."""

import errno
import time

import pytest
from dynamiccl.envs.nccl.agreement import job_store
from dynamiccl.envs.nccl.agreement.job_store import JobStore
from dynamiccl.envs.nccl.agreement.protocol import ABORT, COMMIT
from light_store import Store, StoreServer


class Cut(Store):
    """A connection that was dropped on the way while it idled."""

    def _ask(self, *request):
        raise OSError("Connection reset by peer")


@pytest.fixture
def server():
    return StoreServer()


def opened(server, n_ranks=2, since=0.0):
    """Stores of ranks of one life that have passed the gate."""
    ranks = [JobStore(lambda: (Store(server.port), "127.0.0.1"), rank, since) for rank in range(n_ranks)]
    for rank in ranks:
        rank.connect()
    word = ranks[0].opens(0)
    assert [rank.hears(word) for rank in ranks] == [""] * n_ranks
    return ranks


def test_whose_connection_has_died_asks_over_a_new_one(server):
    """Before: it took an error of its own for "nothing was committed", and trained on under another table."""
    leader, member = opened(server)
    leader._store = member._store = Cut(server.port)
    assert leader.log(1, COMMIT) == COMMIT
    assert member.log(1, ABORT) == COMMIT


def test_who_is_in_doubt_does_not_trust_a_connection_that_has_idled(server):
    leader, member = opened(server)
    assert leader.log(1, COMMIT) == COMMIT
    member._store = None  # using it would raise
    assert member.log(1, ABORT) == COMMIT


def test_a_node_without_descriptors_asks_over_the_connection_it_has(server):
    leader, member = opened(server)
    assert leader.log(1, COMMIT) == COMMIT

    def none():
        raise OSError(errno.EMFILE, "Too many open files")

    member._make = none
    assert member.log(1, ABORT) == COMMIT


def test_a_store_that_is_away_is_waited_for_and_one_that_nobody_serves_has_committed_nothing(server, capsys):
    _, member = opened(server)
    tries = []

    def away():
        tries.append(1)
        if len(tries) < 4:
            raise TimeoutError("timed out")
        return Store(server.port), "127.0.0.1"

    member._make = away
    assert member.log(1, ABORT) == ABORT and len(tries) == 4 and capsys.readouterr().err == ""

    def gone():
        raise ConnectionRefusedError("nobody listens")

    member._make = gone
    assert member.log(2, ABORT) == ABORT
    assert "the job's store is gone (nobody listens); the table stays" in capsys.readouterr().err
    member._make, member.closing = away, True
    tries.clear()
    assert member.log(3, ABORT) == ABORT and len(tries) == 1, "who leaves does not wait"


def test_the_leaders_connection_is_made_anew_after_an_error(server):
    """Before: every attempt was lost from then on, to "the job's store answers late"."""
    leader, _ = opened(server)
    leader._store = Cut(server.port)
    with pytest.raises(OSError, match="reset"):
        leader.forget(1)
    leader.forget(1)
    leader._store = Cut(server.port)
    assert [leader.next_opening(0), leader.next_opening(0)] == [0, 1]


@pytest.mark.parametrize("word", ["open", "shut"])
def test_a_life_of_the_job_reads_nothing_of_the_one_before(server, monkeypatch, word):
    """torchrun keeps its store, and agents of several nodes count restarts each for itself: none names a life."""
    old = opened(server)
    assert old[0].log(1, COMMIT) == COMMIT and old[0].next_opening(0) == 1
    assert old[1].shuts(1, "rank 9 is gone") == "shut:rank 9 is gone"
    if word == "shut":
        server.values.pop("0/gate")
        assert old[1].shuts(0, "versions differ") == old[0].opens(0) == "shut:versions differ"
    later = time.time() + 20
    monkeypatch.setattr(job_store.time, "time", lambda: later)
    new = opened(server, since=later - 10)
    assert new[1].shuts(0, "too late").startswith("open ")
    assert new[1].log(1, ABORT) == ABORT
    assert new[1].next_opening(0) == 0 and new[0].next_opening(0) == 1
    assert new[0].hears(new[0].opens(1)) == ""

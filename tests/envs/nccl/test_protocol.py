"""The protocol by which ranks change tables: every order of events in small jobs, and mutations that must be found."""

from dataclasses import replace

import protocol_model
import pytest
from dynamiccl.envs.nccl.agreement import protocol
from dynamiccl.envs.nccl.agreement.protocol import ABORT, CommVote, Decision, Vote, decide
from protocol_model import explore
from protocol_scopes import CAPTURED, ONE, PARTS, SMALL, TWO


@pytest.fixture(autouse=True)
def fresh():
    """What a part asks for is remembered: not beyond a test that changes the parts."""
    protocol_model._request.cache_clear()
    yield
    protocol_model._request.cache_clear()


def test_no_order_of_events_splits_a_collective():
    wrong, states = explore(SMALL)
    assert wrong == "" and states > 5_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "scope",
    [
        replace(ONE, calls=3, deaths=1),
        replace(TWO, calls=1),
        replace(ONE, members=((0, 1, 2),), trials=(1,), calls=1),
        ONE,
    ],
)
def test_no_order_of_events_splits_a_collective_in_larger_jobs(scope):
    assert explore(scope)[0] == ""


@pytest.mark.parametrize("name", ["groups", "captured, told late from there on", "few places for changes"])
def test_no_order_of_events_splits_a_collective_whatever_the_plugin_does(name):
    assert explore(PARTS[name])[0] == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_no_order_of_events_splits_a_collective_in_each_part_of_the_model(name):
    assert explore(PARTS[name])[0] == ""


#: What the plugin or the store does wrong, and a job in which it shows.
MUTATIONS = {
    "nobody waits at a limit": SMALL,
    "the register can be set twice": SMALL,
    "a limit is not looked at again": SMALL,
    "a trial ends one call later on rank 1": SMALL,
    "what is told counts": replace(SMALL, late=True),
    "the count moves within a group": replace(SMALL, script=(2, 2)),
    "few calls are picked by the rank": replace(SMALL, one_of=2, trials=(2,)),
    "a captured call freezes nothing": replace(SMALL, script=(1, CAPTURED, 1, 1, 1), old=True, trials=(2,)),
    "changes before the last are forgotten": replace(ONE, trials=(1, 1), calls=2),
    "a buffer that may answer is filled": replace(ONE, trials=(1, 1), calls=2, buffers=1),
    "a lift lifts all limits": replace(SMALL, left=1, calls=2),
    "there is one place for what is staged": replace(SMALL, left=1, calls=2),
    "an answer that is lost is a refusal": replace(SMALL, reconnects=True),
    "who gives up goes on": replace(SMALL, gives_up=True),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_of_the_words_is_found(mutation):
    scope = replace(MUTATIONS[mutation], mutations=frozenset({mutation}))
    assert "collective" in explore(scope)[0]


def smallest(votes, *more):
    decision, out = decide(votes, *more)
    low = {c: min(v.comms[c].limit for v in votes if c in v.comms) for c in decision.switches}
    return Decision(
        decision.generation, {c: (low[c], until) for c, (_, until) in decision.switches.items()}
    ), out


def hasty(rank, number, identity):
    vote = yield from protocol._vote(rank, number, identity)
    yield protocol.Cast(vote)
    decision = (yield protocol.Await()) or ABORT  # at its limit it goes on without the register's word
    yield from protocol._act(vote, decision)
    return decision


def unlimited(rank, number, identity):
    yield protocol.Stage()
    comms = yield protocol.Limit()
    yield protocol.Lift(0)  # as if the limit were set after the vote
    vote = Vote(rank, number, identity, comms)
    yield protocol.Cast(vote)
    decision = (yield protocol.Await()) or (yield protocol.Settle(ABORT))
    yield from protocol._act(vote, decision)
    return decision


@pytest.mark.parametrize(
    ("name", "mutant"),
    [("decide", smallest), ("follow", hasty), ("follow", unlimited), ("_odd", lambda comm, members: None)],
    ids=[
        "N below a limit",
        "no look at the register",
        "no limit when the vote leaves",
        "a member has not voted",
    ],
)
def test_a_mutation_of_the_parts_is_found(monkeypatch, name, mutant):
    monkeypatch.setattr(protocol, name, mutant)
    assert "collective" in explore(SMALL)[0]


def vote(rank, limit=10, n_ranks=2, identity="same", marks=None, comm=5, no_clock=""):
    return Vote(rank, 1, identity, {comm: CommVote(n_ranks, 1, limit, 2.5, marks or {16: 7}, no_clock)})


def test_the_decision_is_the_largest_limit_and_a_trial_ends_some_steps_later():
    decision, out = decide([vote(0, 12), vote(1, 15)], 3, 4, {})
    assert decision == Decision(3, {5: (15, 25)}) and out == {}
    assert decide([vote(0, 12), vote(1, 15)], 3, 0, {})[0].switches == {5: (15, 0)}


@pytest.mark.parametrize(
    ("votes", "for_good", "words"),
    [
        ([vote(0)], False, "1 of 2 ranks"),
        ([vote(0), vote(1, identity="other")], False, "rank 1 has other, rank 0 has same"),
        ([vote(0), vote(1, marks={16: 8})], True, "the first 16 collectives"),
        ([vote(0, marks={16: 7, 32: 9}), vote(1)], False, ""),
        ([vote(0, marks={2048: 9}), vote(1)], False, "cannot be compared"),
        ([vote(0, marks={16: 7, 2048: 9}), vote(1, marks={16: 7, 48: 3})], False, ""),
        ([vote(0), vote(1, no_clock="told late")], True, "rank 1 of its collectives late (told late)"),
    ],
)
def test_who_is_not_of_one_mind_is_left_out_by_name(votes, for_good, words):
    decision, out = decide(votes, 1, 0, {})
    if not words:
        assert 5 in decision.switches and not out
        return
    assert not decision.switches and words in out[5].why and out[5].for_good is for_good

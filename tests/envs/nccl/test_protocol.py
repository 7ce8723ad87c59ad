"""The protocol by which ranks change tables: every order of events in small jobs, and mutations that must be found."""

from dataclasses import replace

import protocol_model
import pytest
from dynamiccl.envs.nccl.agreement import plans, protocol
from dynamiccl.envs.nccl.agreement.protocol import ABORT, CommVote, Decision, Vote, decide
from dynamiccl.envs.nccl.plugin.bindings import Span
from dynamiccl.traces.reasons import NotAgreeing, RowRefused
from dynamiccl.traces.records import Trial
from protocol_model import explore
from protocol_scopes import (
    CAPTURED,
    ONE,
    PARTS,
    REPORT_PARTS,
    REPORTS,
    SMALL,
    TURN_PARTS,
    TURNS,
    TWO,
    UNEVEN,
    UNEVEN_PARTS,
)

REFUSES = RowRefused.PLUGIN_REFUSES(error="x")


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


@pytest.mark.parametrize(
    "name", ["groups", "captured", "few places for changes", "one rank counts all-reduces"]
)
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
    "sends launch all calls": replace(SMALL, script=(1, CAPTURED, 1)),
    "changes before the last are forgotten": replace(ONE, trials=(1, 1), calls=2),
    "a buffer that may answer is filled": replace(ONE, trials=(1, 1), calls=2, buffers=1),
    "a lift lifts all limits": replace(SMALL, left=1, calls=2),
    "there is one place for what is staged": replace(SMALL, left=1, calls=2),
    "an answer that is lost is a refusal": replace(SMALL, reconnects=True),
    "who gives up goes on": replace(SMALL, gives_up=True),
    "the option is in no identity": PARTS["one rank counts all-reduces"],
}


#: Those that take three seconds and more to find, of all mutations.
FAR_OFF = {
    "each communicator has an order of its own",
    "there is one place for what is staged",
    "a buffer that may answer is filled",
    "the length of a turn is the rank's own",
    "a trial has no end",
    "the table that stays is read at each answer",
    "a mixed step is the base's",
    "two steps' calls are a step",
}


def quick_and_slow(names):
    """The mutations of a model, those of FAR_OFF marked as slow."""
    return [pytest.param(name, marks=pytest.mark.slow if name in FAR_OFF else ()) for name in names]


@pytest.mark.parametrize("mutation", quick_and_slow(MUTATIONS))
def test_a_mutation_of_the_words_is_found(mutation):
    scope = replace(MUTATIONS[mutation], mutations=frozenset({mutation}))
    assert "collective" in explore(scope)[0]


def smallest(votes, *more):
    decision, out = decide(votes, *more)
    low = {c: min(v.comms[c].limit for v in votes if c in v.comms) for c in decision.switches}
    return Decision(
        decision.generation, {c: span._replace(since=low[c]) for c, span in decision.switches.items()}
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
    [
        ("decide", smallest),
        ("follow", hasty),
        ("follow", unlimited),
        ("_odd", lambda comm, members, strangers: None),
    ],
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
    decision, out = decide([vote(0, 12), vote(1, 15)], 3, Trial(4), {})
    assert decision == Decision(3, {5: Span(15, 25)}) and out == {}
    assert decide([vote(0, 12), vote(1, 15)], 3, Trial(), {})[0].switches == {5: Span(15)}


@pytest.mark.parametrize(
    ("votes", "for_good", "words"),
    [
        ([vote(0)], False, "1 of 2 ranks"),
        ([vote(0), vote(1, identity="other")], False, "rank 1 has other, rank 0 has same"),
        ([vote(0), vote(1, marks={16: 8})], True, "the first 16 collectives"),
        ([vote(0, marks={16: 7, 32: 9}), vote(1, marks={16: 7, 32: 8})], True, "the first 32 collectives"),
        ([vote(0, marks={16: 7, 32: 9}), vote(1)], False, ""),
        ([vote(0, marks={2048: 9}), vote(1)], False, "cannot be compared"),
        ([vote(0, marks={16: 7, 2048: 9}), vote(1, marks={16: 7, 48: 3})], False, ""),
        (
            [vote(0), vote(1, no_clock="NCCL is old")],
            True,
            "the calls of rank 1 where they are made (NCCL is old)",
        ),
    ],
)
def test_who_is_not_of_one_mind_is_left_out_by_name(votes, for_good, words):
    decision, out = decide(votes, 1, Trial(), {})
    if not words:
        assert 5 in decision.switches and not out
        return
    assert not decision.switches and words in str(out[5].why) and out[5].for_good is for_good


def led(own, *others):
    """What rank 0 decides of a table to stay, and whom it leaves out. A vote with a refusal has no communicators."""
    left_out = {}
    part = protocol.lead(1, own.identity, 3, Trial(), {}, None, lambda left_out: False, left_out, {})
    assert isinstance(next(part), protocol.Propose) and isinstance(part.send(None), protocol.Gather)
    assert isinstance(part.send(list(others)), protocol.Stage)
    request = part.send((own.refusal, own.no_room))
    if isinstance(request, protocol.Limit):
        request = part.send(own.comms)
    return request.decision, left_out


@pytest.mark.parametrize("fault", [{"refusal": REFUSES}, {"no_room": NotAgreeing.NO_ROOM(n=9)}])
def test_a_rank_of_another_release_leaves_only_its_own_communicators_out(fault):
    """Before: where its plugin refused the table no rank had one, and nobody said a word."""
    old = Vote(2, 1, "old", {}, **fault)
    three = together(vote(0), vote(0, n_ranks=3, comm=9)), together(vote(1), vote(1, n_ranks=3, comm=9))
    decision, left_out = led(*three, old)
    assert decision == Decision(3, {5: Span(10)})
    assert left_out == {
        9: protocol.LeftOut(NotAgreeing.NOT_ALIKE(rank=2, what="old", other=0, others="same"))
    }


def test_a_refusal_by_rank_0_s_own_code_is_one_for_all():
    refuses = Vote(1, 1, "same", {}, REFUSES)
    for decision, left_out in (led(vote(0), refuses), led(replace(refuses, rank=0), vote(1))):
        assert decision == ABORT and left_out[0] == protocol.LeftOut(REFUSES, True, True)


def rhythm(rank, limit, a_step, offset, comm=5, pace=4.0, n_ranks=2, steps=0):
    word = CommVote(n_ranks, 1, limit, pace, {16: 7}, "", a_step, offset, steps=steps)
    return Vote(rank, 1, "same", {comm: word})


def together(*votes):
    """The words of one rank on several communicators."""
    return replace(votes[0], comms={comm: word for one in votes for comm, word in one.comms.items()})


def test_turns_begin_at_the_end_of_one_step_on_all_communicators():
    """At or above the largest limit of each: rank 1 is 41 collectives ahead on the second."""
    ranks = [
        together(rhythm(0, 12, 4, 2), rhythm(0, 50, 3, -1, comm=6)),
        together(rhythm(1, 15, 4, 2), rhythm(1, 91, 3, -1, comm=6)),
    ]
    decision, out = decide(ranks, 3, Trial(30, 2, 2, 1), {})
    step, steps = 31, 32  # 3 * 31 - 1 is above 91; whole quads of two-step turns
    assert decision.switches == {
        5: Span(2 + 4 * step, 2 + 4 * (step + steps), 8, 4, 2, 1),
        6: Span(-1 + 3 * step, -1 + 3 * (step + steps), 6, 3, 2, 1),
    }
    assert out == {}
    monitor = decide(ranks, 3, Trial(30, 8, 1), {})[0].switches[5]
    assert (monitor.length, monitor.until - monitor.since, monitor.one_of) == (4, 4 * 32, 8)


@pytest.mark.parametrize(
    ("others", "switched", "refused"),
    [
        ([(4, 2), (4, 2)], {5, 6}, False),
        ([(0, 0), (4, 2)], {5}, True),  # one rank's steps differed
        ([(4, 2), (4, 6)], {5}, True),  # the ranks count steps differently
        ([(0, 0), (0, 0), 0.1], {5}, False),  # it is used in some steps only, and keeps its table
    ],
)
def test_turns_are_refused_where_a_communicator_has_no_rhythm(others, switched, refused):
    pace = others[2] if len(others) > 2 else 4.0
    ranks = [together(rhythm(r, 12, 4, 2), rhythm(r, 9, *others[r], comm=6, pace=pace)) for r in range(2)]
    decision, out = decide(ranks, 3, Trial(16, 2, 1), {})
    assert set(decision.switches) == switched and (0 in out) == refused and set(out) <= {0}
    if refused:
        assert out[0].for_good and out[0].why.reason is NotAgreeing.NO_RHYTHM


def test_turns_are_not_refused_before_all_ranks_have_voted():
    """The round is lost, and there will be another."""
    _, out = decide([rhythm(0, 12, 4, 2), rhythm(1, 12, 0, 0, comm=6, n_ranks=1)], 3, Trial(16, 2, 1), {})
    assert 0 not in out and not out[5].for_good


def test_long_turns_need_no_rhythm_and_begin_near_one_step_on_all_communicators():
    """From the limit on that is farthest in steps: of communicator 6, 8 steps after the last. One quad, not more. What
    is used in few steps keeps its table."""
    ranks = [
        together(
            rhythm(r, 112, 0, 100, pace=4.5, steps=20),
            rhythm(r, 70 + 10 * r, 0, 60, comm=6, pace=2.5, steps=20),
            rhythm(r, 9, 0, 7, comm=7, pace=0.2, steps=20),
        )
        for r in range(2)
    ]
    decision, out = decide(ranks, 3, Trial(64, 2, 10, 1), {})
    assert out == {} and decision.switches == {
        5: Span(100 + 36, 100 + 36 + 4 * 45, 45, 0, 2, 1),
        6: Span(80, 80 + 4 * 25, 25, 0, 2, 1),
    }
    short = decide(ranks, 3, Trial(64, 2, 2, 1), {})[1]
    assert short[0].why.reason is NotAgreeing.NO_RHYTHM
    _, late = decide([*ranks, rhythm(2, 5, 0, 0, comm=9)], 3, Trial(64, 2, 10), {})
    assert set(late) == {9}, "who is late keeps nobody else from it"


def test_long_turns_of_a_job_with_a_rhythm_end_with_its_steps():
    ranks = [rhythm(r, 12, 4, 2) for r in range(2)]
    assert decide(ranks, 3, Trial(40, 2, 10), {})[0].switches == {5: Span(14, 14 + 160, 40, 4, 2)}


def test_no_long_turn_is_one_of_few_calls():
    ranks = [rhythm(r, 12, 0, 2, pace=1e-9) for r in range(2)]
    assert decide(ranks, 3, Trial(40, 2, 10), {})[1][0].why.reason is NotAgreeing.NO_RHYTHM
    ranks = [rhythm(r, 12, 0, 2, pace=1.0, steps=3) for r in range(2)]
    assert decide(ranks, 3, Trial(40, 2, 10), {})[0].switches[5].length == 10


def test_few_calls_need_no_rhythm():
    spans = decide([rhythm(0, 12, 0, 0), rhythm(1, 15, 4, 2)], 3, Trial(4, 8), {})[0].switches
    assert spans == {5: Span(15, 31, 1, 0, 8)}


@pytest.mark.slow
def test_no_order_of_events_gives_a_turn_to_two_tables():
    """Nor a step to a table that has not answered all of it; every answer is what was decided."""
    assert explore(TURNS)[0] == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", TURN_PARTS)
def test_no_order_of_events_gives_a_turn_to_two_tables_in_each_part_of_the_model(name):
    assert explore(TURN_PARTS[name])[0] == ""


def test_no_order_of_events_gives_a_long_turn_to_two_tables():
    """The ranks know no rhythm, and each step has other calls."""
    assert explore(UNEVEN)[0] == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", UNEVEN_PARTS)
def test_no_order_of_events_gives_a_long_turn_to_two_tables_in_each_part_of_the_model(name):
    assert explore(UNEVEN_PARTS[name])[0] == ""


#: What the plugin does wrong with turns, and a job in which it shows.
TURN_MUTATIONS = {
    "the length of a turn is the rank's own": TURNS,
    "a lease begins at the rank's own limit": TURNS,
    "turns are numbered by the absolute count": TURNS,
    "each communicator has an order of its own": TURNS,
    "a trial has no end": replace(TURNS, one_of=1),
    "the table that stays is read at each answer": TURN_PARTS["a table comes to stay"],
    "a mixed step is the base's": replace(TURNS, steps=((2,), (1,), (2,))),
    "two steps' calls are a step": replace(TURNS, steps=((1,), (1,), (2,))),
}
#: The same with long turns.
LONG_TURN_MUTATIONS = {
    "the length of a turn is the rank's own": UNEVEN,
    "a lease begins at the rank's own limit": UNEVEN,
    "a mixed step is the base's": replace(UNEVEN, steps=((2,), (2,))),
}


@pytest.mark.parametrize("mutation", quick_and_slow(TURN_MUTATIONS))
def test_a_mutation_of_the_turns_is_found(mutation):
    scope = replace(TURN_MUTATIONS[mutation], mutations=frozenset({mutation}))
    assert explore(scope)[0] != ""


@pytest.mark.parametrize("mutation", quick_and_slow(LONG_TURN_MUTATIONS))
def test_a_mutation_of_long_turns_is_found(mutation):
    scope = replace(LONG_TURN_MUTATIONS[mutation], mutations=frozenset({mutation}))
    assert explore(scope)[0] != ""


@pytest.mark.parametrize(("name", "scope"), [("_turns", TURNS), ("_long_turns", UNEVEN)])
def test_turns_that_begin_below_a_limit_are_found(monkeypatch, name, scope):
    decided = getattr(protocol, name)

    def below_the_limit(words, trial):
        spans = decided(words, trial)
        return {comm: span._replace(since=span.since - 1) for comm, span in spans.items()}

    monkeypatch.setattr(protocol, name, below_the_limit)
    assert "collective" in explore(scope)[0]


# -- plans -------------------------------------------------------------------------------------------------------------


def test_no_order_of_events_makes_rank_0_take_a_plan_for_another():
    """Where it finds that a communicator lacks nothing, all members answer the wanted rows; no two plans differ."""
    wrong, states = explore(REPORTS)
    assert wrong == "" and states > 5_000


@pytest.mark.slow
@pytest.mark.parametrize("name", REPORT_PARTS)
def test_no_order_of_events_makes_rank_0_take_a_plan_for_another_in_each_part_of_the_model(name):
    assert explore(REPORT_PARTS[name])[0] == ""


#: What reports do wrong, or hide, and a job in which it shows.
REPORT_MUTATIONS = {
    "an old report is a proof": replace(REPORTS, trials=(0, 0)),
    "a plan leaves its trial out": REPORT_PARTS["a trial, then a table to stay"],
    "a plan tells what answered last": REPORTS,
}


@pytest.mark.parametrize("mutation", REPORT_MUTATIONS)
def test_a_mutation_of_the_reports_is_found(mutation):
    scope = replace(REPORT_MUTATIONS[mutation], mutations=frozenset({mutation}))
    assert "rank 0 finds" in explore(scope)[0] or "is said to have" in explore(scope)[0]


@pytest.mark.parametrize(
    ("name", "mutant"),
    [("has", lambda plan, rows, now: plan.stays == rows), ("_late", lambda comm, reports, rounds: [])],
    ids=["a trial lacks nothing", "each report is a proof"],
)
def test_a_mutation_of_who_lacks_what_is_found(monkeypatch, name, mutant):
    monkeypatch.setattr(plans, name, mutant)
    scope = (
        REPORT_PARTS["a trial, then a table to stay"] if name == "has" else replace(REPORTS, trials=(0, 0))
    )
    assert explore(scope)[0] != ""

"""The switch of all ranks to the next table, proven by exploring every state of the real protocol code.

Here small scopes and mutations; the whole list takes hours: ``python tests/protocol_explore.py``, or
``make model-check``.
"""

from dataclasses import replace

import numpy as np
import pytest
from dynamiccl.envs.nccl.agreement.place import NO_COUNTS, Progress, Report, SwitchPoint, Verdict
from dynamiccl.envs.nccl.agreement.protocol import PATIENCE, Leader, Member, Phase, Stage, Stop
from protocol_explore import explore
from protocol_world import Scope

SMALL = Scope(steps=2, attempts=1)


@pytest.mark.parametrize(
    "bad_luck",
    [{}, {"skips": 1}, {"extras": 1, "profiler": False}, {"deaths": 1}, {"daemon_deaths": 1}],
    ids=["late messages", "a skipped step", "a pass of its own, no profiler", "a death", "the daemon dies"],
)
def test_no_interleaving_lets_two_ranks_differ(bad_luck):
    result = explore(replace(SMALL, **bad_luck))
    print(f"{result.states} states, {result.transitions} transitions, {result.switched} states under a table")
    assert not result.violation, "\n" + result.story()
    assert result.switched > 100


class KeepsTheLease(Leader):
    """Mutation: a lease that has run out changes nothing."""

    def expire(self) -> None:
        pass


class ClosesWhereItIs(Leader):
    """Mutation: an agreement that closes does not go back to the confirmed table."""

    def next(self, here: Progress) -> bool:
        if self.closing:
            self.stage = Stage.CLOSED
            return False
        return super().next(here)


class RepeatsNumbers(Leader):
    """Mutation: an attempt that was lost is tried again under its number, and with its log."""

    def lost(self, here: Progress, why: str) -> None:
        super().lost(here, why)
        self.attempt -= 1


class NeverTires(Member):
    """Mutation: a rank that stands waits for rank 0's answer for ever."""

    def overdue(self) -> None:
        pass


class TiresFreely(Member):
    """Mutation: a rank that has waited long enough trains on without a look at the log."""

    def overdue(self) -> None:
        self.phase = Phase.IDLE


class PreparesAnyTime(Member):
    """Mutation: the next attempt's table is staged over the one that this rank may yet have to change to."""

    def is_free(self) -> bool:
        return True


MUTANTS = {
    "the ranks' places are not compared": ({"skips": 1}, {"does not compare"}),
    "after a skipped step the number of passes is proof enough": (
        {"extras": 1, "attempts": 2, "closes": True},
        {"compares steps only"},
    ),
    "rank 0 commits although the log says abort": ({}, {"commits without the log"}),
    "rank 0 does not obey the log": ({}, {"does not obey the log"}),
    "a rank in doubt keeps its table": ({}, {"doubt keeps"}),
    "a rank in doubt takes the new table": ({}, {"doubt flips"}),
    "rank 0 counts a rank that missed the place": ({}, {"ignores who missed", "does not compare"}),
    "leases have no end": ({"leader": KeepsTheLease}, set()),
    "the trial of a daemon that is gone is taken for confirmed": (
        {"daemon_deaths": 1},
        {"keeps what a dead daemon tried"},
    ),
    "closing leaves a trial in force": ({"leader": ClosesWhereItIs, "closes": True}, set()),
    "a lost attempt's number is used again": ({"leader": RepeatsNumbers, "attempts": 2}, set()),
    "a rank waits for ever": ({"member": NeverTires}, set()),
    "a rank leaves without asking": ({"member": TiresFreely}, set()),
    "a table is staged over the one in doubt": (
        {"member": PreparesAnyTime, "tables": 2, "attempts": 2},
        {"prepares in doubt"},
    ),
}


@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_broken_protocol_is_refuted(name):
    change, broken = MUTANTS[name]
    result = explore(replace(SMALL, **change, broken=frozenset(broken)))
    print(f"{name} ({result.states} states):\n{result.story()}")
    assert result.violation


# -- places --------------------------------------------------------------------------------------------------------


def report(rank, backwards=9, steps=9, comms=(), counts=(), asked=0):
    return Report.of(Progress(rank, backwards, steps, asked), dict(zip(comms, counts, strict=True)))


def test_ranks_at_one_place_and_ranks_that_are_not():
    """Communicators are compared between those that share them; the words name a rank."""
    tp = [report(r, comms=[7, 100 + r // 2], counts=[40, 10 + r // 2]) for r in range(4)]
    assert Report.merged(tp).verdict() == (True, True, "")
    assert Report.merged([Report.merged(tp[:2]), Report.merged(tp[2:])]).verdict() == (True, True, "")
    late = report(3, comms=[7, 101], counts=[40, 10])
    same, proven, words = Report.merged([*tp[:3], late]).verdict()
    assert not same and not proven and "rank 3" in words and "10 collectives where rank 2 has enqueued 11" in words
    same, proven, words = Report.merged([report(0), report(1, steps=8), report(2)]).verdict()
    assert (same, proven) == (False, True) and words == "rank 1 has ended 8 steps where rank 0 has ended 9 steps"
    bare = Report.merged([report(0, asked=30), report(1, steps=8, asked=28)]).verdict()
    assert (bare.same, bare.same_collectives) == (False, False)
    assert Report.merged([report(0, asked=30), report(1, asked=28)]).verdict().same, "pipelines ask differently"


def test_a_report_survives_the_network():
    one = Report.merged([report(0, comms=[5, 3], counts=[4, 2]), report(1, steps=8, comms=[3], counts=[2])])
    two = Report.decode(one.encode())
    assert two.verdict() == one.verdict() and np.array_equal(two.counts, one.counts)
    assert two.odd == one.odd and two.here == one.here
    assert Report.decode(report(0).encode()).counts.tolist() == NO_COUNTS.tolist()


# -- the two classes, where the model takes any number -------------------------------------------------------------


def test_lost_attempts_are_tried_again_ever_farther_apart_and_then_it_closes():
    leader, step, begun = Leader(), 0, []
    leader.want(b"new", True)
    while not leader.closing:
        step += 1
        if leader.next(Progress(0, step, step)):
            begun.append(step)
            assert leader.acknowledged(leader.attempt, Progress(0, step, step))
            leader.lost(Progress(0, step, step), "too slow")
    apart = np.diff(begun)
    assert len(begun) == PATIENCE and (apart[1:] > 1.5 * apart[:-1]).all() and leader.closing == "too slow"
    assert not leader.next(Progress(0, 10**6, 10**6)) and leader.stage is Stage.CLOSED, "nothing was in force"


def test_places_are_named_by_backward_passes_where_there_are_any():
    leader = Leader()
    leader.want(b"one", False)
    assert leader.next(Progress(0, 6, 3)) is True
    assert leader.acknowledged(1, Progress(0, 8, 4), stride=2) == SwitchPoint("backwards", 8 + 2 * leader.ahead)
    leader.lost(Progress(0, 8, 4), "late")
    assert leader.next(Progress(0, 0, 40)) is True  # nothing counts them
    assert leader.acknowledged(2, Progress(0, 0, 41)) == SwitchPoint("steps", 41 + leader.ahead)


def test_after_a_lost_attempt_the_next_place_is_of_the_other_kind():
    """Where one rank makes more backward passes ranks meet by steps, and find what differs; or the other way round."""
    leader, kinds = Leader(), []
    leader.want(b"one", True)
    for k in range(1, 5):
        here = Progress(0, 10**k, 10**k)
        assert leader.next(here) is True
        kinds.append(leader.acknowledged(k, here).by)
        leader.lost(here, "rank 1 did not come")
    assert kinds == ["backwards", "steps"] * 2 and leader.why == "rank 1 did not come"


def test_an_agreement_that_closes_goes_by_steps_and_by_backward_passes_in_turn():
    leader, kinds = Leader(active=b"trial", trial=True), []
    leader.close("apart")
    for k in range(1, 5):
        here = Progress(0, 10**k, 10**k)
        assert leader.next(here) is True
        kinds.append(leader.acknowledged(k, here).by)
        leader.lost(here, "late")
    assert kinds == ["steps", "backwards"] * 2


def test_a_change_that_succeeds_lets_the_next_place_come_nearer_and_only_a_confirmed_table_is_gone_back_to():
    leader = Leader()
    for k, (table, trial) in enumerate([(b"kept", False), (b"tried", True)], 1):
        leader.want(table, trial)
        leader.lost(Progress(0, 100 * k, 100 * k), "late")
        ahead = leader.ahead
        here = Progress(0, 1000 * k, 1000 * k)
        assert leader.next(here) and leader.next(here) is False, "one at a time"
        assert leader.acknowledged(leader.attempt, here)
        assert leader.arrived(leader.attempt, Verdict(True, True, "")) and leader.log_read("abort") is False
        assert leader.log_read("commit") and (leader.active, leader.trial, leader.failures) == (table, trial, 0)
        assert leader.ahead == ahead - 1
    assert leader.next(Progress(0, 5000, 5000)) is False and leader.trial, "what is wanted is in force"
    leader.want(b"tried", False)
    assert leader.next(Progress(0, 5000, 5000)) is False and not leader.trial, "the same table, no longer on a lease"
    leader.want(b"tried", True)
    leader.expire()
    assert (leader.wanted, leader.wanted_trial) == (b"kept", False)


def test_an_attempt_that_is_called_off_before_a_place_was_named_leaves_nothing_behind():
    member = Member()
    member.prepared(1)
    member.answered(1, False)
    assert member.phase is Phase.IDLE and member.is_free()
    assert member.appointed(1, SwitchPoint("steps", 9)) and member.boundary(Progress(1, 9, 9)) is Stop.PASS


def test_a_place_that_was_passed_is_missed_and_a_called_off_one_told():
    member, here = Member(), Progress(1, 6, 3)
    member.boundary(here)
    member.prepared(1)
    assert not member.appointed(1, SwitchPoint("backwards", 6)) and member.phase is Phase.IDLE
    member.prepared(2)
    assert member.appointed(2, SwitchPoint("backwards", 7))
    member.answered(2, False)
    assert member.boundary(Progress(1, 8, 4)) is Stop.TELL and member.boundary(Progress(1, 10, 5)) is Stop.PASS

"""What runs on each communicator, as rank 0 knows it: which of them lack the table that is there to stay."""

from types import SimpleNamespace

import pytest
from dynamiccl.envs.live.reader import Reader
from dynamiccl.envs.nccl.agreement import leader as leaders
from dynamiccl.envs.nccl.agreement.agreement import TOGETHER, Agreement
from dynamiccl.envs.nccl.agreement.leader import PATIENCE
from dynamiccl.envs.nccl.agreement.pace import Pace
from dynamiccl.envs.nccl.agreement.protocol import CommVote, Decision, LeftOut, Vote
from dynamiccl.envs.nccl.agreement.store import Proposal
from dynamiccl.envs.nccl.plugin.bindings import Span
from dynamiccl.traces.reasons import NotAgreeing
from dynamiccl.traces.records import AgreementState
from test_leader import BOTH, LATE, TRIAL, Rank0, message
from test_silent_ranks import Clock


def test_a_communicator_without_any_table_is_not_said_to_lack_one():
    """A rank without a tuner never takes part: NCCL decides there from the first step on."""
    rank = Rank0()
    rank.publish(1)
    rank.round({7: Span(128)}, {9: LATE})
    assert rank.leader.lacks({9: LATE}) == ""


def test_a_communicator_that_runs_the_default_already_does_not_lack_it():
    """Before: `stop` waited in vain and failed, as its table, the default of another number, was an older one."""
    rank = Rank0()
    rank.publish(1, is_default=True)
    rank.round(BOTH)
    rank.publish(2, *TRIAL)
    rank.round({comm: Span(128, 160) for comm in BOTH})
    rank.counts = {7: 150, 9: 159}
    rank.leader.sees(rank.counts)
    rank.publish(3, is_default=True)
    assert rank.round({7: Span(155)}, {9: LATE}) == 3
    assert rank.leader.lacks({9: LATE}) == LATE.why, "the trial may still run"
    rank.leader.sees({7: 170, 9: 160})
    assert rank.leader.lacks({9: LATE}) == ""
    rank.publish(4)
    rank.round({7: Span(200)}, {9: LATE})
    assert rank.leader.lacks({9: LATE}) == LATE.why, "another table is lacked"


GONE = LeftOut(NotAgreeing.NO_CLOCK(rank=1, why="calls are captured"), True)


def test_a_communicator_that_has_left_for_good_under_a_table_is_told():
    """Before: `stop` said that all ranks run the default."""
    rank = Rank0()
    rank.publish(1)
    rank.round(BOTH)
    rank.publish(2, is_default=True)
    assert rank.round({7: Span(600)}, {9: GONE}) == 2
    assert rank.leader.lacks({9: GONE}) == GONE.why and rank.next() == 0
    rank.publish(3)
    rank.round({7: Span(700)}, {9: GONE, 11: GONE})
    assert rank.leader.lacks({9: GONE}) == GONE.why
    assert rank.leader.lacks({11: GONE}) == "", "it has never had a table"


@pytest.mark.parametrize("has_table", [False, True])
def test_who_closes_under_a_table_says_that_it_stays(folder, has_table):
    """Before: "NCCL's default is restored on all ranks", as the end of all changes hid who lacked the last one."""
    rank, said = Rank0(), []
    rank.publish(1, is_default=not has_table)
    rank.round(BOTH)
    rank.publish(2, is_default=True)
    assert rank.round({8: Span(600)}, {7: GONE, 9: GONE}) == 2
    rank_0 = SimpleNamespace(_leader=rank.leader, _say=lambda *word: said.append(word))
    Agreement._stop(rank_0, GONE.why)
    why = NotAgreeing.TABLE_STAYS(why=GONE.why)
    assert said == [(AgreementState.CLOSED, why if has_table else GONE.why)]
    reader = Reader(folder)
    reader.state = said[0]
    assert reader.losing() == (why if has_table else "") and not reader.no_switch()


def words(rank, newest):
    """The vote of a rank of communicator 8, which has two."""
    return Vote(rank, 2, "same", {8: CommVote(2, 1, newest + 8, 4.0, {newest: 1})})


def test_a_communicator_of_which_all_ranks_are_silent_is_owed_what_stays(monkeypatch):
    """Before: no vote named it, so it kept a withdrawn table for good, and `stop` said on all ranks."""
    clock = Clock()
    monkeypatch.setattr(leaders, "time", clock)
    rank = Rank0()
    rank.publish(1)
    rank.round({7: Span(128), 8: Span(128)})
    lookout = SimpleNamespace(spread_s=lambda: 0.0)
    store = SimpleNamespace(lookout=lookout, answer_s=0.0, votes=lambda *_: [words(1, 64), words(2, 64)])
    rank_0 = SimpleNamespace(_leader=rank.leader, _store=store, _pace=Pace())
    Agreement._gathered(rank_0, Proposal(3, b"", 1))
    rank.publish(2, is_default=True)
    assert rank.round({7: Span(128)}) == 2
    assert rank.leader.lacked == NotAgreeing.NOT_ALL_VOTED(rank=2, n=0, of=2)
    clock.now += 1.0
    Agreement._gathered(rank_0, Proposal(2, b"", 1))
    assert rank.round({7: Span(128), 8: Span(128)}) == 2, "they are back"
    clock.now += 3600.0
    assert rank.leader.lacked == "" and rank.next() == 0


def test_where_rank_0_does_not_count_a_trial_is_over_once_all_members_say_so():
    """Before: as soon as it was cut short where rank 0 counts, so `stop` said on all ranks; or never, if only there."""
    rank = Rank0()
    rank.publish(1, *TRIAL)
    rank.round({7: Span(128, 1000), 8: Span(128, 1000)})
    rank.publish(2, is_default=True)
    rank.round({7: Span(140)}, {8: LATE})
    rank.leader.sees({7: 2000})
    for votes in ([], [words(1, 1024)], [words(1, 1024), words(2, 960)]):
        rank.leader.last.in_force.hears(votes)
        assert rank.leader.lacks({8: LATE}) == LATE.why
    rank.leader.last.in_force.hears([words(1, 1024), words(2, 1024)])
    assert rank.leader.lacks({8: LATE}) == ""
    rank.publish(3, *TRIAL)
    rank.round({8: Span(2000, 2064)})
    rank.publish(4, is_default=True)
    rank.round({7: Span(2000)}, {8: GONE})
    assert rank.leader.lacks({8: GONE}) == GONE.why
    rank.leader.last.in_force.hears([words(1, 2112), words(2, 2112)])
    assert rank.leader.lacks({8: GONE}) == ""


def test_once_the_trial_of_a_communicator_that_has_left_for_good_is_over_all_run_the_default(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(leaders, "time", clock)
    rank = Rank0()
    rank.publish(1, *TRIAL)
    rank.round({comm: Span(128, 160) for comm in (7, 9, 8)})  # rank 0 is not in communicator 8
    rank.publish(2, is_default=True)
    left_out = {9: GONE, 8: GONE}
    assert rank.round({7: Span(140)}, left_out) == 2 and rank.leader.lacks({9: GONE})
    assert rank.leader.lacks({8: GONE})
    clock.now += 1.0
    assert rank.round({7: Span(150)}, left_out) == 2, "led again, to hear of its end"
    rank.leader.sees({7: 170, 9: 161})
    rank.leader.last.in_force.hears([words(1, 192), words(2, 192)])
    assert rank.leader.lacks(left_out) == ""
    clock.now += 2.0
    assert rank.round({7: Span(180)}, left_out) == 2
    clock.now += 3600.0
    assert rank.next() == 0


def test_turns_that_were_steady_are_told_also_if_a_communicator_lacks_the_table():
    """Before: not at all, and the tuner did not count what it had seen in them."""
    said = []
    lacks = SimpleNamespace(unlike=lambda _: "", lacked=LATE.why, last=SimpleNamespace(steady=[6]), lost=0)
    rank_0 = SimpleNamespace(_say=lambda *word: said.append(word))
    Agreement._say_what_came(rank_0, lacks, 7, Decision(7, BOTH), {9: LATE})
    assert said == [(*TOGETHER, 6), (AgreementState.LOSING, LATE.why)]


def test_after_a_refused_trial_ranks_that_switch_are_not_said_to_be_waited_for():
    """Before: "not every rank has taken its first step"."""
    said = []
    leader = SimpleNamespace(look=lambda: (5, NotAgreeing.FATAL_TRIAL()), switched={7}, lacked="")
    Agreement._look(SimpleNamespace(_say=lambda *word: said.append(word)), leader)
    assert said == [(AgreementState.NO_TURNS, NotAgreeing.FATAL_TRIAL(), 5), TOGETHER]


def test_while_a_communicator_lacks_what_stays_no_trial_says_that_all_decide_together():
    """Before: a trial without it said so, as did one that was refused; each was a record and a line of the log."""
    rank, said = Rank0(), []
    rank_0 = SimpleNamespace(_say=lambda *word: said.append(word))

    def led(spans, left_out):
        generation = rank.round(spans, left_out)
        Agreement._say_what_came(rank_0, rank.leader, generation, Decision(generation, spans), left_out)

    losing = AgreementState.LOSING, LATE.why
    rank.publish(1)
    led(BOTH, {})
    rank.publish(2)
    led({7: Span(128)}, {9: LATE})
    rank.box.refuses = lambda _: NotAgreeing.FATAL_TRIAL()
    rank.box.found = message(3, *TRIAL)
    Agreement._look(rank_0, rank.leader)
    assert said == [(*TOGETHER, 0), losing, (AgreementState.NO_TURNS, NotAgreeing.FATAL_TRIAL(), 3), losing]
    rank.box.refuses = lambda _: ""
    rank.publish(4, *TRIAL)
    rank.leader.lost = PATIENCE
    led({7: Span(160, 192)}, {9: LeftOut(NotAgreeing.NOT_SERVED(rank=0))})
    assert said[4:] == [losing]
    rank.publish(5)
    led(BOTH, {})
    assert said[5:] == [(*TOGETHER, 0)]

"""What rank 0 says of the ranks' agreement, from what the ranks report: for the tuner, the user, and who waits."""

import json
from types import SimpleNamespace

import pytest
from dynamiccl.envs.live.reader import Reader
from dynamiccl.envs.nccl.agreement.agreement import TOGETHER, Agreement
from dynamiccl.envs.nccl.agreement.leader import PATIENCE
from dynamiccl.envs.nccl.agreement.mailbox import TableMailbox
from dynamiccl.envs.nccl.agreement.protocol import Decision, LeftOut
from dynamiccl.envs.nccl.plugin.bindings import Plan, Span
from dynamiccl.envs.nccl.run_folder import PLANS
from dynamiccl.traces.reasons import NotAgreeing
from dynamiccl.traces.records import AgreementState
from test_leader import BOTH, LATE, TRIAL, Rank0, message

GONE = LeftOut(NotAgreeing.NO_CLOCK(rank=1, why="calls are captured"), True)


class Says:
    """Rank 0's agreement around a leader: what it says."""

    def __init__(self):
        self.rank, self.said, self._said = Rank0(), [], None
        self._leader = self.rank.leader

    def _say(self, *word):
        if word != self._said:
            self._said = word
            self.said.append(word)

    def led(self, spans, left_out, silent=()):
        generation = self.rank.round(spans, left_out, silent)
        decision, steady = Decision(generation, spans), self.rank.steady
        Agreement._say_what_came(self, self.rank.leader, generation, decision, left_out, steady)

    def hears(self):
        Agreement._say_what_ranks_report(self, self.rank.leader)

    def _say_if_plans_differ(self, leader):
        return Agreement._say_if_plans_differ(self, leader)


def test_a_rank_tells_its_plans_only_where_it_is_time_to_look():
    """Each telling is a request to the store: at each look they would be 67 a second and rank, not 8."""
    rests = SimpleNamespace(_pace=SimpleNamespace(is_due=lambda: False))
    assert not Agreement._look_around(rests)


def test_a_communicator_without_any_table_is_not_said_to_lack_one():
    """A rank without a tuner never takes part: NCCL decides there from the first step on."""
    rank = Rank0()
    rank.members[9] = (0, 1, 2, 3)
    rank.publish(1)
    rank.round({7: Span(128)}, {9: LATE})
    assert rank.leader.lacked is None and rank.leader._lacks() == {}


def test_a_communicator_that_runs_the_default_already_does_not_lack_it():
    """Before: `stop` waited in vain and failed, as its table, the default of another number, was an older one."""
    rank = Rank0()
    rank.publish(1, is_default=True)
    rank.round(BOTH)
    rank.publish(2, *TRIAL)
    rank.round({comm: Span(128, 160) for comm in BOTH})
    rank.counts = {7: 150, 9: 159}
    rank.sees()
    rank.publish(3, is_default=True)
    assert rank.round({7: Span(155)}, {9: LATE}) == 3
    assert rank.leader.lacked == rank.leader.not_default() == LATE.why, "the trial still runs"
    rank.counts = {7: 170, 9: 160}
    rank.sees()
    assert rank.leader.lacked is rank.leader.not_default() is None
    rank.publish(4)
    rank.round({7: Span(200)}, {9: LATE})
    assert rank.leader.not_default() and rank.leader.lacked is None, "NCCL decides there"


def test_a_communicator_that_has_left_for_good_under_a_table_is_told():
    """Before: `stop` said that all ranks run the default."""
    rank = Rank0()
    rank.publish(1)
    rank.round(BOTH)
    rank.publish(2, is_default=True)
    assert rank.round({7: Span(600)}, {9: GONE}) == 2
    assert rank.leader.lacked == rank.leader.not_default() == GONE.why
    rank.leader._again_at = 0.0
    assert rank.next() == 0, "no round can give it to it"


def test_a_table_ahead_of_a_communicator_in_use_is_not_in_force_yet():
    rank = Rank0()
    rank.publish(1)
    rank.round(BOTH)
    rank.publish(2, is_default=True)
    rank.round({7: Span(600), 9: Span(600)})
    rank.leader.tell()
    assert rank.leader.lacked is rank.leader.not_default() is None and rank.box.told.pop()
    rank.leader.tell(is_last=True)
    assert rank.box.told.pop() is None
    rank.counts = {7: 600, 9: 600}
    rank.sees()
    rank.leader.tell()
    assert rank.box.told.pop() is None


def test_a_rank_that_gave_up_keeps_its_table_and_is_named():
    rank = Rank0()
    rank.publish(1)
    rank.round(BOTH)
    rank.publish(2, is_default=True)
    why = NotAgreeing.GAVE_UP(rank=1)
    rank.plans[9] = rank.plans[9]._replace(gave_up=True)
    rank.round({7: Span(128)}, {9: LeftOut(why, True)})
    assert rank.leader.not_default() == NotAgreeing.GAVE_UP(rank=0) and rank.next() == 0


@pytest.mark.parametrize("has_table", [False, True])
def test_who_closes_under_a_table_says_that_it_stays(folder, has_table):
    """Before: "NCCL's default is restored on all ranks", as the end of all changes hid who lacked the last one."""
    says = Says()
    says.rank.publish(1, is_default=not has_table)
    says.rank.round(BOTH)
    Agreement._stop(says, GONE.why)
    why = NotAgreeing.TABLE_STAYS(why=GONE.why)
    assert says.said == [(AgreementState.CLOSED, why if has_table else GONE.why)]
    reader = Reader(folder)
    reader.state = says.said[0]
    assert reader.losing() == (why if has_table else None) and not reader.no_switch()


def test_turns_that_were_steady_are_told_also_if_a_communicator_lacks_the_table():
    """Before: not at all, and the tuner did not count what it had seen in them."""
    said = []
    lacks = SimpleNamespace(unlike=lambda _: [], lacked=LATE.why, lost=0, is_again=False)
    rank_0 = SimpleNamespace(_say=lambda *word: said.append(word))
    Agreement._say_what_came(rank_0, lacks, 7, Decision(7, BOTH), {9: LATE}, [6])
    assert said == [(*TOGETHER, 6), (AgreementState.LOSING, LATE.why)]


def test_after_a_refused_trial_ranks_that_switch_are_not_said_to_be_waited_for():
    """Before: "not every rank has taken its first step"."""
    said = []
    leader = SimpleNamespace(look=lambda: (5, NotAgreeing.FATAL_TRIAL()), switched={7}, lacked=None)
    Agreement._look(SimpleNamespace(_say=lambda *word: said.append(word)), leader)
    assert said == [(AgreementState.NO_TURNS, NotAgreeing.FATAL_TRIAL(), 5), TOGETHER]


def test_while_a_communicator_lacks_what_stays_no_trial_says_that_all_decide_together():
    """Before: a trial without it said so, as did one that was refused; each was a record and a line of the log."""
    says, losing = Says(), (AgreementState.LOSING, LATE.why)
    rank = says.rank
    rank.publish(1)
    says.led(BOTH, {})
    rank.publish(2)
    says.led({7: Span(128)}, {9: LATE})
    rank.box.refuses = lambda _: NotAgreeing.FATAL_TRIAL()
    rank.box.found = message(3, *TRIAL)
    Agreement._look(says, rank.leader)
    assert says.said == [
        (*TOGETHER, 0),
        losing,
        (AgreementState.NO_TURNS, NotAgreeing.FATAL_TRIAL(), 3),
        losing,
    ]
    rank.box.refuses = lambda _: None
    rank.publish(4, *TRIAL)
    rank.leader.lost = PATIENCE
    says.led({7: Span(160, 192)}, {9: LeftOut(NotAgreeing.NOT_SERVED(rank=0))})
    assert says.said[4:] == []
    rank.publish(5)
    says.led(BOTH, {})
    assert says.said[4:] == [(*TOGETHER, 0)]


def test_a_communicator_that_is_destroyed_lacks_nothing_any_more():
    says = Says()
    says.rank.publish(1)
    says.led(BOTH, {})
    says.rank.publish(2)
    says.led({7: Span(128)}, {9: LATE})
    assert says.said[-1] == (AgreementState.LOSING, LATE.why)
    del says.rank.counts[9]
    says.rank.sees()
    says.hears()
    assert says.said[-1] == TOGETHER


def test_plans_that_differ_are_told_once_and_close_the_agreement():
    says = Says()
    says.rank.publish(1)
    says.led(BOTH, {})
    told = says.rank.told(1)
    told[7] = told[7]._replace(plan=Plan(100, 99))
    report = says.rank.leader.reports[1]
    says.rank.leader.reports[1] = report._replace(comms=told)
    says.hears()
    says.hears()
    assert [word[0] for word in says.said] == [AgreementState.OPEN, AgreementState.CLOSED]
    assert says.said[-1][1].reason is NotAgreeing.OTHER_PLANS


def test_the_word_in_the_run_folder_is_of_the_newest_table_that_rank_0_has_seen(tmp_path):
    box = TableMailbox(tmp_path / "table")
    box.tell_plans(None, None, False)
    told = {"generation": 0, "why": None, "lacks": None, "is_last": False}
    assert json.loads((tmp_path / PLANS).read_text()) == told
    box._generation = 7
    box.tell_plans(NotAgreeing.NOT_REPORTED(rank=1), None, True)
    assert json.loads((tmp_path / PLANS).read_text())["generation"] == 7

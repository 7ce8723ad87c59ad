"""Who lacks what: the pure functions on reported plans, and rank 0 with ranks that fail at random."""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from dynamiccl.envs.nccl.agreement import leader as leaders
from dynamiccl.envs.nccl.agreement.ballot import Ballot
from dynamiccl.envs.nccl.agreement.leader import Leader
from dynamiccl.envs.nccl.agreement.pace import Pace
from dynamiccl.envs.nccl.agreement.plans import Lack, Report, Told, differ, has, lacking, mismatch
from dynamiccl.envs.nccl.agreement.protocol import CommVote, Decision, LeftOut, Vote, decide
from dynamiccl.envs.nccl.plugin.bindings import CommView, Plan, Span
from dynamiccl.envs.nccl.shm import decode_table, rows_hash, trial_of
from dynamiccl.traces.reasons import NotAgreeing, RowRefused
from dynamiccl.traces.records import Trial
from test_leader import LATE, TRIAL, Box, message
from test_silent_ranks import Clock

A, B = 11, 22  # hashes of rows


def reports(*plans, number=5, n_ranks=0):
    """Of ranks 0, 1, ... that are in communicator 7."""
    size = n_ranks or len(plans)
    return {rank: Report(number, {7: Told(size, plan)}) for rank, plan in enumerate(plans)}


def served(rank):
    return NotAgreeing.NOT_SERVED(rank=rank)


@pytest.mark.parametrize(
    ("plans", "rows", "lack"),
    [
        ((Plan(50, A, 10), Plan(48, A, 10)), A, None),
        ((Plan(50, A, 10), Plan(48, A, 10)), B, Lack(served(0), True)),
        ((Plan(50, A, 10), Plan(48, A, 10)), 0, Lack(served(0), True)),
        ((Plan(50), Plan(48)), 0, None),
        ((Plan(50), Plan(48)), A, Lack(served(0))),  # NCCL decides there
        ((Plan(50, A, 60), Plan(48, A, 60)), A, None),  # it comes by itself
        (
            (Plan(50, 0, 40, B, 40, 60), Plan(61, 0, 40, B, 40, 60)),
            0,
            None,
        ),  # one is past it: the clock is shared
        ((Plan(50, 0, 40, B, 40, 60), Plan(51, 0, 40, B, 40, 60)), 0, Lack(served(0), True)),
        ((Plan(50, 0, 60, B, 40, 60), Plan(51, 0, 60, B, 40, 60)), 0, None),  # a withdrawal cuts it short
        ((Plan(50, A, 10), Plan(48, 0, 0, gave_up=True)), A, Lack(NotAgreeing.GAVE_UP(rank=1), True, True)),
    ],
)
def test_a_communicator_lacks_what_one_of_its_members_will_not_answer(plans, rows, lack):
    assert lacking(rows, reports(*plans), {}) == ({} if lack is None else {7: lack})


def test_a_trial_that_is_wanted_lacks_nothing():
    trial = Plan(50, A, 40, B, 40, 60)
    assert lacking(A, reports(trial, trial), {}) and not lacking(A, reports(trial, trial), {}, may_try=True)


def test_one_without_a_vote_and_without_a_table_lacks_nothing():
    """One of its ranks has no tuner. It lacks something where it has a table, and once all are there."""
    assert lacking(A, reports(Plan(50), Plan(50), n_ranks=3), {}) == {}
    assert lacking(A, reports(Plan(50), Plan(50), n_ranks=2), {})
    assert lacking(A, reports(Plan(50, B, 3), Plan(50, B, 3), n_ranks=3), {})


def test_a_report_proves_nothing_of_a_later_round():
    told = reports(Plan(50, A, 10), Plan(48, A, 10))
    assert lacking(A, told, {7: 5}) == {} and lacking(0, told, {7: 6}) == {
        7: Lack(NotAgreeing.NOT_REPORTED(rank=0))
    }
    old = told | {1: Report(4, {7: Told(2, Plan(48, B, 10))})}
    assert mismatch(old, {7: 4}) and not mismatch(old, {7: 5})


@pytest.mark.parametrize(
    ("one", "other", "count"),
    [
        (Plan(50, A, 10), Plan(48, A, 30), None),  # equal rows are equal plans
        (Plan(50, A, 60), Plan(48, B, 10), 60),
        (Plan(50, A, 10), Plan(48, B, 10), 50),
        (Plan(50, A, 20, B, 20, 60), Plan(40, A, 20), 50),
        (Plan(50, A, 20, B, 20, 60), Plan(61, A, 20), None),
        (Plan(50, A, 70, B, 70, 80), Plan(50, A, 70, B, 72, 80), 70),
        (Plan(50, A, 40, B, 40, 80), Plan(50, A, 42, B, 42, 80), 50),  # other turns of one trial
        (Plan(50, A, 70, B, 70, 80), Plan(50, A, 70, B, 70, 90), 80),
        (Plan(50, A, 70, B, 70, 80), Plan(50, A, 70, B, 70, 80), None),
    ],
)
def test_plans_differ_at_a_collective_that_both_know(one, other, count):
    why = NotAgreeing.OTHER_PLANS(rank=3, other=4, count=count)
    assert differ([(3, one), (4, other)]) == (None if count is None else why)


def word(plan, limit=60, has=False):
    return CommVote(2, 1, limit, 2.0, {16: 7}, plan=plan, has=has)


def votes(*words):
    return [Vote(rank, 9, "same", {7: one}) for rank, one in enumerate(words)]


def test_a_round_leaves_out_members_whose_plans_differ():
    decision, left_out = decide(votes(word(Plan(50, A, 10)), word(Plan(50, B, 10))), 3, Trial(), {})
    assert not decision.switches and left_out[7].is_mismatch
    empty = decide(votes(word(Plan(50, A, 10)), word(Plan(50, B, 10))), 3, Trial(), {}, 0)
    assert empty == (Decision(3, {7: Span(60)}), {}), "all get the empty table"


def test_a_round_that_is_led_again_changes_nothing_where_all_have_the_table():
    keeps = word(Plan(50, A, 10), limit=0, has=True)
    assert decide(votes(keeps, keeps), 3, Trial(), {}) == (Decision(3), {})
    decision, left_out = decide(votes(keeps, word(Plan(50, A, 10))), 3, Trial(), {})
    assert not decision.switches and left_out == {7: LeftOut(served(0))}


def test_who_gave_up_is_left_out_and_named():
    stuck = word(Plan(50, gave_up=True), limit=0)
    _, left_out = decide(votes(stuck, word(Plan(50))), 3, Trial(), {})
    assert left_out == {7: LeftOut(NotAgreeing.GAVE_UP(rank=0), True)}


def test_who_is_past_a_trial_votes_as_those_within_it():
    """All members of a communicator have had the same changes: they set limits, or none does."""
    _, table = message(3)
    rows, asked = rows_hash(table), []
    views = {
        5: CommView(2, 1, 64, {64: 1}, plan=Plan(64, rows, 32)),
        6: CommView(2, 1, 64, {64: 1}, plan=Plan(64, rows, 32, B, 32, 48)),
        7: CommView(2, 1, 64, {64: 1}, plan=Plan(64, rows, 32, B, 32, 96)),
    }
    plugin = SimpleNamespace(comms=lambda: views, limit=lambda _, comm, distance: asked.append(comm) or 90)
    store = SimpleNamespace(answer_s=0.0, lookout=SimpleNamespace(spread_s=lambda: 0.0))
    ballot = Ballot(plugin, 1, Pace(), store)
    words = ballot.limits(table, again=True)
    assert [comm for comm, word in words.items() if word.has] == [5] and asked == [6, 7]
    assert not any(word.has for word in ballot.limits(table, again=False).values())


def test_an_older_report_takes_no_newer_one_back():
    leader = Leader(2, Box())
    leader.number = 4
    newer, older = Plan(90, A, 80), Plan(70, B, 60)
    leader.reports[1] = Report(4, {7: Told(2, newer)})
    leader.votes([Vote(1, 3, "same", {7: word(older)})], 1)
    assert leader.reports[1].comms[7].plan == newer and leader.silent == {1}


def test_news_are_another_communicator_and_once_it_is_quiet_a_trial_that_is_over():
    ballot = Ballot(None, 1, None, None)
    tries = {7: Told(2, Plan(50, A, 40, B, 40, 60))}
    ballot.was_told(tries)
    moved, over = ({7: Told(2, Plan(n, A, 40, B, 40, 60))} for n in (55, 60))
    assert (
        not ballot.has_news(moved, True) and not ballot.has_news(over, False) and ballot.has_news(over, True)
    )
    assert ballot.has_news(tries | {9: Told(2, Plan())}, False)


# -- rank 0 and ranks that fail at random ----------------------------------------------------------------------------


@dataclass
class Cluster:
    """Ranks with plugins as they should be, a rank 0, and a network that loses votes and reports. A plugin may refuse a
    table, a communicator may come, or be used no more."""

    draw: random.Random
    clock: Clock
    box: Box = field(default_factory=Box)
    members: dict = field(default_factory=lambda: {7: (0, 1, 2), 8: (1, 2), 9: (0, 2)})

    def __post_init__(self):
        self.leader = Leader(3, self.box)
        self.leader.here = {1, 2}
        self.counts = dict.fromkeys(self.members, 100)
        self.changes = {
            comm: [] for comm in self.members
        }  # (span, rows, rows that stay then), of all members
        self.frozen, self.given, self.newest = set(), [], 0
        self.resting, self.refused = set(), set()

    def plan(self, comm):
        count, plan = self.counts[comm], Plan(self.counts[comm])
        if self.changes[comm]:
            span, rows, stays = self.changes[comm][-1]
            plan = Plan(count, stays, span.since)
            if span.until:
                plan = plan._replace(trial=1000 + rows, first=span.since, last=span.until)
        return plan

    def told(self, rank):
        mine = {comm: ranks for comm, ranks in self.members.items() if rank in ranks}
        return {comm: Told(len(ranks), self.plan(comm)) for comm, ranks in mine.items()}

    def comes(self):
        comm = 10 + len(self.members)
        self.members[comm] = self.draw.choice([(0, 1, 2), (1, 2), (0, 2), (0, 1)])
        self.counts[comm], self.changes[comm] = self.draw.randrange(5), []

    def rests(self):
        self.resting.add(self.draw.choice([comm for comm in self.members if comm != 7]))  # not the whole job

    def publish(self, *trial):
        self.newest += 1
        self.box.found = message(self.newest, *trial, is_default=self.draw.random() < 0.3)
        self.leader.look()

    def acts(self, fails):
        """A second: collectives are made, ranks freeze and wake, a round is led."""
        self.clock.now += 1.0
        if fails and self.draw.random() < 0.1:
            self.comes()
        if fails and self.draw.random() < 0.05:
            self.rests()
        for comm in self.counts.keys() - self.resting:
            self.counts[comm] += self.draw.randrange(30)
        self.frozen = {rank for rank in (1, 2) if fails and self.draw.random() < 0.4}
        for rank in {1, 2} - self.frozen:
            if not fails or self.draw.random() < 0.7:
                self.leader.reports[rank] = Report(self.leader.number, self.told(rank))
        self.leader.sees(self.told(0))
        assert self.leader.mismatch() is None
        if self.leader.not_default() is None:
            assert all(has(self.plan(comm), 0, self.counts[comm]) for comm in self.members), "`stop` says so"
        if (found := self.leader.next()) is not None:
            self.leads(found, fails)

    def leads(self, found, fails):
        leader, rows = self.leader, rows_hash(found[1])
        leader.begin_round(found)
        trial = trial_of(found[1])
        late = self.frozen | {rank for rank in (1, 2) if fails and self.draw.random() < 0.2}
        leader.votes([Vote(rank, leader.number - (rank in late), "same") for rank in (1, 2)], 2)
        switches, left_out = {}, {}
        for comm, ranks in self.members.items():
            plan = self.plan(comm)
            if set(ranks) & late:
                left_out[comm] = LATE
            elif leader.is_again and plan.stays == rows and plan.last <= plan.since:
                continue
            elif trial.trial_steps and leader.stays not in (None, plan.stays):
                left_out[comm] = LeftOut(served(0))
            else:
                since = max(self.counts[comm] + self.draw.randrange(1, 20), plan.since)
                switches[comm] = Span(since, since + 60 if trial.trial_steps else 0)
        if leader.loses(left_out):
            switches = {}
        if fails and self.draw.random() < 0.05:
            switches, left_out = {}, {0: LeftOut(RowRefused.PLUGIN_REFUSES(error="x"), True, True)}
            self.refused.add(found[0])
        decision = Decision(found[0], switches) if switches else Decision()
        leader.ended(
            found, decision, left_out, {}, {comm for comm, ranks in self.members.items() if 0 in ranks}
        )
        for comm, span in switches.items():
            stays = self.plan(comm).stays if span.until else rows
            self.changes[comm].append((span, rows, stays))
            self.given.append((comm, found[0], bool(span.until)))
        for rank in {1, 2} - late:
            if not fails or self.draw.random() < 0.7:
                leader.reports[rank] = Report(leader.number, self.told(rank))
        leader.sees(self.told(0))


@pytest.mark.parametrize("seed", range(60))
def test_after_quiet_all_plans_are_the_wanted_one(monkeypatch, seed):
    """Whatever was lost before, and whether a trial came last. Then no round is led any more, and `not_default` says
    what is so."""
    clock, draw = Clock(), random.Random(seed)
    monkeypatch.setattr(leaders, "time", clock)
    cluster = Cluster(draw, clock)
    for _ in range(draw.randrange(10, 40)):
        if draw.random() < 0.3:
            cluster.publish(*(TRIAL if draw.random() < 0.6 else ()))
        cluster.acts(fails=True)
    if draw.random() < 0.5 or cluster.leader._stays is None:
        cluster.publish()
    else:
        cluster.publish(*TRIAL)
    wanted = rows_hash(cluster.leader._stays[1])
    for second in range(300):
        cluster.acts(fails=False)
        if second == 3:
            cluster.comes()
            cluster.rests()
    assert {cluster.plan(comm).stays for comm in cluster.members} == {wanted}
    tries = {comm for comm in cluster.members if cluster.plan(comm).tries}
    assert tries <= cluster.resting
    assert cluster.leader.next() is None and cluster.leader.lacked is None
    assert (cluster.leader.not_default() is None) == (wanted == 0 and not tries)


@pytest.mark.parametrize("seed", range(20))
def test_no_table_comes_before_the_one_that_stays_and_none_that_was_withdrawn(monkeypatch, seed):
    clock, draw = Clock(), random.Random(1000 + seed)
    monkeypatch.setattr(leaders, "time", clock)
    cluster = Cluster(draw, clock)
    stays = 0
    for _ in range(60):
        n = len(cluster.given)
        if draw.random() < 0.3:
            is_trial = draw.random() < 0.6
            cluster.publish(*(TRIAL if is_trial else ()))
            stays = stays if is_trial else cluster.newest
        cluster.acts(fails=True)
        for comm, generation, is_trial in cluster.given[n:]:
            assert generation not in cluster.refused, "a refused table is led no more"
            assert generation == stays or (is_trial and generation > stays), (comm, generation, stays)


def test_two_plans_that_differ_end_the_tuning_under_the_default(monkeypatch):
    """A rank has decided alone: the empty table is led, and then nothing else."""
    monkeypatch.setattr(leaders, "time", clock := Clock())
    cluster = Cluster(random.Random(1), clock)
    cluster.publish()
    while not cluster.changes[7]:
        cluster.acts(fails=False)
    leader = cluster.leader
    told = dict(leader.reports[1].comms)
    told[7] = Told(3, told[7].plan._replace(stays=99, since=0))
    leader.reports[1] = Report(leader.number, told)
    why = leader.mismatch()
    assert why.reason is NotAgreeing.OTHER_PLANS and 1 in why.facts.values()
    leader.fails(why)
    generation, table = leader.next()
    assert decode_table(table).rules == () and leader.ends == why
    cluster.publish()
    assert leader.next() == (generation, table), "what is published now is not led"
    leader.begin_round((generation, table))
    leader.ended((generation, table), Decision(generation, {8: Span(500)}), {7: LATE}, {}, {7, 9})
    clock.now += 2.0
    leader.begin_round(leader.next())
    assert not leader.is_again, "one that has the default sets its limit too, as the others do"


def test_members_whose_plans_differ_all_get_the_table_that_leaves_nccl_untouched():
    """With --headroom it has rows. Before: it was taken for any table, so the two plans stood to the job's end."""
    words = votes(word(Plan(50, A, 10)), word(Plan(50, B, 10)))
    untouched = 77
    decision, left_out = decide(words, 3, Trial(), {}, untouched, default=untouched)
    assert decision.switches and not left_out
    assert not decide(words, 3, Trial(), {}, untouched)[0].switches

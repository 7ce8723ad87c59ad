"""A rank that does not answer for a while, or whose request fails: it, and its communicators, come in later."""

import threading
from types import SimpleNamespace

import pytest
from dynamiccl.envs.nccl.agreement import agreement as agreements
from dynamiccl.envs.nccl.agreement import leader as leaders
from dynamiccl.envs.nccl.agreement import lookout, protocol
from dynamiccl.envs.nccl.agreement import store as stores
from dynamiccl.envs.nccl.agreement.agreement import Agreement
from dynamiccl.envs.nccl.agreement.leader import PATIENCE
from dynamiccl.envs.nccl.agreement.pace import Pace
from dynamiccl.envs.nccl.agreement.protocol import ABORT, CommVote, Decision, LeftOut, Vote
from dynamiccl.envs.nccl.agreement.store import Proposal, RoundStore
from dynamiccl.envs.nccl.plugin.bindings import CommView, Plan, Span
from dynamiccl.envs.nccl.shm import decode_table, rows_hash
from dynamiccl.traces.reasons import NotAgreeing
from dynamiccl.traces.records import AgreementState, Trial
from memory_store import MemoryStore
from test_agreement import stub, wait_until
from test_leader import BOTH, LATE, RHYTHMS, TRIAL, Box, Rank0, message

NOT_SERVED = LeftOut(NotAgreeing.NOT_SERVED(rank=0))


class Ranks:
    """The agreements of three ranks in one process: communicator 7 is ranks 0 and 1, communicator 9 all three.

    ``fails``: the first request of rank 2 of this name, with a key that ends so, finds the connection reset. Rank 2
    freezes where ``freezes_at`` says, "stage" or the end of a key that it asks for, until it is ``awake``.
    """

    freezes_at, held = "stage", False  # held: a call of rank 2 waits at a limit, when that is asked next

    def __init__(self, fails=("", "")):
        self.box, self.said, self.tables, self.plans, self.had = Box(), [], {}, {}, []
        self.base, self.fails, self.awake = MemoryStore(), fails, threading.Event()
        self.awake.set()
        self.comms = [{7: 2, 9: 3}, {7: 2, 9: 3}, {9: 3}]
        self.all = [self._rank(rank) for rank in range(3)]

    def _rank(self, rank):
        staged = [b""]

        def stage(_owner, table):
            if rank == 2 and self.freezes_at == "stage":
                self.awake.wait(60)
            staged[0] = table

        def switch(_owner, comm, *_span):
            self.tables[rank, comm] = generation = decode_table(staged[0]).generation
            self.plans[rank, comm] = Plan(64, rows_hash(staged[0]), 64)
            self.had.append((rank, comm, generation))

        def comms():
            found = {}
            for comm, n in self.comms[rank].items():
                plan = self.plans.get((rank, comm), Plan(64))
                found[comm] = CommView(n, 1, 64, {64: 1}, plan=plan)
            return found

        def waiting():
            self.held, now = self.held and rank != 2, self.held and rank == 2
            return int(now)

        plugin = stub(comms=comms, stage=stage, switch=switch, waiting=waiting)
        steps, store = SimpleNamespace(ended=0), (lambda: self) if rank == 2 else (lambda: self.base)

        def tell(state, text, _generation):
            self.said.append((rank, state, text))

        return Agreement(rank, 3, plugin, steps, self.box, store, tell=tell)

    def __getattr__(self, name):
        """As rank 2's store."""
        request = getattr(self.base, name)

        def made(key, *more):
            if name == "check" and key[0].endswith(self.freezes_at):
                self.awake.wait(60)
            if name == self.fails[0] and key.endswith(self.fails[1]) and more != (0,):
                self.fails = "", ""
                raise ConnectionResetError("reset")
            return request(key, *more)

        return made

    def have(self, generation, *comms):
        """Whether all ranks of these communicators have this table."""
        pairs = [(rank, comm) for rank in range(3) for comm in comms if comm in self.comms[rank]]
        return all(self.tables.get(pair) == generation for pair in pairs)


@pytest.fixture
def ranks_of(tmp_path, monkeypatch):
    """Makes such ranks, which look for votes shortly and connect again at once."""
    monkeypatch.setattr(lookout, "shared_roots", lambda: iter([tmp_path]))
    monkeypatch.setattr(agreements, "_VOTES_S", 0.05)
    monkeypatch.setattr(agreements, "_SOON_S", 0.001)
    made = []

    def make(*fails):
        made.append(Ranks(*fails))
        return made[-1]

    yield make
    for ranks in made:
        ranks.awake.set()
        for agreement in ranks.all:
            agreement.close()
        for agreement in ranks.all:
            agreement.join()


def test_a_rank_that_is_back_gets_the_table_to_stay(ranks_of):
    """Before: its communicators kept the withdrawn one for good, the others waited 13 s for it, and nobody was told."""
    ranks = ranks_of()
    ranks.box.found = message(1)
    wait_until(lambda: ranks.have(1, 7, 9))
    ranks.awake.clear()
    ranks.box.found = message(2)
    wait_until(lambda: ranks.have(2, 7))
    wait_until(lambda: ranks.said[-1][1] == AgreementState.LOSING)
    assert ranks.all[0]._leader.lost == 0 and ranks.have(1, 9)
    assert ranks.said[-1][2] == NotAgreeing.NOT_ALL_VOTED(rank=0, n=2, of=3)
    ranks.awake.set()
    wait_until(lambda: ranks.have(2, 9))
    wait_until(lambda: ranks.said[-1][1] == AgreementState.OPEN)


def test_what_a_round_has_changed_is_reported_without_another_round(ranks_of, monkeypatch):
    monkeypatch.setattr(leaders, "_LACKS_S", 3600.0)
    ranks = ranks_of()
    leader = ranks.all[0]._leader
    ranks.box.found = message(1, is_default=True)
    wait_until(lambda: ranks.have(1, 7, 9))
    ranks.box.found = message(2)
    wait_until(lambda: ranks.have(2, 7, 9))
    wait_until(lambda: not leader._lacks() and leader.number == 2)


def test_a_rank_that_freezes_after_its_vote_finds_the_decision_of_its_round(ranks_of):
    """A round is forgotten once all have voted after it. Else the rank that wakes at its limit finds an empty register:
    it writes "abort", and runs another table than the others."""
    ranks = ranks_of()
    ranks.box.found = message(1)
    wait_until(lambda: ranks.have(1, 7, 9))
    ranks.awake.clear()
    ranks.freezes_at = "decision"
    ranks.box.found = message(2)
    wait_until(lambda: ranks.had.count((0, 9, 2)) and ranks.had.count((1, 9, 2)))
    for generation in range(3, 8):  # rank 2 has no vote in their rounds
        ranks.box.found = message(generation)
        wait_until(lambda generation=generation: ranks.have(generation, 7))
    ranks.held = True
    ranks.awake.set()
    wait_until(lambda: ranks.have(7, 9))
    assert (2, 9, 2) in ranks.had


@pytest.mark.parametrize("fails", [("set", "vote/2"), ("add", "news")])
def test_a_request_that_fails_as_a_rank_presents_itself_is_made_again(ranks_of, fails):
    """Before: never, and rank 0 ended the tuning for good, since that rank had not come."""
    ranks = ranks_of(fails)
    wait_until(lambda: ranks.all[0]._leader.here == {1, 2})
    assert ranks.fails == ("", "")


def test_news_of_a_communicator_whose_request_fails_is_told_again(ranks_of):
    """Before: never, and the communicator did not get what stays."""
    ranks = ranks_of()
    ranks.box.found = message(1)
    wait_until(lambda: ranks.have(1, 7, 9))
    ranks.comms[1][11] = 2
    wait_until(lambda: 11 in ranks.all[0]._leader.reports[1].comms)
    ranks.fails = "add", "news"
    ranks.comms[2][11] = 2
    wait_until(lambda: ranks.have(1, 11))
    assert ranks.fails == ("", "")


@pytest.mark.parametrize(("waiting", "ends"), [([0, 0, 1, 1, 1], False), ([0, 0, 0], True)])
def test_a_rank_whose_call_is_held_or_that_leaves_waits_no_longer_for_the_decision(waiting, ends):
    """It asks the register itself: rank 0 may be gone."""
    asked, is_over = [], threading.Event()

    def now():
        asked.append(0)
        if ends and len(asked) == 3:
            is_over.set()
        return waiting[len(asked) - 1]

    store, plugin = SimpleNamespace(decision=lambda number: None), SimpleNamespace(waiting=now)
    rank = SimpleNamespace(_look_s=0.0, _pace=Pace(), _plugin=plugin, _store=store, _end=is_over)
    assert Agreement._awaited(rank, 3) is None and len(asked) == 3


# -- what rank 0 waits for -------------------------------------------------------------------------------------------


def of_rank_2(rank):
    """Communicator 9 is the one of rank 2."""
    rank.members[7] = (0, 1)
    rank.leader.here = {1, 2}
    rank.sees()


def test_a_table_to_stay_waits_for_no_rank_and_a_trial_for_a_while():
    """Before: a withdrawal waited for 13 s, and the first trial for nobody."""
    rank = Rank0()
    of_rank_2(rank)
    rank.publish(1)
    rank.leader.begin_round(message(1))
    rank.leader.silent = {2}
    assert not rank.leader.loses({9: LATE})
    rank.leader.ended(message(1), Decision(1, {7: Span(128)}), {9: LATE}, {}, {7, 9})
    rank.publish(2, *TRIAL)
    for _ in range(PATIENCE):
        rank.leader.begin_round(message(2, *TRIAL))
        assert rank.leader.loses({9: LATE})
        rank.leader.ended(message(2, *TRIAL), ABORT, {9: LATE}, {}, {7, 9})
    assert not rank.leader.loses({9: LATE})
    rank.leader.ended(message(2, *TRIAL), Decision(2, {7: Span(128, 160)}), {9: LATE}, {}, {7, 9})
    rank.leader.begin_round(message(3, *TRIAL))
    assert not rank.leader.loses({9: LATE}), "it is let go"
    rank.leader.ended(message(3, *TRIAL), Decision(3, BOTH), {}, {}, {7, 9})
    rank.leader.silent = {2}
    assert rank.leader.loses({9: LATE}), "it was back"


def test_a_trial_waits_for_no_rank_without_a_tuner():
    rank = Rank0()
    of_rank_2(rank)
    del rank.leader.reports[2]
    rank.publish(2, *TRIAL)
    rank.leader.begin_round(message(2, *TRIAL))
    rank.leader.silent = {1}
    assert not rank.leader.loses({9: LATE}) and rank.leader.loses({7: LATE})


class Clock:
    """Stands in for the time of the leader."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


def test_what_stays_is_led_again_for_who_lacks_it_with_growing_pauses(monkeypatch):
    """Before: never, if nobody said news; then after each late vote, without a pause, for as long as the job ran."""
    clock = Clock()
    monkeypatch.setattr(leaders, "time", clock)
    rank = Rank0()
    of_rank_2(rank)
    rank.publish(1)
    assert rank.round(BOTH) == 1 and rank.next() == 0
    rank.publish(2)
    assert rank.round({7: Span(128)}, {9: LATE}) == 2 and rank.leader.lacked == LATE.why
    rounds = []
    for _ in range(3600):
        clock.now += 1.0
        if rank.next():
            rounds.append(clock.now - 1000.0)
            assert rank.leader.begin_round(message(2)) == 2, "all that are here are waited for"
            rank.leader.ended(message(2), ABORT, {9: LATE}, RHYTHMS, {7, 9})
    assert rounds[:5] == [1, 3, 7, 15, 31] and 55 < len(rounds) < 70
    clock.now += 60.0
    assert rank.round({9: Span(128)}) == 2 and rank.leader.lacked is None
    clock.now += 3600.0
    assert rank.next() == 0


def test_rounds_for_who_lacks_what_stays_hold_up_no_other_table(monkeypatch):
    """Before: led again at once and before any trial, and a trial waited for 100 s."""
    clock = Clock()
    monkeypatch.setattr(leaders, "time", clock)
    rank = lacking_9()
    rank.publish(3, *TRIAL)
    rounds = []
    for _ in range(100):
        if rank.next() == 2:
            rounds.append(clock.now - 1000.0)
            assert rank.round(left_out={9: LATE}) == 2 and rank.next() == 3
            assert rank.leader.lost == 0 and rank.leader.not_before <= clock.now
        clock.now += 1.0
    assert rounds == [1, 3, 7, 15, 31, 63]


def lacking_9():
    """Rank 0 with table 2 to stay, which communicator 9 does not have since rank 2 is silent."""
    rank = Rank0()
    of_rank_2(rank)
    rank.publish(1)
    rank.round(BOTH)
    rank.publish(2)
    rank.leader.silent = {2}
    rank.round({7: Span(128)}, {9: LATE})
    return rank


@pytest.mark.parametrize("trial", [(), TRIAL])
def test_a_round_for_another_table_waits_for_no_silent_rank(monkeypatch, trial):
    """Before: a trial and a withdrawal waited for up to 20 s each for a rank that always comes too late."""
    clock = Clock()
    monkeypatch.setattr(leaders, "time", clock)
    rank = lacking_9()
    rank.publish(3, *trial)
    assert rank.leader.begin_round(message(3, *trial)) == 1 and not rank.leader.is_again
    rank.leader.silent = {1, 2}
    assert rank.leader.begin_round(message(3, *trial)) == 1, "one of them may be back"


def test_how_long_rank_0_has_waited_for_a_silent_rank_makes_it_wait_no_longer_for_who_was_left_out():
    """Before: 0.5, 2, 8 and then 20 s each, in which it saw no withdrawal, and other ranks held calls."""
    waits, voted_in = [], [3, 4]

    def votes(_number, _ranks, seconds):
        waits.append(seconds)
        return [Vote(2, voted_in.pop(0) if len(voted_in) > 1 else voted_in[0], "same")]

    leader, pace = Rank0().leader, Pace(0.1)
    leader.silent, leader.here, leader.is_again, leader.number = {2}, {1, 2}, True, 5
    store = SimpleNamespace(lookout=SimpleNamespace(spread_s=lambda: 0.25), answer_s=0.001, votes=votes)
    rank_0 = SimpleNamespace(_leader=leader, _store=store, _pace=pace)

    def part():
        yield Agreement._gathered(rank_0, Proposal(5, b"", 1))
        return ABORT

    rank_0._do = lambda request, _proposal: request
    pace.round_took(5.0, False, is_whole=False)
    for _ in range(9):
        Agreement._drive(rank_0, part(), Proposal(5, b"", 1))
        assert leader.silent == {2}
    assert waits == 9 * [pytest.approx(1.006)] and pace.round_s == 5.0
    leader.is_again = False
    Agreement._drive(rank_0, part(), Proposal(5, b"", 1))
    assert waits[-1] == 20.0, "all other rounds wait as long as rounds last"
    for _ in range(7):
        Agreement._drive(rank_0, part(), Proposal(5, b"", 1))
    assert pace.round_s < 1.0
    leader.is_again = True
    pace.round_took(1.5, False)
    Agreement._drive(rank_0, part(), Proposal(5, b"", 1))
    assert waits[-1] == 3.0, "whole rounds last so long: the others must have the time to vote"
    voted_in[0] = 5
    for _ in range(8):
        Agreement._drive(rank_0, part(), Proposal(5, b"", 1))
    assert pace.round_s < 1.0, "it is whole, so it counts"


def test_a_trial_does_not_begin_its_lost_rounds_anew_for_what_stays(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(leaders, "time", clock)
    rank = Rank0()
    rank.publish(1)
    rank.round({7: Span(128)}, {9: LATE})
    rank.publish(2, *TRIAL)
    assert rank.round() == 2 and rank.leader.lost == 1
    clock.now += 10.0
    assert rank.round({7: Span(128)}, {9: LATE}) == 1 and rank.leader.lost == 1 and rank.next() == 2


def test_no_table_is_tried_on_a_communicator_that_lacks_what_stays():
    has, lacks = (CommVote(1, 1, 10, 4.0, {16: 7}, plan=Plan(5, stays)) for stays in (33, 44))
    votes = [Vote(0, 1, "", {7: has, 9: lacks})]
    decision, left_out = protocol.decide(votes, 3, Trial(4), {}, 33)
    assert decision.switches.keys() == {7} and left_out == {9: NOT_SERVED}
    assert protocol.decide(votes, 3, Trial(), {}, 33)[0].switches.keys() == {7, 9}


# -- the votes in the store ------------------------------------------------------------------------------------------


def vote_of(rank):
    return Vote(rank, 5, "same")


@pytest.fixture
def store():
    served = MemoryStore()
    round_store = RoundStore(lambda: served, 0, 5)
    round_store.connect()
    for rank in range(1, 5):
        round_store.cast(Vote(rank, 0, "same"), 0)
    yield round_store
    round_store.close()


def test_a_rank_that_is_back_takes_no_vote_from_another(store, monkeypatch):
    """Before: with it the votes were complete, and the slowest of the others was silent, round after round."""
    for rank in (1, 2, 4):
        store.cast(vote_of(rank), 3)  # three are expected
    slow = [vote_of(3)]
    monkeypatch.setattr(stores.time, "sleep", lambda seconds: slow and store.cast(slow.pop(), 3))
    assert {vote.rank for vote in store.votes(5, range(1, 5), 60.0) if vote.round == 5} == {1, 2, 3, 4}

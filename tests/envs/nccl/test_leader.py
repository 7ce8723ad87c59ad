"""Which table rank 0 leads next, and which ranks it asks: without a store, or with one in this process."""

import time
from itertools import product

from dynamiccl.envs.nccl.agreement import leader as leaders
from dynamiccl.envs.nccl.agreement.leader import PATIENCE, Leader
from dynamiccl.envs.nccl.agreement.plans import Report, Told
from dynamiccl.envs.nccl.agreement.protocol import ABORT, Decision, LeftOut
from dynamiccl.envs.nccl.agreement.store import RoundStore
from dynamiccl.envs.nccl.plugin.bindings import Plan, Span
from dynamiccl.envs.nccl.shm import encode_table, rows_hash, trial_of
from dynamiccl.traces.reasons import NotAgreeing
from dynamiccl.traces.records import Decision as Setting
from dynamiccl.traces.records import Rule, Table
from memory_store import MemoryStore

TRIAL, TURNS = (8,), (32, 2, 1, 0)
LATE = LeftOut(NotAgreeing.NOT_ALL_VOTED(rank=0, n=2, of=3))
VOTE = '{"rank": RANK, "round": 0, "identity": "x", "comms": {}}'
RHYTHMS = {7: (4, 0), 9: (4, 0)}


class Box:
    """What the daemon publishes."""

    def __init__(self, confirmed=None):
        self._confirmed, self.found, self.told = confirmed, None, []

    def confirmed(self):
        return self._confirmed

    def default(self, generation):
        return encode_table(Table(generation))

    def take(self):
        found, self.found = self.found, None
        return found

    def refuses(self, found):
        return None

    def read_note(self):
        pass

    def trial_begins(self, found):
        pass

    def trial_is_over(self):
        pass

    def tell_plans(self, why, lacks, is_last):
        self.told.append(why)


def message(generation, *trial, is_default=False):
    """A table that is known by its channels; ``is_default``: without rows."""
    row = Rule(0, 0, "all_gather", 0, 2**40, Setting("ring", "ll", generation))
    return generation, encode_table(Table(generation, () if is_default else (row,), *trial))


class Rank0:
    """A leader of three ranks with a daemon beside it. Communicators 7 and 9 are of all ranks, with plans that rounds
    change as plugins do; ``counts``: collectives made on each, by all ranks."""

    def __init__(self, confirmed=None):
        self.box = Box(confirmed)
        self.leader = Leader(3, self.box)
        self.counts, self.plans = {7: 100, 9: 100}, {7: Plan(), 9: Plan()}
        self.members = {7: (0, 1, 2), 9: (0, 1, 2)}
        self.sees()

    def publish(self, generation, *trial, is_default=False):
        self.box.found = message(generation, *trial, is_default=is_default)
        self.leader.look()

    def told(self, rank):
        """What a rank reports."""
        mine = [comm for comm in self.counts if rank in self.members[comm]]
        plans = {comm: self.plans[comm]._replace(made=self.counts[comm]) for comm in mine}
        return {comm: Told(len(self.members[comm]), plan) for comm, plan in plans.items()}

    def sees(self, *silent):
        """Rank 0 hears of the plans of all ranks that are not silent."""
        for comm in self.counts:
            self.plans.setdefault(comm, Plan())
            self.members.setdefault(comm, (0, 1, 2))
        for rank in {1, 2} - set(silent):
            self.leader.reports[rank] = Report(self.leader.number, self.told(rank))
        self.leader.sees(self.told(0))

    def next(self):
        """The generation that is led next, 0 for none."""
        found = self.leader.next()
        return found[0] if found else 0

    def round(self, spans=None, left_out=None, silent=()):
        """Lead the next one; its generation. ``spans``: of the communicators that switch. ``silent`` ranks report
        nothing after it."""
        found = self.leader.next()
        rows, trial = rows_hash(found[1]), trial_of(found[1])
        decision = Decision(found[0], spans) if spans else ABORT
        self.leader.begin_round(found)
        for comm, span in (spans or {}).items():
            was = self.plans.get(comm, Plan())
            if trial.trial_steps:
                self.plans[comm] = Plan(0, was.stays, span.since, rows + 1, span.since, span.until)
            else:
                self.plans[comm] = Plan(0, rows, span.since)
        self.steady = self.leader.ended(found, decision, left_out or {}, RHYTHMS, {7, 9, 11})
        self.sees(*silent)
        return found[0]


BOTH = {7: Span(128), 9: Span(128)}
UNTIL = {7: Span(128, 160), 9: Span(128, 160)}


def test_a_new_life_leads_the_newer_of_what_was_confirmed_and_what_was_published_to_stay():
    rank = Rank0(message(1))
    assert rank.next() == 1
    rank.publish(2)
    assert rank.round(BOTH) == 2 and rank.next() == 0
    rank = Rank0(message(1))
    rank.publish(2, *TRIAL)
    assert rank.round(BOTH) == 1 and rank.next() == 2, "a trial follows what stays"


def in_a_trial(trial):
    """Rank 0 with table 1, which stays, and then the trial of table 2."""
    rank = Rank0()
    rank.publish(1)
    rank.round(BOTH)
    rank.publish(2, *trial)
    rank.round(UNTIL)
    return rank


def comes(rank):
    """Communicator 11, which runs the default."""
    rank.counts |= {11: 100}
    rank.sees()
    rank.leader._again_at = 0.0  # as when rank 0 hears of it


def at(rank, **counts):
    """So many collectives are made."""
    rank.counts |= {int(comm[1:]): count for comm, count in counts.items()}
    rank.sees()


def test_a_communicator_that_is_used_no_more_holds_back_nothing(monkeypatch):
    """Before: where it came to rest in a trial, the trial was under way for ever."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    rank = in_a_trial(TRIAL)
    comes(rank)
    at(rank, _7=140, _9=140)
    assert rank.next() == 0
    now[0] += 100
    at(rank)
    assert rank.next() == 0, "the whole job may rest, in a checkpoint: the trial goes on after it"
    at(rank, _7=161, _9=141)
    assert rank.next() == 0
    now[0] += 59
    at(rank)
    assert rank.next() == 0
    now[0] += 2
    at(rank)
    assert rank.next() == 1


EVENTS = ("stays", "tries", "news", "lost", "switched", "trial over")


def wrong_round(events):
    """The first round of these events that gives a table to stay that is not the newest, or ends a running trial with
    one that was there before it, or tries one before all have what stays; empty if there is none. Whoever comes has
    what stays, at the end."""
    rank, newest, generation, runs, decided, made = Rank0(), 0, 0, 0, 0, 100
    for event in (*events, *3 * ("switched", "trial over")):
        rank.leader._again_at = 0.0
        led = rank.next()
        if event in ("stays", "tries"):
            generation += 1
            newest = generation if event == "stays" else newest
            rank.publish(generation, *(TRIAL if event == "tries" else ()))
        elif event == "news":
            comes(rank)
        elif event == "trial over":
            runs, made = 0, made + 100
            at(rank, _7=made, _9=made)
        elif led:
            is_trial = rank.leader.next()[1] == message(led, *TRIAL)[1]
            if (decided if is_trial else led) != newest or led < runs:
                return f"table {led} in the round after {events}"
            if event == "switched":
                until = {comm: Span(made + 28, made + 60) for comm in BOTH}
                spans = until if is_trial else {comm: Span(made + 28) for comm in rank.counts}
                rank.round(spans)
                runs, decided = (led, decided) if is_trial else (0, led)
                made += 40
                at(rank, _7=made, _9=made)
            else:
                rank.round()
    late = rank.plans.get(11)
    is_late = late is not None and newest and late.stays != rows_hash(message(newest)[1])
    return f"{events} leave the late without table {newest}" if is_late else ""


def test_no_order_of_events_leads_a_table_that_was_withdrawn_or_ends_a_trial():
    """From the beginning, and from a table that holds everywhere."""
    begins = (), ("stays", "switched")
    orders = [(*begin, *events) for begin in begins for events in product(EVENTS, repeat=4)]
    assert [wrong for events in orders if (wrong := wrong_round(events))] == []


def test_a_communicator_whose_rank_votes_no_more_is_let_go_once():
    """Before: of tables in turns each was lost five times, for 14 s."""
    rank = Rank0()
    rank.publish(1)
    rank.round(BOTH)
    rank.publish(2, *TURNS)
    for _ in range(PATIENCE):
        assert 9 in rank.leader.switched
        rank.round(left_out={9: LATE})
    rank.round({7: Span(128, 160)}, {9: LATE})
    assert rank.leader.switched == {7}


def test_a_communicator_without_a_rhythm_stays_in_later_rounds():
    rank = Rank0()
    rank.publish(1)
    rank.round(BOTH)
    rank.publish(2, *TURNS)
    rank.round({7: Span(128, 160)})
    assert rank.leader.switched == {7, 9}


def test_ranks_with_other_code_are_told_of_once():
    """Before: not at all where other communicators switch."""
    leader = Leader(3, Box())
    alike = {"rank": 2, "what": "old", "other": 0, "others": "new"}
    left_out = {9: LeftOut(NotAgreeing.NOT_ALIKE(**alike)), 11: LATE}
    assert leader.unlike(left_out) == [NotAgreeing.NOT_ALIKE(**alike)] and leader.unlike(left_out) == []


# -- which ranks are there -------------------------------------------------------------------------------------------


def test_after_a_lost_connection_no_rank_is_asked_that_has_not_come_again(monkeypatch):
    """Before: rank 0 waited at the store for the key of one that was gone, and PyTorch warned in the job's output."""
    served = MemoryStore()
    store, leader = RoundStore(lambda: served, 0, 3), Leader(3, Box())

    def begins():
        store.connect()
        leader.begin_life()

    def come(*ranks):
        for rank in ranks:
            served.set(f"{store.life}/vote/{rank}", VOTE.replace("RANK", str(rank)))
            served.set(f"{store.life}/plans/{rank}", "[0, {}]")
            store.says_news()
        leader.hears(store)

    begins()
    assert leader.is_waiting(frozenset({7}))
    come(1, 2)
    assert not leader.is_waiting(frozenset({7})) and leader.begin_round(message(1)) == 2
    leader.silent = {2}
    begins()
    assert store.votes(2, leader.here, 0.0) == []
    assert leader.is_waiting(frozenset({7})), "rank 1 is about to come again"
    come(1)
    assert not leader.is_waiting(frozenset({7})), "nobody waits for who was silent before"
    assert leader.begin_round(message(2)) == 1
    assert [vote.rank for vote in store.votes(2, leader.here, 0.0)] == [1]
    monkeypatch.setattr(leaders, "_BACK_S", 0.0)
    begins()
    assert not leader.is_waiting(frozenset({7})), "not for ever"
    store.close()


def test_a_round_that_is_lost_is_led_again_for_ever_and_more_seldom(monkeypatch):
    """Before: after five lost rounds tuning ended for the life of the job, and what came later was not tuned."""
    now, waits = [1000.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    rank = Rank0()
    rank.publish(1, *TRIAL)
    for _ in range(4 * PATIENCE):
        rank.round(left_out={7: LATE})
        waits.append(rank.leader.not_before - now[0])
        now[0] = rank.leader.not_before
        assert rank.leader.why == LATE.why and rank.leader.next() is not None and not rank.leader.ends
    assert waits == sorted(waits) and waits[0] < 1 and waits[-1] == 60
    rank.leader.not_before = 0.0
    assert rank.round({7: Span(128, 160)}) == 1 and rank.leader.lost == 0

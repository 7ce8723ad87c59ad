"""Two tables take turns in a job: which steps count for which table, leases, refusals. No process runs."""

import numpy as np
import pytest
from dynamiccl.envs.live import job as live
from dynamiccl.envs.live.job import Job
from dynamiccl.envs.live.job_ends import NothingToTune
from dynamiccl.envs.live.pauses import Rhythm
from dynamiccl.envs.live.turns import CURRENT, MOST_UNEVEN, NOBODY, TRIAL, Lease, lease_steps, together
from dynamiccl.envs.nccl.agreement.protocol import LONG_STEPS
from dynamiccl.envs.nccl.shm import decode_table
from dynamiccl.envs.search.config import LONG_TURN_STEPS
from dynamiccl.traces.reasons import NotAgreeing, NotTuning, RowRefused
from dynamiccl.traces.records import (
    COLL_DTYPE,
    FLAG_WHOLE,
    MIXED,
    STATE,
    STATE_DTYPE,
    STEP,
    STEP_DTYPE,
    AgreementState,
    Decision,
    Slot,
    Table,
)

TABLE = {Slot(2, 1, "all_gather", 20): Decision("ring", "ll", 4)}
ORDER = ((TRIAL, CURRENT, CURRENT, TRIAL), (CURRENT, TRIAL, TRIAL, CURRENT))


class Ring:
    """A rank that obeys: every poll is one step. A lease begins two steps after it was published.

    ``odd``: steps of the job, by number, that are not whole. ``refuses``: so many turns of agreed steps are refused;
    ``drifts``: the round after a lease of these numbers does not show its rhythm. ``all_own``: rank 0 is in each
    communicator. ``fatal``: trials of these tables do not begin. ``short``: long turns are so many steps shorter, lease
    by lease; their first steps are not whole. ``took``: times of steps that are not 8 or 10 ms.
    """

    name, key, pid, process, gaps, tail = "ring-1", "1/ring-1", 1, 1, (), 0

    def __init__(self, folder, odd=(), refuses=0, drifts=(), all_own=False, fatal=(), short=(), took=()):
        self.short, self.took = list(short), dict(took)
        self.folder, self.odd, self.refuses, self.drifts = folder, set(odd), refuses, drifts
        self.all_own, self.fatal = all_own, [Table.of(0, table).rules for table in fatal]
        self.step, self.stays, self.lease, self.leases = 0, 0, None, 0
        self.tables, self.began = [], 0

    def start(self):
        return ""

    def known(self):
        return np.zeros(0, COLL_DTYPE)

    def is_alive(self):
        return True

    def head(self):
        return 0

    def waited_ns(self):
        return 0

    def drain(self):
        self.step += 1
        records, found = [], self.folder.table.read()
        table = decode_table(found[1]) if found else None
        if table is not None and (not self.tables or self.tables[-1].generation != table.generation):
            self.tables.append(table)
            records += self._hears(table)
        rows = np.concatenate([*records, self._row()])
        rows["stamp"] = np.arange(self.tail, self.tail + len(rows)) + 1
        self.tail += len(rows)
        return rows

    def _hears(self, table):
        said = []
        if table.trial_steps and table.rules in self.fatal:
            return [state(AgreementState.NO_TURNS, NotAgreeing.FATAL_TRIAL(), table.generation)]
        if 0 < table.turn_steps < LONG_TURN_STEPS and self.refuses:
            self.refuses -= 1
            return [state(AgreementState.NO_TURNS, NotAgreeing.NO_RHYTHM(rank=0), table.generation)]
        if self.lease is not None:
            is_steady = self.leases not in self.drifts
            said.append(state(AgreementState.OPEN, None, self.lease.generation * is_steady))
        self.lease = table if table.trial_steps else None
        if self.lease is not None and self.all_own:
            said.append(state(AgreementState.OPEN, None, self.lease.generation))
        self.leases += table.turn_steps > 0
        self.began, self.stays = self.step + 2, self.stays if table.trial_steps else table.generation
        self.lasts = table.turn_steps
        if self.lasts >= LONG_TURN_STEPS and self.short:
            self.lasts -= self.short.pop(0)
        return said

    def _row(self):
        row = np.zeros(1, STEP_DTYPE)
        row["kind"], row["step"], row["generation"] = STEP, self.step, self.stays
        at = self.step - self.began
        if self.lease is not None and not self.lasts and 0 <= at < self.lease.trial_steps:
            row["generation"], row["trial"] = MIXED, self.lease.generation
        elif (
            self.lease is not None and 0 <= at < self.lease.trial_steps // self.lease.turn_steps * self.lasts
        ):
            is_trial = ORDER[self.lease.swap][at // self.lasts % 4]
            row["generation"] = self.lease.generation if is_trial else self.stays
            row["trial"], row["flags"] = self.lease.generation, FLAG_WHOLE
            is_edge = self.lasts >= LONG_TURN_STEPS - 2 and at % self.lasts == 0
            if self.step in self.odd or is_edge:
                row["generation"], row["flags"] = MIXED, 0
        is_tried = self.lease is not None and row["generation"][0] == self.lease.generation
        row["duration_ns"] = 1e6 * self.took.get(self.step, 8 if is_tried else 10)
        return row.view(COLL_DTYPE)


def state(code, why, generation):
    row = np.zeros(1, STATE_DTYPE)
    text = why.packed().encode() if why else b""
    row["kind"], row["code"], row["text"], row["generation"] = STATE, code, text, generation
    return row.view(COLL_DTYPE)


@pytest.fixture
def job_of(folder, monkeypatch):
    """Makes a job whose rank 0 is such a ring."""
    monkeypatch.setattr(live, "POLL_S", 0.001)

    def made(**how):
        ring = Ring(folder, **how)
        monkeypatch.setattr(folder, "rings", lambda: [ring])
        job = Job(folder)
        job.confirm({})
        return job, ring

    return made


@pytest.mark.parametrize("turn_steps", [1, 2])
def test_each_step_is_told_to_be_its_tables(job_of, turn_steps):
    job, ring = job_of()
    turns = job.alternate(TABLE, 40, turn_steps, discard=8)
    assert len(turns.steps) == len(turns.arms) == 40
    assert set(turns.durations_ms[turns.arms == TRIAL]) == {8.0}
    assert set(turns.durations_ms[turns.arms == CURRENT]) == {10.0}
    assert (turns.arms == TRIAL).sum() == (turns.arms == CURRENT).sum() == 20
    first = np.repeat(ORDER[1], turn_steps).tolist()
    assert turns.arms[: len(first)].tolist() == first and turns.step_ms == 8.0
    leases = [table for table in ring.tables if table.turn_steps]
    assert [(t.trial_steps, t.one_of, t.swap) for t in leases] == [(32, 2, 1), (16, 2, 0)], "arms are swapped"
    assert ring.tables[-1].trial_steps == 0 and ring.tables[-1].rules == (), "what is confirmed is in force"


def test_a_step_that_is_not_whole_counts_for_nobody(job_of):
    job, _ = job_of(odd=[10, 14, 15])
    turns = job.alternate(TABLE, 32)
    assert len(turns.arms) == 32 and (turns.arms == NOBODY).sum() == 3
    assert set(turns.steps[turns.arms == NOBODY]) == {10, 14, 15}


def test_three_steps_in_a_row_that_are_not_whole_end_a_lease_and_the_next_goes_on(job_of):
    job, ring = job_of(odd=[17, 18, 19])
    turns = job.alternate(TABLE, 32)
    assert len(turns.arms) == 32 and (turns.arms == NOBODY).sum() <= 3
    assert sum(table.turn_steps > 0 for table in ring.tables) > 1


def test_where_rank_0_is_in_all_communicators_no_round_follows_the_turns(job_of):
    job, ring = job_of(all_own=True)
    turns = job.alternate(TABLE, 40)
    assert len(turns.arms) == 40 and (turns.arms >= 0).all()
    assert ring.tables[-1].turn_steps == 1, "the trial ends by itself"
    slow = job.alternate(TABLE, 40, give_up_ms=7.0)
    assert slow.arms.tolist() == [CURRENT, TRIAL]
    newest = decode_table(ring.folder.table.read()[1])
    assert newest.turn_steps == 0, "a trial that is too slow does not go on"


def test_turns_that_are_refused_once_are_asked_for_again(job_of):
    """An evaluation among the last steps leaves no rhythm. Before: the job went on in windows for good."""
    job, _ = job_of(refuses=1)
    assert len(job.alternate(TABLE, 32).arms) == 32


def long_leases(ring):
    return [(t.trial_steps, t.turn_steps, t.swap) for t in ring.tables if t.turn_steps >= LONG_TURN_STEPS]


@pytest.mark.parametrize(("n_steps", "quads"), [(4, 1), (32, 1), (64, 2)])
def test_a_job_without_a_rhythm_goes_on_in_long_turns(job_of, n_steps, quads):
    """Before: in windows. A quad a lease, each anchored by a round; the steps in which a table changes count for
    nobody, and neither do those right after them."""
    job, ring = job_of(refuses=10**9)
    turns = job.alternate(TABLE, n_steps)
    assert turns.turn_steps == LONG_TURN_STEPS and len(turns.steps) == 32 * quads
    quad = np.repeat(ORDER, LONG_TURN_STEPS, axis=1)
    assert turns.arms.tolist() == np.concatenate([quad[1], quad[0]][:quads]).tolist()
    assert set(turns.durations_ms[turns.arms == TRIAL]) == {8.0}
    assert set(turns.durations_ms[turns.arms == CURRENT]) == {10.0}
    assert long_leases(ring) == [(44, 11, 1), (44, 11, 0)][:quads]
    assert (turns.others, turns.others_ms) == (12 * quads, pytest.approx(108.0 * quads, abs=12 * quads))


def test_search_and_ranks_call_the_same_turns_long():
    assert LONG_STEPS == LONG_TURN_STEPS


def test_long_turns_that_are_asked_for_are_not_looked_for_in_steps_first(job_of):
    job, ring = job_of(refuses=10**9)
    turns = job.alternate(TABLE, 32, LONG_TURN_STEPS, discard=32)
    assert len(turns.steps) == 32 and len(long_leases(ring)) == 2
    assert all(table.turn_steps in (0, 11) for table in ring.tables)


def test_after_long_turns_with_too_few_steps_they_are_longer(job_of):
    """The job's steps have more calls than they had."""
    job, ring = job_of(refuses=10**9, short=[4, 7])
    turns = job.alternate(TABLE, 32)
    assert [turn_steps for _, turn_steps, _ in long_leases(ring)] == [11, 14, 20] and len(turns.steps) == 32
    assert turns.others > 60, "what the others took is billed"


def test_a_job_whose_long_turns_never_count_is_left_alone_for_a_while(job_of, monkeypatch):
    """Each lease costs the job a trial."""
    monkeypatch.setattr("dynamiccl.envs.live.turns.UNSEEN_S", 0.3)  # of the first ones no step is seen
    job, ring = job_of(refuses=10**9, short=[20] * 100)
    with pytest.raises(NothingToTune) as found:
        job.alternate(TABLE, 32)
    assert found.value.why == NotTuning.UNEVEN(count=MOST_UNEVEN) and len(long_leases(ring)) >= MOST_UNEVEN


def test_a_trial_step_that_is_too_slow_ends_long_turns(job_of):
    """Not the first of a turn, which may still have some of the table before."""
    job, _ = job_of(refuses=10**9)
    turns = job.alternate(TABLE, 32, give_up_ms=7.0)
    counted = turns.arms[turns.arms != NOBODY]
    assert counted.tolist() == [CURRENT] * 10 + [TRIAL] * 2 and turns.durations_ms[-1] == 8.0


@pytest.mark.parametrize("in_turns", [False, True])
def test_rows_in_whose_trial_the_ranks_ended_come_back_as_not_followed(job_of, in_turns):
    """Before: the trial was published anew, for ever. What is measured is the table without them."""
    kept, other = Slot(2, 1, "reduce_scatter", 20), Slot(2, 1, "reduce_scatter", 21)
    proven = {kept: Decision("ring", "ll", 2), other: Decision("ring", "ll", 2)}
    trial = {**TABLE, kept: proven[kept]}
    job, ring = job_of(fatal=[trial])
    job.confirm(proven)
    measured = job.alternate(trial, 32) if in_turns else job.window(trial, 5, one_of=8)
    (row,) = measured.disobeyed
    assert {row.slot: row.decision} == TABLE and len(measured.steps) == (32 if in_turns else 5)
    assert row.why == RowRefused.FATAL(decision="ring/ll/4", slot=row.slot)
    tried = [table.rules for table in ring.tables if table.trial_steps]
    assert tried == [Table.of(0, trial).rules, Table.of(0, {kept: proven[kept]}).rules]


def test_a_job_whose_steps_are_hardly_ever_whole_goes_on_in_long_turns(job_of):
    job, ring = job_of(odd=range(20))
    assert job.alternate(TABLE, 64).turn_steps == LONG_TURN_STEPS
    assert sum(0 < table.turn_steps < LONG_TURN_STEPS for table in ring.tables) == 2


def test_a_lease_whose_ranks_lost_their_rhythm_counts_for_nobody(job_of):
    """Rank 0's own steps look whole: another rank's vote says otherwise."""
    job, _ = job_of(drifts=[2])
    turns = job.alternate(TABLE, 64)
    assert (turns.arms[:32] >= 0).all() and (turns.arms[32:] == NOBODY).all()
    job, _ = job_of(drifts=[1, 2, 3, 4])
    assert job.alternate(TABLE, 64).turn_steps == LONG_TURN_STEPS


@pytest.mark.parametrize("turn_steps", [1, LONG_TURN_STEPS])
def test_a_pause_within_turns_counts_for_nobody(job_of, turn_steps):
    """A checkpoint, an evaluation. Before: it ended the lease, or the window, which was measured again."""
    job, ring = job_of()
    ring.took[20] = 5000.0
    turns = job.alternate(TABLE, 32, turn_steps)
    assert len(turns.steps) == 32 and turns.durations_ms[turns.arms >= 0].max() == 10.0
    assert 20 in turns.steps[turns.arms == NOBODY] or turn_steps > 1


def test_a_table_that_makes_each_of_its_steps_a_pause_is_measured_so(job_of):
    job, ring = job_of()
    ring.took = dict.fromkeys(range(12, 200), 5000.0)
    turns = job.alternate(TABLE, 32, give_up_ms=15.0)
    assert turns.arms[-1] == TRIAL and turns.durations_ms[-1] == 5000.0


@pytest.mark.parametrize("discard", [0, 4])
def test_a_trial_step_that_is_too_slow_ends_the_turns_and_is_kept(job_of, discard):
    """Also in the first quad: the step tells that the table is slow, and not that the job takes no turns. Steps that do
    not count, which may connect an algorithm, end nothing."""
    job, _ = job_of()
    turns = job.alternate(TABLE, 32, discard=discard, give_up_ms=7.0)
    assert turns.arms.tolist() == [CURRENT, TRIAL] and turns.durations_ms.tolist() == [10.0, 8.0]


@pytest.mark.parametrize(
    ("remaining", "waited", "quad", "steps"),
    [(64, 3, 4, 32), (64, 12, 4, 48), (10, 3, 4, 12), (64, 3, 8, 32)],
)
def test_a_lease_is_short_or_four_rounds(remaining, waited, quad, steps):
    assert lease_steps(remaining, waited, quad) == steps


def test_only_whole_quads_of_a_lease_are_kept():
    lease = Lease(5, 8, Rhythm(), is_trial=True, turn_steps=1)
    row = np.zeros(1, STEP_DTYPE)[0]
    row["trial"], row["generation"], row["flags"], row["duration_ns"] = 5, 5, FLAG_WHOLE, 1e6
    for _ in range(6):
        lease.add(row, 0.0)
    assert len(together([lease], {5}, 0, 99).steps) == 4 and not lease.is_whole

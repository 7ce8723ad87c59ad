"""A running job as the daemon sees it: trials, pauses, what it says while it waits, how it ends. No process runs."""

import os
import time

import numpy as np
import pytest
from dynamiccl.envs.live import job as live
from dynamiccl.envs.live import reader
from dynamiccl.envs.live.job import Job, read_confirmed
from dynamiccl.envs.live.job_ends import Closed, JobEnded
from dynamiccl.envs.nccl import site_switch
from dynamiccl.envs.nccl.run_folder import CONFIRMED, WORD
from dynamiccl.envs.nccl.shm import decode_table
from dynamiccl.traces.assemble import Communicator
from dynamiccl.traces.reasons import Happened, NotAgreeing, NotTuning, Why
from dynamiccl.traces.records import (
    COLL_DTYPE,
    STATE,
    STATE_DTYPE,
    STEP,
    STEP_DTYPE,
    AgreementState,
    Decision,
    Slot,
)
from test_obedience import calls

SLOT = Slot(2, 1, "all_gather", 20)
TRIAL = {SLOT: Decision("ring", "ll", 4)}


class Ring:
    """A rank whose every poll is one step under the table published last, as ``script`` says: ms, or what to do."""

    name, key, pid, process, gaps, tail = "ring-1", "1/ring-1", 1, 1, (), 0

    def __init__(self, folder, script=(), rank=0):
        self.folder, self.script, self.rank = folder, iter(script), rank
        self.step, self.extra, self.alive = 0, [], True
        self.seen = []  # tables that the rank found, in order

    def start(self):
        return ""

    def known(self):
        return np.zeros(0, COLL_DTYPE)

    def is_alive(self):
        return self.alive

    def head(self):
        return 0

    def waited_ns(self):
        return 12_345_678

    def drain(self):
        item = next(self.script, 10.0)
        if callable(item):
            item = item()
        records, self.extra = self.extra, []
        found = self.folder.table.read()
        if item is not None:
            if found and (not self.seen or self.seen[-1].generation != found[0]):
                self.seen.append(decode_table(found[1]))
            self.step += 1
            row = np.zeros(1, STEP_DTYPE)
            row["kind"], row["rank"], row["step"], row["duration_ns"] = STEP, self.rank, self.step, item * 1e6
            row["generation"] = found[0] if found else 0
            row["trial"] = row["generation"] if self.seen and self.seen[-1].trial_steps else 0
            records = [*records, row.view(COLL_DTYPE)]
        rows = np.concatenate(records) if records else np.zeros(0, COLL_DTYPE)
        rows["stamp"] = np.arange(self.tail, self.tail + len(rows)) + 1
        self.tail += len(rows)
        return rows

    def says(self, code, why):
        row = np.zeros(1, STATE_DTYPE)
        row["kind"], row["code"], row["text"] = STATE, code, why.packed().encode() if why else b""
        self.extra.append(row.view(COLL_DTYPE))


class Clock:
    """In the place of ``time``: every sleep takes two seconds and no time."""

    def __init__(self):
        self.now = time.monotonic()

    def monotonic(self):
        return self.now

    def sleep(self, _seconds):
        self.now += 2.0


@pytest.fixture
def world(folder, monkeypatch):
    """(job, rank 0's ring, what the job said)."""
    monkeypatch.setattr(live, "POLL_S", 0.001)
    said = []
    ring = Ring(folder)
    monkeypatch.setattr(folder, "rings", lambda: [ring])
    return Job(folder, on_state=said.append), ring, said


def test_a_trial_ends_by_itself_after_its_window_and_what_is_confirmed_stays(world):
    job, ring, _ = world
    assert job.window(TRIAL, 3, one_of=8).step_ms == 10.0
    assert 3 < ring.seen[-1].trial_steps < 50 and ring.seen[-1].rules
    assert job.held_ms == 12
    job.window({}, 3)  # NCCL's own choice is confirmed from the beginning
    assert ring.seen[-1].trial_steps == 0 and ring.seen[-1].rules == ()
    job.confirm(TRIAL)
    job.window(TRIAL, 3)
    assert ring.seen[-1].trial_steps == 0 and ring.seen[-1].rules
    with pytest.raises(ValueError, match="measured in turns"):
        job.window({}, 3)


@pytest.mark.parametrize("steps_a_poll", [1, 4])
def test_the_first_step_that_is_too_slow_is_the_last_however_many_come_at_once(world, steps_a_poll):
    """Before: of four steps in one poll only the last was looked at, so that a table counted as measured. And the slow
    table stayed in force until the next window."""
    job, ring, _ = world
    job.window({}, 8)
    slow = iter([10.0, 40.0, *[10.0] * 20])
    one = ring.drain

    def drain():
        ring.script = slow
        return np.concatenate([one() for _ in range(steps_a_poll)])

    ring.drain = drain
    found = job.window(TRIAL, 8, one_of=8, discard=1, give_up_ms=15.0)
    assert found.durations_ms.tolist() == [40.0]
    assert decode_table(job.run.table.read()[1]).rules == ()


def test_every_way_out_publishes_what_was_confirmed(world, folder):
    """Before: a full disk, a deleted folder or an exception left the table that happened to be in force."""
    job, _, _ = world

    class FullDisk:
        header = {}  # noqa: RUF012

        def log(self, *_):
            raise OSError("no space left on device")

    job.confirm(TRIAL)
    job.publish({})
    job.writer = FullDisk()
    job.release()
    assert decode_table(folder.table.read()[1]).rules == ring_rules(TRIAL)
    os.rename(folder.path, f"{folder.path}-gone")
    try:
        job.writer = None
        job.publish({})
        job.release()
        assert decode_table(folder.table.read()[1]).rules == ring_rules(TRIAL)
    finally:
        os.rename(f"{folder.path}-gone", folder.path)


def test_a_word_that_is_longer_than_its_record_is_read_whole(world, folder):
    """Before: the user saw its first 80 bytes."""
    job, ring, _ = world
    word = NotAgreeing.NOT_ALIKE(rank=1, what="x" * 80, other=0, others="y")
    for left, seen in (("another", Why(NotAgreeing.NOT_ALIKE, {})), (word.packed(), word)):
        (folder.path / WORD).write_text(left)
        ring.says(AgreementState.WAITING, word)
        job.poll()
        assert job.state == (AgreementState.WAITING, seen)


def ring_rules(decisions):
    return live.Table.of(1, decisions).rules


def test_a_daemon_that_comes_back_goes_on_from_what_was_confirmed(world, folder):
    job, _, _ = world
    job.confirm(TRIAL)
    job.publish({})
    back = Job(folder)
    assert back.confirmed == TRIAL and back.publish(back.confirmed) == 3
    (folder.path / CONFIRMED).write_bytes(b"scribbled over")
    assert read_confirmed(folder.path) == {}


def test_the_first_step_may_take_any_time(world, monkeypatch):
    """Before: a job whose first step came after 124 s was never tuned.

    Seen at 679c0ae, the first step comes after 124 s: given up after 120 s, never tuned, exit 2.
    """
    job, ring, said = world
    clock = Clock()
    monkeypatch.setattr(live, "time", clock)
    began = clock.now
    ring.script = iter([None] * 500)
    assert list(job.window({}, 4).durations_ms) == [10.0] * 4 and clock.now - began > 1000
    assert said == [Happened.WAITING(why=NotTuning.NO_STEP())]


def test_a_clock_that_is_set_changes_nothing(world, monkeypatch):
    job, _, said = world
    job.window({}, 4)
    clock = iter(range(10**9, 0, -86_400))  # every look at it is a day earlier
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    assert list(job.window(TRIAL, 4, one_of=8).durations_ms) == [10.0] * 4 and not said
    job.release()


def test_after_a_trial_that_has_ended_the_window_goes_on_in_the_next(world):
    job, ring, _ = world
    job.window({}, 4)
    trial = {SLOT: Decision("ring", "ll", 8)}

    def reverted():
        row = np.zeros(1, STEP_DTYPE)
        row["kind"], row["step"], row["duration_ns"], row["generation"] = STEP, 99, 10e6, 0
        ring.extra.append(row.view(COLL_DTYPE))

    ring.script = iter([10.0, 10.0, reverted])
    window = job.window(trial, 4, one_of=8)
    assert len(window.durations_ms) == 4 and window.generation == job.generation == 2
    assert [bool(table.rules) for table in ring.seen] == [True, True]


def test_a_job_that_ends_without_an_optimizer_step_is_told_so(world, folder, monkeypatch):
    """Inference, say. Before: "the job has ended", and no reason why nothing came of it."""
    job, ring, _ = world
    ring.rank, ring.alive, ring.script = 0, False, iter([None] * 10**6)
    monkeypatch.setattr(folder, "rings", lambda: [ring])
    monkeypatch.setattr(reader, "RESTART_S", 0.0)
    with pytest.raises(
        JobEnded, match="before its ranks switched tables: the probe is loaded; no optimizer step yet"
    ):
        job.window(TRIAL, 4, one_of=8)


def test_what_it_waits_for_is_said(world, folder, monkeypatch):
    """Before: given up after 120 s, "no step for 120 s" in every case."""
    job, ring, _ = world
    monkeypatch.setattr(folder, "rings", list)
    assert job.waits_for() == NotTuning.NO_PROBE() and job.is_alive()
    monkeypatch.setattr(folder, "refused", {"ring-0-1": "ring-0-1: Too many open files"})
    assert job.waits_for() == NotTuning.NO_RING(why="ring-0-1: Too many open files")
    monkeypatch.setattr(folder, "rings", lambda: [ring])
    assert job.waits_for() == NotTuning.NO_STEP()
    ring.rank = 3
    job.poll()
    assert job.waits_for() == NotTuning.NO_STEP_OF_RANK_0() and job.last_step == 0
    monkeypatch.setattr(reader, "ELSEWHERE_S", 0.0)
    assert job.waits_for() == NotTuning.ELSEWHERE()
    ring.rank = 0
    ring.says(AgreementState.WAITING, NotAgreeing.NO_PLUGIN(rank=1))
    job.poll()
    assert job.waits_for() == NotTuning.NO_SWITCH_YET(why=NotAgreeing.NO_PLUGIN(rank=1))
    ring.says(AgreementState.OPEN, None)
    job.poll()
    assert job.waits_for() == NotTuning.NEXT_STEP()
    ring.says(AgreementState.LOSING, NotAgreeing.LATE_STORE())
    job.poll()
    assert job.waits_for() == NotTuning.NO_SWITCH_YET(why=NotAgreeing.LATE_STORE())
    ring.says(AgreementState.WAITING, NotAgreeing.NO_PLUGIN(rank=1))
    ring.alive, ring.script = False, iter([None] * 10**6)
    monkeypatch.setattr(reader, "RESTART_S", 0.0)
    with pytest.raises(JobEnded, match="before its ranks switched tables: rank 1 has no plugin"):
        job.window(TRIAL, 4, one_of=8)


@pytest.mark.parametrize("code", [AgreementState.SHUT, AgreementState.CLOSED])
def test_an_agreement_that_is_over_ends_tuning_with_its_reason(world, code):
    """Before: "waiting for the job's first steps" to the end of the job."""
    job, ring, _ = world
    ring.says(code, NotAgreeing.NO_PLUGIN(rank=3))
    with pytest.raises(Closed, match="rank 3 has no plugin"):
        job.window(TRIAL, 4, one_of=8)
    with pytest.raises(Closed):
        job.window(TRIAL, 4, one_of=8)


def test_the_first_call_that_ran_two_ways_ends_tuning(world):
    """Seen at 679c0ae, a whole ``tune`` of such a job: exit 0 and a speed-up of 1.016, beside 2,576 mismatches in 3,500
    collectives of its own audit.
    """
    job, ring, _ = world
    job.window({}, 2)
    other = Ring(job.run, rank=1)
    other.name, other.key, other.process = "ring-2", "2/ring-2", 2
    job.run.rings = lambda: [ring, other]
    for seq in range(5):
        ring.extra.append(calls(0, [seq], "ring/ll/4"))
        other.extra.append(calls(1, [seq], "ring/ll/4" if seq < 4 else "ring/simple/4"))
    with pytest.raises(Closed, match="two ranks ran one collective with different settings"):
        job.window(TRIAL, 4, one_of=8)
    (job.run.path / "stop").touch()
    with pytest.raises(Closed, match="two ranks"):  # until the tuner has withdrawn the table
        job.check()
    job.audit.is_told = True
    with pytest.raises(Closed, match="stopped by"):  # `dynamiccl stop` waits for the tuner's end
        job.check()


def test_on_a_node_without_rank_0_a_call_that_ran_two_ways_withdraws_nothing_and_says_so(folder):
    """Before: "the table was withdrawn", while the job went on under it: nobody reads the table file of this node."""
    job = Job(folder)
    job.ranks = {8, 9}
    job.audit.add(calls(8, [1], "ring/ll/4"), 8)
    job.audit.add(calls(9, [1], "ring/simple/4"), 9)
    with pytest.raises(
        Closed, match="the table is still in force: run `dynamiccl stop` on the node of rank 0"
    ):
        job.check()
    job.ranks.add(0)
    with pytest.raises(Closed, match="the table was withdrawn"):
        job.check()


@pytest.mark.parametrize(
    ("by", "words"), [("stop", "stopped by"), ("the site", "the tuner is switched off here .*: maintenance")]
)
def test_a_stop_is_heard_in_mid_window(world, tmp_path, monkeypatch, by, words):
    job, ring, _ = world
    monkeypatch.setattr(site_switch, "FILE", str(tmp_path / "off"))

    def stop():
        place = job.run.path / reader.STOP if by == "stop" else tmp_path / "off"
        place.write_text("maintenance\n")
        return 10.0

    ring.script = iter([10.0, stop])
    with pytest.raises(Closed, match=words):
        job.window(TRIAL, 500, one_of=8)


def test_a_job_is_over_when_its_launcher_says_so_and_else_when_nobody_has_lived_for_a_while(
    world, folder, monkeypatch
):
    job, ring, _ = world
    ring.alive = False
    assert job.is_alive()  # its processes may be started anew
    monkeypatch.setattr(reader, "RESTART_S", 0.0)
    assert not job.is_alive()
    ring.script = iter([None] * 10**6)
    with pytest.raises(JobEnded, match="has ended"):
        job.window({}, 4)
    monkeypatch.undo()
    (folder.path / reader.LAUNCHER).touch()
    (folder.path / reader.STATUS).write_text("137\n")
    assert not Job(folder).is_alive() and Job(folder).status == 137


def test_rows_that_are_not_followed_come_with_the_window(world):
    job, ring, _ = world
    job.window({}, 2)
    job.assembler.comms[7] = Communicator(7, 2, 1, "dp")
    ring.script = iter(
        [lambda: ring.extra.append(calls(0, [1], "ring/ll/4", generation=job.generation)) or 10.0] * 9
    )
    assert job.window(TRIAL, 4, one_of=8).disobeyed == ()
    ring.script = iter(
        [lambda: ring.extra.append(calls(0, [1], "ring/simple/4", generation=job.generation)) or 10.0] * 9
    )
    (row,) = job.window({SLOT: Decision("ring", "ll128", 4)}, 4, one_of=8).disobeyed
    assert row.slot == SLOT and row.ran == "ring/simple/4"

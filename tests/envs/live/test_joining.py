"""A tuner that joins a job: rings hold what went before, which is neither the job of now nor to be judged again."""

from functools import partial

import numpy as np
import pytest
from dynamiccl.envs.live import job as live
from dynamiccl.envs.live.job import Job
from dynamiccl.envs.live.job_ends import Closed, Stopped, Withdrawn
from dynamiccl.envs.nccl import rings
from dynamiccl.envs.nccl.run_folder import SAID, STOP, WORD
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.traces.files import Trace
from dynamiccl.traces.records import COLL_DTYPE, FUNCS, KERNEL, KERNEL_DTYPE, AgreementState, Table
from dynamiccl.traces.writer import TraceWriter
from ring_files import CAPACITY, RingFile, state, step
from test_live import Clock, Ring
from test_obedience import calls

NO_PLUGIN = "rank 3 has no plugin"


def kernel(seq):
    row = np.zeros(1, KERNEL_DTYPE)
    row["kind"], row["comm_id"], row["seq"], row["func"] = KERNEL, 7, seq, FUNCS.index("all_gather")
    row["start_ns"], row["end_ns"] = 1, 2
    return row


def rows_and_lost(trace):
    """How many records a trace has or knows to be lost."""
    found = Trace.read(trace)
    return len(found.events) + len(found.steps) + found.header.get("records_lost", 0)


def killed(folder, trace):
    """A tuner is killed that has written what it had to write."""
    job = Job(RunFolder(folder.path), writer=TraceWriter(trace, {}, part_rows=1))
    job.poll()
    job.take()
    return job


def served(folder, trace, existing):
    """The job as a tuner has read it, which wrote a ``trace`` and ended."""
    job = Job(RunFolder(folder.path))
    with TraceWriter(trace, {}, existing=existing) as writer:
        job.begin_trace(writer)
        job.poll()
        job.take(everything=True)
    job.end_trace()
    return job


@pytest.mark.parametrize("dead_first", [True, False])
def test_a_life_that_is_over_tells_nothing_of_the_job_now(folder, dead_first):
    """Before: the ring that was read last told the state, and that was the dead one's: tuning ended."""
    dead = RingFile(folder.path, 0, 100).put(step(5000), state(AgreementState.SHUT, NO_PLUGIN))
    RingFile(folder.path, 0, 200).put(state(AgreementState.OPEN, "all ranks decide together"), step(20))
    dead.die()
    rings = sorted(folder.rings(), key=lambda ring: ring.is_alive() == dead_first)
    folder.rings = lambda: rings
    job = Job(folder)
    job.poll()
    assert job.state[0] == AgreementState.OPEN and job.last_step == 20
    job.check()


def test_a_life_that_is_over_is_read_where_none_has_followed(folder):
    RingFile(folder.path, 0, 100).put(step(5000)).die()
    job = Job(folder)
    job.poll()
    assert job.last_step == 5000 and job.ranks == {0}


def test_who_joins_after_the_ring_has_gone_round_knows_the_state_and_has_lost_nothing(folder):
    """Before: it waited for ever, as the job stepped on; and all records of before counted as lost."""
    ring = RingFile(folder.path, 0, 100).put(state(AgreementState.SHUT, NO_PLUGIN))
    (folder.path / WORD).write_text(NO_PLUGIN)
    (folder.path / SAID).write_text(f"{ring.life} {int(AgreementState.SHUT)}")
    ring.put(*map(step, range(2 * CAPACITY)))
    job = Job(folder)
    job.poll()
    with pytest.raises(Closed, match=f"the ranks never switched tables: {NO_PLUGIN}"):
        job.check()
    assert sum(job.lost.values()) == 0
    ring.put(*map(step, range(2 * CAPACITY, 4 * CAPACITY)))
    job.poll()
    assert sum(job.lost.values()) > CAPACITY


def test_ranks_that_step_on_and_do_not_agree_are_told_of(folder, monkeypatch):
    """Before: it said what it waits for only while no step came."""
    clock, said = Clock(), []
    monkeypatch.setattr(live, "time", clock)
    ring = Ring(folder)
    monkeypatch.setattr(folder, "rings", lambda: [ring])
    job = Job(folder, on_state=said.append)
    job.publish({})
    ring.says(AgreementState.WAITING, NO_PLUGIN)
    left = iter(range(20))

    def steps_under_no_table():
        number = next(left, None)
        if number is None:
            (folder.path / STOP).touch()
        ring.extra.append(step(number or 0).view(COLL_DTYPE))

    ring.script = iter([steps_under_no_table] * 100)
    with pytest.raises(Stopped):
        job.window({}, 4)
    assert said[0] == f"waiting: the ranks do not switch tables yet: {NO_PLUGIN}"


def test_a_later_tuner_of_a_run_neither_writes_nor_judges_again_what_an_earlier_one_has_read(
    folder, tmp_path
):
    """Before: the trace held the last records twice, and a mismatch of before ended the later tuner at once."""
    rings = [RingFile(folder.path, rank, 100 + rank) for rank in (0, 1)]

    def go_on(first, last, odd=-1):
        for n in range(first, last):
            for rank, ring in enumerate(rings):
                config = "ring/ll/16" if (rank, n) == (1, odd) else "ring/simple/16"
                ring.put(calls(rank, [n], config), step(n, rank))

    serve = partial(served, folder, tmp_path / "trace")
    go_on(0, 20, odd=10)
    with pytest.raises(Withdrawn):
        serve("replace").check()
    folder.table.publish(Table(1))
    go_on(20, 40, odd=30)  # nobody is there
    later = serve("resume")
    later.check()
    assert later.last_step == 39 and later.ranks == {0, 1} and later.audit.calls_checked == 0
    steps = Trace.read(tmp_path / "trace").steps
    assert len(steps) == 80 and not steps.duplicated(["pid", "index"]).any()
    rings[1].die()
    RingFile(folder.path, 1, 101, moment=201).put(
        step(0, 1)
    )  # after a restart a process may have the same number
    assert serve("resume").audit.mismatches == 0
    assert len(Trace.read(tmp_path / "trace").steps) == 81


def test_a_killed_tuner_takes_nothing_with_it_that_it_had_not_written(folder, tmp_path):
    """Before: what it had handed to its trace counted as written, and no later tuner wrote it."""
    ring = RingFile(folder.path, 0, 100).put(*map(step, range(20)))
    killed = Job(folder, writer=TraceWriter(tmp_path / "trace", {}, existing="replace"))
    killed.poll()
    killed.take()
    ring.put(step(20))
    served(folder, tmp_path / "trace", "resume")
    assert len(Trace.read(tmp_path / "trace").steps) == 21


def test_calls_that_waited_for_their_kernel_times_are_written_by_the_next_tuner_and_judged_once(
    folder, tmp_path
):
    """Before: up to 256 calls of each process counted as written, and were in no trace."""
    rings = [RingFile(folder.path, rank, 100 + rank) for rank in (0, 1)]
    rings[0].put(calls(0, range(60)), kernel(5), step(0))
    rings[1].put(calls(1, range(59)), calls(1, [59], "ring/ll/16"), step(0, 1))
    assert killed(folder, tmp_path / "trace").audit.mismatches == 1
    folder.table.publish(Table(1))
    assert Trace.read(tmp_path / "trace").events["seq"].tolist() == [5]
    rings[0].put(calls(0, [60]), kernel(7), step(1))
    rings[1].put(calls(1, [60]), step(1, 1))
    later = served(folder, tmp_path / "trace", "resume")
    assert (later.audit.calls_checked, later.audit.mismatches) == (0, 0)
    trace = Trace.read(tmp_path / "trace")
    assert sorted(trace.events["seq"]) == sorted([*range(61)] * 2) and len(trace.steps) == 4
    assert trace.events.dropna(subset="start_ns")["seq"].tolist() == [5, 7]
    served(folder, tmp_path / "trace", "resume")
    assert len(Trace.read(tmp_path / "trace").events) == 2 * 61, "written once"


@pytest.mark.parametrize("part_rows", [1, 50_000])
def test_a_ring_stays_until_the_trace_has_all_of_it(folder, tmp_path, part_rows):
    """Before: it went as it was read, and its last calls with it, where the tuner was killed after a restart."""
    old = RingFile(folder.path, 0, 100).put(calls(0, range(60)), step(0))
    writer = TraceWriter(tmp_path, {}, part_rows=part_rows)
    job = Job(RunFolder(folder.path), writer=writer)
    job.poll()
    job.take()
    old.die()
    RingFile(folder.path, 0, 200).put(calls(0, [60]))
    for _ in range(3):
        job.poll()
        job.take()
    assert (folder.path / "ring-0-100").exists() == (part_rows > 1)
    assert len(Trace.read(tmp_path).events) == 60 * (part_rows == 1), "nothing else can come from its process"
    later = served(folder, tmp_path, "resume")  # the other one is killed
    assert rows_and_lost(tmp_path) == 62 and not later.records_lost
    with TraceWriter(tmp_path, {}, existing="resume") as last:
        job = Job(RunFolder(folder.path), writer=last)
        job.poll()
        job.poll()
    assert not (folder.path / "ring-0-100").exists()


def test_who_writes_no_trace_removes_no_ring_that_the_tuner_may_need(folder, tmp_path):
    """Before: `dynamiccl stop` removed it."""
    old = RingFile(folder.path, 0, 100).put(calls(0, range(60)))
    killed(folder, tmp_path)
    old.die()
    RingFile(folder.path, 0, 200)
    job = Job(RunFolder(folder.path))
    for _ in range(3):
        job.poll()
    assert (folder.path / "ring-0-100").exists()


def test_a_later_process_of_the_same_number_is_another_one(folder, tmp_path):
    """Before: calls of the ended one that waited counted as the new one's, by their numbers: it was written twice."""
    old = RingFile(folder.path, 0, 100).put(calls(0, range(60)))
    job = killed(folder, tmp_path)
    old.die()
    RingFile(folder.path, 0, 100, moment=200).put(*[step(1)] * 40)
    for _ in range(2):
        job.poll()
        job.take()
    served(folder, tmp_path, "resume")
    assert len(Trace.read(tmp_path).steps) == 40


def test_the_word_of_a_process_is_known_by_its_life(folder):
    """A ring that is left of an earlier process of that number may have been found first."""
    RingFile(folder.path, 0, 100).die()
    folder.rings()
    ring = RingFile(folder.path, 0, 100, moment=200).put(*map(step, range(2 * CAPACITY)))
    (folder.path / WORD).write_text(NO_PLUGIN)
    (folder.path / SAID).write_text(f"{ring.life} {int(AgreementState.SHUT)}")
    job = Job(folder)
    job.poll()
    assert job.state[0] == AgreementState.SHUT


def test_a_record_that_was_never_finished_makes_the_next_tuner_write_nothing_again(
    folder, tmp_path, monkeypatch
):
    """Before: who waits for it has less of the ring at first than was read, and took it for another ring."""
    clock = Clock()
    monkeypatch.setattr(rings, "time", clock)
    ring = RingFile(folder.path, 0, 100).put(calls(0, range(60)), step(0), calls(0, range(60, 99)))
    ring.places["stamp"][60] = 0
    ring.put(calls(0, [99]))

    def look(job):
        job.poll()
        job.take()

    for tuner in range(4):
        folder = RunFolder(folder.path)
        job = Job(folder, writer=TraceWriter(tmp_path, {}, existing="resume", part_rows=1))
        look(job)  # the first two are killed here, before they have read on
        if tuner >= 2:
            clock.now += 2
            look(job)
            assert job.records_lost == 1
            job.take(everything=True)
    job.writer.close()
    assert sorted(Trace.read(tmp_path).events["seq"]) == list(range(100))


def test_calls_that_waited_and_fell_out_of_the_ring_since_are_lost(folder, tmp_path):
    ring = RingFile(folder.path, 0, 100).put(calls(0, range(60)), step(0))
    killed(folder, tmp_path / "trace")
    ring.put(*map(step, range(1, 3 * CAPACITY)))
    assert served(folder, tmp_path / "trace", "resume").records_lost > 60
    assert rows_and_lost(tmp_path / "trace") == ring.head


@pytest.mark.parametrize("meanwhile", [100, 3 * CAPACITY])
def test_a_trace_has_what_another_tuner_has_read_into_another_one_or_tells_that_it_is_lost(
    folder, tmp_path, meanwhile
):
    """Before: records that came by while another trace was written were missing, and nothing told of it."""
    ring, at = RingFile(folder.path, 0, 100), 0
    for name, existing, count in (("x", "replace", 100), ("y", "replace", meanwhile), ("x", "resume", 20)):
        ring.put(*map(step, range(at, at + count)))
        at += count
        served(folder, tmp_path / name, existing)
    assert not Trace.read(tmp_path / "x").steps.duplicated(["pid", "index"]).any()
    assert rows_and_lost(tmp_path / "x") == at
    served(folder, tmp_path / "x", "replace")
    held = at if at <= CAPACITY else CAPACITY // 2
    assert len(Trace.read(tmp_path / "x").steps) == held, "another trace, in the same folder"


def test_another_trace_gets_what_the_rings_hold_and_judges_it_not_again(folder, tmp_path):
    ring = RingFile(folder.path, 0, 100).put(*map(step, range(20)))
    for name in ("first", "other"):
        served(folder, tmp_path / name, "replace")
        assert len(Trace.read(tmp_path / name).steps) == 20
    ring.die()


def test_records_that_fell_out_between_two_tuners_are_lost_to_their_trace(folder, tmp_path):
    """Before: the later tuner set the trace's lost records back to 0."""
    ring = RingFile(folder.path, 0, 100).put(*map(step, range(20)))
    for first, existing in ((20, "replace"), (20 + 3 * CAPACITY, "resume"), (0, "resume")):
        job = served(folder, tmp_path / "trace", existing)
        if first:
            ring.put(*map(step, range(first)))
    lost = Trace.read(tmp_path / "trace").header["records_lost"]
    assert 2 * CAPACITY < lost < 3 * CAPACITY
    assert job.records_lost == lost, "what the summary tells"
    ring.die()


def test_records_that_a_killed_tuner_has_lost_are_counted_once(folder, tmp_path):
    """Before: the header told of them at once, the word of what was read later: each later tuner added them anew."""
    ring = RingFile(folder.path, 0, 100).put(*map(step, range(50)))
    job = killed(folder, tmp_path)
    job.writer.part_rows = 10_000
    ring.put(*map(step, range(50, 50 + 3 * CAPACITY)))
    for _ in range(3):
        job.poll()
        job.take()  # it is killed before the next segment
        lost = Trace.read(tmp_path).header["records_lost"]
        job = Job(RunFolder(folder.path), writer=TraceWriter(tmp_path, {}, existing="resume"))
    assert lost == ring.head - 50 - CAPACITY // 2
    assert served(folder, tmp_path, "resume").records_lost == lost and rows_and_lost(tmp_path) == ring.head


def test_the_last_word_of_a_process_that_has_ended_is_none_of_the_job_now(folder):
    """Before: the file told of a dead life's agreement, and tuning ended."""
    ring = RingFile(folder.path, 0, 100).put(*map(step, range(2 * CAPACITY)))
    (folder.path / WORD).write_text("rank 3 has ended")
    (folder.path / SAID).write_text(f"{ring.life} {int(AgreementState.CLOSED)}")
    ring.die()
    RingFile(folder.path, 0, 200)
    job = Job(folder)
    job.poll()
    job.check()
    assert job.state is None

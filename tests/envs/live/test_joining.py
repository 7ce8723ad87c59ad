"""A tuner that joins a job: rings hold what went before, which is neither the job of now nor to be judged again."""

from functools import partial

import pytest
from dynamiccl.envs.live import job as live
from dynamiccl.envs.live.job import Job
from dynamiccl.envs.live.job_ends import Closed
from dynamiccl.envs.nccl.run_folder import SAID, STOP, WORD
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.traces.files import Trace
from dynamiccl.traces.reasons import Happened, NotAgreeing, NotTuning
from dynamiccl.traces.records import COLL_DTYPE, AgreementState, Table
from dynamiccl.traces.writer import TraceWriter
from ring_files import CAPACITY, RingFile, state, step
from test_live import Clock, Ring
from test_obedience import calls

NO_PLUGIN = NotAgreeing.NO_PLUGIN(rank=3)


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
    RingFile(folder.path, 0, 200).put(state(AgreementState.OPEN, None), step(20))
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


def test_what_a_process_writes_before_its_end_is_read_before_its_ring_goes(folder, tmp_path):
    """It writes once more after its ring was read, and ends before anybody asks whether it lives."""
    ends = RingFile(folder.path, 0, 100).put(step(5))
    RingFile(folder.path, 1, 200).put(step(5, 1))
    job = Job(folder, writer=TraceWriter(tmp_path, {}, part_rows=1))
    for _ in range(2):
        job.poll()
        job.take()
    (ring,) = [one for one in folder.rings() if one.pid == 100]
    drain = ring.drain

    def drain_and_end():
        found, ring.drain = drain(), drain
        ends.put(step(6)).die()
        return found

    ring.drain = drain_and_end
    for _ in range(2):
        job.poll()
        job.take()
    assert job.last_step == 6 and sum(job.lost.values()) == 0
    job.poll()
    assert [one.pid for one in folder.rings()] == [200]


def test_who_joins_after_the_ring_has_gone_round_knows_the_state_and_has_lost_nothing(folder):
    """Before: it waited for ever, as the job stepped on; and all records of before counted as lost."""
    ring = RingFile(folder.path, 0, 100).put(state(AgreementState.SHUT, NO_PLUGIN))
    (folder.path / WORD).write_text(NO_PLUGIN.packed())
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
    with pytest.raises(Closed, match="stopped by"):
        job.window({}, 4)
    assert said[0] == Happened.WAITING(why=NotTuning.NO_SWITCH_YET(why=NO_PLUGIN))


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
    with pytest.raises(Closed, match="two ranks"):
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


def test_the_word_of_a_process_is_known_by_its_life(folder):
    """A ring that is left of an earlier process of that number may have been found first."""
    RingFile(folder.path, 0, 100).die()
    folder.rings()
    ring = RingFile(folder.path, 0, 100, moment=200).put(*map(step, range(2 * CAPACITY)))
    (folder.path / WORD).write_text(NO_PLUGIN.packed())
    (folder.path / SAID).write_text(f"{ring.life} {int(AgreementState.SHUT)}")
    job = Job(folder)
    job.poll()
    assert job.state[0] == AgreementState.SHUT


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

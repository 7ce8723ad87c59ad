"""Which ranks run on this node now: whether a table that is withdrawn here is one that the job reads."""

import pytest
from dynamiccl.envs.live import reader
from dynamiccl.envs.live.job import Job
from dynamiccl.envs.live.job_ends import Closed
from dynamiccl.traces.reasons import NotTuning
from dynamiccl.traces.records import AgreementState
from ring_files import RingFile, state, step
from test_live import Clock
from test_obedience import calls


def begun(folder, *ranks):
    """(the tuner of a job with these ranks, their rings): each has taken some steps."""
    rings = [RingFile(folder.path, rank, 100 + rank).put(step(5, rank)) for rank in ranks]
    job = Job(folder)
    job.poll()
    return job, rings


def the_table_is(job, told):
    job.poll()
    job.audit.mismatches = 1
    with pytest.raises(Closed, match=f"the table {told}"):
        job.check()


def test_a_rank_that_ran_here_in_an_earlier_life_is_not_here(folder):
    """Before: after a restart that moved rank 0 to another node, its old node said that a table had been withdrawn."""
    for rank in (0, 1):
        RingFile(folder.path, rank, 100 + rank).put(step(5, rank)).die()
    job = Job(folder)
    job.poll()
    for rank, config in ((8, "ring/simple/16"), (9, "ring/ll/16")):
        RingFile(folder.path, rank, 200 + rank).put(step(0, rank), calls(rank, [2], config))
    job.poll()
    with pytest.raises(Closed, match="the table is still in force"):
        job.check()


@pytest.fixture
def restarted(folder, monkeypatch):
    """(its tuner, rings of ranks 0 and 1, the clock): a job that has stepped for an hour, and was started again."""
    clock = Clock()
    monkeypatch.setattr(reader, "time", clock)
    old = [RingFile(folder.path, rank, 100 + rank).put(step(5, rank)) for rank in (0, 1)]
    job = Job(folder)
    job.poll()
    clock.now += 3600
    for ring in old:
        ring.die()
    return (
        job,
        [RingFile(folder.path, rank, 200 + rank).put(state(AgreementState.OPEN, None)) for rank in (0, 1)],
        clock,
    )


def test_rank_0_is_here_before_its_first_step_after_a_restart_and_not_after_its_end(restarted):
    """Before: where another rank had stepped first, rank 0 was said to be on another node."""
    job, rings, _ = restarted
    rings[1].put(step(0, 1))
    job.poll()
    assert job.waits_for() == NotTuning.NEXT_STEP()
    rings[0].put(step(0), calls(0, [2]))
    rings[1].put(calls(1, [2], "ring/ll/16"))
    job.poll()
    with pytest.raises(Closed, match="the table was withdrawn"):
        job.check()
    rings[0].die()
    job.poll()
    with pytest.raises(Closed, match="the table is still in force"):  # nobody is left who would read it
        job.check()


def test_rank_0_counts_as_late_before_it_counts_as_elsewhere_in_each_life(restarted):
    """Before: as elsewhere at once, from the second life on."""
    job, rings, clock = restarted
    rings[0].die()
    rings[1].put(step(0, 1))
    job.poll()
    assert job.waits_for() == NotTuning.NO_STEP_OF_RANK_0()
    clock.now += reader.ELSEWHERE_S
    assert job.waits_for() == NotTuning.ELSEWHERE()


def test_a_process_that_lives_through_a_restart_keeps_no_other_rank_here(folder):
    """Before: the old rank 0 counted as here for ever, and a table in force as withdrawn."""
    job, rings = begun(folder, 0, 1, 2)
    for ring in rings[:2]:
        ring.die()
    RingFile(folder.path, 3, 203).put(step(0, 3))
    the_table_is(job, "is still in force")


def test_a_process_that_never_steps_keeps_no_earlier_rank_here(folder):
    """Before: as long as it lived, all ranks of earlier lives counted as here."""
    job, rings = begun(folder, 0, 1)
    for ring in rings:
        ring.die()
    RingFile(folder.path, 2, 202).put(step(0, 2))
    RingFile(folder.path, 9, 209).put(calls(9, [1]))
    the_table_is(job, "is still in force")


@pytest.mark.parametrize("lives", [1, 2])
def test_rank_0_is_here_before_its_first_step_in_whichever_life(folder, lives):
    """Before: once another rank had stepped, the user was sent to the node of rank 0, which was this one."""
    if lives == 2:
        job, (ring,) = begun(folder, 1)
        ring.die()
    RingFile(folder.path, 1, 201).put(step(0, 1))
    RingFile(folder.path, 0, 200).put(calls(0, [1]))
    the_table_is(job if lives == 2 else Job(folder), "was withdrawn")


def test_a_ring_named_by_the_number_of_its_process_says_nothing_of_ranks(folder):
    RingFile(folder.path, 300, 300).put(calls(0, [1]))
    the_table_is(Job(folder), "was withdrawn")

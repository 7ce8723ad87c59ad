"""A job that pauses, once or again and again, and tables whose trial ends meanwhile, as the daemon sees them."""

import pytest
from dynamiccl.envs.live import job as live
from dynamiccl.envs.live import turns
from dynamiccl.traces.reasons import NotTuning
from dynamiccl.traces.records import STEP, STEP_DTYPE
from test_live import TRIAL, Clock, world

__all__ = ["world"]  # a fixture


@pytest.mark.parametrize("few", [0, 8])
def test_a_pause_of_any_length_counts_for_nobody_and_ends_nothing(world, monkeypatch, few):
    """Before: after 120 s without a step the run was over, and the trial table stayed to the job's end.

    Seen at 679c0ae, the job pauses for 125 s in a trial window: "the job has taken no step for 120 s", exit 2; the
    trial stays for the other 1,116 steps.
    """
    job, ring, said = world
    job.window({}, 4)
    n_before = len(ring.seen)
    clock = Clock()
    monkeypatch.setattr(live, "time", clock)
    began = clock.now
    ring.script = iter([10.0, 10.0] + [None] * 500 + [3000.0])
    window = job.window(TRIAL if few else {}, 4, one_of=few)
    assert clock.now - began > 1000 and list(window.durations_ms) == [10.0] * 4
    assert len(ring.seen) - n_before == bool(few), "the same trial goes on"
    assert any(NotTuning.PAUSED in what for what in said)


def test_a_table_at_few_calls_that_makes_the_job_pause_twice_in_a_row_is_measured_so(world):
    job, ring, _ = world
    job.window({}, 4)
    ring.script = iter([10.0, 10.0, 10.0, 5000.0, 6000.0])
    found = job.window(TRIAL, 20, give_up_ms=15.0, one_of=8)
    assert found.durations_ms[-1] == 6000.0 and len(ring.seen[-1].rules) == 1


def rollouts(every):
    """A step of a minute after so many of a second: reinforcement learning, evaluation."""
    while True:
        for i in range(every):
            yield 60e3 if i == every - 1 else 1000.0


@pytest.mark.parametrize("every", [6, 8, 10, 12, 14])
def test_a_job_with_a_long_step_now_and_then_is_measured_and_no_table_blamed_for_it(world, every):
    """Before: the first window never ended, or every table was struck for steps over 1.5 times as long."""
    job, ring, _ = world
    ring.script = rollouts(every)
    assert list(job.window({}, 10, 1).durations_ms) == [1000.0] * 10
    for _ in range(3):
        assert list(job.window(TRIAL, 8, 1, 1500.0, 8).durations_ms) == [1000.0] * 8
    assert ring.step < 60 * every


def test_long_steps_that_come_often_are_the_jobs_rhythm(world):
    job, ring, _ = world
    ring.script = rollouts(4)
    job.window({}, 6, 1)
    assert set(job.window(TRIAL, 12, 1, one_of=8).durations_ms) == {1000.0, 60e3}


def test_a_trial_that_came_and_went_between_two_steps_is_published_anew(world, monkeypatch):
    """Its calls were those of an evaluation. Before: waited for to the job's end."""
    job, ring, _ = world
    job.window({}, 4)
    monkeypatch.setattr(turns, "UNSEEN_S", 0.01)
    drain, publish = ring.drain, job.publish
    published = []

    def unseen():
        records = drain()
        assert ring.step < 200
        if len(published) < 2:
            records.view(STEP_DTYPE)["trial"][records["kind"] == STEP] = 0
        return records

    def publishes(*args):
        published.append(args)
        return publish(*args)

    ring.drain, job.publish = unseen, publishes
    assert list(job.window(TRIAL, 4, one_of=8).durations_ms) == [10.0] * 4

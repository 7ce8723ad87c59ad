"""A job that pauses, once or again and again, and tables whose trial ends meanwhile, as the daemon sees them."""

import pytest
from dynamiccl.envs.live import job as live
from dynamiccl.envs.live import pauses
from dynamiccl.traces.reasons import Happened, NotTuning
from dynamiccl.traces.records import STEP, STEP_DTYPE
from test_live import TRIAL, Clock, world

__all__ = ["world"]  # a fixture


def test_a_pause_of_any_length_ends_the_window_and_not_the_run(world, monkeypatch):
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
    window = job.window(TRIAL, 4)
    assert clock.now - began > 1000 and list(window.durations_ms) == [10.0] * 4
    tables = ring.seen[n_before:]
    assert [bool(t.rules) for t in tables] == [
        True,
        True,
    ]  # the trial, which ends by itself, and the trial anew
    assert all(t.trial_steps for t in tables) and any(NotTuning.PAUSED in what for what in said)


def test_a_table_that_makes_the_job_pause_twice_is_measured_so(world, monkeypatch):
    job, ring, _ = world
    job.window({}, 4)
    ring.script = iter([10.0, 10.0, 5000.0, 10.0, 10.0, 6000.0])
    assert list(job.window(TRIAL, 20).durations_ms) == [6000.0]


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
        assert list(job.window(TRIAL, 8, 1).durations_ms) == [1000.0] * 8
    assert ring.step < 60 * every


def test_where_the_default_had_not_paused_yet_it_is_asked_before_a_table_is_blamed(world):
    job, ring, _ = world
    job.window({}, 6)
    ring.script = rollouts(8)
    assert list(job.window(TRIAL, 8, 1).durations_ms) == [1000.0] * 8


def test_long_steps_that_come_often_are_the_jobs_rhythm(world):
    job, ring, _ = world
    ring.script = rollouts(4)
    job.window({}, 6, 1)
    assert set(job.window(TRIAL, 12, 1).durations_ms) == {1000.0, 60e3}


def under(generation, ring):
    """The ring's steps run under that table, whatever is published; call it to end that."""
    drain = ring.drain

    def drained():
        records = drain()
        assert ring.step < 200
        records.view(STEP_DTYPE)["generation"][records["kind"] == STEP] = generation
        return records

    ring.drain = drained
    return lambda: setattr(ring, "drain", drain)


def test_a_trial_that_came_and_went_between_two_steps_is_published_anew(world, monkeypatch):
    """Its calls were those of an evaluation. Before: waited for to the job's end."""
    job, ring, said = world
    job.window({}, 4)
    monkeypatch.setattr(pauses, "UNSEEN_S", 0.01)
    end = under(0, ring)
    published = job.publish

    def heard(*args):
        if said:
            end()
        return published(*args)

    job.publish = heard
    assert list(job.window(TRIAL, 4).durations_ms) == [10.0] * 4
    assert any(Happened.TABLE_ENDED in what for what in said)


def test_a_table_that_was_never_in_force_is_not_blamed_for_pauses(world, monkeypatch):
    """Two checkpoints while the ranks fail to meet. Before: the second was the window's result."""
    job, ring, said = world
    job.window({}, 4)
    clock = Clock()
    monkeypatch.setattr(live, "time", clock)
    end = under(1, ring)
    ring.script = iter(([10.0] * 3 + [None] * 6) * 3 + [lambda: end() or 10.0])
    assert list(job.window(TRIAL, 4).durations_ms) == [10.0] * 4
    assert sum(NotTuning.PAUSED in what for what in said) >= 2


def test_a_default_that_is_measured_in_pieces_ends_where_another_table_is_confirmed(world):
    """As a tuner that comes back does, beside a job with rollouts. Before: without end."""
    job, ring, _ = world
    job.window({}, 4)
    job.confirm(TRIAL)
    ring.script = rollouts(6)
    assert list(job.window({}, 10, 1).durations_ms) == [1000.0] * 10

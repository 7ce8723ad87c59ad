"""How many calls ahead a limit is, by what a rank has counted."""

from types import SimpleNamespace

import pytest
from dynamiccl.envs.nccl.agreement import pace as paces
from dynamiccl.envs.nccl.agreement.pace import Pace

OLD, NEW = 7, 8


@pytest.fixture()
def clock(monkeypatch):
    found = SimpleNamespace(now=100.0)
    monkeypatch.setattr(paces, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def samples(clock, step_s, seconds):
    """Of a job with two calls a step on OLD; NEW has come since the last sample."""
    pace = Pace(0.05)
    n = int(seconds / 0.1)
    for i in range(n + 1):
        steps = int(0.1 * i / step_s)
        pace.sample(steps, {OLD: 2 * steps})
        clock.now += 0.1
    pace.sample(steps, {OLD: 2 * steps, NEW: 16})
    return pace


def test_a_communicator_that_is_new_has_its_limit_as_many_steps_ahead_as_the_others(clock):
    """Before: two steps ahead, so that its calls were held in each round, and the next limits were twice as far."""
    pace = samples(clock, 0.005, 2.0)
    ahead = [pace.distance(OLD, 0.0, rhythm=2) / 2, pace.distance(NEW, 0.0, rhythm=4) / 4]
    assert ahead[1] == pytest.approx(ahead[0], rel=0.1) and ahead[0] > 20  # two rounds of 50 ms


def test_where_steps_last_longer_than_samples_are_kept_the_limit_is_two_steps_ahead(clock):
    pace = samples(clock, 1000.0, 10.0)
    assert pace.distance(NEW, 0.0, rhythm=4) == 10


@pytest.mark.parametrize("rhythm", [0, 4])
def test_of_a_rank_that_has_counted_nothing_yet_any_communicator_may_begin_at_any_moment(clock, rhythm):
    assert Pace(0.05).distance(NEW, 0.0, rhythm=rhythm) == 64

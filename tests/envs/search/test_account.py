"""What a search charges to its account and to the reward, and what it forgets when the job changes."""

from dataclasses import replace

import numpy as np
import pytest
from dynamiccl.envs.search.belief.prior import Prior
from dynamiccl.envs.search.config import SearchConfig
from dynamiccl.envs.search.interfaces import LEAVE, SHARE
from dynamiccl.envs.search.step_times import DefaultCalls
from told_job import OPEN, Told, go_on, good, run


@pytest.fixture(scope="module")
def prior():
    return Prior.load()


def test_the_default_follows_its_own_windows_also_after_turns(prior):
    """Before: its step stayed what the last turns had shown, and a job that slowed by itself paid for it."""
    told = Told(lambda configs: 0.0)
    search, _ = run(told, prior, config=SearchConfig(trials=0))
    assert search.is_done and not search.confirmed.any()
    search.state.turns.default_ms = 100.0  # as turns had shown
    spent = search.state.spent
    for _ in range(300):
        told.scale *= 1.0003
        go_on(search, told, 1)
    assert search.marks.reopened == 0 and told.scale > 1.09
    assert search.state.default_ms_now == pytest.approx(100 * told.scale, rel=0.01)
    assert search.state.spent <= spent


def test_the_jobs_own_long_steps_cost_no_turn(prior):
    """A checkpoint in a window of the current table: its time counts neither in the account nor in the reward."""
    told = Told(good)
    search, _ = run(told, prior, config=SearchConfig(trials=0))
    lost = search.lost
    plan = search.plan()
    seen = told.measure(plan)
    long = seen.step_ms.copy()
    long[len(long) // 2] *= 4.0
    later = replace(seen, step_ms=long, billed_ms=seen.billed_ms + 3 * seen.step_ms[0])
    saved = search.record(plan, later)
    assert abs(saved) < 0.2 and abs(search.lost - lost + seen.billed * search.state.current.saved) < 0.2


def test_who_leaves_on_the_last_slot_after_the_verdict_tries_nothing_more(prior):
    """Before: the slot's choice was tried first."""
    told = Told(good)
    search, _ = run(told, prior)
    assert search.is_over
    while (plan := search.plan()) is not None:
        search.record(plan, told.measure(plan))
    while search.turn < search.n_slots - 1:
        search.decide(int(search.confirmed[search.turn]))
    other = next(c for c in OPEN if c != search.confirmed[search.turn])
    search.decide(other, LEAVE)
    assert search.is_done


def test_a_change_of_the_job_counts_its_calls_anew():
    calls = DefaultCalls(np.array([100.0, np.nan]))
    is_default = np.ones(2, bool)
    for _ in range(30):
        calls.add(np.log([100.0, np.nan]), is_default)
    calls.changed(np.array([220.0, np.nan]))
    for _ in range(30):
        calls.add(np.log([200.0, 50.0]), is_default)
    np.testing.assert_allclose(np.exp(calls.logs), [200.0, 50.0], rtol=0.005)


def test_a_change_of_the_job_shows_in_the_features_of_its_slots():
    job, _ = Told(good).begin()
    now = job.changed(np.array([200.0, 100.0]), 1.25)
    assert now.share == pytest.approx([0.48, 0.24])
    assert now.features[:, SHARE] == pytest.approx(now.share) and not job.features[:, SHARE].any()

"""Jobs of 40 and 60 slots: a turn stays cheap, and the last slot is known."""

import time
from dataclasses import replace

import numpy as np
import pytest
from dynamiccl.agent.policies.rule import ExpectedImprovement
from dynamiccl.envs.search.belief.prior import Prior
from dynamiccl.envs.search.interfaces import Job, Measured, choices_of
from dynamiccl.envs.search.observation import decode
from dynamiccl.envs.search.search import Search
from dynamiccl.envs.sim.jobs import SLOTS, STANDARD, draw_jobs

#: Seconds of a processor that a decision may take.
LIMIT_S = 2e-3


def searched(n_slots):
    """A search over a job of so many slots, each like one of simulated jobs."""
    jobs = draw_jobs(replace(STANDARD, parts=STANDARD.parts[:1]), np.random.default_rng(3), n_slots)
    first = np.arange(n_slots) * SLOTS
    mask = jobs.mask[:, 0]
    job = Job(
        features=jobs.fingerprint.vector()[first],
        mask=mask,
        share=np.full(n_slots, 0.6 / n_slots),
        call_us=np.full(n_slots, 100.0),
        families=np.full(mask.shape, -1),
        calls=np.full(n_slots, 16.0),
    )
    return Search(job, window(n_slots), Prior.load())


def window(n_slots):
    steps = 100 * np.exp(0.004 * np.random.default_rng(0).standard_normal(8))
    return Measured(steps, np.full(n_slots, 100.0), np.ones(n_slots, bool), 8, float(steps.sum()))


@pytest.mark.parametrize("n_slots", [1, 8, 32, 40, 43, 60])
def test_the_last_slot_is_known(n_slots):
    """Before, from 43 slots on the last but one was taken for the last."""
    search = searched(n_slots)
    for slot in range(n_slots):
        assert search.turn == slot
        assert bool(decode(search.observe()).is_last_slot[0]) == (slot == n_slots - 1)
        search.decide(0)
    assert search.plan() is not None


@pytest.mark.timing
@pytest.mark.parametrize("n_slots", [40, 60])
def test_a_decision_takes_two_milliseconds_at_most(n_slots):
    """Of a processor: the observation, the rule, and what the search makes of its answer; the mean of a round."""
    search, policy, took = searched(n_slots), ExpectedImprovement(), []
    for _ in range(6):
        while (plan := search.plan()) is None:
            began = time.thread_time()
            config, what = choices_of(policy.predict(search.observe())[0])
            search.decide(int(config), int(what))
            took.append(time.thread_time() - began)
        search.record(plan, window(n_slots))
    assert np.mean(took) < LIMIT_S

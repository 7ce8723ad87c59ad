"""What a search still looks at before it closes."""

import math

import numpy as np
import pytest
from dynamiccl.envs.search.belief import Prior
from dynamiccl.envs.search.neighbours import one_slot_neighbours
from dynamiccl.envs.search.search import Search
from dynamiccl.envs.search.windows import TABLE, Job, Measured
from dynamiccl.traces.spaces import N_CONFIGS
from test_search import Told

# ring/ll128 with NCCL's count, 1, 2, 4 and 8 channels; ring/simple with NCCL's and 16
CONFIGS = [0, 16, 17, 18, 19, 20, 24, 29]
SHARE = np.array([0.3, 0.2, 0.01])


@pytest.fixture(scope="module")
def prior():
    return Prior.load()


MASK = np.zeros((3, N_CONFIGS), bool)
MASK[:, CONFIGS] = True


def asked(table, tried=(), open_=MASK):
    """Of a job of three slots, the last of no account."""
    counts = np.zeros((3, N_CONFIGS))
    for slot, config in tried:
        counts[slot, config] = 1
    return one_slot_neighbours(np.array(table), SHARE, open_, counts).tolist()


def test_fewer_channels_come_before_more_in_all_slots_at_once():
    assert asked([19, 18, 19]) == [18, 17, 19]  # the third slot is too small
    assert asked([19, 18, 19], tried=[(0, 18)]) == [20, 17, 19]
    assert asked([19, 18, 19], tried=[(0, 18), (0, 20), (1, 17)]) == [19, 19, 19]
    assert asked([19, 18, 19], tried=[(0, 18), (0, 20), (1, 17), (1, 19)]) == [19, 18, 19]


def test_at_the_ends_of_a_pair():
    assert asked([17, 20, 0]) == [18, 19, 0]
    assert asked([24, 29, 0]) == [29, 29, 0]  # NCCL's count: what has most; a pair of one count has no neighbour
    assert asked([24, 29, 0], tried=[(0, 29)]) == [24, 29, 0]


def test_what_may_not_run_is_no_neighbour():
    open_ = np.zeros((3, N_CONFIGS), bool)
    open_[:, [0, 17, 19, 20]] = True
    assert asked([19, 19, 0], open_=open_) == [17, 17, 0]


def test_a_policy_without_curiosity_finds_the_better_neighbour(prior):
    """18 is good, 17 beside it better: nobody asks for it but the search."""

    class Wide(Told):
        def begin(self):
            job, default = super().begin()
            mask = np.zeros((2, N_CONFIGS), bool)
            mask[:, [0, 16, 17, 18, 19, 20]] = True
            return Job(job.features, mask, job.share, job.call_us, job.families), default

    told = Wide(lambda c: 0.06 * (c[0] == 18) + 0.12 * (c[0] == 17))
    job, default = told.begin()
    search = Search(job, default, prior)
    at = search.belief.parts[0].start + 1 + search.belief.config[0]
    search.belief.learn(at[[18, 17]], [-0.5, 0.1], [0.01, 0.05])  # and 17 is believed to be slower
    while not search.is_over:
        if search.plan() is None:
            search.decide(int(search.belief.best()[search.turn]))
        else:
            plan = search.plan()
            search.record(plan, told.measure(plan))
    assert search.confirmed[0] == 17


@pytest.mark.parametrize(("long_steps", "confirmed"), [(1, 20), (2, 0)])
def test_one_long_step_in_a_comparison_is_no_verdict(prior, long_steps, confirmed):
    """A checkpoint falls into the first window of a table that was never tried: it is measured again. Twice is no
    chance."""
    told = Told(lambda c: 0.10 * (c[0] == 20))
    job, default = told.begin()
    search = Search(job, default, prior)
    search._race(np.array([20, 0]), closing=True)
    while search.race is not None:
        plan = search.plan()
        found = told.measure(plan)
        if plan.kind == TABLE and long_steps:
            long_steps -= 1
            found = Measured(np.array([1e3 * plan.limit_ms]), found.call_us, found.obeyed, 1, 1e3 * plan.limit_ms)
            assert math.isfinite(plan.limit_ms)
        search.record(plan, found)
    assert search.confirmed.tolist() == [confirmed, 0]

"""What is promised of the time after a verdict holds in simulation; ``envs/README.md`` has the figures in full."""

import numpy as np
from dynamiccl.agent.rules import ExpectedImprovement
from dynamiccl.envs.promises import tables_of_nothing, watch


def test_where_there_is_nothing_to_gain_hardly_a_table_is_left():
    assert tables_of_nothing(24, ExpectedImprovement(), seed=1).sum() <= 2


def test_a_small_gain_stays_in_force_and_costs_few_default_steps():
    found = watch(12, 6000, 0.99, 0.99, seed=1)
    assert np.isnan(found.dropped).all() and found.in_force.sum() >= 11
    assert np.median(found.default_share) <= 0.01


def test_a_table_that_turned_bad_is_gone_within_windows():
    found = watch(16, 4000, 0.95, 1.2, change_at=1000, seed=2)
    gone = np.fmin(found.dropped, found.reopened)
    assert np.isfinite(gone).all() and np.median(found.dropped_windows[np.isfinite(found.dropped)]) <= 2

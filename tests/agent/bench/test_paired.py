"""``paired_boards.py``: what one row says of two policies on the same jobs."""

import numpy as np
from dynamiccl.envs.bench.scores import Scores
from dynamiccl.envs.search.config import HORIZON
from paired_boards import against_default


def test_jobs_are_counted_against_the_default_with_the_time_of_their_trials():
    """A job that could gain 1 % loses that, its trials and nothing else if its default stays."""
    could_gain = np.full(4, 0.01)
    trials = np.array([-300.0, 10.0, 41.0, 0.0])  # what each took beyond the default
    n = np.zeros(4)
    scores = Scores(n, n, n, n, could_gain, HORIZON * could_gain + trials, n, n)
    assert against_default(scores) == "1/1"  # 40 steps are 0.2 % of 20,000

"""``paired_boards.py``: what one row says of two policies on the same jobs."""

import numpy as np
from dynamiccl.envs.bench.scores import HARM, Scores
from paired_boards import ends


def test_jobs_are_counted_by_the_table_that_they_end_under():
    """Before: by their loss, which takes steps that were not played for the first thousand after the last trial."""
    n, gain = np.zeros(4), np.array([0.03, 0.0, -0.01, -0.001])
    scores = Scores(n, n, n, gain, n, np.full(4, 4000.0), n, gain < -HARM)
    assert ends(scores) == "1/1"

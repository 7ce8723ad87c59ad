import numpy as np
import pytest
from dynamiccl.agent.commands.bench_overhead import compare


def test_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(1)
    inside = 0
    for seed in range(200):
        a = 100 * np.exp(0.02 * rng.standard_normal(30))
        b = 90 * np.exp(0.02 * rng.standard_normal(30))
        c = compare(a, b, seed)
        inside += c.low <= 100 / 90 <= c.high
    assert 0.88 * 200 <= inside <= 200  # the percentile bootstrap is a little narrow at n = 30


def test_refuses_what_gives_no_interval():
    with pytest.raises(ValueError, match="at least 3 pairs"):
        compare(np.ones(2), np.ones(2))

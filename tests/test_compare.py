import numpy as np
import pytest
from dynamiccl.agent.compare import compare, judge


def test_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(1)
    inside = 0
    for seed in range(200):
        a = 100 * np.exp(0.02 * rng.standard_normal(30))
        b = 90 * np.exp(0.02 * rng.standard_normal(30))
        c = compare(a, b, seed)
        inside += c.low <= 100 / 90 <= c.high
    assert 0.88 * 200 <= inside <= 200  # the percentile bootstrap is a little narrow at n = 30


def test_drift_cancels_between_neighbours():
    drift = np.linspace(100, 130, 41)  # the machine slows down by 30 % during the run
    verdict = judge(drift[0::2], 0.9 * drift[1::2])
    assert verdict.tuned.speedup == pytest.approx(1 / 0.9, rel=1e-3)
    assert verdict.same.low <= 1 <= verdict.same.high


def test_no_difference_is_not_called_faster():
    rng = np.random.default_rng(3)
    wins = sum(
        judge(*(100 * np.exp(0.03 * rng.standard_normal(n)) for n in (21, 20))).tuned.is_faster for _ in range(200)
    )
    assert wins <= 0.08 * 200


def test_refuses_what_gives_no_interval():
    with pytest.raises(ValueError, match="at least 3 pairs"):
        compare(np.ones(2), np.ones(2))
    with pytest.raises(ValueError, match="want 3 default windows"):
        judge(np.ones(2), np.ones(2))

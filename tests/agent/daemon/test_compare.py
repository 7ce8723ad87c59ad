import numpy as np
import pytest
from overhead import compare, main


def test_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(1)
    inside = 0
    for seed in range(200):
        a = 100 * np.exp(0.02 * rng.standard_normal(30))
        b = 90 * np.exp(0.02 * rng.standard_normal(30))
        c = compare(a, b, seed)
        inside += c[1] <= 100 / 90 <= c[2]
    assert 0.88 * 200 <= inside <= 200  # the percentile bootstrap is a little narrow at n = 30


def test_refuses_what_gives_no_interval(capsys):
    with pytest.raises(SystemExit) as refused:
        main(["--pairs", "2"])
    assert refused.value.code == 2 and "--pairs: must be at least 3" in capsys.readouterr().err

"""The noise of simulated steps beside that of real ones, and how it is drawn."""

import numpy as np
import pytest
from dynamiccl.envs.sim.jobs import STANDARD, draw_jobs
from dynamiccl.envs.sim.noise import NODE, SHARED, Noise, NoiseFamily, NoiseStream
from step_series import LONG, all_series, figures, simulated, spread

NODES = ("a100", "h100")
#: Standard error of a correlation over a long series.
ERROR = 0.025


def told(series):
    return [figures(one.settled) for one in series]


@pytest.fixture(scope="module")
def short():
    """Figures of the real series that the family is fitted to, and of simulated ones that are as long."""
    real = [one for one in all_series() if one.gpu in NODES and len(one.seconds) < LONG]
    lengths = np.random.default_rng(1).choice([len(one.seconds) for one in real], 600)
    return told(real), told(simulated(NODE, lengths))


def test_node_noise_is_as_wide_as_that_of_real_nodes(short):
    real, made = short
    assert len(real) >= 258
    ratio = spread(made, "sd") / spread(real, "sd")
    print("robust standard deviation, p10 / p50 / p90, %:", spread(real, "sd"), spread(made, "sd"))
    assert (np.abs(np.log(ratio)) < np.log(1.3)).all()


@pytest.mark.parametrize("lag", [1, 10])
def test_node_noise_lasts_as_long_as_that_of_real_nodes(short, lag):
    real, made = (spread(part, f"lag {lag}") for part in short)
    print(f"correlation at lag {lag}, p10 / p50 / p90:", real, made)
    assert np.abs(real - made).max() < 0.17


@pytest.mark.parametrize(("q", "most"), [(5, 1.25), (25, 1.15), (75, 1.5), (95, 2.0)])
def test_node_noise_has_the_quantiles_of_real_nodes(short, q, most):
    real, made = (spread(part, f"q{q}") for part in short)
    print(f"quantile {q} %, p10 / p50 / p90, robust standard deviations:", real, made)
    assert (np.abs(np.log(made / real)) < np.log(most)).all()


def test_node_noise_has_as_many_long_steps_as_real_nodes(short):
    real, made = (spread(part, "long") for part in short)
    print("steps longer than 1.1 times the median, p10 / p50 / p90:", real, made)
    assert made[0] == real[0] == 0 and np.abs(real - made).max() < 0.04


def test_the_long_real_series_lie_within_node_noise():
    """Of the noise that lasts for 100 steps there are two series that tell."""
    real = [one for one in all_series() if len(one.seconds) >= LONG]
    made = told(simulated(NODE, 2000, n=300))
    assert len(real) == 2
    for lag in (1, 10, 100):
        low, high = np.percentile([one[f"lag {lag}"] for one in made], [2.5, 97.5])
        for one in told(real):
            print(f"lag {lag}: {one[f'lag {lag}']:.2f}, simulated 95 %: {low:.2f} to {high:.2f}")
            assert low - ERROR <= one[f"lag {lag}"] <= high + ERROR


def test_the_noise_of_a_shared_gpu_is_the_extreme_end():
    """What one H100 that two processes shared has shown: a scatter of 6 to 14 %, a correlation of 0.55 to 0.87 at
    lag 1 and 0.2 to 0.4 at lag 10."""
    shared, node = (told(simulated(family, 500, n=200)) for family in (SHARED, NODE))
    low, middle, high = spread(shared, "sd")
    assert spread(node, "sd")[2] < low and middle > 6 and high < 14
    assert 0.55 < spread(shared, "lag 1")[1] < 0.87
    assert 0.2 < spread(shared, "lag 10")[1] < 0.4


def test_a_step_meets_the_same_noise_whoever_plays_it():
    """Windows of any length, jobs alone or beside others: step t of a job is the same."""
    jobs = np.array([3, 8])
    none = np.zeros(2), np.zeros(2)
    found = []
    for cuts in ([40], [7, 13, 20]):
        noise, stream = Noise.draw(NODE, np.random.default_rng(5), 2), NoiseStream(1, jobs, 4)
        parts = [noise.steps(np.ones(2), np.full(2, k), stream, none) for k in cuts]
        found.append(np.concatenate(parts, axis=1))
    assert (found[0] == found[1]).all()
    both = Noise.draw(NODE, np.random.default_rng(5), 2)
    alone = both.take(np.array([1]))
    steps = alone.steps(np.ones(1), np.full(1, 40), NoiseStream(1, jobs[1:], 4), (none[0][:1], none[1][:1]))
    assert steps[0] == pytest.approx(found[0][1], abs=0)


def test_a_window_longer_than_a_block_meets_the_noise_of_its_steps():
    """Before: all its steps from the end of the second block on had one number, and short windows had others there."""
    jobs, at, n_steps = np.array([3, 8]), np.array([200, 0]), np.array([700, 600])
    whole, parts = (NoiseStream(1, jobs, 4) for _ in range(2))
    long = whole.steps(at, n_steps)
    for begin in range(0, 700, 100):
        few = np.clip(n_steps - begin, 0, 100)
        short = parts.steps(at + begin, few)
        for name, numbers in vars(short).items():
            for job, n in enumerate(few):
                there = vars(long)[name][begin : begin + n, job]
                np.testing.assert_array_equal(there, numbers[:n, job])
    assert len(np.unique(long.shock[:, 0])) == 700
    np.testing.assert_array_equal(whole.calls(at + n_steps, n_steps), parts.calls(at + n_steps, n_steps))


def test_noise_without_a_lasting_part_draws_nothing_for_it():
    """Jobs of older families are what they were."""
    first, second = (np.random.default_rng(2) for _ in range(2))
    Noise.draw(NoiseFamily(), first, 5)
    Noise.draw(NoiseFamily(slow=(0.01, 0.02)), second, 5)
    assert first.random() != second.random()
    assert not Noise.draw(NoiseFamily(), first, 5).drift.size.any()


@pytest.mark.parametrize("world", ["plain", "lasting"])
def test_steps_that_nobody_measures_move_what_lasts(world):
    """Before: steps of a switch left the level, the pace and the drift where they were, so that two policies met other
    noise after their first switches."""
    jobs = draw_jobs(STANDARD.only(world), np.random.default_rng(5), 12)
    skipped = draw_jobs(STANDARD.only(world), np.random.default_rng(5), 12)
    measures, skips = (NoiseStream(3, np.arange(12), jobs.width) for _ in range(2))
    us, late = np.full(12, 1000.0), (np.zeros(12), np.zeros(12))
    for n in (7, 3, 20, 3, 3):
        steps = np.full(12, n)
        jobs.noise.steps(us, steps, measures, late)
        if n == 3:
            skipped.noise.skip(steps, skips)
        else:
            skipped.noise.steps(us, steps, skips, late)
    for name in ("level", "is_slow", "at"):
        np.testing.assert_array_equal(getattr(jobs.noise, name), getattr(skipped.noise, name))
    np.testing.assert_array_equal(jobs.noise.drift.level, skipped.noise.drift.level)

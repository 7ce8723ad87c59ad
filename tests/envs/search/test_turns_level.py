"""Comparisons by turns on real and simulated steps: how often they are wrong, and what they find."""

import numpy as np
import pytest
from dynamiccl.envs.search.comparison import level_of
from dynamiccl.envs.sim.noise import NODE
from step_series import LONG, all_series, deviations, most_of, simulated
from turns_race import one_slot, race

FEWEST, PART = 40, 400
#: Level of each comparison here: a job's first.
LEVEL = level_of(1)
NODES = ("a100", "h100")


def share(n, races):
    return f"{sum(races)} of {n} ({100 * sum(races) / n:.1f} %)"


@pytest.fixture(scope="module")
def job():
    return one_slot()


def test_the_default_seldom_beats_itself_by_turns_on_real_steps(job):
    parts = []
    for one in all_series():
        steps = one.settled
        if len(one.seconds) < LONG:
            parts.append(steps)
        else:
            parts += [steps[at : at + PART] for at in range(0, len(steps) - PART, PART)]
    adopted = [race(job, 1e3 * steps).is_adopted for steps in parts if len(steps) >= FEWEST]
    allowed = most_of(len(adopted), LEVEL / 2)
    print(f"false tables on real steps: {share(len(adopted), adopted)}, {allowed} are allowed")
    assert len(adopted) >= 190 and sum(adopted) <= allowed


@pytest.mark.slow
def test_a_gain_of_nothing_is_seldom_found_on_node_noise(job):
    races = [race(job, one.seconds) for one in simulated(NODE, 1500, 400, seed=3)]
    adopted = [one.is_adopted for one in races]
    allowed = most_of(len(races), LEVEL / 2)
    print(f"false tables on node noise: {share(len(races), adopted)}, {allowed} are allowed")
    assert sum(adopted) <= allowed


@pytest.mark.slow
@pytest.mark.parametrize("gain", [0.005, 0.02, -0.005])
def test_intervals_hold_the_true_gain_at_every_check(job, gain):
    races = [race(job, one.seconds, gain) for one in simulated(NODE, 1500, 200, seed=4)]
    missed = [one.missed for one in races]
    print(f"intervals that missed a gain of {100 * gain} %: {share(len(races), missed)}")
    assert sum(missed) <= most_of(len(races), LEVEL)


@pytest.mark.slow
@pytest.mark.parametrize("carry", [0.15, 0.3])
def test_where_a_part_carries_over_the_gain_that_is_told_is_not_too_large(job, carry):
    """Turns of one step show (1 - carry) of a gain, until there is proof of it: then turns have two steps."""
    gain = 0.02
    races = [race(job, one.seconds, gain, carry) for one in simulated(NODE, 1500, 200, seed=4)]
    bounds = [one.comparison.test.interval for one in races]
    above = [low > gain for low, _ in bounds]
    below = [high < gain for _, high in bounds]
    print(
        f"carry {carry}: intervals above the true gain {share(len(races), above)}, below {share(len(races), below)}"
    )
    assert sum(above) <= most_of(len(races), LEVEL / 2)


@pytest.mark.slow
@pytest.mark.parametrize(("gain", "least"), [(0.005, 0.4), (0.01, 0.6)])
def test_small_gains_are_found_on_median_node_noise(job, gain, least):
    """The noise of jobs like the median of A100 and H100 nodes."""
    real = [
        deviations(one.settled)[1] for one in all_series() if one.gpu in NODES and len(one.seconds) < LONG
    ]
    median = np.median(real)
    made = simulated(NODE, 1500, 3000, seed=3)
    like_it = [one for one in made if abs(np.log(deviations(one.seconds)[1] / median)) < 0.1][:200]
    found = [one.is_adopted and one.steps <= 400 for one in (race(job, s.seconds, gain) for s in like_it)]
    print(f"a gain of {100 * gain} % found within 400 steps: {share(len(found), found)}")
    assert len(found) == 200 and np.mean(found) >= least

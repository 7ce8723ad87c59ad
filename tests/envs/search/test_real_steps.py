"""The default compared with itself on real steps, by the code that judges live: every gain that it finds is false."""

import math

import numpy as np
import pytest
from dynamiccl.envs.search.comparison import Comparison, LongSteps, SequentialTest, Terms
from dynamiccl.envs.search.config import ALPHA, LEAST_PAIRS, SearchConfig
from dynamiccl.envs.search.step_times import trimmed_mean, window_noise
from step_series import LONG, all_series, most_of

RULES = SearchConfig()
PROFILE, STEPS, SWITCH = 12, RULES.window_steps[0], 2
TABLE, DEFAULT = np.array([18]), np.array([0])
TERMS = Terms(RULES.pairs, RULES.pairs_long_steps, LEAST_PAIRS, RULES.least_gain, known_gain=None)


def without_long_steps():
    """Every table ran long enough that steps which are too rare for a comparison change no verdict."""
    long_steps = LongSteps()
    long_steps.add(TABLE, np.ones(10**6), 1.0)
    return long_steps


def compared(steps):
    """What a comparison says of a table that is the default, run as in a search; None where there are too few steps."""
    noise = window_noise(np.log(steps[:PROFILE]), STEPS)
    test = SequentialTest(noise * math.sqrt(2), ALPHA)
    comparison, at = Comparison(TABLE, DEFAULT, test), PROFILE
    long_steps = without_long_steps()
    while at + 2 * (STEPS + SWITCH) <= len(steps):
        first, second = (trimmed_mean(steps[at + SWITCH + shift :][:STEPS]) for shift in (0, STEPS + SWITCH))
        at += 2 * (STEPS + SWITCH)
        # Reference and table change places from pair to pair.
        reference, table = (first, second) if test.n % 2 == 0 else (second, first)
        comparison.add_log(math.log(reference / table))
        verdict = comparison.decide(TERMS, long_steps)
        if verdict is not None:
            return verdict
    return None if test.n < LEAST_PAIRS else False


def stretches(series, n):
    """Parts of ``n`` steps of a long series."""
    steps = series.settled
    return [steps[at : at + n] for at in range(0, len(steps) - n + 1, n)]


@pytest.mark.parametrize("which", ["short", "long"])
def test_the_default_seldom_beats_itself_on_real_steps(which):
    every = all_series()
    if which == "short":
        parts = [one.settled for one in every if len(one.seconds) < LONG]
    else:
        parts = [part for one in every if len(one.seconds) >= LONG for part in stretches(one, 150)]
    said = [result for part in parts if (result := compared(part)) is not None]
    false, allowed = sum(said), most_of(len(said), ALPHA / 2)
    print(f"{which} series: {false} false tables in {len(said)} comparisons, {allowed} are allowed")
    assert len(said) >= (190 if which == "short" else 20) and false <= allowed

"""The default compared with itself on real steps, by the code that judges live: every gain that it finds is false."""

import math

import numpy as np
import pytest
from dynamiccl.envs.search.sequential import ALPHA, Race, middle, window_noise
from dynamiccl.envs.search.watch import SearchConfig
from step_series import LONG, all_series

RULES = SearchConfig()
PROFILE, STEPS, SWITCH = 12, RULES.window_steps[0], 2
#: Least pairs of a comparison that counts: with fewer no table is ever taken.
LEAST = 2


def most_of(n, level, sure=0.95):
    """So many of ``n`` at a ``level`` each are not exceeded in ``sure`` of all cases (binomial)."""
    below, k = (1 - level) ** n, 0
    total = below
    while total < sure:
        k += 1
        below *= (n - k + 1) / k * level / (1 - level)
        total += below
    return k


def race(steps):
    """What a comparison says of a table that is the default, run as in a search; None where there are too few steps."""
    noise = window_noise(np.log(steps[:PROFILE]), STEPS)
    found, at = Race(noise * math.sqrt(2)), PROFILE
    while at + 2 * (STEPS + SWITCH) <= len(steps):
        windows = [middle(steps[at + SWITCH + shift :][:STEPS]) for shift in (0, STEPS + SWITCH)]
        at += 2 * (STEPS + SWITCH)
        # Reference and table change places from pair to pair.
        found.add(*(windows if found.n % 2 == 0 else windows[::-1]))
        said = found.verdict(RULES.pairs, RULES.least_gain)
        if said is not None:
            return said
    return None if found.n < LEAST else False


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
    said = [result for part in parts if (result := race(part)) is not None]
    false, allowed = sum(said), most_of(len(said), ALPHA / 2)
    print(f"{which} series: {false} false tables in {len(said)} comparisons, {allowed} are allowed")
    assert len(said) >= (190 if which == "short" else 20) and false <= allowed

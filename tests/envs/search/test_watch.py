"""The watch by itself: when it looks at the default, what it makes of that, and which changes are none."""

import numpy as np
import pytest
from dynamiccl.envs.search.canary import Canary
from dynamiccl.envs.search.sequential import least, middle
from dynamiccl.envs.search.watch import CHANGED, HARMFUL, LONGEST, ODD, PROOF, SearchConfig, Watch


def begun(gain=0.05, steps=8, noise=0.005, windows=10, levels=()):
    watch = Watch(noise, steps, SearchConfig(), True, 0, (gain, 6), levels)
    for _ in range(windows):
        assert watch.saw(100.0, False, 0) == "" and not watch.wants_default(1)
    return watch


@pytest.mark.parametrize(("gain", "slower"), [(0.05, 1.25), (0.15, 1.4)])
def test_a_table_that_has_become_slower_than_the_default_is_looked_into_at_once_and_goes(gain, slower):
    watch = begun(gain)
    watch.saw(100.0 * slower, False, 2)
    assert watch.wants_default(3)
    assert watch.saw(100.0 * np.exp(gain), True, 4) == HARMFUL


def test_a_table_that_is_still_ahead_of_what_the_default_took_is_not_worth_a_look():
    """17 % slower than usual, but it had gained 30: the default is no better, going by what is known."""
    watch = begun(0.3)
    for _ in range(ODD - 3):
        assert watch.saw(117.0, False, 2) == "" and not watch.wants_default(3)


@pytest.mark.parametrize(("after", "found"), [(100.0, ""), (106.0, HARMFUL)])
def test_a_table_that_is_a_little_slower_is_seen_once_more_before_it_goes(after, found):
    """The job may have gone back to its quicker pace just before the default was looked at."""
    watch = begun(gain=0.01, steps=40)
    while not watch.wants_default(1):
        assert watch.saw(106.0, False, 1) == ""
    assert watch.saw(101.0, True, 2) == "" and watch.is_uneasy and not watch.wants_default(3)
    assert watch.saw(after, False, 3) == found
    assert watch.innocent == (not found)


def test_where_all_is_slower_it_is_not_the_tables_doing_and_the_next_look_costs_more():
    watch, asked = begun(), []
    for _ in range(2):
        windows = 0
        while not watch.wants_default(1):
            assert watch.saw(118.0, False, 1) == ""
            windows += 1
        asked.append(windows)
        assert watch.saw(124.0, True, 1) == ""  # as slow as the table
        assert all(watch.saw(100.0, False, 1) == "" for _ in range(3))
    assert asked == [1, 2]


def test_stragglers_are_no_fault_of_a_table():
    steps = np.array([100.0, 101.0, 99.0, 250.0, 240.0])
    assert middle(steps) > 130 and least(steps) == 100.0
    watch = begun(steps=5)
    assert watch.saw(middle(steps), False, 2, least(steps)) == "" and not watch.wants_default(3)


def visits(default_ms, until=60_000):
    """When a watch looks at a default of ``default_ms(k)`` in its visit k, beside a table of 100 ms; what it says."""
    watch, looks, now, found = begun(windows=0), [], 0, ""
    while now < until and not found:
        now += 8
        if watch.wants_default(now):
            found = watch.saw(default_ms(len(looks)), True, now)
            looks.append(now)
        else:
            watch.saw(100.0, False, now)
    return watch, looks, found


def test_scheduled_looks_become_rarer_while_nothing_speaks_against_the_table():
    watch, looks, found = visits(lambda k: 105.0)
    gaps = np.diff(looks)
    assert (
        gaps[0] > looks[0]
        and looks[0] < 1.1 * watch.early
        and gaps[-1] == pytest.approx(LONGEST * watch.base, rel=0.02)
    )
    assert len(looks) * watch.visit / 60_000 < 0.002 and found == ""
    watch.saw(99.0, True, 60_000)  # the default was quicker once: looked at again as soon as is usual
    assert watch.gap == watch.base


def test_a_table_that_gains_nothing_by_itself_is_taken_back():
    """It was confirmed with a gain of 5 %, the luckiest of many. Too little to be sure that it is slower."""
    watch, looks, found = visits(lambda k: 100.0 + 0.3 * (-1) ** k - 0.1)
    assert found == HARMFUL and len(looks) == PROOF and watch.race.interval[1] >= 0
    _, looks, found = visits(lambda k: 100.0 + 0.3 * (-1) ** k + 0.1, until=20_000)
    assert found == "" and np.diff(looks).max() < 1.1 * watch.early  # nor has it shown a gain


def test_a_pace_that_was_seen_before_is_no_change():
    watch = begun(levels=())
    found = [watch.saw(105.0, False, 2) for _ in range(ODD)]
    change = watch.change
    assert (
        CHANGED in found
        and change.moved == pytest.approx(np.log(1.05))
        and change.level == pytest.approx(np.log(105))
    )
    again = Watch(0.005, 8, SearchConfig(), True, 0, (0.05, 6), change.levels)
    for ms in (105.0, 100.0, 105.0, 100.0):
        assert all(again.saw(ms, False, 1) == "" for _ in range(20))
    assert CHANGED in [again.saw(112.0, False, 1) for _ in range(ODD)]


def test_a_regime_that_comes_back_and_whose_table_does_not_do_what_it_did_is_searched_anew():
    watch = Watch(0.004, 8, SearchConfig(), True, 0, (0.1, 6))
    watch.begin_with(100.0)
    assert watch.saw(98.0, False, 1) == CHANGED and watch.change.is_other
    watch = Watch(0.004, 8, SearchConfig(), True, 0, (0.1, 6))
    watch.begin_with(100.0)
    assert watch.saw(91.0, False, 1) == ""


class Risks:
    """How likely all configs of each slot are to make a step far too long."""

    def __init__(self, *likely):
        self.likely = likely

    def too_long(self, slot, times):
        return np.full(4, self.likely[slot])


def test_a_config_that_struck_twice_is_guilty():
    canary, tried = Canary((1, 4)), np.zeros((1, 4))
    assert [canary.struck(np.array([2]), tried, Risks(0.1)) for _ in range(2)] == [False, True]
    tried[0, 2] = 1  # it was measured since
    assert not canary.struck(np.array([2]), tried, Risks(0.1)) and not canary.risk(0, Risks(0.1), tried)[2]


def test_two_new_configs_share_the_blame():
    canary, tried, risks = Canary((2, 4)), np.zeros((2, 4)), Risks(0.3, 0.1)
    assert [canary.struck(np.array([2, 3]), tried, risks) for _ in range(2)] == [False, True]
    np.testing.assert_allclose(canary.blame, [[0, 0, 1.5, 0], [0, 0, 0, 0.5]], rtol=1e-4)
    assert [canary.risk(slot, risks, tried)[slot + 2] for slot in (0, 1)] == [1.0, 0.1]

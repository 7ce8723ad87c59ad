"""The watch by itself: when it looks at the default, what it makes of that, and which changes are none."""

import numpy as np
import pytest
from dynamiccl.envs.search.comparison import Comparison, SequentialTest
from dynamiccl.envs.search.config import LONGEST, ODD, PROOF, WATCH_ALPHA, SearchConfig
from dynamiccl.envs.search.monitor import CHANGED, HARMFUL, Watch
from dynamiccl.envs.search.step_times import shortest_counted, trimmed_mean


def watch_of(noise=0.005, steps=8, known=(0.0, 0), levels=()):
    table, default = np.array([18]), np.array([0])
    scheduled = Comparison(table, default, SequentialTest(noise * np.sqrt(2), WATCH_ALPHA))
    return Watch(scheduled, noise, steps, SearchConfig(), 0, known, levels)


def begun(gain=0.05, steps=8, noise=0.005, windows=10, levels=()):
    watch = watch_of(noise, steps, (gain, 6), levels)
    for _ in range(windows):
        assert watch.saw_table(100.0) == "" and not watch.wants_default(1)
    return watch


@pytest.mark.parametrize(("gain", "slower"), [(0.05, 1.25), (0.15, 1.4)])
def test_a_table_that_has_become_slower_than_the_default_is_looked_into_at_once_and_goes(gain, slower):
    watch = begun(gain)
    watch.saw_table(100.0 * slower)
    assert watch.wants_default(3)
    assert watch.saw_default(100.0 * np.exp(gain), 4) == HARMFUL


def test_a_table_that_is_still_ahead_of_what_the_default_took_is_not_worth_a_look():
    """17 % slower than usual, but it had gained 30: the default is no better, going by what is known."""
    watch = begun(0.3)
    for _ in range(ODD - 3):
        assert watch.saw_table(117.0) == "" and not watch.wants_default(3)


@pytest.mark.parametrize(("after", "found"), [(100.0, ""), (106.0, HARMFUL)])
def test_a_table_that_is_a_little_slower_is_seen_once_more_before_it_goes(after, found):
    """The job may have gone back to its quicker pace just before the default was looked at."""
    watch = begun(gain=0.01, steps=40)
    while not watch.wants_default(1):
        assert watch.saw_table(106.0) == ""
    assert watch.saw_default(101.0, 2) == "" and watch.is_uneasy and not watch.wants_default(3)
    assert watch.saw_table(after) == found
    assert watch.survived == (not found)


def test_where_all_is_slower_it_is_not_the_tables_doing_and_the_next_look_costs_more():
    watch, asked = begun(), []
    for _ in range(2):
        windows = 0
        while not watch.wants_default(1):
            assert watch.saw_table(118.0) == ""
            windows += 1
        asked.append(windows)
        assert watch.saw_default(124.0, 1) == ""  # as slow as the table
        assert all(watch.saw_table(100.0) == "" for _ in range(3))
    assert asked == [1, 2]


def test_stragglers_are_no_fault_of_a_table():
    steps = np.array([100.0, 101.0, 99.0, 250.0, 240.0])
    assert trimmed_mean(steps) > 130 and shortest_counted(steps) == 100.0
    watch = begun(steps=5)
    found = watch.saw_table(trimmed_mean(steps), shortest_counted(steps))
    assert found == "" and not watch.wants_default(3)


def visits(default_ms, until=60_000):
    """When a watch looks at a default of ``default_ms(k)`` in its visit k, beside a table of 100 ms; what it says."""
    watch, looks, now, found = begun(windows=0), [], 0, ""
    while now < until and not found:
        now += 8
        if watch.wants_default(now):
            found = watch.saw_default(default_ms(len(looks)), now)
            looks.append(now)
        else:
            watch.saw_table(100.0)
    return watch, looks, found


def test_scheduled_looks_become_rarer_while_nothing_speaks_against_the_table():
    watch, looks, found = visits(lambda k: 105.0)
    gaps = np.diff(looks)
    assert (
        gaps[0] > looks[0]
        and looks[0] < 1.1 * watch.schedule.early
        and gaps[-1] == pytest.approx(LONGEST * watch.schedule.usual, rel=0.02)
    )
    assert len(looks) * watch.visit_steps / 60_000 < 0.002 and found == ""
    watch.saw_default(99.0, 60_000)  # the default was quicker once: looked at again as soon as is usual
    assert watch.schedule.gap == watch.schedule.usual


def test_a_table_that_gains_nothing_by_itself_is_taken_back():
    """It was confirmed with a gain of 5 %, the luckiest of many. Too little to be sure that it is slower."""
    watch, looks, found = visits(lambda k: 100.0 + 0.3 * (-1) ** k - 0.1)
    assert found == HARMFUL and len(looks) == PROOF and watch.scheduled.test.interval[1] >= 0
    _, looks, found = visits(lambda k: 100.0 + 0.3 * (-1) ** k + 0.1, until=20_000)
    assert found == "" and np.diff(looks).max() < 1.1 * watch.schedule.early  # nor has it shown a gain


def test_a_pace_that_was_seen_before_is_no_change():
    watch = begun(levels=())
    found = [watch.saw_table(105.0) for _ in range(ODD)]
    change = watch.change
    assert (
        CHANGED in found
        and change.moved == pytest.approx(np.log(1.05))
        and change.level == pytest.approx(np.log(105))
    )
    again = watch_of(0.005, 8, (0.05, 6), change.levels)
    for ms in (105.0, 100.0, 105.0, 100.0):
        assert all(again.saw_table(ms) == "" for _ in range(20))
    assert CHANGED in [again.saw_table(112.0) for _ in range(ODD)]


def test_a_regime_that_comes_back_and_whose_table_does_not_do_what_it_did_is_searched_anew():
    watch = watch_of(0.004, 8, (0.1, 6))
    watch.begin_with(100.0)
    assert watch.saw_table(98.0) == CHANGED and watch.change.is_other
    watch = watch_of(0.004, 8, (0.1, 6))
    watch.begin_with(100.0)
    assert watch.saw_table(91.0) == ""


def test_the_first_window_of_a_regime_that_came_back_is_a_pair_of_windows_also_where_tables_take_turns():
    """Before: judged by the noise of turns, a window that was slow by chance alone dropped a good table."""
    watch = watch_of(0.03, 10, (0.05, 40))
    test = SequentialTest(0.003, WATCH_ALPHA, quads_a_pair=1.0)
    watch.scheduled = Comparison(watch.scheduled.table, watch.scheduled.reference, test)
    watch.begin_with(100.0)
    assert watch.saw_table(109.0) == ""
    watch.begin_with(100.0)
    assert watch.saw_table(200.0) == HARMFUL

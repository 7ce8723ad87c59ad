"""The watch by itself: when it looks at the default, what it makes of that, and which changes are none."""

import numpy as np
import pytest
from dynamiccl.envs.search.comparison import Comparison, SequentialTest
from dynamiccl.envs.search.config import LONGEST, ODD, PROOF, WATCH_ALPHA, WATCH_KNOWN, SearchConfig
from dynamiccl.envs.search.monitor import CHANGED, HARMFUL, Watch
from dynamiccl.envs.search.step_times import shortest_counted, trimmed_mean

#: Of a look at the default: its steps, and the standard deviation of what it shows.
VISIT, QUAD_NOISE = 16, 0.004


def watch_of(noise=0.005, steps=8, known=(0.0, 0), levels=()):
    table, default = np.array([18]), np.array([0])
    scheduled = Comparison(table, default, SequentialTest(QUAD_NOISE, WATCH_ALPHA, known=WATCH_KNOWN))
    return Watch(scheduled, noise, steps, SearchConfig(), 0, VISIT, known, levels)


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
    assert watch.saw_turns(gain - np.log(slower), QUAD_NOISE, 4) == HARMFUL


def test_a_table_that_is_still_ahead_of_what_the_default_took_is_not_worth_a_look():
    """17 % slower than usual, but it had gained 30: the default is no better, going by what is known."""
    watch = begun(0.3)
    for _ in range(ODD - 3):
        assert watch.saw_table(117.0) == "" and not watch.wants_default(3)


def test_where_all_is_slower_it_is_not_the_tables_doing_and_the_next_look_costs_more():
    watch, asked = begun(), []
    for _ in range(2):
        windows = 0
        while not watch.wants_default(1):
            assert watch.saw_table(118.0) == ""
            windows += 1
        asked.append(windows)
        assert watch.saw_turns(0.05, QUAD_NOISE, 1) == ""  # it gains what it did
        assert all(watch.saw_table(100.0) == "" for _ in range(3))
    assert asked == [1, 2]


def test_stragglers_are_no_fault_of_a_table():
    steps = np.array([100.0, 101.0, 99.0, 250.0, 240.0])
    assert trimmed_mean(steps) > 130 and shortest_counted(steps) == 100.0
    watch = begun(steps=5)
    found = watch.saw_table(trimmed_mean(steps), shortest_counted(steps))
    assert found == "" and not watch.wants_default(3)


def visits(gain, until=60_000):
    """When a watch looks at the default, beside which the table gains ``gain(k)`` (log) in visit k; what it says."""
    watch, looks, now, found = begun(windows=0), [], 0, ""
    while now < until and not found:
        now += 8
        if watch.wants_default(now):
            found = watch.saw_turns(gain(len(looks)), QUAD_NOISE, now)
            looks.append(now)
        else:
            watch.saw_table(100.0)
    return watch, looks, found


def test_scheduled_looks_become_rarer_while_nothing_speaks_against_the_table():
    watch, looks, found = visits(lambda k: 0.05)
    gaps = np.diff(looks)
    assert (
        gaps[0] > looks[0]
        and looks[0] < 1.1 * watch.schedule.early
        and gaps[-1] == pytest.approx(LONGEST * watch.schedule.usual, rel=0.02)
    )
    assert len(looks) * watch.visit_steps / 60_000 < 0.002 and found == ""
    watch.saw_turns(
        -0.01, QUAD_NOISE, 60_000
    )  # the default was quicker once: looked at again as soon as is usual
    assert watch.schedule.gap == watch.schedule.usual


def test_a_table_that_gains_nothing_by_itself_is_taken_back():
    """It was confirmed with a gain of 5 %, the luckiest of many. Too little to be sure that it is slower."""
    watch, looks, found = visits(lambda k: 0.003 * (-1) ** k - 0.001)
    assert found == HARMFUL and watch.scheduled.test.interval[1] >= 0
    assert len(looks) == PROOF + 1, "the last one was out of turn, to be sure"
    _, looks, found = visits(lambda k: 0.003 * (-1) ** k + 0.001, until=12_000)
    assert found == "" and np.diff(looks).max() < 1.1 * watch.schedule.early  # nor has it shown a gain


def test_a_pace_that_was_seen_before_is_no_change():
    """Without a table: where there is one, turns tell whether the change matters."""
    watch = begun()
    found = [watch.saw_table(105.0) for _ in range(ODD)]
    assert found == [""] * ODD and watch.wants_default(1)
    default = Comparison(
        np.array([0]), np.array([0]), SequentialTest(QUAD_NOISE, WATCH_ALPHA, known=WATCH_KNOWN)
    )
    watch = Watch(default, 0.005, 8, SearchConfig(), 0, VISIT)
    assert all(watch.saw_table(100.0) == "" for _ in range(10))
    found = [watch.saw_table(105.0) for _ in range(ODD)]
    change = watch.change
    assert CHANGED in found and change.moved == pytest.approx(np.log(1.05))
    assert change.level == pytest.approx(np.log(105))
    again = Watch(default, 0.005, 8, SearchConfig(), 0, VISIT, levels=change.levels)
    for ms in (105.0, 100.0, 105.0, 100.0):
        assert all(again.saw_table(ms) == "" for _ in range(20))
    assert CHANGED in [again.saw_table(112.0) for _ in range(ODD)]


@pytest.mark.parametrize(("gain", "found"), [(0.1, ""), (0.02, CHANGED), (-0.05, HARMFUL)])
def test_a_look_out_of_turn_says_whether_the_table_does_what_it_did(gain, found):
    watch = watch_of(0.004, 8, (0.1, 6))
    watch.schedule.is_due = True
    assert watch.saw_turns(gain, QUAD_NOISE, 0) == found and watch.change.is_other == (found == CHANGED)


def test_longer_turns_make_looks_rarer_and_they_begin_anew():
    watch = begun()
    assert watch.saw_turns(0.05, QUAD_NOISE, 1) == ""
    usual, price = watch.schedule.usual, watch.price
    scheduled = Comparison(
        np.array([18]), np.array([0]), SequentialTest(0.001, WATCH_ALPHA, known=WATCH_KNOWN)
    )
    watch.lengthen(scheduled, 8 * VISIT)
    assert watch.scheduled is scheduled and watch.schedule.usual == 8 * usual and watch.price > price


def test_visits_to_the_default_that_the_table_survives_have_a_price_at_any_number():
    """Before: "int too large to convert to float" at the 1,024th, and the tuner ended."""
    watch = begun()
    for _ in range(2_000):
        watch._survives()
    assert 0 < watch.price < np.inf

"""The monitor by itself: when it looks at the default, what it makes of that, and which changes are none."""

import numpy as np
import pytest
from dynamiccl.envs.search.belief.prior import Prior
from dynamiccl.envs.search.comparison import Comparison, SequentialTest
from dynamiccl.envs.search.config import LONG_TURN_STEPS, LONGEST, ODD, PROOF, SearchConfig
from dynamiccl.envs.search.monitor import Monitor
from dynamiccl.envs.search.state import State
from dynamiccl.envs.search.step_times import shortest_counted, trimmed_mean
from told_job import Told

#: Of a look at the default: its quads, its default steps, and the standard deviation of what it shows.
QUADS, VISIT, QUAD_NOISE = 8, 16, 0.004


def monitor_of(
    gain=0.0, looks=0, table=18, levels=(), noise=0.005, steps=8, quads=QUADS, quad_noise=QUAD_NOISE
):
    """Of a table that was adopted for its ``gain`` (log) in so many quads as ``looks``. ``noise``: of so many steps as
    ``steps``; ``quad_noise``: of so many quads as ``quads``, which is a look."""
    job, default = Told(lambda c: 0.0).begin()
    state = State(job, SearchConfig(), Prior.load(), lambda configs: None)
    configs, none = np.array([table, 0]), np.zeros(2, np.int64)
    state.begin(default, none)
    state.noise.window_steps, state.noise.of_window = steps, noise
    state.noise.quads, state.noise._quad = quads, quad_noise * np.sqrt(quads)
    adopted = Comparison(configs, none, SequentialTest(quad_noise, 0.05, [gain] * looks))
    state.current.set(configs, [adopted] if looks else [])
    monitor = Monitor(state, list(levels))
    assert monitor.gain == pytest.approx(gain) and monitor.looks == looks
    return monitor


def saw(monitor, ms, least_ms=None):
    """What steps of the table show that took so long."""
    return monitor.saw_table(ms, least_ms or ms)


def begun(gain=0.05, windows=10, **more):
    monitor = monitor_of(gain, 6, **more)
    for _ in range(windows):
        assert saw(monitor, 100.0) is None and not monitor.wants_default
    return monitor


@pytest.mark.parametrize(("gain", "slower"), [(0.05, 1.25), (0.15, 1.4)])
def test_a_table_that_has_become_slower_than_the_default_is_looked_into_at_once_and_goes(gain, slower):
    monitor = begun(gain)
    saw(monitor, 100.0 * slower)
    assert monitor.wants_default
    change = monitor.saw_turns(gain - np.log(slower), QUAD_NOISE)
    assert change.is_harmful and not change.before.any()


def test_a_table_that_is_still_ahead_of_what_the_default_took_is_not_worth_a_look():
    """17 % slower than usual, but it had gained 30: the default is no better, going by what is known."""
    monitor = begun(0.3)
    for _ in range(ODD - 3):
        assert saw(monitor, 117.0) is None and not monitor.wants_default


def test_where_all_is_slower_it_is_not_the_tables_doing_and_the_next_look_costs_more():
    monitor, asked = begun(), []
    for _ in range(2):
        windows = 0
        while not monitor.wants_default:
            assert saw(monitor, 118.0) is None
            windows += 1
        asked.append(windows)
        assert monitor.saw_turns(0.05, QUAD_NOISE) is None  # it gains what it did
        assert all(saw(monitor, 100.0) is None for _ in range(3))
    assert asked == [1, 2]


def test_stragglers_are_no_fault_of_a_table():
    steps = np.array([100.0, 101.0, 99.0, 250.0, 240.0])
    assert trimmed_mean(steps) > 130 and shortest_counted(steps) == 100.0
    monitor = begun(steps=5)
    found = saw(monitor, trimmed_mean(steps), shortest_counted(steps))
    assert found is None and not monitor.wants_default


def visits(gain, until=60_000):
    """When a monitor looks at the default, beside which the table gains ``gain(k)`` (log) in visit k; what it says."""
    monitor, looks, found = begun(windows=0), [], None
    account = monitor._state.account
    while account.steps < until and found is None:
        account.steps += 8
        if monitor.wants_default:
            found = monitor.saw_turns(gain(len(looks)), QUAD_NOISE)
            looks.append(account.steps)
        else:
            saw(monitor, 100.0)
    return monitor, looks, found


def test_scheduled_looks_become_rarer_while_nothing_speaks_against_the_table():
    monitor, looks, found = visits(lambda k: 0.05)
    gaps, schedule = np.diff(looks), monitor.schedule
    assert schedule.visit_steps == VISIT
    assert gaps[0] > looks[0] and looks[0] < 1.1 * schedule.early
    assert gaps[-1] == pytest.approx(LONGEST * schedule.usual, rel=0.02)
    assert len(looks) * VISIT / 60_000 < 0.002 and found is None
    monitor.saw_turns(-0.01, QUAD_NOISE)  # the default was quicker once: looked at again as soon as is usual
    assert schedule.gap == schedule.usual


def test_a_table_that_gains_nothing_by_itself_is_taken_back():
    """It was confirmed with a gain of 5 %, the luckiest of many. Too little to be sure that it is slower."""
    monitor, looks, found = visits(lambda k: 0.003 * (-1) ** k - 0.001)
    assert found.is_harmful and monitor.scheduled.test.interval[1] >= 0
    assert len(looks) == PROOF + 1, "the last one was out of turn, to be sure"
    monitor, looks, found = visits(lambda k: 0.003 * (-1) ** k + 0.001, until=12_000)
    assert found is None and np.diff(looks).max() < 1.1 * monitor.schedule.early  # nor has it shown a gain


def test_a_pace_that_was_seen_before_is_no_change():
    """Without a table: where there is one, turns tell whether the change matters."""
    monitor = begun()
    assert all(saw(monitor, 105.0) is None for _ in range(ODD)) and monitor.wants_default
    monitor = monitor_of(table=0)
    assert all(saw(monitor, 100.0) is None for _ in range(10))
    *_, change = filter(None, [saw(monitor, 105.0) for _ in range(ODD)])
    assert not change.is_harmful
    again = monitor_of(table=0, levels=monitor.level.levels)
    for ms in (105.0, 100.0, 105.0, 100.0):
        assert all(saw(again, ms) is None for _ in range(20))
    assert any(saw(again, 112.0) for _ in range(ODD))


@pytest.mark.parametrize(("gain", "found"), [(0.1, ""), (0.02, "gains less"), (-0.05, "is harmful")])
def test_a_look_out_of_turn_says_whether_the_table_does_what_it_did(gain, found):
    monitor = monitor_of(0.1, 6, noise=0.004)
    monitor.schedule.is_due = True
    change = monitor.saw_turns(gain, QUAD_NOISE)
    assert (change is not None) == bool(found)
    if change is not None:
        assert change.is_harmful == (found == "is harmful")
        assert change.before.any() != change.is_harmful, "what is slower than the default is not tried again"


def test_longer_turns_make_looks_rarer_and_they_begin_anew():
    monitor = begun()
    assert monitor.saw_turns(0.05, QUAD_NOISE) is None and monitor.scheduled.test.n == 1
    usual, price = monitor.schedule.usual, monitor.price
    monitor._state.turns.steps = LONG_TURN_STEPS
    monitor.saw_current(np.full(8, 100.0))
    assert monitor.scheduled.test.n == 0 and monitor.price > price
    assert monitor.schedule.usual == pytest.approx(LONG_TURN_STEPS * usual)


def test_visits_to_the_default_that_the_table_survives_have_a_price_at_any_number():
    """Before: "int too large to convert to float" at the 1,024th, and the tuner ended."""
    monitor = begun()
    for _ in range(2_000):
        monitor.schedule.is_due = True
        assert monitor.saw_turns(0.05, QUAD_NOISE) is None
    assert 0 < monitor.price < np.inf and monitor.survived > 10

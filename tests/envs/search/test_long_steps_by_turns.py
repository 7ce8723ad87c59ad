"""Long steps of the job's own, such as checkpoints, in measurements of a quad or two, where one is much of what was
seen."""

import numpy as np
import pytest
from dynamiccl.envs.search.belief.prior import Prior
from dynamiccl.envs.search.config import CHECK_QUADS, PROOF, SearchConfig
from dynamiccl.envs.search.interfaces import QUAD, TRIAL
from dynamiccl.envs.search.loop import Trial
from dynamiccl.envs.search.step_times import NoiseEstimate
from test_monitor import monitor_of
from told_job import Told, run

#: Of a visit of one quad: steps of the current table, and of the default.
OF_TABLE, OF_DEFAULT = 0, 1


@pytest.fixture
def tuned():
    """A job whose table gains 5 %, and its search, which only watches."""
    told = Told(lambda c: 0.05 * (c[0] == 20), noise=0.002)
    search, _ = run(told, Prior.load())
    assert search.confirmed[0] == 20 and search.state.noise.quads == 1
    search.loop.trial, search.loop.is_done = None, True
    return told, search


def visit(told, search, *long):
    """Look at the default, in a measurement with these long steps; its plan."""
    if not search.loop.monitor.wants_default:
        search.loop.monitor.look_at_default()
    plan = search.plan()
    assert plan.turns and not plan.configs.any()
    told.long = long
    search.record(plan, told.measure(plan))
    return plan


@pytest.mark.parametrize(
    ("ms", "usual"),
    [([100, 300], 100), ([100, 100, 100, 2000], 100), ([100] * 5 + [300], 100), ([100, 101], 100.5)],
)
def test_the_usual_step_of_a_few_is_none_of_the_long_ones(ms, usual):
    noise = NoiseEstimate()
    noise.begin(100.0 * np.exp(0.01 * np.array([1, -1, 1, -1, -1, 1, -1, 1])), SearchConfig())
    assert noise.usual_ms(np.array(ms, float)) == pytest.approx(usual)
    noise.begin(
        np.array([100.0, 300, 100, 100, 300, 100, 100, 300]), SearchConfig()
    )  # its steps look noisy so far
    assert noise.usual_ms(np.array(ms, float)) == pytest.approx(usual)


@pytest.mark.parametrize("which", [OF_TABLE, OF_DEFAULT])
def test_a_long_step_counts_under_either_table(tuned, which):
    """Before: nothing, as it was measured against the mean of two steps, of which it was one. So the job's own long
    steps were charged to the table, which is also seen in windows, and not to the default."""
    told, search = tuned
    none = np.zeros(2, np.int64)
    seen, table = search.loop.monitor._long_steps, search.confirmed.copy()
    visit(told, search, which)
    excess = {OF_TABLE: seen._of(table)[1], OF_DEFAULT: seen._of(none)[1]}
    assert excess.pop(which) == pytest.approx(2.0, abs=0.1)
    assert excess.popitem()[1] == pytest.approx(0.0, abs=0.1)


def test_one_long_step_in_a_visit_drops_no_table(tuned):
    """Before: the table was dropped at once. Now the default is looked at once more, with more quads."""
    told, search = tuned
    monitor = search.loop.monitor
    gain = monitor.gain
    assert visit(told, search, OF_TABLE).n_steps == QUAD
    assert search.marks.dropped == 0 and monitor.wants_default and monitor.gain == gain
    assert visit(told, search, OF_TABLE).n_steps == CHECK_QUADS[0] * QUAD
    assert search.marks.dropped == 0 and search.confirmed[0] == 20
    assert monitor.gain == pytest.approx(gain, abs=0.01) and not monitor.wants_default


def test_a_table_that_is_slower_is_dropped_by_the_second_visit(tuned):
    told, search = tuned
    told.saving = lambda c: -0.2 * (c[0] == 20)
    visit(told, search)
    visit(told, search)
    assert search.marks.dropped == 1 and not search.confirmed.any()


def test_visits_that_show_no_gain_are_not_believed_because_of_the_last_one():
    """Before: one long step after five visits with a small gain made their mean negative."""
    monitor = monitor_of(0.015, 300, quads=1, quad_noise=0.08)
    test = monitor.scheduled.test
    for _ in range(PROOF - 1):
        assert monitor.saw_turns(0.015, 0.08) is None
    assert monitor.saw_turns(-0.53, 0.08) is None and monitor.wants_default and test.n == PROOF - 1
    assert monitor.saw_turns(0.015, 0.04) is None and not monitor.wants_default and test.n == PROOF
    for log_ratio in (-0.53, -0.53):
        found = monitor.saw_turns(log_ratio, 0.04)
    assert found.is_harmful


def test_a_long_step_beside_a_trial_is_no_level_of_the_job(tuned):
    """Before: the mean of it and another step was: the default was looked at out of turn, and then that was usual."""
    told, search = tuned
    loop = search.loop
    loop.is_done, monitor = False, loop.monitor
    long_steps = [(), (), (), (), (OF_TABLE,)]
    tables = [(18, 0), (16, 0), (8, 0), (20, 18), (20, 16)]  # each has a first measurement, of one quad
    for table, long in zip(tables, long_steps, strict=True):
        loop.trial = Trial(TRIAL, np.array(table))
        while search.plan().kind != TRIAL:
            search.record(plan := search.plan(), told.measure(plan))
        told.long = long
        plan = search.plan()
        assert plan.n_steps == QUAD
        search.record(plan, told.measure(plan))
    assert monitor.level.is_known and monitor.is_calm
    assert search.state.default_ms_now == pytest.approx(100.0, rel=0.02)

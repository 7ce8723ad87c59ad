"""Long steps of the job's own, such as checkpoints, in measurements of a quad or two, where one is much of what was
seen."""

import numpy as np
import pytest
from dynamiccl.envs.search.belief.prior import Prior
from dynamiccl.envs.search.comparison import Comparison, SequentialTest
from dynamiccl.envs.search.config import (
    CHECK_QUADS,
    PROOF,
    WATCH_ALPHA,
    WATCH_KNOWN,
    WATCH_TUNED_FOR,
    SearchConfig,
)
from dynamiccl.envs.search.interfaces import QUAD, TRIAL
from dynamiccl.envs.search.monitor import HARMFUL, Monitor, Watch
from dynamiccl.envs.search.refine import Refine
from dynamiccl.envs.search.step_times import NoiseEstimate
from told_job import Told, run

#: Of a visit of one quad: steps of the current table, and of the default.
OF_TABLE, OF_DEFAULT = 0, 1


@pytest.fixture
def tuned():
    """A job whose table gains 5 %, and its search, which only watches."""
    told = Told(lambda c: 0.05 * (c[0] == 20), noise=0.002)
    search, _ = run(told, Prior.load())
    assert search.confirmed[0] == 20 and search.state.noise.quads == 1
    search.phase = Monitor(search.state, search.confirmed)
    return told, search


def visit(told, search, *long):
    """Look at the default, in a measurement with these long steps; its plan."""
    if not search.phase.wants_default:
        search.phase.look_at_default()
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
    seen, table = search.phase._long_steps, search.confirmed.copy()
    visit(told, search, which)
    excess = {OF_TABLE: seen._of(table)[1], OF_DEFAULT: seen._of(none)[1]}
    assert excess.pop(which) == pytest.approx(2.0, abs=0.1)
    assert excess.popitem()[1] == pytest.approx(0.0, abs=0.1)


def test_one_long_step_in_a_visit_drops_no_table(tuned):
    """Before: the table was dropped at once. Now the default is looked at once more, with more quads."""
    told, search = tuned
    watch = search.phase.watch
    gain = watch.gain
    assert visit(told, search, OF_TABLE).n_steps == QUAD
    assert search.marks.dropped == 0 and watch.wants_default(search.steps) and watch.gain == gain
    assert visit(told, search, OF_TABLE).n_steps == CHECK_QUADS[0] * QUAD
    assert search.marks.dropped == 0 and search.confirmed[0] == 20
    assert watch.gain == pytest.approx(gain, abs=0.01) and not watch.wants_default(search.steps)


def test_a_table_that_is_slower_is_dropped_by_the_second_visit(tuned):
    told, search = tuned
    told.saving = lambda c: -0.2 * (c[0] == 20)
    visit(told, search)
    visit(told, search)
    assert search.marks.dropped == 1 and not search.confirmed.any()


def test_visits_that_show_no_gain_are_not_believed_because_of_the_last_one():
    """Before: one long step after five visits with a small gain made their mean negative."""
    test = SequentialTest(0.08, WATCH_ALPHA, tuned_for=WATCH_TUNED_FOR, known=WATCH_KNOWN)
    watch = Watch(
        Comparison(np.array([18]), np.array([0]), test), 0.005, 8, SearchConfig(), 0, 2, (0.015, 300)
    )
    now = 0
    for _ in range(PROOF - 1):
        assert watch.saw_turns(0.015, 0.08, now) == ""
    assert watch.saw_turns(-0.53, 0.08, now) == "" and watch.wants_default(now) and test.n == PROOF - 1
    assert watch.saw_turns(0.015, 0.04, now) == "" and not watch.wants_default(now) and test.n == PROOF
    for log_ratio in (-0.53, -0.53):
        found = watch.saw_turns(log_ratio, 0.04, now)
    assert found == HARMFUL


def test_a_long_step_beside_a_trial_is_no_level_of_the_job(tuned):
    """Before: the mean of it and another step was: the default was looked at out of turn, and then that was usual."""
    told, search = tuned
    search.phase = refine = Refine(search.state, 10, search.confirmed)
    watch = refine._monitor.watch
    long_steps = [(), (), (), (), (OF_TABLE,)]
    tables = [(18, 0), (16, 0), (8, 0), (20, 18), (20, 16)]  # each has a first measurement, of one quad
    for table, long in zip(tables, long_steps, strict=True):
        refine.trial = np.array(table)
        while search.plan().kind != TRIAL:
            search.record(plan := search.plan(), told.measure(plan))
        told.long = long
        plan = search.plan()
        assert plan.n_steps == QUAD
        search.record(plan, told.measure(plan))
    assert watch.level.is_known and not watch.is_uneasy
    assert search.state.default_ms_now == pytest.approx(100.0, rel=0.02)

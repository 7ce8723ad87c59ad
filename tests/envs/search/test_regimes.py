"""Regimes that come and go have tables of their own, found again when they return."""

from dataclasses import replace
from itertools import cycle, pairwise

import numpy as np
import pytest
from dynamiccl.agent.daemon.tuner import Tuner
from dynamiccl.agent.policies.choosing import make_chooser
from dynamiccl.envs.live.windows import LiveWindows
from dynamiccl.envs.search.belief.prior import Prior
from dynamiccl.envs.search.change import Regime, Regimes
from dynamiccl.envs.search.comparison import ADOPTED, Comparison, SequentialTest, level_of
from dynamiccl.envs.search.config import MOST_REGIMES
from dynamiccl.envs.search.interfaces import LEAVE, RUN, actions_of
from dynamiccl.envs.search.search import Search
from dynamiccl.traces.records import AUTO, Decision
from fake_job import SCATTER, STEP_MS, FakeJob
from told_job import OPEN, Told, go_until, good, run


@pytest.fixture(scope="module")
def prior():
    return Prior.load()


class Batches(Told):
    """A job of two batch sizes: the larger computes for longer, and what is good in the one costs in the other."""

    def be(self, name):
        self.scale = {"small": 1.0, "large": 1.6}[name]
        sign = {"small": 1, "large": -1}[name]
        self.saving = lambda c: sign * (0.10 * (c[0] == 20) - 0.08 * (c[0] == 18) + 0.02 * (c[1] == 18))


class Restless:
    """Tries another of the open configs at each turn."""

    def __init__(self):
        self.configs = cycle(OPEN)

    def predict(self, *_):
        return actions_of([next(self.configs)], RUN), None


def begun(prior, seed=0):
    told = Batches(None, noise=0.004, seed=seed)
    told.be("small")
    search = Search(*told.begin(), prior)
    go_until(search, told, lambda s: s.is_done)
    assert search.confirmed[0] == 20
    return told, search


def test_a_regime_that_returns_has_its_table_at_once_and_a_new_one_is_searched(prior):
    told, search = begun(prior)
    tables, took = {"small": search.confirmed.tolist()}, []
    for name in ("large", "small", "large", "small"):
        go_until(search, told, lambda s, at=search.steps + 300: s.steps > at)
        told.be(name)
        before = search.marks.reopened
        took.append(go_until(search, told, lambda s, n=before: s.marks.reopened > n and s.is_done))
        assert search.confirmed.tolist() == tables.setdefault(name, search.confirmed.tolist())
        assert search.marks.reopened == len(took) and search.marks.returned == len(took) - 1
    assert tables["large"][0] == 18 and tables["small"] != tables["large"]
    # In the one that was new there was a search; where one returned, the windows that saw it and the default's.
    assert max(took[1:]) < 0.7 * took[0] and max(took[1:]) < 100
    go_until(search, told, lambda s, at=search.steps + 500: s.steps > at)
    assert search.confirmed.any() and search.gain[0] > 0.05


def test_trials_that_a_change_cut_short_go_on_in_the_regime_that_returned(prior):
    told, search = begun(prior)
    go_until(search, told, lambda s, at=search.steps + 300: s.steps > at)
    told.be("large")
    go_until(search, told, lambda s: s.marks.reopened == 1 and s.is_over)
    # Of 16 seeds the return is not seen in 7 after 40 steps here, in 1 after 300.
    go_until(search, told, lambda s, at=search.steps + 300: s.steps > at, policy=Restless())
    left = search.trials_left
    assert search.is_over and not search.is_done and left > 0
    told.be("small")
    go_until(search, told, lambda s: s.marks.returned == 1, policy=Restless())
    assert search.confirmed[0] == 20 and search.is_over and not search.is_done
    assert not search.loop._compared, "what was seen of a trial in the other regime counts for nothing here"
    assert 0 < search.trials_left <= left  # they go on, and are no more: paces may come and go for good
    go_until(search, told, lambda s: s.is_done)
    assert search.confirmed[0] == 20 and search.trials_left == 0


def test_what_does_not_hold_in_a_regime_any_more_is_taken_back_at_its_first_window_and_not_found_again(prior):
    told, search = begun(prior)
    for name in ("large", "small"):
        go_until(search, told, lambda s, at=search.steps + 300: s.steps > at)
        told.be(name)
        if name == "small":
            told.saving = lambda c: (
                -0.2 * (c > 0).any()
            )  # the same default, but the table is now the worse one
        go_until(search, told, lambda s, n=search.marks.reopened: s.marks.reopened > n)
        go_until(search, told, lambda s: s.is_done)
    assert search.marks.returned == 1 and search.confirmed.any()
    before, dropped = search.steps, search.marks.dropped
    go_until(search, told, lambda s: s.marks.dropped > dropped)
    assert search.steps - before < 30 and not search.confirmed.any()
    go_until(search, told, lambda s: s.is_done)
    assert not search.confirmed.any() and search.marks.returned == 1


def test_all_searches_of_a_job_share_its_level_until_a_table_is_adopted(prior):
    """Seen at 62a8d71: of 1,000 jobs without gain seven ended under a table, six of them after 11 to 43 changes."""
    told = Told(lambda configs: 0.0)
    search = Search(*told.begin(), prior)

    def changed(saving):
        go_until(search, told, lambda s: s.is_done)
        go_until(
            search, told, lambda s, at=search.steps + 200: s.steps > at
        )  # so that the watch knows what is usual
        told.scale, told.saving = 1.3 * told.scale, saving
        go_until(search, told, lambda s, n=search.marks.reopened: s.marks.reopened > n and s.is_over)

    go_until(search, told, lambda s: s.is_over)
    for _ in range(5):
        changed(told.saving)
    numbers = range(1, len(search.comparisons) + 1)
    assert len(numbers) > 5 and [one.test.level for one in search.comparisons] == [*map(level_of, numbers)]
    changed(good)
    assert search.confirmed.tolist() == [20, 18]
    changed(lambda configs: 0.10 * (configs[0] == 18))
    go_until(search, told, lambda s: s.is_done)  # with 6 of 40 seeds a trial after the verdict finds it
    assert search.confirmed[0] == 18
    number, numbers_since = 0, []  # of comparisons since a table was adopted
    for one in search.comparisons:
        number += 1
        numbers_since.append(number)
        number = 0 if one.outcome == ADOPTED else number
    assert [one.test.level for one in search.comparisons] == [*map(level_of, numbers_since)]
    assert numbers_since.count(1) > 2, "the level begins anew with each table that was adopted"


def test_the_tuner_beside_a_job_of_two_batch_sizes():
    """Through live windows, slots and decisions: what is published is the regime's own table."""
    truth = {"batch": 1.0}
    good = {1.0: Decision("ring", "simple", 4), 1.6: Decision("ring", "ll128", 16)}

    def step_ms(decisions):
        d = decisions.get(SCATTER, AUTO)
        own = d == good[truth["batch"]]
        other = not own and d in good.values()
        return STEP_MS * truth["batch"] * (1 - 0.12 * own + 0.08 * other)

    job = FakeJob(step_ms, noise=0.003)
    tuner = Tuner(LiveWindows(job), make_chooser("expected-improvement", 0))
    tuner.run()
    tables = {}
    for before, batch in pairwise((1.0, 1.6, 1.0, 1.6, 1.0)):
        while (
            not tuner.search.is_done
        ):  # a change just after a trial took its place is not seen: the watch is new
            tuner.step()
        tables[before] = job.confirmed
        for _ in range(20):
            tuner.step()
        truth["batch"], reopened = batch, tuner.search.marks.reopened
        for _ in range(200):
            if tuner.search.marks.reopened > reopened and tuner.search.is_over:
                break
            tuner.step()
        tuner.step()
        assert job.confirmed == tables.get(batch, job.confirmed)
    assert tuner.search.marks.reopened == 4 and tuner.search.marks.returned == 3 and tuner.outcome.kept


def regime(step_ms, us=(100.0, 50.0)):
    return Regime(
        step_ms,
        np.log(np.array(us)),
        np.array([8, 0]),
        (Comparison(np.array([8, 0]), np.array([0, 0]), SequentialTest(0.01, 0.05)),),
    )


def test_a_regime_is_known_by_its_default_step_and_its_calls():
    regimes = Regimes()
    for step_ms in (100.0, 160.0):
        regimes.leave(regime(step_ms), 0.002)
    logs = regime(1.0).call_logs
    assert regimes.find(101.0, logs, 0.002).step_ms == 100.0 and regimes.find(130.0, logs, 0.002) is None
    assert regimes.find(158.0, np.full(2, np.nan), 0.002).step_ms == 160.0  # no kernel was sampled
    assert regimes.find(100.0, logs + 0.3, 0.002) is None  # the network is another
    assert regimes.find(110.0, logs, 0.03).step_ms == 100.0  # a noisy job
    regimes.leave(regime(100.5), 0.002)
    assert sorted(r.step_ms for r in regimes.known) == [100.5, 160.0]
    regimes.leave(
        regime(161.0), 0.002, True, 100.0
    )  # it was slower than the default of another regime: no fault of its own
    assert sorted(r.step_ms for r in regimes.known) == [100.5, 161.0]
    regimes.leave(regime(161.0), 0.002, True, 160.0)
    assert [r.step_ms for r in regimes.known] == [100.5]
    regimes.leave(regime(100.5), 0.002, True)  # no window of the default says that it is another one
    assert not regimes.known
    for k in range(12):
        regimes.leave(regime(200.0 * 1.1**k), 0.002)
    assert len(regimes.known) == MOST_REGIMES


@pytest.mark.parametrize("by_long_steps", [True, False])
def test_a_table_that_was_dropped_in_a_window_of_its_own_does_not_come_back_at_once(prior, by_long_steps):
    """The default was 2.8 % slower since the search began. Before: the default of that time was taken for the one that
    the table was slower than, so that the regime was kept, and found again by the next default steps."""
    told = Told(good)
    search, _ = run(told, prior)
    state = search.state
    told.scale = 1.028
    go_until(search, told, lambda s: s.is_done)
    monitor = search.loop.monitor
    monitor._regime = replace(monitor._regime, step_ms=1.028 * state.default_ms)
    table = search.confirmed.copy()
    if by_long_steps:
        monitor._long_steps.add(table, np.full(400, 200.0), 100.0)
        monitor._long_steps.add(np.zeros(2, np.int64), np.full(400, 100.0), 100.0)
    else:
        told.saving = lambda c: -0.2 * (c > 0).any()
    go_until(search, told, lambda s: s.marks.dropped == 1, windows=1000)
    assert table.any() and not search.confirmed.any()
    go_until(search, told, lambda s: s.is_over)
    assert search.marks.reopened == 1 and search.marks.returned == 0
    assert not by_long_steps or search.confirmed.tolist() != table.tolist()


def test_a_table_that_was_dropped_does_not_come_back_as_another_pace(prior):
    """A change of pace, long over, had its default taken for the one of before at another pace: the table came back."""
    gain = [0.012]

    def saving(configs):
        first, second = configs
        return gain[0] * (first == 20) - 0.03 * (first not in (0, 20)) - 0.03 * (second != 0)

    told = Told(saving, noise=0.001, seed=1)
    search, _ = run(told, prior)
    assert search.confirmed.tolist() == [20, 0]

    def go_until(steps, is_over):
        end = search.steps + steps
        while search.steps < end and not is_over():
            plan = search.plan()
            if plan is None:
                search.decide(0, LEAVE)
            else:
                search.record(plan, told.measure(plan))

    go_until(1500, lambda: False)
    told.scale = 0.95
    go_until(3000, lambda: False)
    assert not search.marks.dropped
    gain[0] = -0.012
    go_until(30_000, lambda: search.marks.dropped)
    assert search.marks.dropped == 1
    go_until(200, lambda: False)
    assert not search.marks.returned

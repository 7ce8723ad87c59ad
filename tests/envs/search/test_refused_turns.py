"""A job that says that its tables can take turns, as a running job does, and then refuses or stops: the search goes on
in windows, and nothing that a phase knew of turns stays."""

import math
from dataclasses import replace

import numpy as np
import pytest
from dynamiccl.agent.policies.rule import ExpectedImprovement
from dynamiccl.envs.search.belief.prior import Prior
from dynamiccl.envs.search.comparison import ADOPTED, TimedWindow
from dynamiccl.envs.search.config import DISCARD, SWITCHES
from dynamiccl.envs.search.interfaces import TRIAL, WATCH
from dynamiccl.envs.search.monitor import Monitor
from dynamiccl.envs.search.refine import Refine
from dynamiccl.envs.search.search import Search
from dynamiccl.envs.search.step_times import Quads
from told_job import Told


@pytest.fixture(scope="module")
def prior():
    return Prior.load()


class Refusing(Told):
    """It is asked for turns, and never takes any."""

    def begin(self):
        job, default = super().begin()
        return replace(job, takes_turns=True), default


def gains(config):
    return lambda c: 0.10 * (c[0] == config)


def tuned(prior):
    """A job with its search, and what lets it run for so many steps."""
    told, policy = Refusing(gains(20)), ExpectedImprovement()
    search = Search(*told.begin(), prior)

    def go_on(steps, until=lambda: False):
        end = search.steps + steps
        while search.steps < end and not until():
            plan = search.plan()
            if plan is None:
                search.ask(policy)
            else:
                search.record(plan, told.measure(plan))

    go_on(5_000, lambda: search.is_done)
    assert search.is_done and search.confirmed[0] == 20
    return told, search, go_on


def test_a_lasting_change_of_such_a_job_begins_a_new_search(prior):
    """Before: the default ran in every other window for the rest of the job, and no search began."""
    told, search, go_on = tuned(prior)
    go_on(400)
    told.scale, told.saving = 1.3, gains(18)
    account = search.state.account
    go_on(800)
    assert search.marks.reopened == 1 and search.confirmed[0] == 18
    assert account.default_since_verdict < 0.1 * account.since_verdict


def test_visits_to_the_default_that_the_table_survives_have_a_price_at_any_number(prior):
    """Before: "int too large to convert to float" at the 1,024th, and the tuner ended."""
    watch = tuned(prior)[1].phase.watch
    for _ in range(2_000):
        watch._survives()
    assert 0 < watch.price < np.inf


def test_a_phase_forgets_what_it_knew_of_turns_once_they_are_refused(prior):
    _, search, go_on = tuned(prior)
    state = search.state
    state.turns.try_again()
    state.noise._quad = 1e-4
    search.phase = monitor = Monitor(state, search.confirmed)
    by_turns = monitor.watch.visit_steps, monitor.watch.schedule.usual, monitor.watch.price
    assert monitor.watch.scheduled.takes_turns and monitor.watch.scheduled.test.noise < state.noise.of_pair
    monitor.look_at_default()
    go_on(1)
    watch = monitor.watch
    by_windows = watch.visit_steps, watch.schedule.usual, watch.price
    assert not watch.scheduled.takes_turns and watch.visit_steps == state.noise.window_steps + SWITCHES
    assert watch.scheduled.test.noise == pytest.approx(state.noise.of_pair, rel=0.2)
    assert all(after > before for after, before in zip(by_windows, by_turns, strict=True))


def test_trials_and_the_belief_have_the_noise_of_windows_after_a_refusal(prior):
    """Before: that of turns, which is smaller, as it was when the phase began."""
    told = Refusing(lambda c: 0.0)
    search, policy = Search(*told.begin(), prior), ExpectedImprovement()
    noise = search.state.noise
    noise.add_quads, noise._quad = lambda quads: None, 1e-4  # turns are steadier
    search.state.begin(told.begin()[1], search.confirmed)
    of_turns = search.state.belief.reveal
    while not search.is_done:
        plan = search.plan()
        if plan is None:
            search.ask(policy)
            continue
        search.record(plan, told.measure(plan))
        if len(told.windows) == 1:
            assert search.state.belief.reveal > of_turns
    trials = [one.test.noise for one in search.comparisons if one.is_trial and not one.takes_turns]
    assert trials and min(trials) > 0.5 * noise.of_pair


def test_a_refused_trial_makes_no_pair_with_turns_before_it(prior):
    """Before: with the last turns of the current table, from before the job's steps became unlike; and the next window
    counted the step that runs under both tables."""
    told, search, _ = tuned(prior)
    state = search.state
    state.turns.try_again()
    search.phase = refine = Refine(state, 10, search.confirmed)
    slower = search.confirmed.copy()
    slower[0] = 18
    refine.trial = slower
    refine._reference = TimedWindow(500.0, 1, 2)
    plan = search.plan()
    assert plan.kind == TRIAL and plan.turns
    search.record(plan, told.measure(plan))
    assert refine.trial.tolist() == slower.tolist() and not search.comparisons[-1].test.n
    kinds = []
    for _ in range(2):
        plan = search.plan()
        assert plan.discard >= DISCARD and not plan.turns
        kinds.append(plan.kind)
        search.record(plan, told.measure(plan))
    logs = search.comparisons[-1].test.logs
    assert kinds == [WATCH, TRIAL] and logs == [pytest.approx(math.log(0.9), abs=0.02)]


def test_a_comparison_that_goes_on_in_windows_stays_the_one_that_was_begun(prior):
    """Before: another took its place at the end of the list, so that the tuner never told what became of it."""
    told = Refusing(gains(20))
    search = Search(*told.begin(), prior)
    table = np.array([20, 0])
    one = search.phase.compare(table)
    seen = TimedWindow(100.0, 1, 4)
    one.add_quads(Quads.single(0.5), seen, seen)
    search.record(plan := search.plan(), told.measure(plan))
    assert search.comparisons == [one] and not one.takes_turns and one.steps == [] and not one.test.n
    while search.is_comparing:
        search.record(plan := search.plan(), told.measure(plan))
    assert search.comparisons == [one] and one.outcome == ADOPTED
    assert len(one.table_windows) == one.test.n > 0 and search.gain[0] == pytest.approx(0.105, abs=0.01)

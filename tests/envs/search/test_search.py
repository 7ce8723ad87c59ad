"""The search over whole jobs, in simulation and on a job whose truth is written here."""

import math
from dataclasses import replace

import numpy as np
import pytest
from dynamiccl.agent.policies.rule import ExpectedImprovement
from dynamiccl.envs.search.belief.prior import Prior
from dynamiccl.envs.search.config import ABORT, CARRIED_TURN_STEPS, HORIZON, REWARD_QUADS, SearchConfig
from dynamiccl.envs.search.interfaces import (
    COMPARE,
    LEAVE,
    PROFILE,
    QUAD,
    RUN,
    SEARCH,
    TABLE,
    Measured,
    arms_of,
)
from dynamiccl.envs.search.observation import N_OBSERVATION, decode
from dynamiccl.envs.search.search import Search
from dynamiccl.envs.search_env import Reward
from dynamiccl.envs.sim.jobs import STANDARD, draw_jobs
from dynamiccl.envs.sim.windows import SimSearch, SimWindows
from oracle import oracle
from side_by_side import turn
from told_job import Straggling, Told, go_on, good, run


@pytest.fixture(scope="module")
def prior():
    return Prior.load()


def test_it_finds_what_there_is_and_says_when(prior):
    search, rewards = run(Told(good), prior)
    assert search.confirmed.tolist() == [20, 18] and search.is_over
    m = search.marks
    assert 0 < m.first_gain <= m.verdict == search.steps < 500
    mean, low, high = search.gain
    assert 0 < low < -math.log(1 - 0.15) < high and mean == pytest.approx(-math.log(1 - 0.15), abs=0.02)
    later = search.steps_left * (1 - math.exp(-mean))
    assert rewards == pytest.approx((later - search.lost) / 100, rel=0.02)
    assert search.steps_left == HORIZON - search.steps


def test_nothing_is_confirmed_where_nothing_helps(prior):
    kept = [run(Told(lambda c: 0.0, noise=0.02, seed=s), prior)[0].confirmed.any() for s in range(40)]
    assert sum(kept) <= 4


def test_what_costs_is_never_left_in_force(prior):
    for seed in range(20):
        search, _ = run(Told(lambda c: -0.02 * (c > 0).sum(), noise=0.02, seed=seed), prior)
        assert not search.confirmed.any()


def test_a_step_that_is_far_too_long_ends_its_window(prior):
    told = Told(lambda c: -1.0 * (c[0] == 16))
    job, default = told.begin()
    search = Search(job, default, prior)
    for _ in range(2):
        for config in (16, 0):
            assert search.decide(config)
        plan = search.plan()
        assert plan.limit_ms == pytest.approx(ABORT * 100, rel=0.05)
        seen = told.measure(plan)
        assert len(seen.tried) == 1
        search.record(plan, seen)
    assert search.marks.aborted == 2 and decode(search.observe()).risk[0, 16] == 1 and search.open[0, 16]
    search.decide(16, RUN)
    assert search.plan().configs.tolist() == [16, 0]  # a price, not a prohibition
    search.state.begin(default, np.zeros(2, int))  # the job has changed
    assert decode(search.observe()).risk[0, 16] == 1
    search = Search(job, default, prior)
    assert not search.decide(40) and search.loop.proposal.configs[0] == 0  # what is masked runs as AUTO


@pytest.mark.parametrize(
    ("n", "saving", "is_given_up"), [(1, 0.2, True), (2, 0.2, False), (2, -0.2, True), (5, 0.2, False)]
)
def test_a_long_step_after_others_that_were_not_is_none_of_the_tables(prior, n, saving, is_given_up):
    """Seen on simulated jobs: a table 19 % faster, its last step a stray, was taken for one that is far too slow."""
    job, default = Told(good).begin()
    search = Search(job, default, prior)
    search.decide(20, RUN)
    plan = search.plan()
    arms = arms_of(20, plan.turns)
    arms = arms[: np.flatnonzero(arms == 1)[n - 1] + 1]  # it ends with step n of its own
    ms = np.where(arms == 1, 100.0 * (1 - saving), 100.0)
    ms[-1] = 1.1 * plan.limit_ms
    seen = Measured(
        ms, np.full(2, np.nan), np.ones(2, bool), len(ms), float(ms.sum()), arms=arms, turns=plan.turns
    )
    search.record(plan, seen)
    assert search.marks.aborted == is_given_up and (search.state.guard.windows[0, 20] == 0) == is_given_up
    if n != 2:  # with two steps the stray is half of what was seen
        assert (search.state.belief.saving(np.array([20, 0]))[0] > 0.1) != is_given_up


def one_percent(configs):
    return 0.01 * (configs[0] == 20) - 0.03 * (configs[0] in (8, 16, 18)) - 0.03 * (configs[1] > 0)


def finished(told, prior, config=None):
    """A search that is over, with what is tried after its verdict."""
    search, _ = run(told, prior, config=config)
    policy = ExpectedImprovement()
    while not search.is_done:
        plan = search.plan()
        if plan is None:
            search.ask(policy)
        else:
            search.record(plan, told.measure(plan))
    return search


@pytest.mark.slow
def test_a_config_that_is_faster_but_for_its_long_steps_goes_once_these_were_seen(prior):
    """1 % faster in 99 steps of 100, three times as long in the last: 1 % slower. A comparison of some dozen steps does
    not show that. Eight such tables were dropped after 7,000 to 15,000 steps."""
    for seed in range(4):
        told = Straggling(one_percent, seed=seed)
        search = finished(told, prior)
        assert search.confirmed.tolist() == [20, 0]
        while search.steps < HORIZON and not search.marks.dropped:
            go_on(search, told, 1)
        assert search.marks.dropped == 1


@pytest.mark.parametrize(("which", "every"), [((), 100), ((0, 8, 16, 18, 20), 200)])
def test_long_steps_that_are_the_jobs_own_do_not_stand_in_the_way(prior, which, every):
    kept, steps = [], []
    for seed in range(12):
        search = finished(Straggling(one_percent, which, every, seed=seed), prior)
        kept.append(search.confirmed.tolist() == [20, 0])
        steps.append(search.marks.first_gain)
    assert sum(kept) >= 11 and np.median(steps) < 700


@pytest.mark.slow
@pytest.mark.parametrize(("which", "is_gone"), [((20,), True), ((0, 20), False)])
def test_a_table_in_force_whose_long_steps_cost_more_than_it_gains_is_gone(prior, which, is_gone):
    """6 % by long steps, for 1 % in all others: no window shows it, but all together. Where they are the job's, a table
    is gone in 39 of 240 jobs, by chance (27 of 240 before the removals of November 2026)."""
    n_jobs, gone = 20, 0
    for seed in range(n_jobs):
        told = Straggling(one_percent, which=(), seed=seed)
        search = finished(told, prior)
        assert search.confirmed.tolist() == [20, 0]
        told.which, told.every = which, 33
        go_on(search, told, 1500)
        is_here = bool(search.confirmed.any())
        assert is_here or search.marks.reopened, "dropped, or a search after a change has not found it yet"
        gone += not is_here
    assert gone == n_jobs if is_gone else gone <= 7


def test_turns_then_a_window_under_all(prior):
    told = Told(good)
    job, default = told.begin()
    search = Search(job, default, prior)
    assert search.plan() is None and search.observe().shape == (N_OBSERVATION,)
    search.decide(20)
    assert search.plan() is None
    search.decide(18)
    plan = search.plan()
    assert plan.kind == SEARCH and plan.configs.tolist() == [20, 18]
    search.record(plan, told.measure(plan))
    seen = decode(search.observe())
    assert seen.count[0, 20] == 1 and seen.last[0, 20] and seen.open[0].sum() == 5
    assert seen.context.share[0] == pytest.approx(0.3)


def test_a_table_that_promises_much_is_compared_before_the_search_goes_on(prior):
    """By the rule, after three windows at the earliest."""
    told = Told(good)
    job, default = told.begin()
    search, windows, policy = Search(job, default, prior), 0, ExpectedImprovement()
    for _ in range(60):
        plan = search.plan()
        if plan is None:
            search.ask(policy)
        elif plan.kind == SEARCH:
            windows += 1
            search.record(plan, told.measure(plan))
        else:
            break
    assert plan.kind == TABLE and windows >= 3 and search.state.comparisons.in_search == 0


def test_slots_without_a_turn_run_what_is_believed_best(prior):
    told = Told(good)
    job, default = told.begin()
    search = Search(job, default, prior)
    for configs in ([20, 18], [0, 0], [20, 18]):
        for config in configs:
            search.decide(config)
        plan = search.plan()
        search.record(plan, told.measure(plan))
    assert search.state.belief.best().tolist() == [20, 18]
    search.decide(8, RUN)
    plan = search.plan()
    assert plan.kind == SEARCH and plan.configs.tolist() == [8, 18]
    search.record(plan, told.measure(plan))
    search.decide(20, COMPARE)
    assert search.plan().kind == TABLE and search.loop.trial.table.tolist() == [20, 18]


class Refused(Told):
    """NCCL does not obey config 20 of the first slot; it counts how often that was planned."""

    planned = 0

    def measure(self, plan):
        obeyed = np.array([plan.configs[0] != 20, True])
        self.planned += not obeyed[0]
        return replace(
            super().measure(replace(plan, configs=np.where(obeyed, plan.configs, 0))), obeyed=obeyed
        )


def test_what_nccl_refuses_is_not_tried_again_and_takes_no_other_gain_with_it(prior):
    """Before: slots without a turn ran it again, the table that was compared held it, and nothing was kept."""
    told = Refused(good)
    job, default = told.begin()
    search = Search(job, default, prior)
    belief = search.state.belief
    belief.learn([belief.parts[0].start + 1 + belief.config[0][20]], [-0.5], [0.01])  # it is believed in
    assert belief.best()[0] == 20
    for config in (20, 18):
        search.decide(config)
    search.record(search.plan(), told.measure(search.plan()))
    saving, _, _ = belief.outlook(0)
    assert belief.best()[0] != 20 and belief.best_saving() == belief.saving(belief.best())
    assert max(np.delete(saving, 20)) == pytest.approx(0)  # the others are compared with what may be had
    search.decide(0, RUN)  # the next slot has no turn
    assert search.plan().configs[0] != 20
    while not search.is_over:
        plan = search.plan()
        if plan is None:
            search.ask(ExpectedImprovement())
        else:
            search.record(plan, told.measure(plan))
    assert told.planned == 1 and search.confirmed[1] == 18


def test_who_leaves_has_a_verdict_at_once(prior):
    told = Told(good)
    job, default = told.begin()
    search = Search(job, default, prior)
    search.decide(20, LEAVE)
    assert search.is_over and not search.confirmed.any() and search.marks.verdict == search.steps
    search.decide(0, LEAVE)  # nor any trial beside the default
    assert search.is_done


def test_what_runs_already_has_no_steps_to_throw_away(prior):
    told = Told(good)
    job, default = told.begin()
    search = Search(job, default, prior)
    search.state.running.configs = np.array([20, 0])
    assert (
        search.state.running.discard(np.array([20, 0]))
        == 0
        < search.state.running.discard(np.array([20, 18]))
    )


def test_the_default_is_measured_against_itself(prior):
    search, _ = run(Told(good, noise=0.1), prior)
    logs = search.state.comparisons.default_logs
    assert logs and np.abs(logs).max() < 0.3  # its turns one measurement after the other


def test_a_table_that_turned_bad_is_gone_within_two_windows(prior):
    told = Told(good)
    search, _ = run(told, prior)
    go_on(search, told, 30)
    assert search.confirmed.any()
    table = search.confirmed.copy()
    told.saving = lambda c: -0.2 * (c > 0).any()
    go_on(search, told, 2)
    assert not search.confirmed.any() and search.marks.dropped == 1 and table.any()


def test_a_small_true_gain_survives_the_watch(prior):
    """And the watch runs less than 1 % of the steps under the default."""
    kept, share, reopened = 0, [], 0
    for seed in range(12):
        told = Told(lambda c: 0.03 * (c[0] == 20), noise=0.01, seed=seed)
        search, _ = run(told, prior)
        if not search.confirmed.any():
            continue
        told.saving = lambda c: 0.01 * (c[0] == 20)
        go_on(search, told, 2500)
        kept += bool(search.confirmed.any())
        share.append(search.state.account.default_since_verdict / search.state.account.since_verdict)
        reopened += search.marks.reopened
    assert len(share) >= 10 and kept == len(share) and reopened == 0
    assert 0 < max(share) <= 0.01


def test_what_a_table_is_worth_is_told_by_steps_that_did_not_choose_it(prior):
    told = Told(good)
    search, _ = run(told, prior)
    reward = Reward(search)
    reward.saved, reward.steps = search.state.current.saved, HORIZON - search.marks.first_gain
    told.saving = lambda c: 0.02 * c.any()  # it was confirmed by luck
    n = len(told.windows)
    assert reward.settled(told) == pytest.approx((0.02 - reward.saved) * reward.steps / 100, rel=0.05)
    (plan,) = told.windows[n:]
    assert not plan.configs.any() and plan.others.any() and plan.turns == CARRIED_TURN_STEPS
    assert plan.n_steps == REWARD_QUADS * QUAD * CARRIED_TURN_STEPS
    search.state.current.set(np.zeros(2, int))
    assert reward.settled(told) == 0 and len(told.windows) == n + 1


def test_a_lasting_change_begins_a_new_search(prior):
    told = Told(good)
    search, _ = run(told, prior)
    go_on(search, told, 20)
    told.scale, told.saving = 1.4, lambda c: 0.1 * (c[0] == 16)
    for _ in range(60):
        if search.marks.reopened:
            break
        go_on(search, told, 1)
    assert search.marks.reopened == 1 and search.marks.dropped == 0
    plan, before = search.plan(), search.loop.change.before.copy()
    assert plan.kind == PROFILE
    search.record(plan, told.measure(plan))
    assert (
        search.plan().configs.tolist() == before.tolist() and search.plan().limit_ms == np.inf
    )  # it ran until now
    policy = ExpectedImprovement()
    for _ in range(400):
        plan = search.plan()
        if search.is_over:
            break
        if plan is None:
            search.ask(policy)
        else:
            search.record(plan, told.measure(plan))
    assert search.confirmed[0] == 16 and search.state.default_ms == pytest.approx(140, rel=0.05)


@pytest.mark.slow
def test_simulated_jobs_gain_and_none_ends_slower(prior):
    jobs = draw_jobs(STANDARD.only("plain"), np.random.default_rng(11), 40)
    _, best = oracle(jobs)
    possible = 1 - best / jobs.step_us(np.zeros((40, jobs.width), int))[0]
    windows = SimWindows(jobs.take(np.arange(40)), np.random.default_rng(1))
    policy, done = ExpectedImprovement(), SimSearch(windows, prior, SearchConfig())
    while turn(done, policy) is not None:
        pass
    now, tables = done.windows.jobs, done.tables
    saving = 1 - now.step_us(tables)[0] / now.step_us(np.zeros_like(tables))[0]
    assert saving.min() > -0.005
    assert saving.sum() > 0.4 * possible.sum()
    # What long steps cost has to be settled too before a table is confirmed: below 400 steps before that was asked.
    assert np.median([s.marks.verdict for s in done.searches]) < 500

"""What a search plans, how it measures a job whose steps are not alike, and what long steps decide."""

import math
from dataclasses import replace

import numpy as np
import pytest
from dynamiccl.agent.policies.rule import ExpectedImprovement
from dynamiccl.envs.search.belief.prior import Prior
from dynamiccl.envs.search.comparison import OPEN, LongSteps
from dynamiccl.envs.search.config import LONG_TURN_STEPS, TURN_STEPS, SearchConfig
from dynamiccl.envs.search.interfaces import PATTERN, PROFILE, QUAD, SEARCH, TABLE, TRIAL, WATCH
from dynamiccl.envs.search.search import Search
from dynamiccl.envs.search.step_times import Quads
from dynamiccl.envs.sim.family import STANDARD
from dynamiccl.envs.sim.jobs import draw_jobs
from dynamiccl.envs.sim.noise import NoiseStream
from dynamiccl.envs.sim.windows import OneJob, SimWindows
from told_job import Told, Uneven, go_until, good

DEFAULT, CHOSEN = np.zeros(1, np.int64), np.ones(1, np.int64)


def steps(*long):
    """A hundred steps of 10 ms, some of which take so many times as long."""
    ms = np.full(100, 10.0)
    ms[: len(long)] *= long
    return ms


@pytest.mark.parametrize(
    ("default", "table", "gains"),
    [
        ((), (), True),
        ((3, 3), (3, 3), True),  # the job's own
        ((), (3,), False),  # 2 % of the table's steps, and it gains 1 %
        ((3, 3), (3,), True),
    ],
)
def test_long_steps_of_either_table_count(default, table, gains):
    long_steps = LongSteps()
    long_steps.add(DEFAULT, steps(*default), 10.0)
    long_steps.add(CHOSEN, steps(*table), 10.0)
    assert (long_steps.gain(CHOSEN, DEFAULT, 0.01) > 0) is gains


def lengthened(plan):
    """As a job runs it whose steps are not alike."""
    if not plan.turns:
        return plan
    quad = QUAD * LONG_TURN_STEPS
    return replace(plan, turns=LONG_TURN_STEPS, n_steps=quad, discard=quad * (plan.discard > 0))


def played(n_plans=60, job=11, from_plan=math.inf):
    """A search by the rule and its plans; from ``from_plan`` on the job's steps are not alike."""
    jobs = draw_jobs(STANDARD.only("plain"), np.random.default_rng(job), 1)
    windows = OneJob(SimWindows(jobs, NoiseStream(0, np.zeros(1), jobs.width)), SearchConfig().profile_steps)
    search, policy, state, plans = Search(*windows.begin(), Prior.load()), ExpectedImprovement(), None, []
    while len(plans) < n_plans:
        plan = search.plan()
        if plan is None:
            state = search.ask(policy, state)
            continue
        plans.append(plan)
        search.record(plan, windows.measure(plan if len(plans) < from_plan else lengthened(plan)))
    return search, plans


def test_every_table_that_is_tried_at_all_calls_takes_turns_with_the_current_one():
    _, plans = played(job=12)
    tried = [plan for plan in plans if plan.kind in (SEARCH, TABLE, TRIAL) and not plan.one_of]
    assert {plan.kind for plan in tried} == {SEARCH, TABLE, TRIAL}
    assert all(plan.turns == TURN_STEPS for plan in tried if not np.array_equal(plan.configs, plan.others))
    looks = [plan for plan in plans if plan.kind == WATCH]
    assert looks and all(bool(plan.turns) == (not plan.configs.any()) for plan in looks)


@pytest.mark.parametrize("from_plan", [0, 5, 20])
def test_a_job_whose_steps_are_not_alike_goes_on_in_long_turns(from_plan):
    search, plans = played(80, 12, from_plan)
    first = next(i for i, plan in enumerate(plans) if i + 1 >= from_plan and plan.turns)
    later = [plan for plan in plans[first + 1 :] if plan.turns]
    assert later and all(plan.turns == LONG_TURN_STEPS for plan in later)
    assert all(plan.n_steps % (QUAD * LONG_TURN_STEPS) == 0 for plan in later)
    assert search.state.turns.steps == LONG_TURN_STEPS


def test_long_turns_find_what_there_is_and_a_new_search_asks_for_turns_of_one_step_again():
    told = Uneven(good)
    search = Search(*told.begin(), Prior.load())
    go_until(search, told, lambda search: search.is_done, 600)
    assert search.confirmed.tolist() == [20, 18]
    turns = [plan.turns for plan in told.windows if plan.turns]
    assert turns[0] == TURN_STEPS and set(turns[1:]) == {LONG_TURN_STEPS}
    end = search.steps + 500
    go_until(search, told, lambda search: search.steps > end, 600)
    told.scale, told.saving = 1.3, lambda c: 0.1 * (c[0] == 18)
    go_until(search, told, lambda search: search.marks.reopened, 600)
    go_until(search, told, lambda search: told.windows[-1].kind == PROFILE, 600)
    n = len(told.windows)
    go_until(search, told, lambda search: search.is_done, 600)
    turns = [plan.turns for plan in told.windows[n:] if plan.turns]
    assert turns[0] == TURN_STEPS and set(turns[1:]) == {LONG_TURN_STEPS}
    assert search.confirmed[0] == 18


def test_no_gain_is_found_in_long_turns_where_there_is_none():
    kept = 0
    for seed in range(20):
        told = Uneven(lambda c: 0.0, noise=0.01, seed=seed)
        search = Search(*told.begin(), Prior.load())
        go_until(search, told, lambda search: search.is_done)
        kept += bool(search.confirmed.any())
    assert kept <= 2


def test_what_an_open_comparison_has_seen_does_not_count_in_turns_of_another_length():
    told = Told(lambda c: 0.0)
    search = Search(*told.begin(), Prior.load())
    comparison = search.loop.compare(np.array([20, 0]))
    search.record(plan := search.plan(), told.measure(plan))
    n, noise = comparison.test.n, search.state.noise.of_quads(1)
    assert n == plan.n_steps // QUAD and comparison.outcome == OPEN
    search.record(plan := search.plan(), told.measure(lengthened(plan)))
    assert comparison.test.n == 1 and search.comparisons == [comparison] and comparison.outcome == OPEN
    assert comparison.test.noise != noise and len(comparison.table_windows) == 1


@pytest.mark.parametrize("before", [1, 2])
def test_a_long_step_counts_alike_under_both_tables(before):
    """Before: one of the tried table ended its quad, which was left out; one of the current table counted."""
    usual, long = 100.0, 300.0
    whole = np.array([usual, usual, usual, long])
    of_current = Quads.of(whole, PATTERN, 1)
    ended = np.array([usual] * before + [long])
    of_tried = Quads.of(ended, PATTERN[: before + 1], 1, has_ended=True)
    assert of_current.ratios == pytest.approx([math.log(3) / 2])
    assert of_tried.ratios == pytest.approx([-math.log(3) / 2])
    assert len(Quads.of(ended, PATTERN[: before + 1], 1).ratios) == 0

"""A search whose job takes turns: what it plans, what long steps decide, and what it does where turns are refused."""

import math
from dataclasses import replace

import numpy as np
import pytest
from dynamiccl.agent.policies.rule import ExpectedImprovement
from dynamiccl.envs.search.belief.prior import Prior
from dynamiccl.envs.search.comparison import LongSteps
from dynamiccl.envs.search.config import SearchConfig
from dynamiccl.envs.search.interfaces import PATTERN, REFERENCE, SEARCH, TABLE, TRIAL, Plan
from dynamiccl.envs.search.search import Search
from dynamiccl.envs.search.step_times import Quads
from dynamiccl.envs.sim.family import STANDARD
from dynamiccl.envs.sim.jobs import draw_jobs
from dynamiccl.envs.sim.noise import NoiseStream
from dynamiccl.envs.sim.windows import OneJob, SimWindows

DEFAULT, CHOSEN = np.zeros(1, np.int64), np.ones(1, np.int64)


def steps(*long):
    """A hundred steps of 10 ms, some of which take so many times as long."""
    ms = np.full(100, 10.0)
    ms[: len(long)] *= long
    return ms


@pytest.mark.parametrize(
    ("default", "table", "by_turns", "by_windows"),
    [
        ((), (), True, False),  # in windows one long step is assumed of the table alone
        ((3, 3), (3, 3), True, False),  # the job's own
        ((), (3,), False, False),  # 2 % of the table's steps, and it gains 1 %
        ((3, 3), (3,), True, True),
    ],
)
def test_a_small_gain_waits_for_long_steps_in_windows_and_counts_those_seen_in_turns(
    default, table, by_turns, by_windows
):
    long_steps = LongSteps()
    long_steps.add(DEFAULT, steps(*default), 10.0)
    long_steps.add(CHOSEN, steps(*table), 10.0)
    assert long_steps.allows(CHOSEN, DEFAULT, 0.01, by_turns=True) is by_turns
    assert long_steps.allows(CHOSEN, DEFAULT, 0.01) is by_windows


def played(refused=0, n_windows=60, refuses=lambda search, plan: True, job=11):
    """A search by the rule and its plans; the first ``refused`` that the job ``refuses`` run as plain windows."""
    jobs = draw_jobs(STANDARD.only("plain"), np.random.default_rng(job), 1)
    windows = OneJob(SimWindows(jobs, NoiseStream(0, np.zeros(1), jobs.width)), SearchConfig().profile_steps)
    search, policy, state, plans = Search(*windows.begin(), Prior.load()), ExpectedImprovement(), None, []
    while len(plans) < n_windows:
        plan = search.plan()
        if plan is None:
            state = search.ask(policy, state)
            continue
        plans.append((plan, search.is_over))
        runs = plan
        if plan.turns and refused and refuses(search, plan):
            refused -= 1
            runs = plan.as_window
        search.record(plan, windows.measure(runs))
    return search, plans


def test_every_table_that_is_tried_at_all_calls_takes_turns_with_the_current_one():
    _, plans = played()
    tried = [plan for plan, _ in plans if plan.kind in (SEARCH, TABLE, TRIAL) and not plan.one_of]
    assert tried and all(plan.turns for plan in tried)
    assert not any(plan.kind == REFERENCE for plan, _ in plans)


def test_a_job_that_refuses_turns_goes_on_in_windows_and_is_asked_again_after_the_verdict():
    _, plans = played(refused=1)
    first = next(i for i, (plan, _) in enumerate(plans) if plan.turns)
    rest = plans[first + 1 :]
    assert not any(plan.turns for plan, is_over in rest if not is_over)
    assert any(plan.turns for plan, is_over in rest if is_over)


def test_a_job_may_refuse_turns_in_the_middle_of_a_trial():
    """Before: "The truth value of an array with more than one element is ambiguous", and the tuner ended."""

    def in_the_middle(search, plan):
        going = [c for c in search.comparisons if c.test.n and np.array_equal(c.table, plan.configs)]
        return plan.kind == TRIAL and len(search.comparisons) > 1 and bool(going)

    search, plans = played(1, 300, in_the_middle, job=12)
    first = next(
        i
        for i, (plan, is_over) in enumerate(plans)
        if plan.kind == TRIAL and not plan.turns and not plan.one_of
    )
    assert not any(plan.turns for plan, _ in plans[first:]) and not all(
        c.takes_turns for c in search.comparisons
    )


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


def test_a_plan_without_turns_is_a_window_as_it_is():
    plan = Plan(SEARCH, np.array([8, 0]), 10, others=np.array([0, 20]))
    assert plan.as_window is plan
    assert replace(plan, turns=1).as_window == replace(plan, others=0, discard=1)

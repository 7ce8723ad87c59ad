"""The tuning run on a job whose truth is known."""

import numpy as np
import pytest
from dynamiccl.agent.baselines import make_policy
from dynamiccl.agent.guard import Guard
from dynamiccl.agent.tuner import Settings, Tuner
from dynamiccl.envs.live_env import LiveEnv
from dynamiccl.traces.records import AUTO, Decision
from fake_job import GATHER, SCATTER, STEP_MS, FakeJob

BEST = {GATHER: Decision("ring", "ll128", 8), SCATTER: Decision("ring", "simple", 4)}


def truth(decisions):
    """Each slot's best config saves 10 ms, ll on gathers costs 70, all else costs up to 5."""
    ms = STEP_MS
    for slot, best in BEST.items():
        d = decisions.get(slot, AUTO)
        if d.is_auto:
            continue
        ms -= 5 * (d.algo == best.algo and d.proto == best.proto) + 5 * (d.n_channels == best.n_channels)
        ms += 3 * (d.n_channels in (1, 2)) + 2 * (d.proto != best.proto)
    return ms


def run(policy, job, **settings):
    lines = []
    tuner = Tuner(LiveEnv(job), make_policy(policy, 0), Settings(**settings), lines.append)
    return tuner.run(), lines, tuner


def test_exhaustive_search_finds_the_best_of_each_slot():
    job = FakeJob(truth, noise=0.002)
    outcome, lines, _ = run("exhaustive", job, windows=200, budget=1.0)
    assert outcome.decisions == BEST
    assert outcome.kept and outcome.verdict.tuned.low > 1.15 and outcome.verdict.same.low <= 1
    assert job.tables[-1].rules and {c.profile.slot for c in outcome.choices} == set(BEST)
    assert all("saves" in c.reason for c in outcome.choices)
    assert {line.phase for line in lines} == {"profile", "search", "confirm", "verify"}
    assert [line.index for line in lines] == sorted(line.index for line in lines)


@pytest.mark.parametrize("policy", ["random", "coordinate-descent", "thompson"])
def test_a_table_that_does_not_win_is_taken_back(policy):
    """Nothing helps here: whatever a policy picks, NCCL's own choice must be in force at the end."""
    job = FakeJob(lambda d: STEP_MS + 3 * sum(not x.is_auto for x in d.values()), noise=0.03)
    outcome, _, _ = run(policy, job, windows=40)
    assert not outcome.kept
    assert job.tables[-1].rules == ()


def test_a_job_that_ends_early_leaves_what_was_seen():
    outcome, lines, _ = run("random", FakeJob(truth, steps=120), windows=60)
    assert outcome.verdict is None and "ended" in outcome.ended
    assert lines and outcome.windows > 0


def test_last_steps_are_kept_for_the_closing_comparison():
    outcome, _, tuner = run("exhaustive", FakeJob(truth, noise=0.002, steps=500), windows=200, steps=500)
    assert outcome.verdict is not None and outcome.verdict.tuned.n_pairs == 20
    assert tuner.env.job.last_step <= 500
    assert any("closing comparison" in c.reason for c in outcome.choices)


def test_a_job_without_tunable_collectives_has_nothing_to_tune():
    job = FakeJob(truth)
    job.assembler.offers = {}
    outcome, _, _ = run("random", job)
    assert outcome.choices == [] and not outcome.kept and "never asks the tuner" in outcome.ended


def test_search_ends_when_it_has_cost_its_budget():
    """Every trial is 40 % slower than the default: the guard ends the search long before its windows are used up."""
    job = FakeJob(lambda d: 500.0 * (1 + 0.4 * any(not x.is_auto for x in d.values())))
    outcome, _, tuner = run("random", job, windows=200)
    assert tuner.guard.is_spent and outcome.windows < 100
    assert any("cost its budget" in c.reason for c in outcome.choices)


def test_confirmation_refuses_luck():
    """One lucky window must not pass: pure noise is kept in few of many confirmations."""
    kept = 0
    for seed in range(100):
        env = LiveEnv(FakeJob(lambda d: STEP_MS, noise=0.04, seed=seed))
        env.profile()
        guard = Guard(0.05, noise=list(0.033 * np.random.default_rng(seed).standard_normal(20)))
        *_, outcome = guard.confirm(env, GATHER, Decision("ring", "ll128", 8))
        kept += outcome.kept
    assert kept <= 15  # 5 looks at two standard errors

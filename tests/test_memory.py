"""What one search leaves to the next: evidence, its discounting, and that a wrong one is thrown away."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
from dynamiccl.agent.rules import ExpectedImprovement
from dynamiccl.envs.belief import Belief, Prior
from dynamiccl.envs.memory import HALF_LIFE_DAYS, Memory, Notes, aged
from dynamiccl.envs.search import Search
from dynamiccl.envs.sim.jobs import STANDARD, draw_jobs
from dynamiccl.envs.sim_windows import OneJob, SimWindows
from dynamiccl.envs.windows import TABLE
from dynamiccl.traces.spaces import config_index


@pytest.fixture(scope="module")
def prior():
    return Prior.load()


@pytest.fixture(scope="module")
def told():
    """A simulated job as its search is told of it."""
    jobs = draw_jobs(STANDARD, np.random.default_rng(3), 1)
    return OneJob(SimWindows(jobs, np.random.default_rng(0)), 8).begin()


def notes_of(job, log=-0.4, saving=0.1, windows=4):
    """Evidence that the first arm of the first slot takes ``log`` (log) of the default's time, and saves so much."""
    notes = Notes(len(job.share))
    configs = np.zeros(len(job.share), np.int64)
    configs[0] = np.flatnonzero(job.mask[0])[1]
    logs = np.full(len(job.share), np.nan)
    logs[0] = log
    for _ in range(windows):
        notes.add(configs, -saving, 0.003, logs)
    return configs, notes.evidence(job, job.call_us, configs)


def recall(job, prior, *evidence):
    belief = Belief(prior, job.features, job.mask, job.share)
    return Memory(evidence).recall(job, prior, belief)


def log_of(belief, config):
    """Mean and standard deviation of the log time of a config of the first slot."""
    at = belief.parts[0].start + 1 + belief.config[0][config]
    return belief.mean[at], math.sqrt(belief.cov[at, at])


def test_notes_become_means_and_what_they_are_worth(told):
    job, _ = told
    notes = Notes(len(job.share))
    configs = np.zeros(len(job.share), np.int64)
    configs[0] = 8
    for log, step in ((-0.2, -0.1), (-0.4, -0.2)):
        notes.add(configs, step, 0.01, np.r_[log, np.full(len(job.share) - 1, np.nan)])
    evidence = notes.evidence(job, job.call_us, configs)
    assert evidence.logs[0, 8] == pytest.approx(-0.3) and evidence.counts[0, 8] == 2
    assert np.isnan(evidence.logs[0, 9]) and evidence.counts.sum() == 2
    assert evidence.tables.tolist() == [configs.tolist()]
    assert evidence.savings == pytest.approx([0.15]) and evidence.deviations == pytest.approx([0.01 / math.sqrt(2)])


def test_the_same_job_begins_with_the_table_that_was_confirmed(told, prior):
    job, default = told
    configs, evidence = notes_of(job)
    search = Search(job, default, prior, memory=Memory([evidence]))
    assert search.plan() is not None and search.plan().configs.tolist() == configs.tolist()
    mean, deviation = log_of(search.belief, configs[0])
    assert mean == pytest.approx(-0.4, abs=0.05) and deviation < 0.06
    assert search.belief.saving(configs)[0] > 0.05


def test_older_evidence_is_less_sure(told, prior):
    job, _ = told
    configs, evidence = notes_of(job)
    deviations = [
        log_of(recall(job, prior, aged(evidence, days)).belief, configs[0])[1]
        for days in (0, HALF_LIFE_DAYS, 10 * HALF_LIFE_DAYS)
    ]
    assert deviations[0] * 1.2 < deviations[1] < deviations[2]
    unaware = log_of(Belief(prior, job.features, job.mask, job.share), configs[0])[1]
    assert deviations[2] > 0.8 * unaware


def test_the_nearer_in_size_the_more_is_known(told, prior):
    job, _ = told
    configs, evidence = notes_of(job)
    deviations = []
    for octaves in (0.0, 1.0, 4.0):
        features = evidence.features.copy()
        features[:, 1:3] += octaves / 32
        deviations.append(log_of(recall(job, prior, replace(evidence, features=features)).belief, configs[0])[1])
    assert deviations[0] < deviations[1] < deviations[2]


def test_two_who_agree_are_surer_and_the_newest_table_is_tried_first(told, prior):
    job, _ = told
    configs, evidence = notes_of(job)
    other = np.zeros_like(configs)
    other[0] = np.flatnonzero(job.mask[0])[2]
    one, both = recall(job, prior, evidence), recall(job, prior, aged(replace(evidence, confirmed=other), 2), evidence)
    assert log_of(both.belief, configs[0])[1] < log_of(one.belief, configs[0])[1]
    assert both.table.tolist() == configs.tolist()
    swapped = recall(job, prior, replace(evidence, confirmed=other), aged(evidence, 2))
    assert swapped.table.tolist() == other.tolist()


def test_other_durations_of_the_default_throw_the_memory_away_before_a_step_is_spent(told, prior):
    job, default = told
    _, evidence = notes_of(job)
    slower = replace(evidence, call_us=evidence.call_us / 2)
    search = Search(job, default, prior, memory=Memory([slower]))
    assert "the cluster has changed" in search.memory.recalled.text and not search.memory.recalled.is_used
    assert search.plan() is None and not search.choices.any()
    plain = Search(job, default, prior)
    assert (search.belief.mean == plain.belief.mean).all() and (search.belief.cov == plain.belief.cov).all()


def test_a_wrong_memory_is_gone_with_the_first_window_and_nothing_of_it_is_left(told, prior):
    job, default = told
    _, evidence = notes_of(job)
    search, plain = (Search(job, default, prior, memory=m) for m in (Memory([evidence]), None))
    plan = search.plan()
    calls = job.call_us.copy()
    calls[0] *= 1.3  # not 0.67
    seen = replace(default, step_ms=default.step_ms * 1.05, call_us=calls, obeyed=np.ones(len(calls), bool))
    search.record(plan, seen)
    plain.choices, plain.turn = plan.configs.copy(), plain.n_slots
    plain.record(plain.plan(), seen)
    assert not search.memory.recalled.is_used and "forgotten" in search.memory.recalled.text
    assert search.belief.mean == pytest.approx(plain.belief.mean)
    assert search.belief.cov == pytest.approx(plain.belief.cov)


def test_a_memory_that_is_borne_out_is_confirmed_next(told, prior):
    job, default = told
    configs, evidence = notes_of(job)
    search = Search(job, default, prior, memory=Memory([evidence]))
    calls = job.call_us.copy()
    calls[0] *= math.exp(-0.4)
    seen = replace(default, step_ms=default.step_ms * 0.9, call_us=calls, obeyed=np.ones(len(calls), bool))
    search.record(search.plan(), seen)
    assert search.memory.is_borne_out and search.phase == TABLE and search.table.tolist() == configs.tolist()


def test_evidence_of_another_version_is_refused(told):
    job, _ = told
    _, evidence = notes_of(job)
    with pytest.raises(ValueError, match="another version"):
        Memory([replace(evidence, features=evidence.features[:, :-1])])


def test_a_search_leaves_what_it_measured(told, prior):
    jobs = draw_jobs(STANDARD, np.random.default_rng(3), 1)
    windows = OneJob(SimWindows(copy.deepcopy(jobs), np.random.default_rng(0)), 8)
    search = Search(*windows.begin(), prior)
    policy = ExpectedImprovement()
    while not search.is_over:
        plan = search.plan()
        if plan is None:
            search.decide(int(config_index(policy.predict(search.observe())[0][None])[0]))
        else:
            search.record(plan, windows.measure(plan))
    left = search.evidence
    assert left.confirmed.tolist() == search.confirmed.tolist()
    assert ((left.counts > 0) <= (search.tried > 0)).all() and (left.counts > 0).sum() > 1
    assert left.tables.any(axis=1).all() and len(left.savings) == len(left.tables)

"""Searches on whole jobs with every step on the bill."""

import contextlib
import time

import numpy as np
import pytest
from dynamiccl.agent.policies.rule import ExpectedImprovement
from dynamiccl.envs.bench import job_arena
from dynamiccl.envs.bench.job_arena import AccountedWindows, play
from dynamiccl.envs.bench.job_suites import JobSuite
from dynamiccl.envs.bench.scores import LossAccount, summary
from dynamiccl.envs.bench.submissions import rows_of
from dynamiccl.envs.search.belief.prior import Prior
from dynamiccl.envs.search.config import SearchConfig
from dynamiccl.envs.search.interfaces import LEAVE, RUN, Plan, actions_of
from dynamiccl.envs.search.observation import decode
from dynamiccl.envs.sim.jobs import STANDARD, draw_jobs
from dynamiccl.envs.sim.noise import NoiseStream
from dynamiccl.envs.sim.windows import SWITCH_STEPS, SimSearch
from dynamiccl.traces.spaces import N_CHANNELS
from no_gain import without_gain
from oracle import oracle


def played(policy, jobs, best_us, after=100):
    """Scores of a policy on jobs whose best step is ``best_us``; the jobs are left as they are."""
    jobs, rng = jobs.take(slice(None)), np.random.default_rng([0, len(jobs)])
    windows = AccountedWindows(jobs, rng, LossAccount(jobs, best_us))
    search = SimSearch(windows, Prior.load(), SearchConfig())
    return play(policy, search, windows.ledger, after).scores


class Idle:
    """Leaves every slot to NCCL."""

    def predict(self, observation, state=None, episode_start=None, deterministic=True):
        return actions_of(np.zeros(len(observation), int), LEAVE), state


def work(seconds):
    begin = time.thread_time()
    while time.thread_time() - begin < seconds:
        pass


class Slow(Idle):
    """Takes its time over the first decision."""

    def __init__(self, wait):
        self.waits = [wait]

    def predict(self, *asked):
        if self.waits:
            self.waits.pop()(0.3)
        return super().predict(*asked)


@pytest.fixture(scope="module")
def calm():
    jobs = draw_jobs(STANDARD.only("plain"), np.random.default_rng(21), 6)
    jobs.swing[:, 0] = 0
    return jobs, oracle(jobs)[1]


def test_every_step_is_billed_under_what_ran(calm):
    jobs, us = calm[0].take(slice(None)), calm[1]
    ledger = LossAccount(jobs, us)
    windows = AccountedWindows(jobs, np.random.default_rng(0), ledger)
    other = np.zeros(jobs.width, int)
    other[0] = np.flatnonzero(jobs.mask[2, 0])[-1]
    configs = other[: jobs.n_slots[2]]
    at = jobs.noise.at.copy()
    seen = windows.measure([2], [Plan("search", configs, 7, 2)])
    pace = jobs.step_us(other[None], [2])[0][0] / jobs.default_us[2]
    assert seen[0].billed == 7 + 2 + SWITCH_STEPS == ledger.steps[2] and ledger.steps.sum() == ledger.steps[2]
    assert ledger.lost[2] == pytest.approx(9 * (pace - 1)) and jobs.noise.at[2] - at[2] == ledger.steps[2]


@pytest.fixture
def straggling():
    """Jobs without noise, so that what is measured is the truth; all their settings but the default straggle."""
    jobs = draw_jobs(STANDARD.only("tails"), np.random.default_rng(4), 4)
    noise, extras = jobs.noise, jobs.sites.extras
    for name in ("sigma", "tail", "pace", "late", "save_every"):
        getattr(noise, name)[:] = 0
    noise.drift.size[:] = 0
    jobs.swing[:, 0] = 0
    extras.straggle[:, 0], extras.straggle[:, 1:] = 0, 1
    extras.late_often[:], extras.late_size[:] = 0.05, 3.0
    jobs.first_use.us[:] = 0
    jobs.default_us = jobs.usual_us(np.zeros((4, jobs.width), int))
    return jobs


def trial(jobs, i, kind="search", turns=0):
    """A window of the job's second setting in its first slot; where it has turns, the default has the others."""
    configs = np.zeros(jobs.n_slots[i], int)
    configs[0] = next(c for c in np.flatnonzero(jobs.mask[i, 0]) if c % N_CHANNELS)
    return Plan(kind, configs, 40, turns=turns)


@pytest.mark.parametrize("turns", [0, 2])
def test_a_step_that_a_tried_setting_made_far_too_long_is_seen_as_long_as_it_was(straggling, turns):
    """Before: stragglers counted at their mean, so that a setting with one in 20 steps four times as long passed."""
    jobs, rows = straggling, range(len(straggling))
    ledger = LossAccount(jobs, jobs.default_us)
    windows = AccountedWindows(jobs, NoiseStream(5, np.arange(len(jobs)), jobs.width), ledger)
    jobs.carry[:] = 0
    seen = windows.measure(rows, [trial(jobs, i, turns=turns) for i in rows])
    longest = [m.step_ms.max() for m in seen] / (jobs.default_us / 1e3)
    is_long = longest > 3
    assert ledger.worst[is_long] == pytest.approx(longest[is_long]) and is_long.sum() > 1
    assert (ledger.scores().is_harsh == (longest > 1.5)).all()


def test_steps_under_a_setting_that_is_kept_are_not_those_of_a_trial(straggling):
    jobs, rows = straggling, range(len(straggling))
    ledger = LossAccount(jobs, jobs.default_us)
    windows = AccountedWindows(jobs, NoiseStream(5, np.arange(len(jobs)), jobs.width), ledger)
    windows.measure(rows, [trial(jobs, i, kind="watch") for i in rows])
    usual = jobs.step_us(windows.tried)[0] / jobs.default_us
    assert ledger.worst == pytest.approx(np.maximum(usual, 1), rel=1e-3)


def test_the_step_that_connects_an_algorithm_is_seen(straggling):
    jobs, rows = straggling, range(len(straggling))
    jobs.sites.extras.straggle[:] = 0
    jobs.first_use.us[:], jobs.first_use.connected[:] = 2 * jobs.default_us, False
    ledger = LossAccount(jobs, jobs.default_us)
    windows = AccountedWindows(jobs, NoiseStream(5, np.arange(len(jobs)), jobs.width), ledger)
    seen = windows.measure(rows, [trial(jobs, i) for i in rows])
    longest = [m.step_ms.max() for m in seen] / (jobs.default_us / 1e3)
    assert ledger.worst == pytest.approx(longest) and (longest > 2.5).all()


@pytest.mark.parametrize(("wait", "is_refused"), [(work, True), (time.sleep, False)])
def test_a_decision_that_takes_long_is_the_policys_fault_where_it_kept_a_processor_busy(
    calm, wait, is_refused
):
    jobs = calm[0].take([0])
    windows = AccountedWindows(jobs, np.random.default_rng(0), LossAccount(jobs, calm[1][:1]))
    search = SimSearch(windows, Prior.load(), SearchConfig())
    with pytest.raises(ValueError, match="a decision took") if is_refused else contextlib.nullcontext():
        play(Slow(wait), search, windows.ledger, after=0, limit_s=0.1)


@pytest.mark.slow
def test_where_nothing_helps_nothing_is_gained_and_little_lost(calm):
    """A/A: every config is the default, but for what the first use of an algorithm costs. The jobs themselves are left
    as they were."""
    jobs = without_gain(calm[0])
    at = jobs.noise.at.copy()
    for policy in (Idle(), ExpectedImprovement()):
        scores = played(policy, jobs, jobs.default_us)
        assert (jobs.noise.at == at).all()
        most = 0.0 if isinstance(policy, Idle) else 1.0
        assert scores.lost.min() > -1e-3 and scores.lost.max() < most + 1e-3
        assert scores.gain == pytest.approx(0, abs=1e-6)
        assert np.isfinite(scores.verdict).all() and not (scores.is_harmed | scores.is_harsh).any()


@pytest.mark.slow
def test_where_every_other_config_costs_none_is_left_that_is_slower():
    jobs = without_gain(draw_jobs(STANDARD.only("plain"), np.random.default_rng(1), 16), worse=0.03)
    other = np.zeros((16, jobs.width), int)
    other[:, 0] = [np.flatnonzero(row)[-1] for row in jobs.mask[:, 0]]
    slower = jobs.step_us(other)[0] / jobs.step_us(np.zeros_like(other))[0] - 1
    assert slower.min() > -1e-6 and 0.005 < slower.max() < 0.06
    assert not played(ExpectedImprovement(), jobs, jobs.default_us).is_harmed.any()


@pytest.mark.slow
def test_a_rule_on_the_belief_brings_gain_and_is_repeatable(calm):
    jobs, us = calm
    found = [played(ExpectedImprovement(), jobs, us) for _ in range(2)]
    assert (found[0].lost == found[1].lost).all() and (found[0].gain == found[1].gain).all()
    assert (found[0].gain <= found[0].oracle_gain + 1e-3).all()  # the oracle goes slot by slot
    told = summary(found[0])
    assert told["jobs"] == 6 and told["gain_delivered"] > 0.2 and told["slower"] == 0


@pytest.mark.slow
def test_a_job_is_played_alone_as_it_is_among_others():
    """Alone, one that begins to try something again as its watch ends has no other job that keeps the play going."""
    suite = JobSuite.load("unseen")
    rows = rows_of(suite, 200)[16:20]
    alone, among = (play(ExpectedImprovement(), *suite.open(some, 0)) for some in (rows[2:3], rows))
    assert alone.decisions[0] == among.decisions[2] and alone.scores.lost[0] == among.scores.lost[2]


def test_a_job_that_always_tries_something_is_played_no_longer_than_a_job_lasts(calm, monkeypatch):
    """Before: one whose pace came and went for good was never played to its end."""
    monkeypatch.setattr(job_arena, "HORIZON", 500)

    class Trying(Idle):
        turns_taken = 0

        def predict(self, observation, state=None, episode_start=None, deterministic=True):
            seen = decode(observation)
            if not seen.is_refining[0]:
                return super().predict(observation)
            self.turns_taken += 1
            open_ = np.flatnonzero(seen.open[0])
            return actions_of(open_[[self.turns_taken % len(open_)]], RUN), None

    jobs = calm[0].take(slice(None))
    windows = AccountedWindows(jobs, np.random.default_rng(0), LossAccount(jobs, calm[1]))
    play(Trying(), SimSearch(windows, Prior.load(), SearchConfig()), windows.ledger, after=100)
    assert (windows.ledger.steps < 500 + 200).all() and (windows.ledger.steps > 500).any()

"""The windows of a running job, and Live-v0 on them: slots from default steps, decisions out, durations back."""

import dynamiccl  # noqa: F401
import gymnasium as gym
import numpy as np
import pytest
from dynamiccl.envs.live_windows import LiveWindows
from dynamiccl.envs.windows import SEARCH, Plan
from dynamiccl.traces import spaces
from dynamiccl.traces.records import Decision
from fake_job import GATHER, SCATTER, STEP_MS, FakeJob
from gymnasium.utils.env_checker import check_env

LL128 = Decision("ring", "ll128", 8)


def truth(decisions):
    return STEP_MS - 10 * (decisions.get(GATHER) == LL128)


def config(decision):
    return int(spaces.config_index(spaces.action_of(decision)[None])[0])


def test_gymnasium_accepts_it():
    env = gym.make("dynamiccl/Live-v0", job=FakeJob(truth, noise=0.01))
    check_env(env.unwrapped, skip_render_check=True)


def test_slots_come_from_default_steps_largest_share_first():
    windows = LiveWindows(FakeJob(truth))
    job, default = windows.begin()
    assert [p.slot for p in windows.profiles] == [GATHER, SCATTER]
    assert windows.profiles[0].calls == 8 and job.call_us.tolist() == [4000, 4000]
    assert job.share == pytest.approx(8 * 4 / STEP_MS)
    assert default.billed == 11 and len(default.step_ms) == 8
    assert job.mask[:, 0].all() and not job.mask[0, config(Decision("nvls", "simple", 0))]
    # AUTO with a count is the own pair with that count: one of the two is folded.
    assert not job.mask[0, config(Decision(None, None, 8))] and job.mask[0, config(Decision("ring", "simple", 8))]


def test_a_window_runs_under_the_decisions_and_says_what_it_cost():
    job = FakeJob(truth)
    windows = LiveWindows(job)
    windows.begin()
    seen = windows.measure(Plan(SEARCH, np.array([config(LL128), 0]), 5, 3, 150.0))
    assert len(seen.step_ms) == 5 and seen.step_ms[0] == pytest.approx(STEP_MS - 10)
    assert seen.billed == 8 and seen.billed_ms == pytest.approx(8 * (STEP_MS - 10)) and seen.obeyed.all()
    assert {rule.decision for rule in job.tables[-1].rules} == {LL128}
    quiet = windows.measure(Plan(SEARCH, np.zeros(2, np.int64), 5))
    assert quiet.call_us == pytest.approx([4000, 4000]) and np.isnan(seen.call_us).all()


def test_a_step_above_the_limit_ends_the_window():
    windows = LiveWindows(FakeJob(lambda d: STEP_MS * (2 if d else 1)))
    windows.begin()
    seen = windows.measure(Plan(SEARCH, np.array([config(LL128), 0]), 5, 1, 150.0))
    assert len(seen.step_ms) == 1 and seen.step_ms[-1] > 150


def test_only_the_functions_that_may_be_tuned():
    windows = LiveWindows(FakeJob(truth), funcs=("all_gather",))
    windows.begin()
    assert [p.slot for p in windows.profiles] == [GATHER]


def test_nothing_to_tune_is_said():
    job = FakeJob(truth)
    job.assembler.offers = {}
    with pytest.raises(ValueError, match=r"never asks the tuner|nothing to tune"):
        LiveWindows(job).begin()

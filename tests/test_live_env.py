import gymnasium as gym
import numpy as np
import pytest
from dynamiccl.envs import spaces
from dynamiccl.envs.live_env import DEFAULT, TRIAL, WARM, LiveEnv
from dynamiccl.traces.records import AUTO, Decision
from fake_job import GATHER, SCATTER, STEP_MS, FakeJob
from gymnasium.utils.env_checker import check_env

LL128 = Decision("ring", "ll128", 8)


def truth(decisions):
    return STEP_MS - 10 * (decisions.get(GATHER) == LL128) - 5 * (decisions.get(SCATTER, AUTO).n_channels == 4)


def test_gymnasium_accepts_it():
    env = gym.make("dynamiccl/Live-v0", job=FakeJob(truth, noise=0.01))
    check_env(env.unwrapped, skip_render_check=True)


def test_slots_come_from_default_steps_largest_share_first():
    env = LiveEnv(FakeJob(truth))
    profiles = env.profile()
    assert [p.slot for p in profiles] == [GATHER, SCATTER]
    assert profiles[0].calls == 8 and profiles[0].call_us == 4000
    assert profiles[0].share == pytest.approx(8 * 4 / STEP_MS)
    assert profiles[0].fingerprint.own_pair[0] == spaces.PAIRS.index(("ring", "simple"))


def test_a_step_compares_a_config_with_the_default_next_to_it():
    env = LiveEnv(FakeJob(truth))
    env.reset(options={"slot": GATHER})
    _, reward, terminated, truncated, info = env.step(spaces.action_of(LL128))
    assert info["saving"] == pytest.approx(0.10)
    assert [kind for kind, _ in info["log"]] == [WARM, DEFAULT, TRIAL]  # new, so warmed up first
    assert not terminated and not truncated
    gain = 0.10 / (8 * 4 / STEP_MS)
    assert reward == pytest.approx(gain * (1 + spaces.TRIAL_PRICE))
    assert env.best() == LL128
    *_, info = env.step(spaces.action_of(LL128))
    assert [kind for kind, _ in info["log"]] == [DEFAULT, TRIAL]


def test_gains_of_other_slots_do_not_count():
    env = LiveEnv(FakeJob(truth))
    env.reset(options={"slot": GATHER})
    env.committed[GATHER] = LL128
    env.reset(options={"slot": SCATTER})
    *_, info = env.step(np.array([0, 0]))  # AUTO: only the committed gain is there
    assert info["saving"] == pytest.approx(0.10) and env.best() == AUTO
    assert env._trials.last_saving[0] == pytest.approx(0.0, abs=1e-9)


def test_masked_actions_run_as_auto():
    job = FakeJob(truth)
    env = LiveEnv(job)
    env.reset(options={"slot": GATHER})
    nvls = np.array([1 + spaces.PAIRS.index(("nvls", "simple")), 0])
    *_, info = env.step(nvls)
    assert info["masked"] and info["decision"] == AUTO
    assert all(not t.rules for t in job.tables)


def test_a_config_whose_canary_takes_far_too_long_goes_no_further():
    env = LiveEnv(FakeJob(lambda d: STEP_MS * (2 if d.get(GATHER) == LL128 else 1)))
    env.reset(options={"slot": GATHER})
    for _ in range(2):  # and is a canary again when it is tried again
        *_, info = env.step(spaces.action_of(LL128))
        assert [kind for kind, _ in info["log"]] == [WARM, DEFAULT]
        assert len(info["window"].durations_ms) == 1 and info["saving"] == pytest.approx(-1.0)


def test_a_window_is_cut_short_when_a_step_takes_far_too_long():
    slow = iter([1, 1, 2, 1, 1, 1])  # the canary was fine
    env = LiveEnv(FakeJob(lambda d: STEP_MS * (next(slow) if d.get(GATHER) == LL128 else 1)))
    env.reset(options={"slot": GATHER})
    *_, info = env.step(spaces.action_of(LL128))
    assert [kind for kind, _ in info["log"]] == [WARM, DEFAULT, TRIAL]
    assert len(info["window"].durations_ms) == 1


def test_nothing_to_tune_is_said():
    job = FakeJob(truth)
    job.assembler.offers = {}
    with pytest.raises(ValueError, match="nothing to tune"):
        LiveEnv(job).reset()

"""The simulated environment: its contract, its truth, and its speed."""

import dynamiccl  # noqa: F401
import gymnasium as gym
import numpy as np
import pytest
from dynamiccl.agent.policies.rule import ExpectedImprovement
from dynamiccl.envs.search.interfaces import actions_of
from dynamiccl.envs.search.observation import decode
from dynamiccl.envs.sim.workloads import MANY_SLOTS
from gymnasium.utils.env_checker import check_env


def test_gymnasium_accepts_it():
    env = gym.make("dynamiccl/Sim-v0")
    check_env(env.unwrapped, skip_render_check=True)
    obs, info = env.reset(seed=5)
    again, _ = env.reset(seed=5)
    assert (obs == again).all()
    for _ in range(1200):
        _, reward, terminated, truncated, info = env.step(np.array([0, 0, 0]))
        assert not truncated and np.isfinite(reward)
        if terminated:
            break
    assert terminated and info["table"].shape == (MANY_SLOTS,)
    with pytest.raises(ValueError, match=r"call reset\(\)"):
        env.unwrapped.step(np.array([0, 0, 0]))


def test_it_says_what_may_be_chosen_and_how_the_search_stands():
    env = gym.make("dynamiccl/Sim-v0").unwrapped
    obs, info = env.reset(seed=2)
    assert (info["mask"] == decode(obs).open[0]).all() and info["mask"][0] and not info["mask"].all()
    assert info["slot"] == 0 and not info["table"].any()
    done = False
    while not done:
        obs, _, done, _, info = env.step(ExpectedImprovement().predict(obs)[0])
    assert env.search.is_done and (info["table"][: env.search.n_slots] == env.search.confirmed).all()


def test_episodes_of_the_same_seed_are_the_same():
    def episode(seed):
        env = gym.make("dynamiccl/Sim-v0").unwrapped
        obs, _ = env.reset(seed=seed)
        rewards, done = [], False
        while not done:
            action, _ = ExpectedImprovement().predict(obs)
            obs, reward, done, _, info = env.step(action)
            rewards.append(reward)
        return rewards, info["table"].tolist(), info["steps"]

    assert episode(3) == episode(3) != episode(4)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_jobs_of_any_number_of_slots_run_side_by_side(mode):
    """Before: "could not broadcast input array from shape (4,) into shape (2,)"."""
    envs = gym.make_vec("dynamiccl/Sim-v0", num_envs=4, vectorization_mode=mode)
    try:
        _, info = envs.reset(seed=1)
        assert info["table"].shape == (4, MANY_SLOTS)
        for _ in range(12):
            observations, rewards, _, _, info = envs.step(envs.action_space.sample())
        assert observations.shape == envs.observation_space.shape and np.isfinite(rewards).all()
        assert info["table"].shape == (4, MANY_SLOTS)
    finally:
        envs.close()


def test_an_action_outside_the_mask_runs_as_auto():
    env = gym.make("dynamiccl/Sim-v0").unwrapped
    _, info = env.reset(seed=1)
    closed = np.flatnonzero(~info["mask"])[0]
    _, _, _, _, info = env.step(actions_of(closed))
    assert info["masked"] and env.search.phase.choices[0] == 0


def test_the_masks_of_the_parts_leave_out_only_what_no_open_config_has():
    """Through a vector environment, as MaskablePPO of sb3-contrib asks for them."""
    utils = pytest.importorskip("sb3_contrib.common.maskable.utils")
    vectors = pytest.importorskip("stable_baselines3.common.vec_env")
    env = gym.make("dynamiccl/Sim-v0")
    with pytest.raises(ValueError, match=r"reset\(\)"):
        env.unwrapped.action_masks()
    several = vectors.DummyVecEnv([lambda: env])
    several.reset()
    assert utils.is_masking_supported(several)
    (masks,) = utils.get_action_masks(several)
    is_open = np.zeros((7, 8), bool)
    for config in np.flatnonzero(env.unwrapped.search.open[0]):
        pair, channels, _ = actions_of(config)
        is_open[pair, channels] = True
    pairs, counts, what = np.split(masks, [7, 15])
    assert (pairs == is_open.any(axis=1)).all() and (counts == is_open.any(axis=0)).all()
    assert what.all() and not pairs.all()

"""The examples for RL, run as a stranger runs them; a model of theirs is a policy, and learns."""

import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from dynamiccl.agent.policies.choosing import make_chooser
from dynamiccl.envs.search.observation import masks_of
from paths import ROOT

EXAMPLES = ROOT / "examples" / "rl"
#: Jobs on which a model is judged.
JOBS = range(10_000, 10_040)


def run(name, turns, folder, timeout):
    command = [sys.executable, str(EXAMPLES / name), str(turns)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    assert "the rule earns " in done.stdout and ("ep_rew_mean" in done.stdout or turns < 1000)
    return str(folder / "model.zip")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["maskable_ppo.py", "recurrent_ppo.py"])
def test_an_example_leaves_a_policy_and_prints_what_the_rule_earns(name, tmp_path):
    policy = make_chooser(run(name, 64, tmp_path, 300))
    env = gym.make("dynamiccl/Sim-v0")
    observation, info = env.reset(seed=0)
    action, _ = policy.predict(observation[None], None, np.array([True]), True)
    assert action.shape == (1,) and env.action_space.contains(np.int64(action[0]))
    assert (masks_of(observation) == info["action_mask"]).all()
    if name == "maskable_ppo.py":
        assert info["action_mask"][action[0]]


def earned(decide):
    """What each job of JOBS paid."""
    env, found = gym.make("dynamiccl/Sim-v0"), []
    for seed in JOBS:
        observation, info = env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            observation, reward, ended, cut, info = env.step(decide(observation, info))
            total, over = total + reward, ended or cut
        found.append(total)
    return np.array(found)


@pytest.mark.slow
def test_a_few_minutes_of_plain_maskable_ppo_beat_a_random_policy(tmp_path):
    """30,000 turns, in about two minutes of a core."""
    model = make_chooser(run("maskable_ppo.py", 30_000, tmp_path, 1200)).model
    rng = np.random.default_rng(0)
    random = earned(lambda seen, info: rng.choice(np.flatnonzero(info["action_mask"])))
    own = earned(lambda seen, info: model.predict(seen, action_masks=info["action_mask"] > 0)[0])
    beyond = own - random
    error = beyond.std() / len(beyond) ** 0.5
    print(
        f"random {random.mean():.1f}, MaskablePPO {own.mean():.1f}: +{beyond.mean():.1f}, error {error:.1f}"
    )
    assert beyond.mean() > 2 * error

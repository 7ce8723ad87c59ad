"""Policies by name: a model of stable-baselines3, a folder, and what is refused with the cure."""

import gymnasium
import numpy as np
import pytest
from dynamiccl.agent.policies.choosing import make_chooser

OWN = "class Policy:\n    def predict(self, observation, state=None, episode_start=None, deterministic=True): ...\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Untrained models as ``model.save()`` leaves them."""
    stable_baselines3 = pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")
    from sb3_contrib import RecurrentPPO

    folder = tmp_path_factory.mktemp("models")
    env = gymnasium.make("dynamiccl/Sim-v0")
    few = {"n_steps": 16, "batch_size": 16, "device": "cpu", "seed": 0}
    stable_baselines3.PPO("MlpPolicy", env, **few).save(folder / "ppo")
    stable_baselines3.A2C("MlpPolicy", env, device="cpu", seed=0).save(folder / "a2c")
    RecurrentPPO("MlpLstmPolicy", env, **few).save(folder / "recurrent")
    stable_baselines3.PPO("MlpPolicy", "CartPole-v1", **few).save(folder / "foreign")
    return folder, env


@pytest.mark.parametrize("name", ["ppo", "a2c", "recurrent"])
def test_a_saved_model_is_a_policy(models, name):
    """Before: `bench --policy model.zip` was refused."""
    folder, env = models
    policy = make_chooser(str(folder / f"{name}.zip"))
    observation, _ = env.reset(seed=0)
    action, _ = policy.predict(observation[None], None, np.array([True]), True)
    assert env.action_space.contains(np.reshape(action, ()).astype(np.int64))


def test_a_model_of_another_environment_is_refused(models):
    with pytest.raises(ValueError, match="not trained on dynamiccl/Sim-v0"):
        make_chooser(str(models[0] / "foreign.zip"))


def test_a_file_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "text.zip").write_text("no zip")
    with pytest.raises(ValueError, match="no model of stable-baselines3"):
        make_chooser(str(tmp_path / "text.zip"))
    with pytest.raises(ValueError, match="there is no file"):
        make_chooser(str(tmp_path / "none.zip"))


def test_a_folder_holds_one_policy(tmp_path):
    with pytest.raises(ValueError, match="holds no policy: put one"):
        make_chooser(str(tmp_path))
    (tmp_path / "policy.py").write_text(OWN)
    assert type(make_chooser(str(tmp_path))).__name__ == "Policy"
    (tmp_path / "model.zip").write_text("")
    with pytest.raises(ValueError, match="holds 2 policies"):
        make_chooser(str(tmp_path))

"""Policies by name: a model of stable-baselines3, a folder, and what is refused with the cure."""

import os
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from dynamiccl.agent.policies.choosing import make_chooser, runs_code

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


@pytest.fixture(autouse=True)
def forgets(monkeypatch):
    """Python forgets a test's modules and folders."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("policy", "beside_a", "beside_b", "wrong_here"):
        sys.modules.pop(name, None)


def test_a_folder_holds_one_policy(tmp_path):
    with pytest.raises(ValueError, match="holds no policy: put one"):
        make_chooser(str(tmp_path))
    (tmp_path / "policy.py").write_text(OWN)
    assert type(make_chooser(str(tmp_path))).__name__ == "Policy"
    (tmp_path / "model.zip").write_text("")
    with pytest.raises(ValueError, match="holds 2 policies"):
        make_chooser(str(tmp_path))


@pytest.fixture
def folders(tmp_path):
    """Folders a and b, each with a policy that needs a module beside it."""
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "policy.py").write_text(f"import beside_{name}\n{OWN}    who = beside_{name}.WHO\n")
        (folder / f"beside_{name}.py").write_text(f"WHO = {name!r}\n")
    return tmp_path


def test_a_folder_plays_its_own_policy_and_a_second_one_is_refused(folders):
    """Before: the one that was loaded first played under another folder's name."""
    assert make_chooser(str(folders / "a")).who == "a"
    assert make_chooser(str(folders / "a")).who == "a"
    with pytest.raises(
        ValueError, match=r"another module policy .*/a/policy\.py\) than .*b/policy\.py: give it another"
    ):
        make_chooser(str(folders / "b"))


def test_a_folder_leaves_python_its_own_modules(folders):
    (folders / "a" / "wave.py").write_text("raise SystemExit('not this one')\n")
    (folders / "a" / "policy.py").write_text("import wave\n" + OWN)
    assert type(make_chooser(str(folders / "a"))).__module__ == "policy"


@pytest.mark.parametrize(
    ("name", "is_code"),
    [
        ("lstm", False),
        ("w.npz", False),
        ("m.zip", True),
        ("m:N", True),
        ("{}/a", True),
        ("{}/weights", False),
    ],
)
def test_it_is_known_which_policies_run_their_authors_code(folders, name, is_code):
    (folders / "weights").mkdir()
    (folders / "weights" / "w.npz").touch()
    assert runs_code(name.format(folders)) == is_code


@pytest.mark.parametrize(
    ("code", "why"),
    [("import beside_none\n", "No module named 'beside_none'"), ("", "no attribute 'Policy'")],
)
def test_a_folder_without_the_class_is_refused(folders, code, why):
    (folders / "a" / "policy.py").write_text(code)
    with pytest.raises(ValueError, match=f"cannot load policy .*policy.py.*{why}"):
        make_chooser(str(folders / "a"))


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("class Policy:\n    def predict(self) ...\n", r"SyntaxError: .*policy\.py, line 2\)"),
        ("import wave\n1 / 0\n", r"ZeroDivisionError: division by zero \(policy\.py, line 2\)"),
        (
            "class Policy:\n    def __init__(self):\n        int('x')\n",
            r"ValueError: .* \(policy\.py, line 3\)",
        ),
        ("import json\njson.loads('{')\n", r"JSONDecodeError: .* \(policy\.py, line 2\)"),
        ("class Policy: ...\n", "TypeError: it has no predict"),
    ],
)
def test_an_error_in_the_users_code_is_told_with_its_line(folders, monkeypatch, code, why):
    """Before: a traceback of ours for all but a missing module."""
    (folders / "a" / "policy.py").write_text(code)
    with pytest.raises(ValueError, match=rf"cannot load policy .*policy\.py': {why}"):
        make_chooser(str(folders / "a"))
    (folders / "b" / "wrong_here.py").write_text(code)
    monkeypatch.chdir(folders / "b")
    for known in [name for name in sys.modules if name == "wrong_here"]:
        del sys.modules[known]
    with pytest.raises(
        ValueError, match=rf"cannot load policy 'wrong_here:Policy'.*{why.replace('policy', 'wrong_here')}"
    ):
        make_chooser("wrong_here:Policy")


def test_a_module_that_is_not_the_current_folders_is_refused(folders, monkeypatch):
    """Before: in another folder, the first folder's module of this name played again."""
    monkeypatch.chdir(folders / "a")
    assert make_chooser("policy:Policy").who == "a"
    monkeypatch.chdir(folders / "b")
    with pytest.raises(ValueError, match=r"another module policy .*b/policy\.py: give it another name"):
        make_chooser("policy:Policy")


#: A recurrent policy in a module whose name does not say so.
MINE = (
    "from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy\n"
    "class Mine(RecurrentActorCriticPolicy): ...\n"
)
SAVE = (
    "import sys\nimport dynamiccl, gymnasium, sb3_contrib\nfrom my_memory import Mine\n"
    "env = gymnasium.make('dynamiccl/Sim-v0')\n"
    "sb3_contrib.RecurrentPPO(Mine, env, n_steps=16, batch_size=16, device='cpu').save('model')\n"
)
LOAD = (
    "import sys\nsys.path.remove('')\nfrom dynamiccl.agent.policies.choosing import make_chooser\n"
    "print(type(make_chooser(sys.argv[1])).__name__)\n"
)


@pytest.mark.slow
def test_a_model_with_a_class_of_the_current_folder_is_loaded_as_what_it_is(models, tmp_path):
    """Before: only with PYTHONPATH=., and as PPO, without its memory: its module is not named "recurrent"."""
    (tmp_path / "my_memory.py").write_text(MINE)
    for program, word in ((SAVE, ""), (LOAD, "model.zip")):
        command = [sys.executable, "-c", program, word]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    assert done.stdout == "Mine\n"
    (tmp_path / "elsewhere").mkdir()
    command = [sys.executable, "-c", LOAD, "../model.zip"]
    done = subprocess.run(command, cwd=tmp_path / "elsewhere", capture_output=True, text=True, timeout=120)
    assert "ValueError: ../model.zip needs the module my_memory" in done.stderr
    assert done.stderr.rstrip().endswith("run the command in the folder of my_memory.py")
    (tmp_path / "my_memory.py").write_text("import einops_of_mine\n" + MINE)
    command = [sys.executable, "-c", LOAD, "model.zip"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "model.zip needs the module einops_of_mine" in done.stderr


OWN_LOAD = (
    "import sys\nsys.path.remove('')\nfrom dynamiccl.agent.policies.choosing import make_chooser\n"
    "policy = make_chooser(sys.argv[1])\nimport this_is_installed, wave\n"
    "print(type(policy).__module__, this_is_installed.__file__, wave.__name__)\n"
)


def test_the_current_folder_hides_no_module_that_python_has(tmp_path):
    """Before: it came first on Python's path, so its files replaced packages and Python's own modules. A policy in a
    module whose name another one has is refused: which of them is meant?"""
    here, installed = tmp_path / "here", tmp_path / "installed"
    for folder in (here, installed):
        folder.mkdir()
        (folder / "this_is_installed.py").write_text(OWN)
    (here / "mine.py").write_text(OWN)
    (here / "wave.py").write_text("raise SystemExit('not this one')\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(os.path.abspath, sys.path), str(installed)])}
    said = []
    for module in ("mine", "this_is_installed"):
        command = [sys.executable, "-c", OWN_LOAD, f"{module}:Policy"]
        said.append(subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, timeout=120))
    assert said[0].stdout.split() == ["mine", str(installed / "this_is_installed.py"), "wave"], said[0].stderr
    assert "another module this_is_installed" in said[1].stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["ppo", "a2c", "recurrent"])
def test_a_model_decides_as_the_algorithm_that_left_it(models, name):
    from sb3_contrib import RecurrentPPO
    from stable_baselines3 import A2C, PPO

    folder, env = models
    algorithm = {"ppo": PPO, "a2c": A2C, "recurrent": RecurrentPPO}[name]
    whole, ours = algorithm.load(folder / name, device="cpu"), make_chooser(str(folder / f"{name}.zip"))
    states = [None, None]
    for seed in range(8):
        observation, _ = env.reset(seed=seed)
        begins = np.array([seed == 0])
        found = [
            m.predict(observation[None], s, begins, True) for m, s in zip((whole, ours), states, strict=True)
        ]
        states = [state for _, state in found]
        assert np.array_equal(found[0][0], found[1][0])


def test_models_of_other_algorithms_decide_too(models, tmp_path):
    """Before: refused. Nothing but its policy is asked."""
    from sb3_contrib import TRPO
    from stable_baselines3 import DQN

    TRPO("MlpPolicy", models[1], device="cpu").save(tmp_path / "trpo")
    DQN("MlpPolicy", models[1], device="cpu", buffer_size=2).save(tmp_path / "dqn")
    observation, _ = models[1].reset(seed=0)
    for name in ("trpo", "dqn"):
        action, _ = make_chooser(str(tmp_path / f"{name}.zip")).predict(observation[None], None, None, True)
        assert models[1].action_space.contains(np.reshape(action, ()).astype(np.int64))

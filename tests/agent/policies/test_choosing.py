"""Policies by name: a model of stable-baselines3, a folder, and what is refused with the cure."""

import os
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from dynamiccl.agent.policies import own_folder
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


#: A policy of a folder that says who it is by a module beside it, at the top, where it is made and where it decides.
BESIDE = (
    "import beside\n"
    "class Policy:\n"
    "    def __init__(self):\n"
    "        import beside_too\n"
    "        self.who = [beside.WHO, beside_too.WHO]\n"
    "    def predict(self, observation, state=None, episode_start=None, deterministic=True):\n"
    "        import beside, beside_late\n"
    "        return [*self.who, beside.WHO, beside_late.WHO], state\n"
)
NAMES = ("beside", "beside_too", "beside_late")


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Folders a and b and the current one, each with a policy and the modules that it needs, all of the same names."""
    for name in ("a", "b", "here"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "policy.py").write_text(BESIDE)
        for module in NAMES:
            (folder / f"{module}.py").write_text(f"WHO = {name!r}\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(tmp_path / "here")
    own_folder.forget()
    before = sys.meta_path.copy()
    yield tmp_path
    own_folder.forget()
    assert sys.meta_path == before
    for name in (*NAMES, "policy"):
        sys.modules.pop(name, None)


def who(policy):
    return "".join(policy.predict(None)[0])


def test_a_folder_plays_its_own_policy(folders):
    """Before: the current folder's policy.py, or the one that was loaded first, played under another folder's name."""
    path = sys.path.copy()
    for name in ("a", "b", "a"):
        policy = make_chooser(str(folders / name))
        assert (
            who(policy) == 4 * name
            and Path(sys.modules[type(policy).__module__].__file__).parent.name == name
        )
    assert sys.path == path
    # Nor are a's modules left to those who come after it.
    policy = make_chooser("policy:Policy")
    assert [*policy.who, type(policy).__module__] == ["here", "here", "policy"]


def test_a_folder_leaves_what_python_had(folders):
    """Its modules replace neither Python's nor those that others have imported."""
    import beside

    (folders / "a" / "wave.py").write_text("raise SystemExit('not this one')\n")
    (folders / "a" / "policy.py").write_text("import wave\n" + BESIDE)
    assert make_chooser(str(folders / "a")).who == ["a", "a"]
    assert sys.modules["beside"] is beside and beside.WHO == "here"


def test_a_folders_policy_may_make_that_of_another(folders):
    (folders / "a" / "policy.py").write_text(
        "from dynamiccl.agent.policies.choosing import make_chooser\n"
        f"class Policy:\n    def __init__(self):\n        self.other = make_chooser({str(folders / 'b')!r})\n"
        "        import beside\n        self.who = beside.WHO\n    def predict(self): ...\n"
    )
    policy = make_chooser(str(folders / "a"))
    assert (policy.who, policy.other.who) == ("a", ["b", "b"])


def test_a_folder_without_the_class_is_refused(folders):
    (folders / "a" / "policy.py").write_text("import beside_none\n")
    (folders / "b" / "policy.py").write_text("")
    for name, why in (("a", "No module named 'beside_none'"), ("b", "no attribute 'Policy'")):
        with pytest.raises(ValueError, match=f"cannot load class Policy of .*policy.py .*{why}"):
            make_chooser(str(folders / name))


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
    with pytest.raises(ValueError, match=rf"cannot load class Policy of .*policy\.py \({why}"):
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
    assert make_chooser("policy:Policy").who == ["here", "here"]
    monkeypatch.chdir(folders / "b")
    with pytest.raises(ValueError, match=r"another module policy than .*b/policy\.py: give it another name"):
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
    assert done.stdout == "RecurrentPPO\n"
    (tmp_path / "elsewhere").mkdir()
    command = [sys.executable, "-c", LOAD, "../model.zip"]
    done = subprocess.run(command, cwd=tmp_path / "elsewhere", capture_output=True, text=True, timeout=120)
    assert "ValueError: ../model.zip has a class of the module my_memory" in done.stderr
    assert done.stderr.rstrip().endswith("run the command in the folder of my_memory.py")
    (tmp_path / "my_memory.py").write_text("import einops_of_mine\n" + MINE)
    command = [sys.executable, "-c", LOAD, "model.zip"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    # Before: "run the command in the folder of einops_of_mine.py".
    assert done.stderr.rstrip().endswith(
        "model.zip has a class of the module my_memory, which needs einops_of_mine. Python does not find it: "
        "install this package"
    )


#: The current folder has a module of the policy, one of the same name as an installed one, and one that hides Python's.
OWN_LOAD = (
    "import sys\nsys.path.remove('')\nfrom dynamiccl.agent.policies.choosing import make_chooser\n"
    "policy = make_chooser(sys.argv[1])\nimport this_is_installed, wave\n"
    "print(type(policy).__module__, this_is_installed.__file__, wave.__name__)\n"
)


def test_the_current_folder_hides_no_installed_module_and_has_the_users_policy(tmp_path):
    """Before: it came first on Python's path, so its files replaced packages and Python's own modules."""
    here, installed = tmp_path / "here", tmp_path / "installed"
    for folder in (here, installed):
        folder.mkdir()
        (folder / "this_is_installed.py").write_text("class Policy: ...\n" if folder == installed else OWN)
    (here / "mine.py").write_text(OWN)
    (here / "wave.py").write_text("raise SystemExit('not this one')\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(os.path.abspath, sys.path), str(installed)])}
    for module, found in (("mine", installed), ("this_is_installed", here)):
        command = [sys.executable, "-c", OWN_LOAD, f"{module}:Policy"]
        done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, timeout=120)
        assert done.stdout.split() == [module, str(found / "this_is_installed.py"), "wave"], done.stderr


@pytest.mark.parametrize(
    ("name", "algorithm"), [("ppo", "PPO"), ("a2c", "A2C"), ("recurrent", "RecurrentPPO")]
)
def test_a_model_is_loaded_by_the_algorithm_that_left_it(models, name, algorithm):
    """Before: A2C was loaded as PPO."""
    assert type(make_chooser(str(models[0] / f"{name}.zip"))).__name__ == algorithm


def test_a_model_of_an_unknown_algorithm_is_refused_with_the_cure(models, tmp_path):
    """Before: TRPO was loaded as PPO."""
    from sb3_contrib import TRPO
    from stable_baselines3 import DQN

    TRPO("MlpPolicy", models[1], device="cpu").save(tmp_path / "trpo")
    DQN("MlpPolicy", models[1], device="cpu", buffer_size=2).save(tmp_path / "dqn")
    for name in ("trpo", "dqn"):
        with pytest.raises(ValueError, match=r"is a model of none of RecurrentPPO, .*: give MODULE:NAME"):
            make_chooser(str(tmp_path / f"{name}.zip"))

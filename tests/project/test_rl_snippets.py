"""The pages' snippets for reinforcement learning run as they stand there, on models of 64 turns and on one job."""

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest
from paths import ROOT

#: Trains a model of the class that the page shows, and one of MaskablePPO, as a reader would.
TRAIN = """
import dynamiccl
from my_lstm import MaskedLstm
from sb3_contrib import MaskablePPO, RecurrentPPO
from stable_baselines3.common.env_util import make_vec_env

few = {"n_steps": 64, "n_epochs": 1, "gamma": 0.999, "device": "cpu", "seed": 0}
env = make_vec_env("dynamiccl/Sim-v0", seed=0)
RecurrentPPO(MaskedLstm, env, **few).learn(64).save("lstm")
print(env.buf_infos[0]["n_masked"])
MaskablePPO("MlpPolicy", make_vec_env("dynamiccl/Sim-v0", seed=0), **few).learn(64).save("model")
"""
BENCH = ("-m", "dynamiccl.agent.cli", "bench", "--policy", "lstm.zip", "--policy", "my_module:MyPolicy")


def blocks(page):
    """The Python of a page, also that of a list's item."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    found = re.findall(r"^( *)```(?:py|python)\n(.*?)^ *```$", text, re.M | re.S)
    return [textwrap.dedent(block) for _, block in found]


def block(page, word):
    (found,) = [one for one in blocks(page) if word in one]
    return found


def python(folder, *words):
    """What the program prints."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A reader's folder: the pages' modules, and what training said."""
    pytest.importorskip("sb3_contrib", reason="sb3-contrib is not installed")
    made = tmp_path_factory.mktemp("reader")
    (made / "my_lstm.py").write_text(block("environments.md", "class MaskedLstm"))
    (made / "my_module.py").write_text(block("environments.md", "def MyPolicy"))
    (made / "compare.py").write_text(block("environments.md", "evaluate_policy"))
    (made / "said.txt").write_text(python(made, "-c", TRAIN))
    return made


def test_no_snippet_of_the_page_is_left_out():
    """Three here; that for ``Replay-v0`` and ``Live-v0`` in test_docs.py."""
    assert len(blocks("environments.md")) == 4


@pytest.mark.slow
def test_the_class_with_mask_and_memory_takes_no_masked_action(folder):
    """Of random actions nine of ten are masked."""
    assert (folder / "said.txt").read_text() == "0\n"


@pytest.mark.slow
def test_bench_plays_the_class_and_the_module_from_their_folder(folder):
    """Without PYTHONPATH=. for the class in ``lstm.zip``."""
    rows = json.loads(python(folder, "-P", *BENCH, "--jobs", "1", "--json"))
    played = {row["entrant"] for row in rows if row["decision_us"] > 0}
    assert played == {"lstm.zip", "my_module:MyPolicy"}


@pytest.mark.slow
def test_two_policies_are_compared_on_the_same_jobs(folder):
    lines = python(folder, "compare.py", "lstm", "expected-improvement", "1").splitlines()
    found = [re.fullmatch(r"(.*): (-?\d+\.\d) \(0\.0\)", line).groups() for line in lines]
    names, means = zip(*found, strict=True)
    assert names == ("first", "second", "first - second")
    assert float(means[0]) - float(means[1]) == pytest.approx(float(means[2]), abs=0.11)

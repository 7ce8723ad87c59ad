"""Training in small: it is paid against the rule, goes on after a kill, and says what made the weights."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from command import invoke
from dynamiccl.agent.commands.lab.train import _beyond
from dynamiccl.agent.policies.lstm import LstmPolicy
from dynamiccl.agent.policies.rule import ExpectedImprovement
from dynamiccl.agent.train.against import AgainstBaseline
from dynamiccl.agent.train.training import Settings, Training, export
from dynamiccl.envs.search.interfaces import LEAVE, actions_of
from dynamiccl.envs.sim.family import STANDARD
from dynamiccl.envs.sim_env import SimEnv
from dynamiccl.traces.outside import TraceError
from paths import ROOT

SMALL = Settings(turns=64, envs=2, rollout=16, batch=16, epochs=1, hidden=8, head_width=8)


def played(env, decide, seed):
    observation, _ = env.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        observation, reward, ended, cut, _ = env.step(decide(observation))
        total, over = total + reward, ended or cut
    return total


@pytest.mark.slow
def test_the_rule_earns_nothing_beyond_itself_and_who_leaves_as_soon_as_it_may_loses_what_it_would_have_gained():
    """While a table promises a gain nobody may leave: such a job may gain by the comparison at its end."""
    env, rule = AgainstBaseline(*(SimEnv(STANDARD.only("plain")) for _ in range(2))), ExpectedImprovement()
    lost, kept = [], []
    for seed in range(6):
        assert played(env, lambda seen: rule.predict(seen)[0], seed) == pytest.approx(0.0, abs=1e-9)
        alone = played(env, lambda seen: actions_of(0, LEAVE), seed)
        lost.append(alone)
        kept.append(alone + env.earned)
    assert min(kept) > -1 and sum(abs(more) < 0.5 for more in kept) >= 3
    assert min(lost) < -5 and np.mean(lost) < 0
    env.most = 0.5
    paid = [played(env, lambda seen: actions_of(0, LEAVE), seed) for seed in range(6)]
    np.testing.assert_allclose(paid, np.clip(lost, -0.5, 0.5), atol=1e-9)


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint_and_says_what_made_the_weights(tmp_path):
    training = Training(SMALL, tmp_path / "a")
    before = training.policy.export()
    training.run()
    assert any(
        not np.array_equal(before[name], weights) for name, weights in training.policy.export().items()
    )
    told = json.loads(export(training, tmp_path / "p.npz").read_text())
    assert [row["turns"] for row in told["curve"]] == [32, 64] and told["settings"]["rollout"] == 16
    shipped = LstmPolicy.load(tmp_path / "p.npz")
    assert shipped.record["curve"] == told["curve"]
    twin = Training(SMALL, tmp_path / "b", is_split=True)
    twin.run()
    for name, weights in training.policy.export().items():
        np.testing.assert_array_equal(weights, twin.policy.export()[name], err_msg=name)
    again = Training(SMALL, tmp_path / "a")
    again.resume()
    for name, weights in training.policy.export().items():
        np.testing.assert_array_equal(weights, again.policy.export()[name], err_msg=name)
    assert again.policy.optimizer.state_dict()["state"] and len(again.curve) == 2
    # Before: a resumed run compared its weights with other first ones.
    assert again.record()["correlation with the first weights"] == told["correlation with the first weights"]
    again.begin_with(shipped)
    for name, weights in shipped.weights.items():
        np.testing.assert_allclose(again.policy.export()[name], weights, rtol=1e-6, err_msg=name)
    for settings, folder, why in (
        (replace(SMALL, seed=1), "a", "other settings"),
        (SMALL, "none", "no checkpoint"),
    ):
        with pytest.raises(ValueError, match=why):
            Training(settings, tmp_path / folder).resume()


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_the_runs_that_it_was_made_with(tmp_path):
    """Before: with other runs, and with none: then on simulated jobs, with a record that told of no runs."""
    run = ROOT / "tests" / "data" / "recordings" / "demo"
    Training(SMALL, tmp_path / "runs", (run,)).save()
    Training(SMALL, tmp_path / "none").save()
    for folder, runs in (("runs", ()), ("none", (run,)), ("runs", (run, run))):
        with pytest.raises(ValueError, match="it was made with other --runs"):
            Training(SMALL, tmp_path / folder, runs).resume()


@pytest.mark.parametrize("place", [0, 4])
def test_a_run_that_cannot_be_read_is_told_before_the_training(place, tmp_path, monkeypatch):
    """Before: a traceback, for the fifth one, which judges, after the training."""
    read = []

    def reading(run):
        if run.name == "none":
            raise TraceError(f"no trace in {run}")
        read.append(run)
        return SimpleNamespace(reset=lambda seed: None)

    monkeypatch.setattr("dynamiccl.envs.replay_env.ReplayEnv", reading)
    monkeypatch.setattr("dynamiccl.agent.train.training.Training", None)
    runs = [tmp_path / ("none" if i == place else "good") for i in range(5)]
    words = [word for run in runs for word in ("--runs", str(run))]
    done = invoke(["lab", "train", "--out", str(tmp_path / "p.npz"), *words])
    assert done.exit_code == 2 and done.stderr == f"error: no trace in {tmp_path / 'none'}\n"
    assert len(read) == place


@pytest.mark.slow
def test_a_run_that_was_killed_keeps_each_update_and_goes_on_with_other_jobs(tmp_path):
    """Before: a checkpoint held the weights of before its last update, and training began with its first jobs again."""
    training = Training(SMALL, tmp_path)
    first = training.policy.export()
    began = training.model.get_env().reset()

    def killed(done, total, row):
        if done == 64:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training.run(killed)
    updated = training.policy.export()
    again = Training(SMALL, tmp_path)
    again.resume()
    assert again.model.num_timesteps == 32
    kept = again.policy.export()
    assert all(np.array_equal(updated[name], kept[name]) for name in first)
    assert any(not np.array_equal(first[name], kept[name]) for name in first)
    assert not np.array_equal(again.model.get_env().reset(), began)


def test_no_two_seeds_train_on_the_same_jobs(tmp_path):
    """Before: seed 1 had all jobs of seed 0 but those of one environment."""
    drawn = []
    for seed in (0, 1):
        jobs = Training(replace(SMALL, seed=seed, envs=3), tmp_path / str(seed)).model.get_env()
        jobs.reset()
        drawn += [round(float(env.unwrapped.jobs.default_us[0]), 3) for env in jobs.envs]
    assert len(set(drawn)) == 6


def test_every_update_learns_and_adam_sees_small_gradients(tmp_path):
    """Before: the last update had a rate of 0, and 97 % of the recurrent weights' gradients lay below epsilon."""
    training = Training(replace(SMALL, turns=40), tmp_path)
    rates = []
    update = training.model._update_learning_rate

    def noted(optimizer):
        update(optimizer)
        rates.append(optimizer.param_groups[0]["lr"])

    training.model._update_learning_rate = noted
    training.run()
    assert training.model.num_timesteps == 64
    assert rates == pytest.approx([1e-3, 5e-4])
    assert {group["eps"] for group in training.policy.optimizer.param_groups} == {1e-8}


@pytest.mark.parametrize(
    ("saved", "error", "said"),
    [
        (
            14.3,
            20.0,
            "+14.3 (standard error 20.0) default steps a job beyond the rule's, not told apart from the rule",
        ),
        (-50.0, 20.0, "-50.0 (standard error 20.0) default steps a job beyond the rule's"),
        (3.0, None, "+3.0 default steps a job beyond the rule's (one job: error not known)"),
    ],
)
def test_a_figure_of_the_training_is_told_with_its_error(saved, error, said):
    """Before: "+14.3 default steps a job beyond the rule's", of ten jobs with an error of 20."""
    assert _beyond(saved, error) == said

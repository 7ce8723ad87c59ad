"""The numpy policy is the trained one; the fast LSTM pass is the stock one; masks hold; searches end."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from dynamiccl.agent.belief import Belief, expected_improvement
from dynamiccl.agent.policy import PARTS, LstmPolicy, actor_input
from dynamiccl.agent.prior import Prior, log_loss
from dynamiccl.agent.recurrent import N_INPUT, MaskedLstmPolicy, config_mask
from dynamiccl.agent.stopping import StopRule
from dynamiccl.envs import spaces
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from standin import HiddenKind


def made(seed: int = 0, **kwargs: Any) -> MaskedLstmPolicy:
    torch.manual_seed(seed)
    inputs = gym.spaces.Box(-4.0, 4.0, (N_INPUT,), np.float32)
    policy = MaskedLstmPolicy(inputs, spaces.action_space(), lambda _: 1e-3, lstm_hidden_size=24, **kwargs)
    with torch.no_grad():  # weights large enough that the memory matters and the choice varies
        for p in policy.parameters():
            p.mul_(2.0)
        policy.mlp_extractor.policy_net.skip.weight.normal_(0, 1)
        policy.mlp_extractor.policy_net.u.normal_(0, 1)
    return policy


def light_of(policy: MaskedLstmPolicy, **record: Any) -> LstmPolicy:
    torch.manual_seed(9)
    return LstmPolicy(policy.export() | Prior().export(), record)


def told(light: LstmPolicy, obs: Any) -> Any:
    """What the twin in training is given for the same observations."""
    return np.concatenate(actor_input(light.belief, obs, light.without), axis=1)


def test_fast_lstm_pass_equals_the_stock_one() -> None:
    rng = np.random.default_rng(0)
    lstm = torch.nn.LSTM(7, 5)
    for case in range(20):
        n_seq, length = rng.integers(1, 5), rng.integers(1, 12)
        x = torch.randn(n_seq * length, 7)
        states = (torch.randn(1, n_seq, 5), torch.randn(1, n_seq, 5))
        starts = torch.tensor(rng.random(n_seq * length) < (0.0 if case == 0 else 0.3), dtype=torch.float32)
        stock = RecurrentActorCriticPolicy._process_sequence(x, states, starts, lstm)
        fast = MaskedLstmPolicy._process_sequence(x, states, starts, lstm)
        torch.testing.assert_close(fast[0], stock[0])
        torch.testing.assert_close(fast[1], stock[1])


def test_numpy_policy_equals_the_torch_one_over_rollouts() -> None:
    for seed in range(3):
        policy = made(seed)
        light = light_of(policy)
        env = HiddenKind(5, seed)
        obs = env.reset()
        states: tuple[Any, Any] = (None, None)
        start = np.ones(5, bool)
        differing = 0
        for _ in range(40):
            heavy_action, heavy = policy.predict(told(light, obs), states[0], start, deterministic=True)
            action, lean = light.predict(obs, states[1], start)
            np.testing.assert_array_equal(action, heavy_action)
            with torch.no_grad():
                given = [torch.zeros(1, 5, 24)] * 2 if states[0] is None else [torch.tensor(s) for s in states[0]]
                begun = torch.tensor(start, dtype=torch.float32)
                dist, _ = policy.get_distribution(torch.tensor(told(light, obs)), (given[0], given[1]), begun)
            before = light._fresh(5) if states[1] is None else states[1]
            keep = 1 - start[:, None].astype(np.float32)
            scores, _ = light.logits(obs, (before[0] * keep, before[1] * keep))
            valid = spaces.config_mask(obs)
            np.testing.assert_allclose(
                np.where(valid, scores - scores.max(1, keepdims=True), 0),
                np.where(valid, (z := dist.distribution.logits.numpy()) - z.max(1, keepdims=True), 0),
                atol=1e-5,
            )
            np.testing.assert_allclose(lean[0], heavy[0][0], atol=1e-5)
            differing += len(np.unique(action, axis=0))
            states = (heavy, lean)
            noisy = light.predict(obs, lean, deterministic=False)[0]
            obs, _, _, start, _ = env.step(noisy)
        assert differing > 40  # the test saw more than one constant action


def test_one_slot_and_a_batch_agree() -> None:
    light = light_of(made(1))
    obs = HiddenKind(4, 2).reset()
    batch, state = light.predict(obs)
    single, own = light.predict(obs[2])
    assert single.shape == (2,) and single.dtype == np.int64
    np.testing.assert_array_equal(single, batch[2])
    np.testing.assert_allclose(own[0][0], state[0][2], atol=1e-6)


def test_masked_configs_are_never_chosen_and_padding_is_left_open() -> None:
    policy = made()
    obs = HiddenKind(64, 0).reset()
    obs[:, -spaces.N_MASK :] = np.random.default_rng(0).random((64, spaces.N_MASK)) < 0.3
    obs[:, -spaces.N_MASK] = obs[:, -spaces.N_CHANNELS] = 1
    rows = np.arange(64)
    light = light_of(policy)
    for _ in range(50):
        for deterministic in (True, False):
            actions = policy.predict(told(light, obs), deterministic=deterministic)[0]
            assert spaces.config_mask(obs)[rows, spaces.config_index(actions)].all()
            lean = light.predict(obs, deterministic=deterministic)[0]
            assert spaces.config_mask(obs)[rows, spaces.config_index(lean)].all()
    assert bool(config_mask(torch.zeros(2, spaces.N_OBSERVATION)).all())


def test_distribution_is_one_categorical_over_configs() -> None:
    policy = made()
    seen = HiddenKind(3, 0).reset()
    obs = torch.tensor(told(light_of(policy), seen))
    states = (torch.zeros(1, 3, 24), torch.zeros(1, 3, 24))
    dist, _ = policy.get_distribution(obs, states, torch.ones(3))
    every = torch.tensor(spaces.actions_of(np.arange(spaces.N_CONFIGS)))
    with torch.no_grad():
        chances = torch.stack([dist.log_prob(every[c].expand(3, 2)).exp() for c in range(spaces.N_CONFIGS)], 1)
    torch.testing.assert_close(chances.sum(dim=1), torch.ones(3))
    assert float(chances[~torch.tensor(spaces.config_mask(seen))].max()) < 1e-12


def test_weights_survive_the_file_and_another_layout_is_refused(tmp_path: Path) -> None:
    light = light_of(made(), seed=3)
    light.save(tmp_path / "w.npz")
    again = LstmPolicy.load(tmp_path / "w.npz")
    assert again.record["seed"] == 3
    obs = HiddenKind(4, 2).reset()
    np.testing.assert_array_equal(again.predict(obs)[0], light.predict(obs)[0])
    weights = dict(light.weights, lstm_x=light.weights["lstm_x"][:-1])
    LstmPolicy.save(light, tmp_path / "w.npz")
    with pytest.raises(ValueError, match="train anew"):
        LstmPolicy(weights)
    (tmp_path / "junk.npz").write_bytes(b"junk")
    for path in (tmp_path / "junk.npz", tmp_path / "absent.npz"):
        with pytest.raises(ValueError, match="cannot use"):
            LstmPolicy.load(path)
    old = {key: light.weights[key] for key in light.weights}
    np.savez(tmp_path / "old.npz", meta=np.array(json.dumps({"format": 0})), **old)
    with pytest.raises(ValueError, match="format 0"):
        LstmPolicy.load(tmp_path / "old.npz")


def test_run_time_needs_neither_torch_nor_sb3() -> None:
    code = (
        "import sys; import dynamiccl.agent.policy, dynamiccl.agent.baselines;"
        "print([m for m in ('torch', 'stable_baselines3', 'sb3_contrib', 'pandas') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.timing
def test_a_step_takes_no_longer_than_some_small_array_operations() -> None:
    """About 60 us on an idle core, five times as much as a hundred of numpy's smallest operations beside it."""
    light = light_of(made())
    obs = HiddenKind(1, 0).reset()[0]
    state = light.predict(obs)[1]
    x = np.zeros(24, np.float32)
    ratios = []
    for _ in range(500):
        begin = time.perf_counter()
        _, state = light.predict(obs, state)
        middle = time.perf_counter()
        for _ in range(100):
            np.tanh(x)
        ratios.append((middle - begin) / (time.perf_counter() - middle))
    assert np.median(ratios) < 25, np.median(ratios)


def test_stop_rule() -> None:
    env = HiddenKind(1, 0)
    obs = env.reset()
    good = np.array([1 + env.kind[0], 4])
    stop = StopRule()
    assert not stop(obs[0], good)  # not tried yet
    obs = env.step(good[None])[0]
    assert not stop(obs[0], good)  # the best already: measured once more
    obs = env.step(good[None])[0]
    assert stop(obs[0], good)  # asked for twice running: done
    stop = StopRule()
    assert not stop(obs[0], good) and not stop(obs[0], np.array([0, 0])) and not stop(obs[0], good)

    class Long:
        horizon = 40

        def predict(self, *args: Any, **kwargs: Any) -> Any: ...

    trials = spaces.Trials.start(1)
    for t in range(41):
        seen = spaces.observe(env.fingerprint.vector(), env.mask, trials)[0]
        assert StopRule()(seen, np.array([1, 1])) == (t >= spaces.HORIZON)
        assert StopRule(Long())(seen, np.array([1, 1])) == (t >= 40)
        trials.record(np.array([2]), np.array([0.1]))


# The belief ---------------------------------------------------------------------------------------------------------


def test_belief_is_the_posterior_of_the_full_gaussian() -> None:
    torch.manual_seed(3)
    belief = Belief(Prior(n_factors=3).export())
    env = HiddenKind(6, 1)
    rng = np.random.default_rng(2)
    obs = env.reset()
    for _ in range(4):
        allowed = spaces.config_mask(obs)
        obs = env.step(spaces.actions_of([rng.choice(np.flatnonzero(row)) for row in allowed]))[0]
    mean, loadings, own = belief.prior(obs)
    found_mean, found_variance = belief.posterior(obs)
    seen = spaces.seen(obs)
    for i in range(6):
        # The textbook way, with the whole covariance matrix.
        tried = [c for c in np.flatnonzero(seen.count[i] > 0) if c]
        covariance = loadings[i] @ loadings[i].T + np.diag(own[i])
        time = np.maximum(1 - seen.mean[i, tried], 0.05)
        share = max(obs[i, 10], 0.01)
        noise = (0.02 / share / time) ** 2 / seen.count[i, tried] + 0.02**2
        gain = covariance[:, tried] @ np.linalg.inv(covariance[np.ix_(tried, tried)] + np.diag(noise))
        wanted = mean[i] + gain @ (np.log(time) - mean[i, tried])
        variance = np.diag(covariance - gain @ covariance[tried])
        np.testing.assert_allclose(found_mean[i, 1:], wanted[1:], atol=1e-6)
        np.testing.assert_allclose(found_variance[i, 1:], variance[1:], rtol=1e-5, atol=1e-7)
        assert found_mean[i, 0] == 0


def test_prior_loss_is_the_likelihood_of_what_is_known() -> None:
    torch.manual_seed(4)
    x, times = torch.randn(5, 25 + spaces.N_MASK)[:, : Prior().layers[0].in_features], torch.randn(5, spaces.N_CONFIGS)
    known = torch.rand(5, spaces.N_CONFIGS) < 0.4
    mean, loadings, own = Prior(n_factors=3)(x)
    total = 0.0
    for i in range(5):
        k = known[i]
        covariance = (loadings[i] @ loadings[i].T + torch.diag(own[i]))[k][:, k]
        normal = torch.distributions.MultivariateNormal(mean[i, k], covariance)
        total -= float((normal.log_prob(times[i, k]) / k.sum() + 0.5 * np.log(2 * np.pi)).detach())
    assert float(log_loss(mean, loadings, own, times, known.float()).detach()) == pytest.approx(total / 5, rel=1e-4)


def test_expected_improvement_against_draws() -> None:
    rng = np.random.default_rng(0)
    for ahead, deviation in [(0.3, 0.1), (0.0, 0.5), (-0.4, 0.3), (-2.0, 0.1)]:
        drawn = np.maximum(rng.normal(ahead, deviation, 400_000), 0).mean()
        assert expected_improvement(np.array(ahead), np.array(deviation)) == pytest.approx(drawn, abs=2e-3)


@pytest.mark.parametrize("part", [p for p in PARTS if p != "memory"])
def test_what_a_policy_is_trained_without_does_not_reach_it(part: str) -> None:
    light = light_of(made(2), settings={"without": [part]})
    env = HiddenKind(8, 3)
    obs = env.reset()
    obs = env.step(light.predict(obs)[0])[0]
    told_without, believed = actor_input(light.belief, obs, light.without)
    told_all, believed_all = actor_input(light.belief, obs)
    changed = told_without.shape == told_all.shape and not np.array_equal(told_without, told_all)
    assert changed == (part != "belief")
    assert bool((believed == 0).all()) == (part in ("belief", "statistics")) and (believed_all != 0).any()
    rows = np.arange(8)
    assert spaces.config_mask(obs)[rows, spaces.config_index(light.predict(obs)[0])].all()

"""Each baseline keeps to the mask, finds what its method can find, and speaks the policy protocol."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from dynamiccl.agent.baselines import BASELINES, GaussianProcess, Thompson, Ucb1, make_baseline, make_policy
from dynamiccl.agent.stopping import StopRule
from dynamiccl.envs import spaces
from standin import HiddenKind

Array = np.ndarray[Any, Any]


#: The method itself, without the settings found for it and without an end of its search.
ENDLESS = {"horizon": 10**9, "patience": 10**9}


def search(
    name: str, n: int = 16, steps: int = 60, noise: float = 0.0, seed: int = 0
) -> tuple[Array, HiddenKind, Array]:
    """Configs chosen (steps, n), the environment at its end, and the true saving of the best measured config (n,)."""
    env = HiddenKind(n, seed, noise)
    env.horizon = 10**9
    obs, state, start = env.reset(), None, np.ones(n, bool)
    policy = make_baseline(name, seed, ENDLESS)
    chosen = []
    for _ in range(steps):
        actions, state = policy.predict(obs, state, start)
        assert actions.shape == (n, 2) and actions.dtype == np.int64
        chosen.append(spaces.config_index(actions))
        obs, _, _, start, _ = env.step(actions)  # asserts that the mask was kept
    return np.array(chosen), env, env.truth[np.arange(n), env.trials.best()]


@pytest.mark.parametrize("name", [*BASELINES, "tpe"])
def test_protocol_masks_and_single_observations(name: str) -> None:
    if name == "tpe":
        pytest.importorskip("optuna")
    chosen, env, _ = search(name, n=6, steps=40, noise=0.05)
    single, state = make_policy(name).predict(env._observe()[0])
    assert single.shape == (2,) and single.dtype == np.int64 and state is not None
    masked = ~spaces.config_mask(env._observe())
    assert masked.any() and not masked[0, chosen].any()


@pytest.mark.parametrize("name", ["coordinate-descent", "thompson", "ucb1", "gp", "exhaustive", "random"])
def test_finds_the_best_without_noise(name: str) -> None:
    # Random draws 60 of 24 configs: it misses one with probability (23 / 24)^60, about 8 %.
    _, _, found = search(name)
    assert (found == 0.5).mean() >= (0.75 if name == "random" else 1.0)


def test_default_stays_at_auto() -> None:
    chosen, _, found = search("default", steps=5)
    assert not chosen.any() and not found.any()


def test_exhaustive_tries_each_config_once_and_then_stays() -> None:
    chosen, env, _ = search("exhaustive", n=3)
    n_valid = int(spaces.config_mask(env._observe())[0].sum()) - 1  # AUTO counts as tried
    for i in range(3):
        assert len(set(chosen[:n_valid, i])) == n_valid
        assert set(chosen[n_valid:, i]) == {int(env.truth[i].argmax())}


def test_coordinate_descent_changes_one_knob_at_a_time() -> None:
    env = HiddenKind(1, 0, 0.0)
    env.horizon = 10**9
    obs, state = env.reset(), None
    policy = make_baseline("coordinate-descent", 0, ENDLESS)
    for _ in range(30):
        best = env.trials.best()[0]
        action, state = policy.predict(obs[0], state)
        moved = (action != spaces.actions_of(np.array([best]))[0]).sum()
        assert moved <= 1
        obs = env.step(action[None])[0]
    assert env.truth[0, env.trials.best()[0]] == 0.5


@pytest.mark.parametrize("name", ["thompson", "ucb1", "gp"])
def test_bandits_pull_the_best_most_in_the_end(name: str) -> None:
    chosen, env, _ = search(name, steps=120, noise=0.05)
    last = chosen[-40:]
    assert (last == env.truth.argmax(axis=1)).mean() > 0.5


def test_gp_posterior_is_the_conditional_gaussian() -> None:
    gp = GaussianProcess(noise=0.1)
    count, mean = np.zeros(spaces.N_CONFIGS), np.full(spaces.N_CONFIGS, -np.inf)
    tried, values = np.array([0, 9, 12, 30]), np.array([0.0, 0.3, -0.2, 0.1])
    count[tried], mean[tried] = [1, 2, 1, 4], values
    centre, deviation = gp.posterior(count, mean)
    noise = np.diag(0.01 / count[tried])
    gain = gp.kernel[:, tried] @ np.linalg.inv(gp.kernel[np.ix_(tried, tried)] + noise)
    np.testing.assert_allclose(centre, gain @ values, atol=1e-10)
    np.testing.assert_allclose(deviation**2, np.diag(gp.kernel - gain @ gp.kernel[tried]), atol=1e-9)
    assert (np.linalg.eigvalsh(gp.kernel) > -1e-9).all()


def test_bandits_count_past_what_the_observation_shows() -> None:
    env = HiddenKind(1, 0, 0.0)
    env.horizon = 10**9
    obs = env.reset()
    for policy in (Thompson(0), Ucb1(0)):
        state = None
        obs = env.reset()
        for _ in range(40):
            action, state = policy.predict(obs, state, np.zeros(1, bool))
            obs = env.step(action)[0]
        policy.predict(obs, state)
        assert state is not None
        np.testing.assert_array_equal(state[0].count, env.trials.count[0])


def test_searches_end_by_the_stop_rule() -> None:
    for name, limit in (("exhaustive", 58), ("coordinate-descent", 16), ("random", 16), ("default", 2)):
        env = HiddenKind(1, 1, 0.0)
        env.horizon = 10**9
        policy, obs, state = make_policy(name), env.reset(), None
        stop = StopRule(policy)
        trials = 0
        while trials < 100:
            action, state = policy.predict(obs[0], state)
            if stop(obs[0], action):
                break
            obs, trials = env.step(action[None])[0], trials + 1
        assert trials <= limit
        if name == "exhaustive":
            assert env.truth[0, env.trials.best()[0]] == 0.5


def test_a_search_that_has_ended_stays_with_its_best() -> None:
    env = HiddenKind(8, 3, 0.05)
    env.horizon = 10**9
    policy, obs, state = make_baseline("random", 0, {"horizon": 6}), env.reset(), None
    for window in range(20):
        best = env.trials.best()
        actions, state = policy.predict(obs, state)
        assert window < 6 or (spaces.config_index(actions) == best).all()
        obs = env.step(actions)[0]


def test_tpe_learns_and_says_when_optuna_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    chosen, env, found = search("tpe", n=8, steps=40)
    assert (found == 0.5).mean() >= 0.75
    last = chosen[-15:]
    assert (last == env.truth.argmax(axis=1)).mean() > 2 / 24  # far more often than by chance
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match=r"pip install 'dynamiccl\[optuna\]'"):
        make_policy("tpe")


def test_policies_by_name() -> None:
    assert make_policy("test_baselines:Own").predict(np.zeros(3))[0] == 7
    for bad in (
        "no-such",
        "no_such_module:X",
        "dynamiccl.agent.baselines:absent",
        "dynamiccl.agent.baselines:NOISE",
    ):
        with pytest.raises(ValueError, match="polic"):
            make_policy(bad)


class Own:
    def predict(self, observation: Array, *args: Any, **kwargs: Any) -> Any:
        return 7, None

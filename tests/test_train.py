"""Training learns a task that needs memory, goes on after a kill as if nothing had happened, and keeps its record."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dynamiccl.agent.batches import N_REVEALED
from dynamiccl.agent.policy import LstmPolicy, actor_input
from dynamiccl.agent.stopping import Stopping
from dynamiccl.agent.train import Settings, Training, examine, export
from dynamiccl.envs import spaces
from dynamiccl.envs.arena import Arena, Suite, play
from standin import HiddenKind

SMALL = Settings(
    prior=8_192,
    prior_batch=256,
    steps=32_768,
    chunk=8_192,
    n_envs=128,
    imitation=0.5,
    batch=1024,
    hidden=16,
    head_width=24,
)


def batch(n: int, seed: int) -> HiddenKind:
    return HiddenKind(n, seed, 0.1)


def suite(n: int = 96) -> Suite:
    unseen = batch(n, 10**6)
    unseen.reset()
    return Suite.of("hidden kind", unseen)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Training:
    training = Training(
        dataclasses.replace(SMALL, prior=24_576, steps=131_072, chunk=98_304, imitation=0.7, hidden=24, batch=512),
        batch,
        lambda policy: examine(policy, suite()),
        tmp_path_factory.mktemp("train") / "p.checkpoint",
    )
    training.run()
    return training


def test_learns_to_try_and_to_switch(trained: Training) -> None:
    played = play(Stopping(trained.light()), Arena(suite()))
    kinds = suite().truth.argmax(axis=1)
    first = played.configs[0]
    assert (first == kinds).mean() < 0.7  # nothing shows the kind beforehand ...
    assert played.best[8].mean() > 0.9 * played.oracle[8].mean()  # ... trials do
    wrong = first != kinds
    assert (played.configs[-1] == kinds)[wrong].mean() > 0.8


def test_curve_and_record_tell_how_it_was_made(trained: Training, tmp_path: Path) -> None:
    beside = export(trained, tmp_path / "p.npz", {"lstm": {"regret": 1.0}})
    record = json.loads(beside.read_text())
    assert [row["phase"] for row in record["curve"]] == ["prior", "imitation", "ppo"]
    assert record["settings"] == json.loads(json.dumps(dataclasses.asdict(trained.settings)))
    assert record["figures"]["lstm"]["regret"] == 1.0
    assert record["date"] and "commit" in record
    loaded = LstmPolicy.load(tmp_path / "p.npz")
    assert loaded.record["settings"]["seed"] == 0
    obs = batch(5, 3).reset()
    np.testing.assert_array_equal(loaded.predict(obs)[0], trained.light().predict(obs)[0])
    told = np.concatenate([*actor_input(loaded.belief, obs), np.zeros((5, N_REVEALED), np.float32)], axis=1)
    np.testing.assert_array_equal(trained.policy.predict(told, deterministic=True)[0], loaded.predict(obs)[0])


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = Training(SMALL, batch, lambda policy: {}, tmp_path / "whole")
    whole.run()

    class Killed(Exception):
        pass

    def kill(done: int, total: int, row: dict[str, Any]) -> None:
        if done == 32_768:  # in the midst of PPO
            raise Killed

    with pytest.raises(Killed):
        Training(SMALL, batch, lambda policy: {}, tmp_path / "cut").run(kill)
    again = Training(SMALL, batch, lambda policy: {}, tmp_path / "cut")
    again.resume()
    assert again.done == 32_768 and len(again.curve) == 4
    again.run()
    for key, value in whole.light().weights.items():
        np.testing.assert_array_equal(again.light().weights[key], value)

    other = Training(dataclasses.replace(SMALL, gamma=0.5), batch, lambda policy: {}, tmp_path / "cut")
    with pytest.raises(ValueError, match="gamma"):
        other.resume()
    with pytest.raises(ValueError, match="no checkpoint"):
        Training(SMALL, batch, lambda policy: {}, tmp_path / "absent").resume()


def test_without_memory_the_lstm_says_nothing() -> None:
    training = Training(dataclasses.replace(SMALL, without=("memory",)), batch, lambda policy: {}, Path("unused"))
    light = training.light()
    obs = batch(4, 0).reset()
    rng = np.random.default_rng(0)
    states = [tuple(rng.standard_normal((4, 16)).astype(np.float32) for _ in range(2)) for _ in range(2)]
    a, b = (light.logits(obs, (h, c))[0] for h, c in states)
    np.testing.assert_allclose(a[np.isfinite(a)], b[np.isfinite(b)], atol=1e-6)
    assert a.shape[1] == spaces.N_CONFIGS

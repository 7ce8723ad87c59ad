"""Training in small: it learns, goes on after a kill with the same weights, and says what made them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from dynamiccl.agent.policies.lstm import LstmPolicy
from dynamiccl.agent.policies.rule import ExpectedImprovement
from dynamiccl.agent.train.batches import N_REVEALED, JobBatch, JobVecEnv
from dynamiccl.agent.train.imitation import collect, learn
from dynamiccl.agent.train.training import Settings, Stage, Training, export, make_policy
from dynamiccl.envs.search import turns
from dynamiccl.envs.sim.family import STANDARD
from dynamiccl.traces.spaces import config_index

SMALL = Settings(stages=(Stage(2, 0.02, 0.3, 0.3),), workers=1, jobs=3, descents=2, batch=3, hidden=8, head_width=8)


def test_rewards_of_an_episode_add_up_to_the_time_not_lost():
    batch, rule = JobBatch(4, 0), ExpectedImprovement()
    seen = batch.reset()
    block = batch.at[0][0]
    begin, unit, earned = block.lost.copy(), block.unit.copy(), np.zeros(4)
    checked = 0
    while checked < 2:
        at = list(batch.at)
        seen, rewards, over = batch.step(config_index(rule.predict(seen)[0]))
        earned += rewards
        for i in np.flatnonzero(over):
            if at[i][0] is block:
                row = at[i][1]
                assert earned[i] == pytest.approx((begin[row] - block.lost[row]) / unit[row], abs=1e-6)
                search = block.search.searches[row]
                assert search.is_over and batch.finished[-1]["oracle"] >= 0
                checked += 1
            earned[i] = 0
        for i, (other, _) in enumerate(batch.at):
            if other is not block:
                earned[i] = 0


def test_sb3_sees_the_truth_behind_the_observation():
    env = JobVecEnv(JobBatch(2, 1))
    obs = env.reset()
    assert obs.shape == (2, turns.N_OBSERVATION + N_REVEALED) and env.observation_space.contains(obs[0])
    obs, reward, over, infos = env.step(np.zeros((2, 2), np.int64))
    assert reward.shape == over.shape == (2,) and len(infos) == 2


@pytest.mark.slow
def test_imitation_lowers_its_loss():
    policy = make_policy(SMALL)
    episodes = collect(policy.export(), {}, STANDARD, (0, 1), 4, 3.0)
    assert len(episodes) == 4 and all(e.apart.max() >= 0 for e in episodes)
    losses = [learn(policy, episodes, 0.3, 0.02, 20.0, 0.3) for _ in range(40)]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_a_run_that_was_cut_off_ends_with_the_same_weights(tmp_path):
    class Cut(Exception):
        pass

    def stop(done, total, row):
        if done == 1:
            raise Cut

    whole = Training(SMALL, tmp_path / "a")
    whole.run()
    cut = Training(SMALL, tmp_path / "b")
    with pytest.raises(Cut):
        cut.run(stop)
    again = Training(SMALL, tmp_path / "b")
    again.resume()
    assert again.done == 1
    again.run()
    for name, weights in whole.policy.export().items():
        np.testing.assert_array_equal(weights, again.policy.export()[name], err_msg=name)
    record = export(whole, tmp_path / "p.npz")
    told = json.loads(record.read_text())
    assert [row["phase"] for row in told["curve"]] == ["imitation"] * 2 and told["settings"]["jobs"] == 3
    assert LstmPolicy.load(tmp_path / "p.npz").record["seconds"] == told["seconds"]
    with pytest.raises(ValueError, match="other settings"):
        Training(replace(SMALL, seed=1), tmp_path / "b").resume()
    with pytest.raises(ValueError, match="no checkpoint"):
        Training(SMALL, tmp_path / "none").resume()


@pytest.mark.slow
def test_ppo_goes_on_from_there(tmp_path):
    training = Training(replace(SMALL, stages=(), ppo=1, ppo_turns=64), tmp_path)
    before = training.policy.export()
    training.run()
    assert any(not np.array_equal(before[k], v) for k, v in training.policy.export().items())
    assert training.curve[0]["phase"] == "ppo"

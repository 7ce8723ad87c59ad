"""Replay: what the trace measured comes back as measured, the rest is predicted and says so."""

from dataclasses import replace

import dynamiccl  # noqa: F401
import gymnasium as gym
import numpy as np
import pytest
from dynamiccl.agent.policies.rule import ExpectedImprovement
from dynamiccl.envs.replay import decisions as replay
from dynamiccl.envs.replay.job import RecordedJob
from dynamiccl.envs.replay_env import ReplayEnv
from dynamiccl.traces import spaces
from dynamiccl.traces.files import TraceError
from dynamiccl.traces.records import AUTO, Decision, decision_from
from dynamiccl.traces.spaces import config_of
from dynamiccl.traces.writer import TraceWriter
from gymnasium.utils.env_checker import check_env
from synthetic_trace import CALL_US, FINAL, GATHER, HEADER, LAYER_BYTES, OWN, SCATTER, write_run


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("replay") / "trace", search=24, final=12)[1]


@pytest.fixture(scope="module")
def recorded(trace):
    return replay.load(trace)


def expected_saving(recorded, slot, decision):
    """Scaled saving by the made-up costs: every call is waited for, so saved time is saved step time."""
    func = slot.func
    before, after = CALL_US[func, LAYER_BYTES][OWN], CALL_US[func, LAYER_BYTES][decision]
    return (before - after) / before


def test_gymnasium_and_stable_baselines3_accept_it(trace):
    env = gym.make("dynamiccl/Replay-v0", trace=trace)
    check_env(env.unwrapped, skip_render_check=True)
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    checker.check_env(env.unwrapped, skip_render_check=True)


def test_what_was_measured_comes_back_as_measured(recorded):
    assert recorded.slots[:2] == [GATHER, SCATTER]  # the larger share of the step first
    assert (np.diff(recorded.share) <= 0).all()
    for slot, decision in FINAL.items():
        row, c = recorded.slots.index(slot), config_of(decision)
        assert recorded.measured[row, c]
        right = expected_saving(recorded, slot, (decision.algo, decision.proto, decision.n_channels))
        assert recorded.truth[row, c] == pytest.approx(right, abs=0.12)
    worse = recorded.truth[recorded.slots.index(SCATTER), config_of(Decision("ring", "simple", 8))]
    assert worse < 0, "a config that made the step longer has a negative saving"


def test_what_was_not_measured_is_predicted_and_marked(recorded):
    allowed = spaces.config_mask(spaces.action_mask(recorded.fingerprint))
    assert (np.isfinite(recorded.truth) == allowed).all()
    assert (recorded.measured & ~allowed).sum() == 0
    assert 0 < recorded.measured.sum() < allowed.sum() / 4
    for slot in (GATHER, SCATTER):
        row = recorded.slots.index(slot)
        # NCCL's own choice, forced, is what the default ran.
        own = config_of(Decision(OWN[0], OWN[1], 0))
        assert recorded.truth[row, own] == pytest.approx(0.0, abs=0.05) and not recorded.measured[row, own]
        # One channel was never tried; on any machine it is slow for megabytes.
        assert recorded.truth[row, config_of(Decision("ring", "simple", 1))] < -0.3


def episode(env, seed):
    obs, info = env.reset(seed=seed)
    story, done = [(obs.tolist(), 0.0, info)], False
    while not done:
        action, _ = ExpectedImprovement().predict(obs)
        obs, reward, done, _, info = env.step(action)
        story.append((obs.tolist(), reward, info))
    return [(o, r, {k: np.asarray(v).tolist() for k, v in i.items()}) for o, r, i in story]


def test_the_search_over_a_record_finds_what_the_job_found(trace, recorded):
    """Its steps have the noise of the record, so that one beginning finds more than another."""
    saved = []
    for seed in range(5):
        env = ReplayEnv(trace)
        story = episode(env, seed)
        table = env.windows.decisions(np.array(story[-1][2]["table"])[: env.search.n_slots])
        saved.append(RecordedJob(trace, recorded).saving(table))
    assert np.mean(saved) >= 0.6 * RecordedJob(trace, recorded).saving(FINAL) > 0 and min(saved) > 0


def test_a_seed_repeats_a_replay(trace):
    assert episode(ReplayEnv(trace), 3) == episode(ReplayEnv(trace), 3)


def test_decisions_read_back():
    for decision in (
        AUTO,
        Decision(None, None, 8),
        Decision("ring", "ll128"),
        Decision("nvls", "simple", 16),
    ):
        assert decision_from(str(decision)) == decision
    with pytest.raises(ValueError, match="is no decision"):
        decision_from("ring")


def test_traces_that_cannot_be_replayed_are_refused(tmp_path):
    with pytest.raises(TraceError, match="no trace in"):
        ReplayEnv(tmp_path / "absent")
    with TraceWriter(tmp_path / "empty", HEADER):
        pass
    with pytest.raises(TraceError, match="holds no steps"):
        ReplayEnv(tmp_path / "empty")
    _, trace = write_run(tmp_path / "trace", search=4, final=2)
    silent = replace(trace, events=trace.events.iloc[:0])
    with pytest.raises(TraceError, match="no all_gather or reduce_scatter"):
        ReplayEnv(silent)

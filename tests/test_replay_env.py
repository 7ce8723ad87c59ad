"""Replay: what the trace measured comes back as measured, the rest is predicted and says so."""

import dynamiccl.envs  # noqa: F401 - registers the ids
import gymnasium as gym
import numpy as np
import pytest
from dynamiccl.envs import replay, spaces
from dynamiccl.envs.arena import Suite
from dynamiccl.envs.replay_env import ReplayEnv
from dynamiccl.traces.files import Trace, TraceError, TraceWriter
from dynamiccl.traces.records import AUTO, Decision, Slot
from gymnasium.utils.env_checker import check_env
from synthetic_trace import CALL_US, FINAL, GATHER, HEADER, LAYER_BYTES, OWN, SCATTER, write_run


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("replay") / "trace", search=24, final=12)[1]


@pytest.fixture(scope="module")
def recorded(trace):
    return replay.load(trace)


def config(decision):
    return int(spaces.config_index(spaces.action_of(decision)[None])[0])


def expected_saving(recorded, slot, decision):
    """Scaled saving by the made-up costs: every call is waited for, so saved time is saved step time."""
    func = slot.func
    before, after = CALL_US[func, LAYER_BYTES][OWN], CALL_US[func, LAYER_BYTES][decision]
    return (before - after) / before


def test_gymnasium_accepts_it(trace):
    env = gym.make("dynamiccl/Replay-v0", trace=trace)
    check_env(env.unwrapped, skip_render_check=True)
    for window in range(1, spaces.HORIZON + 1):
        _, _, terminated, truncated, _ = env.step(np.array([0, 0])) if window > 1 else (env.reset(), 0, False, False, 0)
        assert not terminated
    assert not truncated
    *_, truncated, info = env.step(np.array([0, 0]))
    assert truncated and info["config"] == 0


def test_what_was_measured_comes_back_as_measured(recorded):
    assert recorded.slots[:2] == [SCATTER, GATHER] or recorded.slots[:2] == [GATHER, SCATTER]
    for slot, decision in FINAL.items():
        row, c = recorded.slots.index(slot), config(decision)
        assert recorded.measured[row, c]
        right = expected_saving(recorded, slot, (decision.algo, decision.proto, decision.n_channels))
        assert recorded.truth[row, c] == pytest.approx(right, abs=0.12)
        assert len(recorded.windows[row][c]) >= 5
        assert np.mean(recorded.windows[row][c]) == pytest.approx(recorded.truth[row, c], abs=0.1)
    worse = recorded.truth[recorded.slots.index(SCATTER), config(Decision("ring", "simple", 8))]
    assert worse < 0, "a config that made the step longer has a negative saving"


def test_what_was_not_measured_is_predicted_and_marked(recorded):
    allowed = spaces.config_mask(recorded.mask)
    assert (np.isfinite(recorded.truth) == allowed).all()
    assert (recorded.measured & ~allowed).sum() == 0
    assert 0 < recorded.measured.sum() < allowed.sum() / 4
    for slot in (GATHER, SCATTER):
        row = recorded.slots.index(slot)
        # NCCL's own choice, forced, is what the default ran.
        own = config(Decision(OWN[0], OWN[1], 0))
        assert recorded.truth[row, own] == pytest.approx(0.0, abs=0.05) and not recorded.measured[row, own]
        # One channel was never tried; on any machine it is slow for megabytes.
        assert recorded.truth[row, config(Decision("ring", "simple", 1))] < -0.3


def test_the_environment_plays_the_recorded_windows_and_says_so(trace, recorded):
    env = ReplayEnv(trace)
    obs, info = env.reset(seed=0, options={"slot": GATHER})
    assert info["slot"] == GATHER
    row, decision = recorded.slots.index(GATHER), FINAL[GATHER]
    seen = [env.step(spaces.action_of(decision))[4] for _ in range(3)]
    assert [i["saving"] for i in seen] == pytest.approx(recorded.windows[row][config(decision)][:3])
    assert all(i["measured"] for i in seen)
    _, _, _, _, info = env.step(spaces.action_of(Decision("ring", "simple", 1)))
    assert not info["measured"] and info["saving"] < 0
    closed = np.flatnonzero(~spaces.config_mask(obs[None])[0])[0]
    _, _, _, _, info = env.step(spaces.actions_of(np.array([closed]))[0])
    assert info["refused"] and info["config"] == config(AUTO)
    with pytest.raises(ValueError, match="the trace has no slot"):
        env.reset(options={"slot": Slot(2, 1, "all_gather", 3)})


def test_a_seed_repeats_a_replay(trace):
    def play():
        env = ReplayEnv(trace)
        env.reset(seed=4)
        return [env.step(np.array([3, k]))[4]["saving"] for k in (1, 2, 3)]

    assert play() == play()


def test_it_is_a_suite_for_the_judge(recorded):
    suite = Suite.of("replay", recorded)
    assert len(suite) == len(recorded.slots)


def test_decisions_read_back():
    for decision in (AUTO, Decision(None, None, 8), Decision("ring", "ll128"), Decision("nvls", "simple", 16)):
        assert replay.decision_from(str(decision)) == decision
    with pytest.raises(ValueError, match="is no decision"):
        replay.decision_from("ring")


def test_traces_that_cannot_be_replayed_are_refused(tmp_path):
    with pytest.raises(TraceError, match="no trace in"):
        ReplayEnv(tmp_path / "absent")
    with TraceWriter(tmp_path / "empty", HEADER):
        pass
    with pytest.raises(TraceError, match="holds no steps"):
        ReplayEnv(tmp_path / "empty")
    _, trace = write_run(tmp_path / "trace", search=4, final=2)
    silent = Trace(trace.folder, trace.header, trace.events.iloc[:0], trace.steps, trace.comms, trace.offers, trace.log)
    with pytest.raises(TraceError, match="no all_gather or reduce_scatter"):
        ReplayEnv(silent)

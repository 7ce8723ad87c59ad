"""The numpy policy is the trained one; untrained it is the rule; the fast LSTM pass is the stock one; masks hold."""

import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dynamiccl.agent.policies.choosing import check_chooser, make_chooser
from dynamiccl.agent.policies.lstm import FORMAT, LstmPolicy, rule_scores
from dynamiccl.agent.policies.rule import (
    FORESIGHT,
    FORESIGHT_AFTER,
    MOST_RISK,
    RISK_PRICE,
    RISK_PRICE_AFTER,
    ExpectedImprovement,
)
from dynamiccl.agent.train.recurrent import MaskedLstmPolicy
from dynamiccl.envs.search.belief.prior import Prior
from dynamiccl.envs.search.config import SearchConfig
from dynamiccl.envs.search.interfaces import LEAVE, RUN, action_space, choices_of
from dynamiccl.envs.search.observation import N_OBSERVATION, decode, observation_space
from dynamiccl.envs.sim.jobs import STANDARD, draw_jobs
from dynamiccl.envs.sim.windows import SimSearch, SimWindows
from dynamiccl.envs.sim_env import SimEnv
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from side_by_side import turn


@pytest.fixture(scope="module")
def observed():
    """Observations (t, n, N_OBSERVATION) of the first turns of jobs under the rule."""
    jobs = draw_jobs(STANDARD.only("plain"), np.random.default_rng(4), 6)
    search = SimSearch(SimWindows(jobs, np.random.default_rng(0)), Prior.load(), SearchConfig())
    rule, found = ExpectedImprovement(), []
    while len(found) < 12 and len(seen := turn(search, rule)) == 6:
        found.append(seen)
    assert len(found) >= 6
    return np.array(found)


def untrained(hidden=24):
    return MaskedLstmPolicy(observation_space(), action_space(), lambda _: 1e-3, lstm_hidden_size=hidden)


def shaken():
    torch.manual_seed(0)
    policy = untrained()
    head = policy.mlp_extractor.policy_net
    with torch.no_grad():  # weights large enough that the memory matters and the choice varies
        for p in (*policy.lstm_actor.parameters(), *head.body.parameters(), *head.z.parameters()):
            p.mul_(3.0)
        head.v.normal_(0, 1)
        head.u.normal_(0, 1)
        head.what.normal_(0, 1)
    return policy


def fresh(policy, n):
    return (np.zeros((n, policy.hidden), np.float32),) * 2


def test_fast_lstm_pass_equals_the_stock_one():
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


def test_numpy_and_torch_score_alike(observed):
    policy = shaken()
    light = LstmPolicy(policy.export())
    n = observed.shape[1]
    states, state = (torch.zeros(1, n, 24), torch.zeros(1, n, 24)), fresh(light, n)
    for t, seen in enumerate(observed):
        with torch.no_grad():
            wanted, states = policy.scores(torch.as_tensor(seen), states, torch.full((n,), float(t == 0)))
        found, state = light.scores(seen, state)
        open_ = decode(seen).open
        np.testing.assert_allclose(found[open_], wanted.numpy()[open_], rtol=1e-3, atol=1e-2)
        assert np.isneginf(found[~open_]).all()


def test_exploration_does_not_end_a_search(observed):
    """Before: the end of the search, which nothing takes back, was drawn as often as any other choice; it ended three
    of four jobs of an untrained policy."""
    units = rule_scores(observed.reshape(-1, N_OBSERVATION), sure=5.0).astype(float)
    shares = np.exp(units - units.max(axis=(1, 2), keepdims=True))
    shares /= shares.sum(axis=(1, 2), keepdims=True)
    by_what = shares.sum(axis=1)
    goes_on = by_what[:, LEAVE] < 0.5
    assert goes_on.sum() > 20 and by_what[goes_on, LEAVE].max() < 1e-4 < by_what[goes_on, RUN].min()


def test_what_may_be_far_too_long_has_a_price():
    """A config is tried where it may be worth more than its risk; after the verdict risk is dearer, to the worth that
    a trial then has, and beyond MOST_RISK nothing is tried."""
    policy, seen = ExpectedImprovement(), decode(np.zeros((1, N_OBSERVATION)))
    seen.open[0, :3] = True
    seen.worth[0, 1:3] = 0.01

    def tried(risk, later):
        seen.risk[0, 1], seen.context.refining[0] = risk, later
        seen.current[0, 0] = later
        return policy.decide(seen)[0][0, 1] > 0

    break_even = [FORESIGHT * 0.01 / RISK_PRICE, FORESIGHT_AFTER * 0.01 / RISK_PRICE_AFTER]
    assert 0.1 < break_even[1] < break_even[0]
    for later, most in enumerate(np.minimum(break_even, MOST_RISK)):
        assert tried(0.9 * most, later) and not tried(1.1 * most, later)


def test_untrained_it_is_the_rule(observed):
    light, rule = LstmPolicy(untrained().export()), ExpectedImprovement()
    seen = observed.reshape(-1, N_OBSERVATION)
    same = light.predict(seen)[0] == rule.predict(seen)[0]
    assert same.mean() > 0.98  # but for ties


def test_memory_matters(observed):
    light = LstmPolicy(shaken().export())
    state = fresh(light, observed.shape[1])
    _, later = light.scores(observed[0], state)
    assert (light.scores(observed[1], later)[0] != light.scores(observed[1], state)[0]).any()


def test_a_new_episode_begins_without_memory(observed):
    light = LstmPolicy(shaken().export())
    fresh, _ = light.predict(observed[1])
    _, state = light.predict(observed[0])
    again, _ = light.predict(observed[1], state, np.ones(observed.shape[1], bool))
    assert (fresh == again).all()


def test_the_shipped_policy_plays_jobs_and_respects_masks(observed):
    light = make_chooser("lstm")
    light = light.policy  # around it: NearTables
    assert isinstance(light, LstmPolicy) and light.record["settings"]["turns"]
    state = None
    for seen in observed:
        actions, state = light.predict(seen, state)
        chosen = choices_of(actions)[0]
        assert decode(seen).open[np.arange(len(seen)), chosen].all()


def test_weights_of_another_kind_are_refused(tmp_path):
    light = LstmPolicy(shaken().export(), {"note": "x", "curve": [float("nan"), 0.5]})
    light.save(tmp_path / "w.npz")
    record = {"note": "x", "curve": [None, 0.5], "format": FORMAT}
    assert LstmPolicy.load(tmp_path / "w.npz").record == record
    light.weights["lstm_x"] = light.weights["lstm_x"][:-1]
    light.save(tmp_path / "w.npz")
    with pytest.raises(ValueError, match=r"train anew \(dynamiccl lab train\)"):
        LstmPolicy.load(tmp_path / "w.npz")
    (tmp_path / "no.npz").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot use"):
        LstmPolicy.load(tmp_path / "no.npz")


def test_damaged_weights_are_refused_before_a_job_runs(tmp_path):
    """Before: BadZipFile or TypeError with a traceback; a wrong inner shape failed at the first decision."""
    light, path = LstmPolicy(untrained().export()), tmp_path / "w.npz"
    light.save(path)
    whole = path.read_bytes()
    inside = len(whole) // 2
    damages = [whole[:inside], whole[:-9], b"", whole[:inside] + b"damaged!" + whole[inside + 8 :]]
    for damaged in damages:
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"cannot use .*w\.npz as policy weights"):
            LstmPolicy.load(path)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(
        ValueError, match=r"\(.*Error: .*\): give a whole file of this version's `dynamiccl lab train`"
    ):
        LstmPolicy.load(path)
    for name, wrong in (
        ("body_w", light.weights["body_w"][:-2]),
        ("head_s", light.weights["head_s"][:, :1]),
        ("lstm_b", np.full_like(light.weights["lstm_b"], np.nan)),
    ):
        LstmPolicy.save(SimpleNamespace(record={}, weights=light.weights | {name: wrong}), path)
        with pytest.raises(ValueError, match=rf"{name} is .* or not finite: train anew"):
            LstmPolicy.load(path)
    light.weights.pop("head_u")
    light.save(path)
    with pytest.raises(ValueError, match="KeyError: 'head_u'"):
        LstmPolicy.load(path)
    with pytest.raises(ValueError, match="as policy weights"):  # `tune` ends with status 2 for it
        check_chooser(str(path))


@pytest.mark.parametrize("meta", ["[" * 100_000 + "]" * 100_000, '{"format": 7', '{"format": NaN}', "[]", ""])
def test_a_damaged_record_of_weights_is_told_with_its_file_and_cure(tmp_path, meta):
    """Before: of a record that is nested deep only "RecursionError"."""
    path = tmp_path / "w.npz"
    np.savez(path, meta=np.array(meta))
    with pytest.raises(
        ValueError, match=r"cannot use .*w\.npz .* give a whole file of this version"
    ) as raised:
        LstmPolicy.load(path)
    assert "Recursion" not in str(raised.value) and "\n" not in str(raised.value)


def test_run_time_needs_no_torch():
    code = "import sys; from dynamiccl.agent.policies import choosing, lstm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.timing
@pytest.mark.parametrize(("world", "slots", "most_ms"), [("wide", 10, 1.0), ("many", 40, 3.0)])
def test_a_decision_is_quick(world, slots, most_ms):
    """What the search tells of a slot, and the choice; the median of a job's turns, on the quickest of five jobs."""
    found = []
    for seed in range(40):
        env = SimEnv(STANDARD.only(world))
        env.reset(seed=seed)
        if not slots * 0.5 <= env.search.n_slots <= slots * 1.25 or len(found) == 5:
            continue
        light, state, over, took = LstmPolicy.load(), None, False, []
        while not over and len(took) < 150:
            begin = time.perf_counter()
            seen = env.search.observe()[None]
            actions, state = light.predict(seen, state, np.array([state is None]))
            took.append(time.perf_counter() - begin)
            _, _, ended, cut, _ = env.step(actions[0])
            over = ended or cut
        found.append(1e3 * float(np.median(took)))
    print(f"{slots} slots: {min(found):.2f} ms")
    assert len(found) >= 3 and min(found) < most_ms

"""The simulated environment: its contract, its truth, and its speed."""

import copy

import dynamiccl  # noqa: F401
import gymnasium as gym
import numpy as np
import pytest
from dynamiccl.agent.policies.rule import ExpectedImprovement
from dynamiccl.agent.train.against import AgainstBaseline
from dynamiccl.envs.nccl_model.arms import distinct
from dynamiccl.envs.picture import CELL
from dynamiccl.envs.search.config import MASKED_PRICE, SearchConfig
from dynamiccl.envs.search.interfaces import (
    COMPARE,
    GO_ON,
    LEAVE,
    LOOK,
    N_ACTIONS,
    N_WHAT,
    RUN,
    RUN_LONGER,
    SEARCH_AGAIN,
    actions_of,
    choices_of,
)
from dynamiccl.envs.search.observation import FIGURES, KEPT, N_CONTEXT, NEVER_OPEN, decode, masks_of
from dynamiccl.envs.sim.family import HELD_OUT, STANDARD
from dynamiccl.envs.sim.unseen import UNSEEN
from dynamiccl.envs.sim.workloads import MANY_SLOTS
from dynamiccl.envs.sim_env import SimEnv
from dynamiccl.traces.fingerprint import Fingerprint
from dynamiccl.traces.records import PAIRS
from dynamiccl.traces.spaces import N_CONFIGS
from gymnasium.utils.env_checker import check_env


def test_gymnasium_and_stable_baselines3_accept_it():
    env = gym.make("dynamiccl/Sim-v0")
    check_env(gym.make("dynamiccl/Sim-v0", render_mode="rgb_array").unwrapped)
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    checker.check_env(gym.make("dynamiccl/Sim-v0", render_mode="rgb_array").unwrapped)
    obs, info = env.reset(seed=5)
    again, _ = env.reset(seed=5)
    assert (obs == again).all()
    for _ in range(1200):
        _, reward, terminated, truncated, info = env.step(0)
        assert not truncated and np.isfinite(reward)
        if terminated:
            break
    assert terminated and info["table"].shape == (MANY_SLOTS,)
    with pytest.raises(ValueError, match=r"call reset\(\)"):
        env.unwrapped.step(0)


@pytest.mark.parametrize("action", [-1, 10**6])
def test_an_action_that_there_is_not_is_refused_in_words(action):
    """Before: a raw IndexError."""
    env = gym.make("dynamiccl/Sim-v0").unwrapped
    env.reset(seed=5)
    with pytest.raises(
        ValueError, match=f"there is no action {action}: give one of 0 to {env.action_space.n - 1}"
    ):
        env.step(action)


@pytest.mark.parametrize("world", ["plain", "alternating"])
def test_the_jobs_time_is_that_of_the_steps_it_took(world):
    """Before: a window that a slow step had cut took all steps that were planned, so that two policies met other noise
    and other regimes after their first cut."""
    env = SimEnv(STANDARD.only(world))
    observation, over = env.reset(seed=9000)[0], False
    begun = env.jobs.noise.at - env.search.steps
    env.settles = False
    measure, cuts = env.windows.measure, []

    def counted(plan):
        seen = measure(plan)
        cuts.append(len(seen.step_ms) < plan.n_steps)
        return seen

    env.windows.measure = counted
    while not over:
        action, _ = ExpectedImprovement().predict(observation)
        observation, _, ended, cut, info = env.step(action)
        over = ended or cut
    assert any(cuts)
    assert env.jobs.noise.at - begun == info["steps"]


def test_two_accounts_are_settled_at_the_same_step():
    """Before: each where its episode ended, in other noise: an equal table was paid up to 200 default steps more."""
    played, settled = SimEnv(STANDARD.only("plain")), []
    played.settles = False
    observation, over = played.reset(seed=3)[0], False
    while not over:
        action, _ = ExpectedImprovement().predict(observation)
        observation, _, ended, cut, info = played.step(action)
        over = ended or cut
    for more in (0, 17):
        env = copy.deepcopy(played)
        env.reward._run_on(env.windows, env.search.confirmed, info["steps"] + more)
        env.search.state.account.steps += more
        settled.append(env.settle(info["steps"] + 40))
    assert played.search.confirmed.any()
    assert settled[0] == settled[1] != 0


def test_it_says_what_may_be_chosen_and_how_the_search_stands():
    env = gym.make("dynamiccl/Sim-v0").unwrapped
    obs, info = env.reset(seed=2)
    configs = info["action_mask"].reshape(N_CONFIGS, N_WHAT)
    assert (
        (configs[:, GO_ON] == decode(obs).open[0]).all() and configs[0, GO_ON] and not configs[:, GO_ON].all()
    )
    for what in (RUN, COMPARE):
        assert (configs[:, what] == configs[:, GO_ON]).all()
    assert decode(obs).context.promised > SearchConfig.least_gain and not configs[:, LEAVE].any()
    assert not configs[:, [RUN_LONGER, LOOK, SEARCH_AGAIN]].any()
    assert info["slot"] == 0 and not info["table"].any()
    done = False
    while not done:
        obs, _, done, _, info = env.step(ExpectedImprovement().predict(obs)[0])
    assert env.search.is_done and (info["table"][: env.search.n_slots] == env.search.confirmed).all()


def test_episodes_of_the_same_seed_are_the_same():
    def episode(seed):
        env = gym.make("dynamiccl/Sim-v0").unwrapped
        obs, _ = env.reset(seed=seed)
        rewards, done = [], False
        while not done:
            action, _ = ExpectedImprovement().predict(obs)
            obs, reward, done, _, info = env.step(action)
            rewards.append(reward)
        return rewards, info["table"].tolist(), info["steps"]

    assert episode(3) == episode(3) != episode(4)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_jobs_of_any_number_of_slots_run_side_by_side(mode):
    """Before: "could not broadcast input array from shape (4,) into shape (2,)"."""
    envs = gym.make_vec("dynamiccl/Sim-v0", num_envs=4, vectorization_mode=mode)
    try:
        _, info = envs.reset(seed=1)
        assert info["table"].shape == (4, MANY_SLOTS)
        for _ in range(12):
            observations, rewards, _, _, info = envs.step(envs.action_space.sample())
        assert observations.shape == envs.observation_space.shape and np.isfinite(rewards).all()
        assert info["table"].shape == (4, MANY_SLOTS)
    finally:
        envs.close()


def test_a_masked_action_keeps_the_current_setting_and_costs_a_little():
    env = gym.make("dynamiccl/Sim-v0").unwrapped
    _, info = env.reset(seed=1)
    assert info["n_masked"] == 0 and env.search.n_slots > 1
    env.search.state.current.configs[0] = current = np.flatnonzero(env.search.open[0])[-1]
    closed = np.flatnonzero(~env.search.open[0])[0]
    _, reward, _, _, info = env.step(actions_of(closed, RUN))
    assert info["masked"] and info["n_masked"] == 1 and reward == -MASKED_PRICE
    assert (
        env.search.loop.proposal.configs[0] == current and info["slot"] == 1
    )  # the next slot's turn, no window
    _, _, _, _, info = env.step(actions_of(0, LOOK))
    assert info["masked"] and info["n_masked"] == 2
    _, _, _, _, info = env.step(actions_of(0))
    assert not info["masked"] and info["n_masked"] == 2


def test_masks_come_through_a_vector_environment():
    """As MaskablePPO of sb3-contrib asks for them."""
    utils = pytest.importorskip("sb3_contrib.common.maskable.utils")
    vectors = pytest.importorskip("stable_baselines3.common.vec_env")
    env = gym.make("dynamiccl/Sim-v0")
    with pytest.raises(ValueError, match=r"reset\(\)"):
        env.unwrapped.action_masks()
    several = vectors.DummyVecEnv([lambda: env])
    several.reset()
    assert utils.is_masking_supported(several)
    (masks,) = utils.get_action_masks(several)
    configs, what = choices_of(np.arange(N_ACTIONS))
    wanted = env.unwrapped.search.open[0][configs] & (what < RUN_LONGER)
    assert (masks == wanted)[what != LEAVE].all() and masks[what == COMPARE].any()


def test_a_search_may_end_after_a_comparison_or_where_nothing_promises_a_gain():
    """Its mask follows from the observation, and the rule never meets it."""
    env, rng, early, closed = gym.make("dynamiccl/Sim-v0").unwrapped, np.random.default_rng(3), 0, 0
    for seed in range(6):
        observation, info = env.reset(seed=seed)
        over, is_random = False, seed % 2
        while not over:
            masks = info["action_mask"].astype(bool)
            assert (masks_of(observation) == masks).all()
            may_end = masks[actions_of(np.arange(N_CONFIGS), LEAVE)].any()
            closed += not may_end
            if not env.search.is_over and env.search.state.comparisons.in_search:
                assert may_end
            if not may_end and is_random:
                observation, _, over, cut, info = env.step(actions_of(0, LEAVE))
                early += info["masked"]
                over |= cut  # by what the next slot's turn led to
                assert info["masked"]
                continue
            action = (
                rng.choice(np.flatnonzero(masks))
                if is_random
                else ExpectedImprovement().predict(observation)[0]
            )
            assert masks[action]
            observation, _, ended, cut, info = env.step(action)
            over = ended or cut
    assert early and closed > early


def random_play(env, rng, turns, rule=0.0):
    """Observations of random play: open actions, in part those of the rule."""
    seed = int(rng.integers(2**31))
    observation, info = env.reset(seed=seed)
    found, over = [observation], False
    while not over and len(found) < turns:
        is_open = np.flatnonzero(info["action_mask"])
        action = ExpectedImprovement().predict(observation)[0] if rng.random() < rule else rng.choice(is_open)
        if choices_of(action)[1] == LEAVE and rng.random() < 0.9:
            continue
        observation, reward, ended, cut, info = env.step(action)
        assert np.isfinite(reward)
        found.append(observation)
        over = ended or cut
    assert over or turns < np.inf
    return np.array(found)


def test_further_choices_are_open_if_they_are_asked_for():
    """A look at the default and another search come after the verdict, each a bounded number of times."""
    env = gym.make("dynamiccl/Sim-v0", config=SearchConfig(more_choices=True)).unwrapped
    chosen = set()
    for seed in range(4):
        _, info = env.reset(seed=seed)
        rng, over = np.random.default_rng(seed), False
        while not over:
            is_open = np.flatnonzero(info["action_mask"])
            allowed = set(choices_of(is_open)[1].tolist())
            assert RUN_LONGER in allowed and (SEARCH_AGAIN in allowed) <= env.search.is_over
            assert (LOOK in allowed) == (env.search.is_over and bool(env.search.confirmed.any()))
            if not env.search.is_over and rng.random() < 0.9:
                action, _ = ExpectedImprovement().predict(env.search.observe())
            else:
                action = rng.choice(is_open)
            before = env.search.steps
            chosen.add(int(choices_of(action)[1]))
            _, _, over, _, info = env.step(action)
            assert not info["masked"] and env.search.steps >= before
        assert env.search.marks.asked_again <= 10
    assert chosen == set(range(N_WHAT))


#: Configs that only real clusters offer: CollNet, and counts of communicators with more than 32 channels.
ONLY_REAL = {23, 31, 40, 52, 53, 54, 55}
#: Features of CollNet: its price, NCCL's own choice, and that of NVLS, which NCCL never chooses by itself here.
ONLY_REAL_FEATURES = {16, 21, 22}


@pytest.mark.slow
def test_no_entry_of_an_observation_stays_the_same():
    """Beside those that only real clusters change."""
    rng, lowest, highest = np.random.default_rng(0), np.inf, -np.inf
    for family in (STANDARD, HELD_OUT, UNSEEN):
        env = gym.make("dynamiccl/Sim-v0", family=family).unwrapped
        for _ in range(80):
            seen = random_play(env, rng, 250, 0.5)
            lowest, highest = np.minimum(lowest, seen.min(axis=0)), np.maximum(highest, seen.max(axis=0))
    same = KEPT[lowest == highest]
    figures, configs = np.divmod(same[same >= N_CONTEXT] - N_CONTEXT, N_CONFIGS)
    # Which configs are in the current table at some time is chance: some are best in few jobs.
    configs = configs[figures != list(FIGURES).index("current")]
    assert set(configs.tolist()) <= ONLY_REAL, configs
    assert set(same[same < N_CONTEXT].tolist()) <= ONLY_REAL_FEATURES, same


def test_each_config_of_an_observation_may_be_open_on_some_cluster():
    rng, n, found = np.random.default_rng(0), 4000, np.zeros(N_CONFIGS, bool)
    for release in (22304, 22809, 23007, 23102, 23206):
        nodes = 2 ** rng.integers(0, 8, n)
        channels = rng.integers(1, 65, n)
        fingerprint = Fingerprint(
            func=rng.integers(0, 2, n),
            n_bytes=(2 ** rng.uniform(8, 34, n)).astype(np.int64),
            calls=rng.integers(1, 100, n),
            n_ranks=np.maximum(nodes * 2 ** rng.integers(0, 4, n), 2),
            n_nodes=nodes,
            cost_us=np.ones((n, len(PAIRS))),
            own_pair=rng.integers(0, len(PAIRS), n),
            own_channels=np.minimum(rng.integers(1, 65, n), channels),
            comm_channels=channels,
            share=np.full(n, 0.1),
            memory_pressure=np.zeros(n),
        )
        found |= distinct(fingerprint, np.full(n, release)).any(axis=0)
    assert np.flatnonzero(~found).tolist() == list(NEVER_OPEN)


def test_what_an_environment_lacks_is_said_with_the_cure():
    for name, word in (("Replay-v0", "trace=FOLDER"), ("Live-v0", "job=JOB")):
        with pytest.raises(ValueError, match=word):
            gym.make(f"dynamiccl/{name}")


def test_an_option_of_reset_is_refused_with_the_cure():
    env = gym.make("dynamiccl/Sim-v0")
    with pytest.raises(ValueError, match=r"no option 'world'.*family="):
        env.reset(options={"world": "tails"})
    env.reset(options={})


def test_it_renders_a_line_and_a_picture():
    env = gym.make("dynamiccl/Sim-v0", render_mode="ansi")
    env.reset(seed=0)
    assert env.render().startswith("step ") and "before the verdict" in env.render()
    drawn = gym.make("dynamiccl/Sim-v0", render_mode="rgb_array")
    drawn.reset(seed=0)
    pixels = drawn.render()
    assert pixels.shape == (CELL * drawn.unwrapped.search.n_slots, CELL * N_CONFIGS, 3)
    assert (pixels[0, :CELL] == 0).all() and len(np.unique(pixels.reshape(-1, 3), axis=0)) > 3
    silent = gym.make("dynamiccl/Sim-v0").unwrapped
    silent.reset(seed=0)
    assert silent.render() is None


@pytest.mark.parametrize("own", [False, True])
def test_the_baseline_earns_nothing_beyond_itself_on_the_registered_environment(own):
    """``own``: around two environments that somebody made."""
    env = gym.make("dynamiccl/SimAgainstRule-v0")
    if own:
        env = AgainstBaseline(*(gym.make("dynamiccl/Sim-v0") for _ in range(2)))
    observation, _ = env.reset(seed=3)
    over = False
    while not over:
        action, _ = ExpectedImprovement().predict(observation)
        observation, reward, over, _, _ = env.step(action)
        assert reward == 0

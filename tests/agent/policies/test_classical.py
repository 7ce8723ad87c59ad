"""Each classical searcher keeps to what is open, finds what its method can find, and ends."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
from dynamiccl.agent.policies import choosing
from dynamiccl.agent.policies.choosing import make_chooser
from dynamiccl.agent.policies.classical import CLASSICAL, NvidiaPrice
from dynamiccl.agent.policies.lstm import LstmPolicy
from dynamiccl.agent.policies.searcher import Turn
from dynamiccl.envs.bench.job_arena import play
from dynamiccl.envs.search.interfaces import actions_of
from dynamiccl.envs.sim.jobs import STANDARD
from dynamiccl.traces.records import CHANNELS, PAIRS
from dynamiccl.traces.spaces import N_CHANNELS, N_CONFIGS
from make_job_suites import draw_suite

Array = np.ndarray[Any, Any]
RING = PAIRS.index(("ring", "simple"))


@pytest.fixture(scope="module")
def suite():
    return draw_suite("small", STANDARD, 12, 10)


def config(pair: int, channels: int) -> int:
    return (1 + pair) * N_CHANNELS + CHANNELS.index(channels)


def turn(open_: list[int], saved: dict[int, float], slot: int = 0, **changes: Any) -> Turn:
    mean = np.full(N_CONFIGS, -np.inf)
    for c, value in ({0: 0.0} | saved).items():
        mean[c] = value
    fields = {
        "slot": slot,
        "is_last": True,
        "round": len(saved),
        "open": np.array(sorted({0, *open_})),
        "mean": mean,
    }
    return Turn(**(fields | {"asked": np.zeros(N_CONFIGS), "own": RING} | changes))


@pytest.mark.parametrize("name", CLASSICAL)
def test_plays_whole_jobs_within_what_is_open_and_ends(name, suite):
    policy = make_chooser(name, 1)
    search, ledger = suite.open(np.arange(4, 8), 0)
    game = play(policy, search, ledger, after=0)
    assert all(s.is_over for s in search.searches) and game.scores.gain.min() > -0.005
    assert name != "default" or not game.scores.gain.any()
    assert all(
        s.state.account.rounds <= max(s.config.rounds, s.config.rounds_a_slot * s.n_slots)
        for s in search.searches
    )


def test_a_search_that_finds_much_beats_one_that_finds_nothing(suite):
    """On jobs with more than 5 % to gain every method finds some of it. Not in the world of many slots: there a window
    of a sweep tries all of them at once, and three windows can cost what a whole search may lose."""
    much = np.flatnonzero((suite.gain > 0.05) & (suite.strata != "many"))[:3]
    assert len(much) == 3
    lost = {}
    for name in ("default", "coordinate-descent", "sweep"):
        policy = make_chooser(name)
        opened = suite.open(much, 0)
        lost[name] = play(policy, *opened, after=0).scores.lost.mean()
    assert max(lost, key=lost.__getitem__) == "default", lost


@pytest.mark.parametrize("part", [0.5, 1.0])
def test_a_second_search_of_a_job_goes_as_the_first(part, suite):
    """Before: the memory of the first search outlived it, so that a policy left the search after a change at once.
    A search may also end without the policy's word: of the first one it has seen only a ``part``."""
    asked = list[tuple[Array, int]]()
    policy = make_chooser("coordinate-descent")

    class Heard:
        def predict(self, observation, state=None, episode_start=None, deterministic=True):
            action, state = policy.predict(observation, state, episode_start, deterministic)
            asked.append((observation, int(action[0])))
            return action, state

    play(Heard(), *suite.open(np.array([5]), 0), after=0)
    state = None
    for observation, _ in asked[: math.ceil(part * len(asked))]:
        _, state = policy.predict(observation, state, np.array([state is None]))
    for observation, action in asked:
        again, state = policy.predict(observation, state, np.array([False]))
        assert again[0] == action
    assert len(asked) > 5


def test_a_config_whose_window_was_given_up_comes_again_only_after_the_others():
    a, b = config(RING, 4), config(RING, 8)
    t = turn([a, b], {})
    t.asked[a] = 1
    assert t.untried == [a, b] and t.first([a, b]) == b and t.first([]) == t.best


LL128 = PAIRS.index(("ring", "ll128"))


def ask_all(policy: NvidiaPrice, t: Turn, times: dict[int, float]) -> list[int]:
    """What the rule asks for until it keeps to what has run, each answered by ``times``."""
    asked: list[int] = []
    while (chosen := policy.choose(t)) not in (0, *asked):
        asked.append(chosen)
        t.asked[chosen] += 1
        t.call[chosen] = times[chosen]
    return asked


def test_nvidias_price_takes_the_fewest_channels_that_cost_little_time():
    """AUTO runs Simple with 16 channels. 4 of them take 2 % longer and 2 a third; LL128 is slower with all of them."""
    times = {config(RING, 8): 1.01, config(RING, 4): 1.02, config(RING, 2): 1.3, config(LL128, 0): 1.2}
    t = turn([*times, config(LL128, 2), config(LL128, 4), config(LL128, 8)], {}, own_channels=16)
    policy = NvidiaPrice()
    counts = [config(RING, n) for n in (8, 4, 2)]
    assert ask_all(policy, t, times) == [config(LL128, 0), *counts]
    assert policy.best(t) == config(RING, 4)


def test_nvidias_price_weighs_time_against_channels():
    """LL128 takes 10 % longer and needs 2 channels, 1.10 x 1.02; Simple needs all 16, 1.16."""
    ring = {config(RING, 8): 1.2}
    other = {config(LL128, 0): 1.1, config(LL128, 8): 1.1, config(LL128, 4): 1.1, config(LL128, 2): 1.1}
    t = turn([*ring, *other], {}, own_channels=16)
    policy = NvidiaPrice()
    ask_all(policy, t, ring | other)
    assert policy.best(t) == config(LL128, 2)


def test_nvidias_price_leaves_a_config_whose_calls_are_never_sampled():
    t = turn([config(LL128, 0)], {}, own_channels=2)
    policy = NvidiaPrice()
    for _ in range(2):
        assert policy.choose(t) == config(LL128, 0)
        t.asked[config(LL128, 0)] += 1
    assert policy.choose(t) == policy.best(t) == 0


def test_weights_of_a_file_are_a_policy(tmp_path):
    path = tmp_path / "mine.npz"
    with pytest.raises(ValueError, match=r"mine\.npz as policy weights"):
        make_chooser(str(path))
    shipped = LstmPolicy.load()
    shipped.save(path)
    same = make_chooser(str(path))
    assert all(np.array_equal(same.policy.weights[name], w) for name, w in shipped.weights.items())


def test_policies_by_name():
    assert make_chooser("test_classical:Own").predict(np.zeros(3))[0] == 7
    for bad in ("no-such", "no_such_module:X", "test_classical:Nothing", "test_classical:RING"):
        with pytest.raises(
            ValueError, match=r"known: lstm, expected-improvement|has no predict|cannot load policy"
        ):
            make_chooser(bad)


def test_a_module_that_ends_python_is_no_policy(tmp_path, monkeypatch):
    """Before: it ended the command with its own words and status."""
    (tmp_path / "quits.py").write_text("import sys; sys.exit('bye')")
    (tmp_path / "policy.py").write_text("import sys; sys.exit('bye')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("quits:Policy", str(tmp_path)):
        with pytest.raises(ValueError, match=r"SystemExit: bye"):
            make_chooser(name)


class Own:
    def predict(self, observation, state=None, episode_start=None, deterministic=True):
        return 7, state


def test_answers_that_are_no_action_are_refused(suite):
    class Wrong:
        def __init__(self, answer: Any) -> None:
            self.answer = answer

        def predict(self, observation, state=None, episode_start=None, deterministic=True):
            return self.answer, state

    for answer in (None, [1, 2], np.array([0.5]), np.array([-1]), np.array([392])):
        opened = suite.open(np.array([0]), 0)
        with pytest.raises(ValueError, match="an action is one integer"):
            play(Wrong(answer), *opened, after=0)
    opened = suite.open(np.array([0]), 0)
    play(Wrong(actions_of(0)), *opened, after=0)


def test_every_classical_policy_can_be_asked_for_by_name():
    """The names stand in a file of their own: whoever only checks one need not import numpy."""
    assert tuple(CLASSICAL) == choosing.CLASSICAL
    assert {*CLASSICAL, choosing.LSTM, choosing.RULE} == {
        *choosing.POLICIES
    } and choosing.DEFAULT == choosing.LSTM

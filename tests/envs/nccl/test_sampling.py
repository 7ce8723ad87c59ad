"""How often kernel times are taken: as often as costs nothing, and the same steps on all ranks that can be."""

import random

import pytest
from dynamiccl.envs.nccl.steps.sampling import BUDGET, LEAST_OFTEN, MOST_OFTEN, START, Sampling, share


def run(cost: float, noise: float, steps: int = 8000, seed: int = 0, tables: int = 10**9) -> Sampling:
    """A job whose sampled steps take ``cost`` more; a checkpoint every 97 steps; a new table every ``tables``, each
    of another speed."""
    rng, mine = random.Random(seed), Sampling()
    for step in range(steps):
        sampled = mine.wants(step)
        generation = step // tables
        ms = 100 * (1 + 0.5 * (generation % 2)) * (1 + cost * sampled) * (1 + noise * rng.gauss(0, 1))
        mine.ended(sampled, int(1e6 * (ms + 5000 * (step % 97 == 0))), generation)
    return mine


@pytest.mark.parametrize(
    ("cost", "every"), [(0.0, MOST_OFTEN), (0.018, 4), (0.05, 16), (0.13, 32), (3.0, LEAST_OFTEN)]
)
def test_the_share_follows_what_sampling_is_seen_to_cost(cost, every):
    mine = run(cost, noise=0.001)
    assert mine.every == every
    assert cost / mine.every <= BUDGET or every == LEAST_OFTEN


def test_noise_makes_it_careful_and_checkpoints_and_tables_do_not_matter():
    assert run(0.0, noise=0.005).every == MOST_OFTEN
    assert run(0.0, noise=0.2).every > START
    assert run(0.05, noise=0.001, tables=20).every == 16


@pytest.mark.parametrize("seed", range(5))
def test_the_budget_holds_under_noise(seed):
    assert 0.05 / run(0.05, noise=0.02, seed=seed).every <= BUDGET


def test_nothing_is_decided_on_little_evidence():
    assert run(3.0, noise=0.0, steps=START * 10).every == START


def test_ranks_of_different_answers_have_steps_in_common():
    often, rarely = Sampling(), Sampling()
    often.every, rarely.every = share([0.0] * 16), share([0.1] * 16)
    assert often.every < rarely.every
    assert all(often.wants(step) for step in range(1000) if rarely.wants(step))


def test_the_user_has_the_last_word():
    never, third = Sampling(0), Sampling(3)
    for step in range(300):
        never.ended(False, 10**6, 0)
        third.ended(third.wants(step), 10**9 if third.wants(step) else 10**6, 0)
    assert not any(never.wants(s) for s in range(100))
    assert [s for s in range(9) if third.wants(s)] == [0, 3, 6]

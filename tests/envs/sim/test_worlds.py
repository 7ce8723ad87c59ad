"""Worlds in which a belief in one effect a slot is wrong: what each does; what is measured is what is billed."""

import dataclasses

import numpy as np
import pytest
from dynamiccl.envs.sim.family import HELD_OUT, STANDARD, WORLDS
from dynamiccl.envs.sim.jobs import draw_jobs
from dynamiccl.envs.sim.worlds import chance


def drawn(world, n=60, seed=4, family=STANDARD):
    return draw_jobs(family.only(world), np.random.default_rng(seed), n)


def random_tables(jobs, rng, rows):
    """A random config, within the mask, in every slot of the jobs at ``rows``."""
    return np.where(jobs.mask[rows], rng.random(jobs.mask[rows].shape), -1).argmax(axis=2)


def apart_from_additive(jobs, n=40):
    """Standard deviation of the log step beyond the sum of single effects, (jobs,), over random tables of the four
    quickest configs of each slot."""
    rng, found = np.random.default_rng(0), []
    quick = jobs.tables.us <= np.sort(np.where(jobs.mask, jobs.tables.us, np.inf), axis=2)[:, :, 3:4]
    for j in range(len(jobs)):
        rows, s = np.full(n, j), int(jobs.n_slots[j])
        tables = np.where((jobs.mask & quick)[rows], rng.random(jobs.mask[rows].shape), -1).argmax(axis=2)
        singles = np.zeros((n, s, jobs.width), int)
        singles[:, np.arange(s), np.arange(s)] = tables[:, :s]
        log = np.log(jobs.usual_us(singles.reshape(-1, jobs.width), np.repeat(rows, s)) / jobs.default_us[j])
        whole = np.log(jobs.usual_us(tables, rows) / jobs.default_us[j])
        found.append(np.std(whole - log.reshape(n, s).sum(axis=1)))
    return np.array(found)


def test_a_family_is_a_mixture_and_one_world_of_it_can_be_drawn():
    jobs = draw_jobs(STANDARD, np.random.default_rng(0), 480)
    counts = np.bincount(jobs.sites.world, minlength=len(WORLDS))
    assert (counts[: len(STANDARD.worlds)] > 35).all() and counts.sum() == 480
    assert set(drawn("tails", 7).sites.world.tolist()) == {WORLDS.index("tails")}
    with pytest.raises(ValueError, match="has no world unseen"):
        STANDARD.only("unseen")


def test_chance_is_even_and_depends_on_everything():
    key = np.arange(20_000).astype(np.uint64)
    u = chance(key, 1, np.int64(3), np.int64(5))
    assert (
        u.min() >= 0
        and u.max() < 1
        and u.mean() == pytest.approx(0.5, abs=0.01)
        and u.std() == pytest.approx(12**-0.5, abs=0.01)
    )
    for other in (
        chance(key, 2, np.int64(3), np.int64(5)),
        chance(key, 1, np.int64(5), np.int64(3)),
        chance(key + np.uint64(1), 1, np.int64(3), np.int64(5)),
    ):
        assert abs(np.corrcoef(u, other)[0, 1]) < 0.03


@pytest.mark.parametrize("family", [STANDARD, HELD_OUT], ids=lambda family: family.name)
def test_slots_interact_in_one_world_and_little_in_plain(family):
    plain, mixed = (apart_from_additive(drawn(world, family=family)) for world in ("plain", "interaction"))
    assert np.median(plain) < 0.005 < 0.02 < np.median(mixed)


def test_stragglers_are_measured_as_often_as_they_are_billed():
    jobs = drawn("tails", 40)
    for name in ("tail", "pace", "late", "save_every", "memory"):
        getattr(jobs.noise, name)[:] = 0
    jobs.noise.sigma[:] = 1e-4
    jobs.swing[:, 0] = jobs.first_use.us[:] = 0
    tables = random_tables(jobs, np.random.default_rng(1), np.arange(40))
    steps, _ = jobs.window(tables, 20_000, np.random.default_rng(2))
    usual = np.median(steps, axis=1)
    often = (steps > 1.3 * usual[:, None]).mean(axis=1)
    assert (often > 0.001).mean() > 0.4 and often.max() < 0.06, "a quarter of the configs"
    assert steps.mean(axis=1) == pytest.approx(jobs.step_us(tables)[0], rel=3e-3)
    assert jobs.step_us(tables)[0] == pytest.approx(jobs.usual_us(tables))
    assert ((jobs.usual_us(tables) > 1.002 * usual) == (often > 0.001)).mean() > 0.8


def test_what_moves_changes_which_config_is_best_and_the_usual_step_is_its_mean():
    jobs = drawn("moving", 30)
    jobs.swing[:, 0] = 0
    configs = random_tables(jobs, np.random.default_rng(1), np.arange(30))
    place, slot, config = np.nonzero(
        jobs.mask & (np.arange(jobs.width)[:, None] < jobs.n_slots[:, None, None])
    )
    single = np.zeros((len(place), jobs.width), int)
    single[np.arange(len(place)), slot] = config
    first, period, best, usual = jobs.noise.at, jobs.sites.extras.period, [], []
    for k in range(40):
        jobs.noise.at = (first + k * period / 40).astype(int)
        usual.append(jobs.step_us(configs)[0])
        if k % 10 == 5:
            us = jobs.step_us(single, place)[0]
            best.append([np.where(place == j, us, np.inf).argmin() for j in range(30)])
    assert np.mean(usual, axis=0) == pytest.approx(jobs.usual_us(configs), rel=0.03)
    assert (np.ptp(usual, axis=0) / np.mean(usual, axis=0) > 0.02).mean() > 0.4
    assert (np.ptp(best, axis=0) > 0).mean() > 0.3


def test_the_first_use_of_an_algorithm_is_paid_once():
    jobs = drawn("plain", 80)
    other = np.zeros((80, jobs.width), int)
    ring, rest = jobs.mask[:, 0, 8:32].any(axis=1), jobs.mask[:, 0, 32:].any(axis=1)
    some = np.flatnonzero(ring & rest & (jobs.fingerprint.own_pair.reshape(80, jobs.width) <= 2).all(axis=1))
    assert len(some) > 5
    other[some, 0] = 32 + jobs.mask[some, 0, 32:].argmax(axis=1)
    rng = np.random.default_rng(0)
    jobs.window(np.zeros_like(other), 2, rng)
    assert (jobs.first_use.spent_us == 0).all(), "the default's were connected before"
    apart = jobs.take(some)
    steps, _ = apart.window(other[some], 1, np.random.default_rng(1))
    assert (apart.first_use.spent_us == apart.first_use.us).all() and (jobs.first_use.spent_us == 0).all()
    assert (steps[:, 0] > apart.first_use.us).all()
    apart.window(other[some], 1, rng)
    assert (apart.first_use.spent_us == apart.first_use.us).all()


def test_in_the_wide_world_channels_are_not_smooth_and_calls_steal():
    plain, wide = drawn("plain"), drawn("wide")
    rough = []
    for jobs in (plain, wide):
        log = np.log(jobs.tables.us[:, 0, 9:16])  # a ring with LL, by channels
        rough.append(np.abs(np.diff(log, n=2, axis=1)).mean())
    assert rough[1] > 1.5 * rough[0]
    faster = wide.tables.us < 0.8 * wide.tables.us[:, :, :1]
    assert np.mean(wide.tables.slow[faster]) > np.mean(wide.tables.slow[~faster]) + 0.1


def test_a_world_may_bring_a_mechanism_of_its_own():
    def double(jobs, rng):
        jobs.tables.us[:, :, 1:] *= 2

    part = dataclasses.replace(STANDARD.parts[0], name="rail", hook=double)
    families = (dataclasses.replace(STANDARD, parts=(only,)) for only in (part, STANDARD.parts[0]))
    jobs, plain = (draw_jobs(f, np.random.default_rng(1), 6) for f in families)
    assert (jobs.sites.world == WORLDS.index("rail")).all()
    assert (jobs.tables.us[:, :, 1:] == 2 * plain.tables.us[:, :, 1:]).all()

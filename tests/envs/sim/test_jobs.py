"""Whole jobs: what may be chosen, what a step takes, what is measured, and what a perfect tuner finds."""

import functools
import itertools

import numpy as np
import pytest
from dynamiccl.envs.sim.jobs import HELD_OUT, STANDARD, Jobs, draw_jobs
from dynamiccl.envs.sim.unseen import UNSEEN
from oracle import oracle

FAMILIES = {"standard": STANDARD.only("plain"), "held-out": HELD_OUT.only("plain")}


@pytest.fixture(scope="module", params=FAMILIES)
def jobs(request):
    return draw_jobs(FAMILIES[request.param], np.random.default_rng(3), 24)


def test_the_same_seed_draws_the_same_jobs():
    one, again = (draw_jobs(STANDARD, np.random.default_rng(3), 24) for _ in range(2))
    assert (again.which == one.which).all() and (again.sites.fleet.n_nodes == one.sites.fleet.n_nodes).all()
    assert (again.default_us == one.default_us).all()
    assert (again.tables.us == one.tables.us).all() and (again.mask == one.mask).all()
    assert (again.sites.world == one.sites.world).all() and len(set(again.sites.world.tolist())) == len(
        STANDARD.worlds
    )


def test_the_default_step_waits_as_drawn_and_slots_are_ordered(jobs):
    none = np.zeros((len(jobs), jobs.width), int)
    jobs = jobs.take(slice(None))
    jobs.swing[:, 0] = 0
    us, call_us = jobs.step_us(none)
    assert us == pytest.approx(jobs.default_us)
    used = np.arange(jobs.width)[None] < jobs.n_slots[:, None]
    assert (np.isfinite(call_us) == used).all()
    share = jobs.fingerprint.share.reshape(len(jobs), jobs.width)
    assert (jobs.calls * call_us / us[:, None])[used] == pytest.approx(share[used])
    moved = jobs.calls * jobs.fingerprint.n_bytes.reshape(len(jobs), jobs.width)
    for row, n in zip(moved, jobs.n_slots, strict=True):
        assert (np.diff(row[:n]) <= row[:1] * 0.1).all(), "padding to the ranks moves it a little"
    waits = (jobs.exposed * jobs.calls * np.nan_to_num(call_us)).sum(axis=1) / us
    waits = waits[~jobs.works.replicated[jobs.which]]  # the others also wait for what no tuner reaches
    assert waits.min() > 0.008 and waits.max() < 0.55


def test_masked_configs_are_refused(jobs):
    configs = np.zeros((len(jobs), jobs.width), int)
    configs[0, -1] = 1
    with pytest.raises(ValueError, match="within the mask"):
        jobs.step_us(configs)


def test_windows_are_noisy_about_the_truth_and_time_goes_on(jobs):
    jobs = jobs.take(slice(None))
    jobs.swing[:, 0] = 0
    jobs.noise.sampled[:] = 4
    jobs.noise.sampled[0] = 0
    none, rng = np.zeros((len(jobs), jobs.width), int), np.random.default_rng(0)
    n_steps = np.where(np.arange(len(jobs)) == 1, 0, 400)
    before = jobs.noise.at.copy()
    steps, call_us = jobs.window(none, n_steps, rng)
    assert (jobs.noise.at - before == n_steps).all() and steps.shape == (len(jobs), 400)
    assert np.isnan(steps[1]).all() and np.isnan(call_us[:2]).all()
    on = n_steps > 0
    apart = np.abs(np.median(steps[on], axis=1) / jobs.default_us[on] - 1)
    assert (apart < 0.1).all() and np.median(apart) < 0.03
    used = np.arange(jobs.width)[None] < jobs.n_slots[2:, None]
    truth = jobs.step_us(none)[1][2:]
    assert np.abs(np.log(call_us[2:] / truth))[used].max() < 0.3
    steps, call_us = jobs.window(none, 1, rng)
    assert steps.shape == (len(jobs), 1) and np.isnan(call_us).any() and np.isfinite(steps).all()


def test_noise_lasts_where_it_is_said_to():
    jobs = draw_jobs(FAMILIES["standard"], np.random.default_rng(1), 12)
    jobs.first_use.us[:] = 0
    jobs.noise.tail[:] = jobs.noise.pace[:] = jobs.noise.late[:] = 0
    jobs.noise.save_every[:] = 0
    jobs.noise.memory[:6], jobs.noise.memory[6:] = 0.0, 0.9
    steps, _ = jobs.window(np.zeros((12, jobs.width), int), 3000, np.random.default_rng(2))
    log = np.log(steps) - np.log(steps).mean(axis=1, keepdims=True)
    alike = (log[:, 1:] * log[:, :-1]).mean(axis=1) / log.var(axis=1)
    assert alike[:6] == pytest.approx(0.0, abs=0.1) and alike[6:] == pytest.approx(0.9, abs=0.06)
    assert log.std(axis=1) / jobs.noise.sigma == pytest.approx(1.0, abs=0.35)


def test_joined_jobs_are_the_jobs():
    rng = np.random.default_rng(9)
    parts = [draw_jobs(STANDARD, rng, n) for n in (3, 6, 4)]
    whole = Jobs.join(parts)
    for shift in (0, 10**5):
        for batch in (whole, *parts):
            batch.noise.at = batch.noise.at + shift
        found = whole.step_us(np.zeros((13, whole.width), int))[0]
        assert found == pytest.approx(
            np.concatenate([p.step_us(np.zeros((len(p), p.width), int))[0] for p in parts])
        )
    assert (whole.sites.fleet.n_nodes[3:9] == parts[1].sites.fleet.n_nodes).all()


#: Jobs of many slots have no small one among them.
SMALL = [world for world in (*STANDARD.worlds, *UNSEEN.worlds) if world != "many"]


@functools.cache
def many_of(world):
    family = UNSEEN if world in UNSEEN.worlds else STANDARD
    return draw_jobs(family.only(world), np.random.default_rng(6), 250)


@pytest.mark.parametrize("world", SMALL)
@pytest.mark.parametrize(("n_slots", "most"), [(2, 300), (4, 6000)])
@pytest.mark.parametrize("n", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_the_oracle_is_the_best_of_all_joint_configs_on_small_jobs(world, n_slots, most, n):
    jobs = many_of(world)
    tables = np.where(np.arange(jobs.width) < n_slots, jobs.mask.sum(axis=2), 1).prod(axis=1)
    jobs = jobs.take(np.flatnonzero((jobs.n_slots == n_slots) & (tables <= most))[:n])
    assert len(jobs) == n
    configs, us = oracle(jobs)
    assert jobs.usual_us(configs) == pytest.approx(us)
    for j in range(n):
        one = jobs.take([j])
        all_of_them = list(itertools.product(*(np.flatnonzero(one.mask[0, s]) for s in range(n_slots))))
        every = np.zeros((len(all_of_them), jobs.width), int)
        every[:, :n_slots] = all_of_them
        best = one.take(np.zeros(len(every), int)).usual_us(every).min()
        assert us[j] <= best * 1.002

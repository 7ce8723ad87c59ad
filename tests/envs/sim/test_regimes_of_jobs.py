"""Jobs whose batch comes and goes, and jobs of many slots: what is measured, billed and told of them."""

import numpy as np
import pytest
from dynamiccl.envs.bench.scores import LossAccount
from dynamiccl.envs.sim.jobs import HELD_OUT, STANDARD, draw_jobs
from dynamiccl.envs.sim.regimes import MOST_REGIMES
from dynamiccl.envs.sim.workloads import LEAST_MANY, MANY_SLOTS, SLOTS, all_works, recorded_works
from oracle import by_regime


def alternating(n=40, seed=4, family=STANDARD):
    return draw_jobs(family.only("alternating"), np.random.default_rng(seed), n)


def still(jobs):
    """The same jobs without noise, in calm weather and connected."""
    for name in ("sigma", "tail", "pace", "late", "save_every"):
        getattr(jobs.noise, name)[:] = 0
    jobs.noise.drift.size[:] = 0
    jobs.swing[:, 0] = jobs.first_use.us[:] = 0
    return jobs


@pytest.mark.parametrize(("family", "low", "high"), [(STANDARD, 100, 2000), (HELD_OUT, 60, 3000)])
def test_a_job_has_two_to_four_regimes_of_so_many_steps(family, low, high):
    regimes = alternating(200, family=family).regimes
    assert set(regimes.count) == {2, 3, 4} and regimes.weights.sum(axis=1) == pytest.approx(1)
    stays = np.diff(regimes.ends, axis=1, prepend=0)[np.arange(MOST_REGIMES) < regimes.count[:, None]]
    assert low <= stays.min() and stays.max() <= high
    for step in (0, 777, 123_456):
        now = regimes.at(np.full(200, step))
        last = regimes.left(np.full(200, step)).astype(int) - 1
        assert (now < regimes.count).all() and (regimes.at(step + last) == now).all()


def test_other_worlds_have_one_regime_for_good():
    jobs = draw_jobs(STANDARD.only("plain"), np.random.default_rng(0), 5)
    assert (jobs.regimes.count == 1).all() and not jobs.regimes.at(np.full(5, 10**6)).any()


def test_step_times_follow_the_regime_within_a_window():
    jobs = still(alternating(6))
    none = np.zeros((6, jobs.width), int)
    jobs.noise.at = jobs.noise.at + jobs.regimes.left(jobs.noise.at).astype(int)
    rest = jobs.regimes.left(jobs.noise.at).astype(int)
    jobs.noise.at = jobs.noise.at + rest - 10
    now = jobs.regimes.at(jobs.noise.at)
    then = jobs.regimes.at(jobs.noise.at + 10)
    steps, _ = jobs.window(none, 20, np.random.default_rng(0))
    every = np.arange(6)
    assert (now != then).all()
    assert steps[:, 9] == pytest.approx(jobs.regimes.default_us[every, now])
    assert steps[:, 10] == pytest.approx(jobs.regimes.default_us[every, then])


def test_the_best_table_of_each_regime_loses_nothing_and_one_for_all_loses_something():
    jobs = still(alternating(12))
    tables, best_us = by_regime(jobs)
    assert (best_us <= jobs.usual_us(tables[:, 0]) * (1 + 1e-9)).all()
    differs = (tables != tables[:, :1]).any(axis=(1, 2))
    assert differs.mean() > 0.3, "the best setting changes in some jobs"
    ledger = LossAccount(jobs, best_us)
    every = np.arange(12)
    for _ in range(800):
        now = jobs.regimes.at(jobs.noise.at)
        stay = np.minimum(jobs.regimes.left(jobs.noise.at), 500).astype(int)
        stay = np.minimum(stay, 20_000 - ledger.steps).astype(int)
        if not stay.any():
            break
        ledger.bill(every, tables[every, now], stay)
        jobs.noise.at = jobs.noise.at + stay
    lost = ledger.lost + 20_000 * (1 - ledger.oracle)
    # A job ends somewhere in its cycle: that is what it differs by.
    assert np.abs(lost).max() < 0.03 * 20_000


def test_compute_and_memory_grow_with_the_batch_and_calls_of_some_jobs_do():
    jobs = alternating(60)
    regimes = jobs.regimes
    rows, place = np.nonzero((np.arange(MOST_REGIMES) < regimes.count[:, None]) & (regimes.batch > 1.5))
    assert (regimes.default_us[rows, place] > regimes.default_us[rows, 0]).all()
    resized = (regimes.octaves != 0).any(axis=1)
    assert 0.3 < resized.mean() < 0.9
    pressure = regimes.pressure(np.ones(60))
    assert (np.argmax(pressure, axis=1) == np.argmax(regimes.batch, axis=1)).all() and pressure.max() == 1
    assert (jobs.regimes.growth >= -1e-6).all() and jobs.regimes.growth.max() <= 1.2


def test_memory_pressure_tells_of_the_batch_where_it_is_known():
    jobs = draw_jobs(STANDARD.only("plain"), np.random.default_rng(1), 600)
    pressure = jobs.fingerprint.memory_pressure.reshape(600, -1)[:, 0]
    none = np.zeros((600, jobs.width), int)
    total, _, bare = jobs.run(none, np.arange(600))
    waits, known = np.log(bare.sum(axis=1) / total), pressure > 0
    assert 0.4 < known.mean() < 0.6
    assert np.corrcoef(pressure[known], waits[known])[0, 1] < -0.4


@pytest.mark.parametrize("family", [STANDARD, HELD_OUT])
def test_jobs_of_many_slots_have_20_to_60(family):
    jobs = draw_jobs(family.only("many"), np.random.default_rng(0), 40)
    assert jobs.width == MANY_SLOTS
    assert jobs.n_slots.min() >= LEAST_MANY and jobs.n_slots.max() > 40
    used = np.arange(MANY_SLOTS) < jobs.n_slots[:, None]
    assert (jobs.calls[used] >= 1).all() and not jobs.calls[~used].any()
    us, call_us = jobs.step_us(np.zeros((40, MANY_SLOTS), int))
    assert (us > 0).all() and (np.isfinite(call_us) == used).all()


def test_a_step_of_many_slots_has_the_calls_of_the_step_that_it_is_made_of():
    recorded, works = recorded_works(), all_works()
    n = len(recorded.names)
    assert (works.calls[:n, :SLOTS] == recorded.calls).all() and len(works.names) > n
    many = [w for w, name in enumerate(works.names) if str(name).endswith(", many slots")]
    assert min(many) >= n
    for w in many:
        source = str(works.names[w]).removesuffix(", many slots")
        total = works.calls[w].sum()
        assert total in recorded.calls.sum(axis=1)[recorded.names == source]
        begin, end = works.steps.op_at[w : w + 2]
        kinds, counts = np.unique(works.steps.slot[begin:end], return_counts=True)
        slots = works.n_slots[w]
        assert (counts[kinds >= 2] == works.calls[w, :slots]).all() and (kinds >= 2).sum() == slots


def test_a_narrow_job_is_the_same_beside_a_wide_one():
    narrow = draw_jobs(STANDARD.only("plain"), np.random.default_rng(0), 4)
    wide = draw_jobs(STANDARD.only("many"), np.random.default_rng(0), 2)
    both = type(narrow).join([narrow, wide])
    assert both.width == MANY_SLOTS and (both.n_slots[:4] == narrow.n_slots).all()
    table = np.where(narrow.mask, np.random.default_rng(1).random(narrow.mask.shape), -1).argmax(axis=2)
    padded = np.zeros((4, MANY_SLOTS), int)
    padded[:, :SLOTS] = table
    rows = np.arange(4)
    alone, beside = narrow.step_us(table), both.step_us(padded, rows)
    assert beside[0] == pytest.approx(alone[0])
    assert beside[1][:, :SLOTS] == pytest.approx(alone[1], nan_ok=True)
    assert both.take(rows).fingerprint.vector().shape[0] == 4 * MANY_SLOTS

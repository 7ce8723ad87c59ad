"""The world whose gains are measured ones: it draws them as they are, and they are in the time that is billed."""

import numpy as np
import pytest
from dynamiccl.envs.sim.jobs import draw_jobs
from dynamiccl.envs.sim.recorded_gains import MPI_HEADROOM, cells, drawn_gains


def test_half_of_the_cells_have_nothing_to_gain_and_a_quarter_more_than_a_fifth():
    system, is_reduce_scatter, sizes, gain = cells()
    assert len(gain) == 234 and set(system) == {"fugaku", "leonardo", "lumi", "mare_nostrum"}
    assert set(is_reduce_scatter) == {0, 1} and sizes.min() == 32 and sizes.max() == 2**29
    assert 0.45 < (gain < 1.02).mean() < 0.55 and 0.2 < (gain > 1.2).mean() < 0.3


def test_a_slot_takes_a_cell_of_its_function_and_size_and_a_job_those_of_one_system():
    system, func, sizes, gain = cells()
    n_bytes = np.full((300, 2), 2.0**23)
    drawn = drawn_gains(np.tile([0, 1], (300, 1)), n_bytes, np.random.default_rng(1))
    there = sizes == 2**23
    systems = [set(system[there & (func == f) & (gain == g)]) for pair in drawn for f, g in enumerate(pair)]
    assert all(systems) and all(a & b for a, b in zip(systems[::2], systems[1::2], strict=True))
    assert {name for found in systems for name in found} == set(system)


def test_the_quickest_other_setting_saves_what_was_measured_and_nothing_else_is_quicker():
    jobs = draw_jobs(MPI_HEADROOM, np.random.default_rng(3), 200)
    us = jobs.tables.us
    others = np.where(jobs.mask[:, :, 1:], us[:, :, 1:], np.inf).min(axis=2)
    has = np.isfinite(others)
    gains = (us[:, :, 0] / others)[has]
    known = cells()[3]
    off = np.abs(gains[:, None] / known - 1).min(axis=1)
    assert has.any() and off.max() < 1e-3
    assert np.median(gains) == pytest.approx(np.median(known), abs=0.1)

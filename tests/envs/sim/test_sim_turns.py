"""Two tables of a simulated job take turns at every step."""

import math
from dataclasses import replace

import numpy as np
import pytest
from dynamiccl.envs.search.interfaces import PROFILE, TRIAL, Plan, arms_of
from dynamiccl.envs.search.step_times import Quads, trimmed_mean
from dynamiccl.envs.sim.family import STANDARD
from dynamiccl.envs.sim.jobs import draw_jobs
from dynamiccl.envs.sim.noise import NODE, Noise, NoiseStream
from dynamiccl.envs.sim.windows import SWITCH_STEPS, SimWindows

QUIET = dict.fromkeys(("sigma", "tail", "pace", "late", "save_every"), 0.0)


@pytest.fixture
def job():
    """A job of one batch without noise, whose other table has a known step time; the windows, the table, both steps."""
    jobs = draw_jobs(STANDARD.only("plain"), np.random.default_rng(3), 1)
    for name, value in QUIET.items():
        setattr(jobs.noise, name, np.full(1, value))
    jobs.noise.save_every = np.zeros(1, int)
    jobs.noise.swing[:, 0] = 0.0
    table = np.zeros((1, jobs.width), np.int64)
    table[0, 0] = np.flatnonzero(jobs.mask[0, 0])[-1]
    us = np.concatenate([jobs.step_us(np.zeros_like(table))[0], jobs.step_us(table)[0]])
    assert abs(us[1] / us[0] - 1) > 0.003
    return jobs, table[0, : int(jobs.n_slots[0])], us / 1e3


def measured(jobs, table, n_quads=2, turns=1, discard=0, limit_ms=math.inf):
    windows = SimWindows(jobs, NoiseStream(0, np.zeros(1), jobs.width))
    n_steps = 4 * turns * n_quads
    plan = Plan(TRIAL, table, n_steps, discard, limit_ms, others=np.zeros_like(table), turns=turns)
    return windows, windows.measure([0], [plan])[0]


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("carry", [0.0, 0.3])
def test_each_turn_takes_its_tables_time_and_a_part_carries_over(job, turns, carry):
    jobs, table, ms = job
    jobs.carry[:], jobs.first_use.us[:] = carry, 0.0
    _, seen = measured(jobs, table, turns=turns)
    arms = arms_of(8 * turns, turns)
    assert seen.arms.tolist() == arms.tolist() and arms[: 4 * turns : turns].tolist() == [0, 1, 1, 0]
    before = np.append(0, arms[:-1])
    expected = (1 - carry) * ms[arms] + carry * ms[before]
    assert seen.step_ms == pytest.approx(expected, rel=1e-6)
    # Turns of two steps, the first of which does not count, show the whole effect.
    found = Quads.of(seen.step_ms, seen.arms, turns)
    whole = math.log(ms[0] / ms[1])
    assert found.ratios.mean() == pytest.approx(whole if turns == 2 else whole * (1 - carry), rel=0.05)


@pytest.mark.parametrize("is_replicated", [False, True])
def test_the_current_table_runs_around_turns_and_the_bill_counts_it(job, is_replicated):
    jobs, table, ms = job
    jobs.works = replace(jobs.works, replicated=np.full_like(jobs.works.replicated, is_replicated))
    jobs.carry[:], jobs.first_use.us[:] = 0.0, 0.0
    windows, seen = measured(jobs, table)
    around = (1 + is_replicated) * SWITCH_STEPS  # a round before, and one after
    assert seen.billed == around + 8 and not windows.running.any()
    assert seen.billed_ms == pytest.approx((around + 4) * ms[0] + 4 * ms[1], rel=1e-6)
    assert windows.tried_steps.tolist() == [4] and (windows.tried[0, : len(table)] == table).all()


def test_the_first_use_of_an_algorithm_falls_on_the_first_turn_of_its_table(job):
    jobs, table, ms = job
    jobs.carry[:], jobs.first_use.us[:] = 0.0, 5e4
    jobs.first_use.connected[:] = False
    _, seen = measured(jobs, table)
    assert seen.step_ms[1] > ms[1] + 40 and seen.step_ms[2] == pytest.approx(ms[1], rel=1e-6)
    jobs.first_use.connected[:] = False
    _, seen = measured(jobs, table, discard=4)
    assert seen.step_ms == pytest.approx(ms[arms_of(8, 1)], rel=1e-6)  # the quad that does not count


def test_turns_end_with_the_first_step_of_the_tried_table_that_is_too_slow(job):
    jobs, table, ms = job
    jobs.carry[:], jobs.first_use.us[:] = 0.0, 0.0
    slower = ms[1] > ms[0]
    _, seen = measured(jobs, table, limit_ms=ms.min() * 1.001)
    assert len(seen.step_ms) == (2 if slower else 8)
    _, seen = measured(jobs, table, limit_ms=ms.min() * 0.999)
    assert len(seen.step_ms) == 2  # the current table's steps end nothing


def test_a_batch_may_mix_turns_and_windows():
    jobs = draw_jobs(STANDARD.only("plain"), np.random.default_rng(5), 2)
    windows = SimWindows(jobs, NoiseStream(0, np.arange(2), jobs.width))
    tables = [np.zeros(int(n), np.int64) for n in jobs.n_slots]
    turns, window = windows.measure(
        [0, 1], [Plan(TRIAL, tables[0], 8, others=tables[0], turns=1), Plan(PROFILE, tables[1], 5)]
    )
    assert len(turns.arms) == 8 and not len(window.arms) and len(window.step_ms) == 5


def test_turns_have_less_error_than_windows_on_node_noise():
    """At most half the error after 96 steps, in the median."""
    rng = np.random.default_rng(2)
    noise = Noise.draw(NODE, rng, 300)
    steps = noise.steps(np.ones(300), np.full(300, 96), rng, (np.zeros(300), np.zeros(300)))
    by_turns = [trimmed_mean(Quads.of(row, arms_of(96, 1), 1).ratios) for row in steps]
    logs = np.log(steps).reshape(300, 8, 12)[:, :, 2:]  # windows of ten, two steps of each change left out
    by_windows = np.median(logs, axis=2) @ np.array([1, -1, -1, 1, 1, -1, -1, 1]) / 4
    error, other = (np.median(np.abs(found)) for found in (by_turns, by_windows))
    print(
        f"error of a difference after 96 steps: turns {100 * error:.2f} %, windows of ten {100 * other:.2f} %"
    )
    assert error < 0.5 * other

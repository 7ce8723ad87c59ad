"""What is promised of a search holds in simulation, in small; ``dynamiccl lab promises`` measures it in full."""

import json

import numpy as np
import pytest
from dynamiccl.agent.cli import app
from dynamiccl.agent.rules import ExpectedImprovement
from dynamiccl.envs.promises import ended, lived, nothing_to_gain, recovery, watch
from dynamiccl.envs.scores import HARM
from dynamiccl.envs.sim.job_family import HELD_OUT
from dynamiccl.envs.sim.jobs import SLOTS, STANDARD, draw_jobs
from typer.testing import CliRunner


@pytest.mark.slow
def test_where_there_is_nothing_to_gain_hardly_a_table_is_left_and_none_harms():
    found = ended(nothing_to_gain(24, seed=1), ExpectedImprovement(), seed=1)
    assert found.has_table.sum() <= 4 and np.abs(found.saving).max() < 1e-6


def test_where_every_other_config_costs_none_is_left_that_is_slower():
    jobs = nothing_to_gain(16, seed=1, worse=0.03)
    none = np.zeros((16, SLOTS), int)
    other = none.copy()
    other[:, 0] = [np.flatnonzero(row)[-1] for row in jobs.mask[:, 0]]
    slower = jobs.step_us(other)[0] / jobs.step_us(none)[0] - 1
    assert slower.min() > -1e-6 and 0.005 < slower.max() < 0.06
    found = ended(jobs, ExpectedImprovement(), seed=1)
    assert not found.is_harmed.any() and found.saving.min() > -HARM


def test_a_small_gain_stays_in_force_and_costs_few_default_steps():
    found = watch(12, 6000, 0.99, 0.99, ExpectedImprovement(), seed=1)
    assert found.in_force.all() and (found.anew == 0).all()
    assert found.default_share.mean() <= 0.006
    assert (watch(6, 500, 0.99, 0.99, ExpectedImprovement(), seed=1).default_share <= 0.01).all()


def test_a_table_that_turned_bad_is_gone_within_windows():
    for family in (STANDARD, HELD_OUT):
        found = watch(16, 2500, 0.95, 1.2, ExpectedImprovement(), change_at=1000, seed=2, family=family)
        assert np.isfinite(found.windows).sum() >= 15 and np.median(found.windows) <= 2


@pytest.mark.slow
def test_a_job_that_changes_for_good_is_tuned_again():
    found = recovery(6, ExpectedImprovement(), (300, 600), change_at=1500, seed=3)
    assert (found.anew > 0).sum() >= 3
    assert found.in_force[1].sum() > 0.6 * found.possible.sum() and found.in_force[1].min() > -HARM


def test_what_is_lived_through_is_billed_by_the_truth():
    jobs = draw_jobs(STANDARD, np.random.default_rng(5), 3)
    jobs.swing[:, 0] = 0
    found = lived(jobs, ExpectedImprovement(), (200, 600), seed=0)
    has_table = np.isfinite(found.default_share[1])
    assert found.default_share.shape == (2, 3) and has_table.any()
    assert (found.default_share[1][has_table] <= 0.05).all() and (found.saving[~has_table] == 0).all()
    assert (found.saving <= found.oracle + 1e-3).all()


@pytest.mark.slow
def test_one_command_prints_them_for_people_and_programs():
    words = ["lab", "promises", "--part", "nothing", "--jobs", "4"]
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    first, *_ = rows = told["promises"]
    assert told["emulated"] and len(rows) == 4 and {row["part"] for row in rows} == {"nothing"}
    assert first["of"] == 40 and first["holds"] == (first["value"] <= first["aim"] == 0)
    refused = CliRunner().invoke(app, ["lab", "promises", "--part", "wish"])
    assert refused.exit_code == 2 and "watch" in refused.output

"""What a small budget still finds: the figures of the pages are what the filed rows give."""

import budget
import numpy as np
import pytest
from dynamiccl.envs.bench.job_suites import JobSuite
from dynamiccl.envs.bench.scores import Scores
from dynamiccl.envs.bench.submissions import rows_of
from paths import DATA, ROOT

ROWS = budget.read(DATA / "budget.csv")


def text(page):
    return " ".join((ROOT / page).read_text("utf-8").split())


def test_the_pages_say_what_the_filed_rows_give():
    told = budget.figures(ROWS)
    assert " | ".join(budget.cells(told)) in text("docs/evidence.md")
    assert f"Of {told['jobs']:,} simulated jobs {budget.ended(told['small'])}" in text("docs/start.md")
    faster, default, slower = map(budget.percent, told["small"]["ends"])
    said = f"with `--budget 0.01` {faster} of jobs end faster, {default} on NCCL's default, {slower} slower"
    assert said in text("README.md")


def test_the_rows_are_of_one_budget_and_of_jobs_of_the_boards():
    assert {r["budget"] for r in ROWS} == {"0.01"}
    jobs = [(r["suite"], int(r["job"])) for r in ROWS]
    assert len(set(jobs)) == len(jobs) >= 80 and {suite for suite, _ in jobs} == set(budget.BOARDS)
    for name in budget.BOARDS:
        here, there = budget.pairs(ROWS, name)
        assert np.allclose(here["best"], there["best"], atol=2e-5)


@pytest.mark.slow
def test_with_the_usual_budget_the_filed_entry_comes_out_again():
    suite, entry = JobSuite.load("standard"), budget.entry("standard")
    rows = rows_of(suite, entry["jobs"])
    picked = np.array([5, 60])
    found, filed = budget.played(suite, rows[picked], 0.05), Scores.of(entry["scores"]).take(picked)
    assert np.allclose(found.lost, filed.lost, atol=2e-5) and np.allclose(found.gain, filed.gain, atol=2e-5)

"""What perfect knowledge saves: the table of the page is what the filed rows give, and the arms know what they say."""

import re
from functools import cache

import numpy as np
import perfect
import pytest
from dynamiccl.envs.bench.job_suites import JobSuite
from paths import DATA, ROOT

PAGE = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")


@cache
def suite():
    """Drawn in two seconds: not where its tests are only collected."""
    return JobSuite.load("standard")


def rows_of(world, n):
    return np.flatnonzero(suite().strata == world)[:n]


def test_the_table_of_the_page_is_what_the_filed_rows_give():
    found = re.search(r"<!-- rows: perfect -->\n(.*?)\n<!-- /rows -->", PAGE, re.DOTALL)
    assert found and found[1] == perfect.page_table(perfect.read(DATA / "perfect.csv"))


def test_every_arm_played_the_same_jobs():
    """But for returns, where a world comes back to nothing."""
    rows = perfect.read(DATA / "perfect.csv")
    jobs = {}
    for r in rows:
        jobs.setdefault((r["world"], r["arm"]), []).append(int(r["job"]))
    for (world, arm), found in jobs.items():
        assert len(set(found)) == len(found) and set(found) == set(jobs[world, "rule"])
        assert arm != perfect.RETURNS or world in perfect.RETURNING
    assert {arm for _, arm in jobs} == set(perfect.ARMS)


def test_only_what_saves_more_than_30_steps_and_three_errors_is_worth_training():
    assert perfect.is_worth_training(40, 13)
    assert not perfect.is_worth_training(40, 14) and not perfect.is_worth_training(29, 1)


@pytest.mark.slow
def test_who_is_told_the_best_table_proposes_it_first():
    rows = rows_of("plain", 3)
    searches, _ = perfect.opened(suite(), rows, perfect.ARMS[perfect.PROPOSALS])
    player = perfect.Knowing(perfect.ARMS[perfect.PROPOSALS])
    for job, search in enumerate(searches.searches):
        while search.plan() is None and not search.is_done:
            config, what = np.divmod(player.next(job, search), 7)
            search.decide(int(config), int(what))
        compared = search.comparisons
        wanted = suite().best[rows[job], : search.n_slots]
        assert (compared and np.array_equal(compared[0].table, wanted)) or suite().gain[rows[job]] < 0.001


@pytest.mark.slow
def test_a_job_that_comes_back_to_nothing_is_the_rules():
    rows = rows_of("plain", 2)
    rule, back = (perfect.played(suite(), rows, known, 200) for known in ((), (perfect.RETURNS,)))
    assert np.array_equal(rule.lost, back.lost)

"""The bill: against hand-made sums, and what it may never do."""

import numpy as np
import pytest
from dynamiccl.agent.bench.board import _steps
from dynamiccl.envs.bench.scores import HORIZON, LossAccount, Scores, by_stratum, ranks, summary
from dynamiccl.envs.sim.jobs import STANDARD, draw_jobs
from dynamiccl.envs.sim.mixes import default_tables
from oracle import oracle


@pytest.fixture(scope="module")
def calm():
    jobs = draw_jobs(STANDARD.only("plain"), np.random.default_rng(8), 30)
    jobs.swing[:, 0] = 0
    best, us = oracle(jobs)
    return jobs, best, us


def ledger(calm):
    jobs, best, us = calm
    return (
        LossAccount(jobs.take(slice(None)), us),
        best,
        np.zeros((len(jobs), jobs.width), int),
        np.arange(len(jobs)),
    )


def test_who_never_searches_loses_what_there_is_to_gain_and_the_oracle_nothing(calm):
    book, best, none, rows = ledger(calm)
    book.end(rows, none)
    idle = book.scores()
    gain = 1 - calm[2] / calm[0].default_us
    assert idle.lost == pytest.approx(HORIZON * gain) and idle.gain == pytest.approx(0)
    assert (idle.verdict == 0).all() and np.isnan(idle.first_gain).all()
    book, *_ = ledger(calm)
    book.end(rows, best)
    perfect = book.scores()
    assert perfect.lost == pytest.approx(0, abs=1e-3) and perfect.gain == pytest.approx(gain)
    assert not perfect.is_harmed.any() and not perfect.is_harsh.any()
    assert ranks({"idle": idle, "oracle": perfect}) == {"oracle": 1, "idle": 2}
    assert ranks({"a": perfect, "b": perfect}) == {"a": 1, "b": 1}


def test_every_window_is_billed(calm):
    book, best, none, rows = ledger(calm)
    jobs, _, us = calm
    book.bill(rows, none, np.full(len(rows), 100))
    book.first_gain[rows[::2]] = book.steps[rows[::2]]
    book.bill(rows, best, np.full(len(rows), 50))
    book.first_gain[rows[1::2]] = book.steps[rows[1::2]]
    book.end(rows, best)
    # Afterwards one step in ten runs the default.
    book.bill(rows, best, np.full(len(rows), 90))
    book.bill(rows, none, np.full(len(rows), 10))
    scores, gain = book.scores(), 1 - us / jobs.default_us
    assert (scores.verdict == 150).all() and (scores.first_gain == np.where(rows % 2, 150, 100)).all()
    assert scores.lost == pytest.approx(gain * (100 + 0.1 * (HORIZON - 150)))
    assert summary(scores)["steps_to_verdict"] == [150, 150, 150]


def test_a_window_is_billed_by_the_moments_in_which_it_ran():
    """Before: all of it by the truth after it, though the job may have changed meanwhile."""
    jobs = draw_jobs(STANDARD.only("alternating"), np.random.default_rng(4), 6)
    none = default_tables(jobs)
    rows = np.arange(6)
    fast = none.copy()
    fast[:, 0] = [jobs.mask[i, 0].nonzero()[0][-1] for i in rows]
    begun = jobs.noise.at.copy()
    now = LossAccount(jobs, jobs.default_us).bill(rows, fast, np.ones(6))
    jobs.noise.at = begun + 400
    book = LossAccount(jobs, jobs.default_us)
    np.testing.assert_array_equal(book.bill(rows, fast, np.ones(6), at=begun), now)
    assert (LossAccount(jobs, jobs.default_us).bill(rows, fast, np.ones(6)) != now).any()


def test_a_bill_longer_than_the_horizon_counts_only_up_to_it(calm):
    book, _, none, rows = ledger(calm)
    book.bill(rows, none, np.full(len(rows), 4 * HORIZON))
    book.end(rows, none)
    gain = 1 - calm[2] / calm[0].default_us
    assert book.scores().lost == pytest.approx(HORIZON * gain)


def test_harm_and_harsh_steps_are_seen(calm):
    jobs, *_ = calm
    book, _, none, rows = ledger(calm)
    worst = none.copy()
    for s in range(jobs.width):  # one channel, or whatever is slowest
        slow = np.where(jobs.mask[:, s], jobs.tables.us[:, s], -1)
        worst[:, s] = slow.argmax(axis=1)
    pace = book.bill(rows, worst, np.ones(len(rows)))
    book.end(rows, worst)
    scores = book.scores()
    assert (scores.is_harsh == (pace > 1.5)).all() and scores.is_harsh.any()
    assert (scores.is_harmed == (pace > 1.002)).all() and scores.is_harmed.mean() > 0.5
    assert book.worst == pytest.approx(np.maximum(pace, 1))
    one, *_ = ledger(calm)
    one.bill([3, 3], worst[[3, 3]], [2, 5])
    assert one.steps[3] == 7 and one.steps.sum() == 7, "the same job twice in one call"


def test_strata_hold_all():
    gains = np.array([0.0, 0.004, 0.005, 0.03, 0.05, 0.4, 1.0])
    n = len(gains)
    fill = np.zeros(n)
    flags = fill.astype(bool)
    scores = Scores(fill, fill, fill, gains, gains, fill, flags, flags)
    parts = by_stratum(scores, np.array(["plain", "tails", "plain", "plain", "wide", "wide", "tails"]))
    assert {name: part["jobs"] for name, part in parts.items()} == {"plain": 3, "tails": 2, "wide": 2}


def test_the_first_use_of_an_algorithm_is_on_the_bill(calm):
    book, best, _, rows = ledger(calm)
    book.end(rows, best)
    before = book.scores().lost
    book.jobs.first_use.spent_us[:] = 3 * book.jobs.default_us
    assert book.scores().lost == pytest.approx(before + 3)


def test_a_gain_that_was_never_found_is_later_than_any_other(calm):
    """Before: such jobs were left out, so that who fails often looked fast."""
    book, best, *_ = ledger(calm)
    rows = np.flatnonzero(1 - calm[2] / calm[0].default_us >= 0.01)
    found = rows[: 3 * len(rows) // 4]
    book.first_gain[found] = 100.0
    book.end(np.arange(len(best)), best)
    assert summary(book.scores())["steps_to_first_gain"] == [100.0, 100.0, None]
    book.first_gain[:] = np.nan
    assert _steps(summary(book.scores())["steps_to_first_gain"]) == "never, never"
    assert _steps([100.0, 100.0, None]) == "100, never" and _steps(None) == "-"


def test_entrants_share_a_rank_only_with_all_that_they_cannot_be_told_from():
    """Before: each was compared with the one before it alone, so that small steps made one rank of all."""
    n, rng = 400, np.random.default_rng(1)
    blank = {name: np.zeros(n) for name in Scores.__annotations__}

    def of(mean):
        noise = rng.normal(size=n)
        return Scores(**blank | {"lost": mean + 50 * (noise - noise.mean())})

    entrants = {str(mean): of(mean) for mean in (219, 224, 229, 234, 239)}
    assert list(ranks(entrants).values()) == [1, 1, 3, 3, 5]

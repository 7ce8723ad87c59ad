"""However a policy spends its measurements, the comparison is rarely wrong: a policy that asks for everything."""

import numpy as np
import pytest
from dynamiccl.agent.policies.rule import ExpectedImprovement
from dynamiccl.envs.bench.job_arena import AccountedWindows
from dynamiccl.envs.bench.scores import LossAccount
from dynamiccl.envs.search.belief.prior import Prior
from dynamiccl.envs.search.comparison import ADOPTED
from dynamiccl.envs.search.config import SearchConfig
from dynamiccl.envs.search.interfaces import LEAVE, LOOK, RUN_LONGER, SEARCH_AGAIN, choices_of
from dynamiccl.envs.sim.jobs import STANDARD, draw_jobs
from dynamiccl.envs.sim.noise import NoiseStream
from dynamiccl.envs.sim.windows import SimSearch
from no_gain import without_gain

JOBS, ALPHA = 200, 0.05


def restless(search, rng):
    """The rule, but in one turn of four a further choice, and never the end while another search may be had."""
    config, what = choices_of(ExpectedImprovement().predict(search.observe())[0])
    further = [w for w in (RUN_LONGER, LOOK, SEARCH_AGAIN) if search.what_open[w]]
    if further and rng.random() < 0.25:
        what = rng.choice(further)
    elif what == LEAVE and SEARCH_AGAIN in further:
        what = SEARCH_AGAIN
    return int(config), int(what)


def played(more_choices):
    """Searches on JOBS jobs without gain under the noise of real nodes, to 4,000 steps; how often what was asked."""
    jobs = without_gain(draw_jobs(STANDARD.only("lasting"), np.random.default_rng(5), JOBS))
    ledger = LossAccount(jobs, jobs.default_us)
    windows = AccountedWindows(jobs, NoiseStream(0, np.arange(JOBS), jobs.width), ledger)
    found = SimSearch(windows, Prior.load(), SearchConfig(more_choices=more_choices))
    rng, asked = np.random.default_rng(0), np.zeros(7, int)
    while open_ := [i for i, one in enumerate(found.searches) if not one.is_done and ledger.steps[i] < 4_000]:
        for i in open_:
            one = found.searches[i]
            while not one.is_done and one.plan() is None:
                config, what = restless(one, rng)
                asked[what] += 1
                assert one.decide(config, what)
        found.measure([i for i in open_ if not found.searches[i].is_done])
    return found.searches, asked


@pytest.mark.slow
def test_comparisons_keep_their_level_whatever_is_asked_for():
    """Every config does what the default does, so each table that is adopted is a mistake."""
    for more_choices in (False, True):
        searches, asked = played(more_choices)
        comparisons = [c for one in searches for c in one.comparisons if c.test.n]
        wrong = sum(c.outcome == ADOPTED for c in comparisons)
        jobs = sum(any(c.outcome == ADOPTED for c in one.comparisons) for one in searches)
        told = f"further choices {more_choices}: {wrong} of {len(comparisons)} comparisons"
        print(f"{told} adopt a table that gains nothing, in {jobs} of {JOBS} jobs; asked {asked.tolist()}")
        assert len(comparisons) > JOBS and wrong <= ALPHA * len(comparisons)
    assert asked[[RUN_LONGER, SEARCH_AGAIN]].min() > JOBS

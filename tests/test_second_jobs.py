"""Second jobs on a cluster, in small: ``second_jobs.compare`` with more pairs is what the documentation quotes."""

import numpy as np
import pytest
from dynamiccl.agent.rules import ExpectedImprovement
from dynamiccl.envs.belief import Prior
from dynamiccl.envs.second_jobs import CHANGED, OTHER, SAME, STRANGE, compare, draw_pairs
from dynamiccl.envs.sim.jobs import STANDARD


@pytest.mark.parametrize(("kind", "same_work", "same_truth"), [(SAME, True, True), (OTHER, False, True)])
def test_second_jobs_share_what_their_kind_says(kind, same_work, same_truth):
    pairs = draw_pairs(kind, STANDARD, 6)
    assert (pairs.first.which == pairs.second.which).all() == same_work
    assert (pairs.first.sites.truth.bus_gbs == pairs.second.sites.truth.bus_gbs).all() == same_truth
    with pytest.raises(ValueError, match="second jobs are"):
        draw_pairs("a third", STANDARD, 1)


def test_another_fabric_bears_the_same_name_and_the_same_compute():
    for kind in (STRANGE, CHANGED):
        pairs = draw_pairs(kind, STANDARD, 6)
        assert (pairs.first.fingerprint.n_bytes == pairs.second.fingerprint.n_bytes).all()
        assert (pairs.first.scale == pairs.second.scale).all()
        assert not np.allclose(pairs.first.default_us, pairs.second.default_us, rtol=1e-3)


@pytest.mark.slow
def test_the_same_job_again_is_quicker_and_no_worse():
    found = compare(ExpectedImprovement(), SAME, STANDARD, 6, Prior.load())
    assert found["pairs"] == 6 and found["used_at_the_end"] > 0.5
    assert found["first_window"]["with"] > 0.6 > found["first_window"]["without"]
    assert found["with"]["steps_to_verdict"][1] < found["without"]["steps_to_verdict"][1]
    assert found["with"]["lost_20000"] < found["without"]["lost_20000"] + 20 and found["with"]["slower"] == 0

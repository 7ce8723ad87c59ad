"""The prior of the belief as it is fitted: it learns, and the belief reads what training wrote."""

import numpy as np
import pytest
import torch
from dynamiccl.agent.train.job_prior import JobPrior, fit, judge, training_arrays
from dynamiccl.envs.search.belief import Prior
from dynamiccl.envs.sim.jobs import STANDARD, draw_jobs
from dynamiccl.traces.fingerprint import N_FEATURES
from fit_prior import trained


def test_the_prior_learns_and_comes_back_from_its_weights():
    torch.manual_seed(0)
    prior, jobs = (
        JobPrior(width=16, n_shared=2, n_own=2),
        draw_jobs(STANDARD.only("plain"), np.random.default_rng(3), 8),
    )
    before, losses = judge(prior, jobs), []
    fit(prior, lambda n: jobs.take(slice(n)), 30, 8, progress=lambda done, loss: losses.append(loss))
    assert len(losses) == 30 and judge(prior, jobs) < before - 0.2
    weights = prior.export()
    again = trained(weights)
    assert judge(again, jobs) == pytest.approx(judge(prior, jobs), abs=1e-5)
    # The belief reads from these weights what training wrote into them.
    x, _, _ = training_arrays(jobs)
    mean, own, loadings = Prior(weights)(x[0, :2, :N_FEATURES].numpy(), x[0, :2, N_FEATURES:].numpy())
    for found, wanted in zip((mean, own, loadings), prior(x[0, :2]), strict=True):
        np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-4, atol=1e-4)

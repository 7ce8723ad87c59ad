"""What is believed of every config before and after it is tried: a Gaussian process whose prior was learned.

The log of a slot's time under a config, relative to NCCL's own choice, is taken to be Gaussian over all configs at
once: mean and covariance come from a small network that has seen many thousands of simulated slots (``prior.py``
trains it), given the fingerprint. Measurements turn it into the posterior in closed form (Rasmussen and Williams 2006,
chapter 2), so what one config taught is known of its neighbours. Numpy only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..envs import spaces
from ..envs.spaces import N_CONFIGS, N_MASK
from ..traces.fingerprint import N_FEATURES

Array = np.ndarray[Any, Any]

#: Where the fingerprint has the slot's share of the step.
_SHARE = 10
#: Assumed standard deviation of one window's relative step time; and of a log slot time whatever is measured.
WINDOW_NOISE, FLOOR = 0.02, 0.02
#: Figures per config that :meth:`Belief.features` gives.
N_FIGURES = 4


def fingerprint_and_mask(observations: Array) -> Array:
    """The part of observations (n, N_OBSERVATION) that the prior sees, (n, N_FEATURES + N_MASK) float32."""
    return np.concatenate([observations[:, :N_FEATURES], observations[:, -N_MASK:]], axis=1, dtype=np.float32)


class Belief:
    """Prior and posterior for batches of observations.

    ``weights`` (float32): ``prior_w0``, ``prior_b0``, ``prior_w1``, ``prior_b1`` of two tanh layers, then
    ``prior_w2`` (m, N_CONFIGS * (2 + k)), ``prior_b2``: mean, log variance of a config's own part, and its loadings on
    ``k`` factors that configs share.
    """

    def __init__(self, weights: dict[str, Array]) -> None:
        self.weights = weights
        self.n_factors = len(weights["prior_b2"]) // N_CONFIGS - 2
        self._told: Array = np.zeros((0, 0), np.float32)  # what the prior was last asked, and its answer:
        self._prior: tuple[Array, Array, Array] | None = None  # it stays the same for a whole search

    def prior(self, observations: Array) -> tuple[Array, Array, Array]:
        """Mean (n, N_CONFIGS), loadings (n, N_CONFIGS, k) and own variance (n, N_CONFIGS) of log slot times."""
        told = fingerprint_and_mask(observations)
        if self._prior is not None and np.array_equal(told, self._told):
            return self._prior
        w, x = self.weights, told
        for layer in "01":
            x = np.tanh(x @ w["prior_w" + layer] + w["prior_b" + layer])
        out = (x @ w["prior_w2"] + w["prior_b2"]).astype(np.float64)
        mean, own, loadings = np.split(out, [N_CONFIGS, 2 * N_CONFIGS], axis=1)
        self._told = told
        self._prior = mean, loadings.reshape(len(out), N_CONFIGS, self.n_factors), own_variance(own)
        return self._prior

    def posterior(self, observations: Array) -> tuple[Array, Array]:
        """Mean and variance (n, N_CONFIGS) of every config's log slot time, given what the observations tell.

        With loadings L and own variances D the covariance is L L' + D, so k numbers per slot are inferred, not
        N_CONFIGS: the factors' precision is I + sum over measured c of L_c' L_c / (D_c + noise).
        """
        mean, loadings, own = self.prior(observations)
        seen = spaces.seen(observations)
        count = seen.count.copy()
        count[:, 0] = 0  # AUTO is what all is relative to
        tried = count > 0
        share = np.maximum(observations[:, _SHARE, None], 0.01)
        time = np.maximum(1 - np.where(tried, seen.mean, 0.0), 0.05)
        noise = (WINDOW_NOISE / share / time) ** 2 / np.maximum(count, 1) + FLOOR**2
        weight = np.where(tried, 1 / (own + noise), 0.0)
        miss = np.where(tried, np.log(time) - mean, 0.0)
        weighed = loadings * weight[..., None]
        precision = np.eye(self.n_factors) + weighed.swapaxes(1, 2) @ loadings
        spread = np.linalg.inv(precision)
        factors = spread @ (weighed.swapaxes(1, 2) @ miss[..., None])
        mean = mean + (loadings @ factors)[..., 0]
        variance = ((loadings @ spread) * loadings).sum(axis=2)
        # A tried config's own part has been seen too.
        gain = np.where(tried, own / (own + noise), 0.0)
        mean = mean + gain * np.where(tried, np.log(time) - mean, 0.0)
        variance = np.where(tried, (1 - gain) ** 2 * variance + gain * noise, variance + own)
        mean[:, 0], variance[:, 0] = 0.0, 1e-6
        return mean, variance

    def features(self, observations: Array) -> Array:
        """What a policy is told of each config, (n, N_FIGURES * N_CONFIGS) float32, zeros where masked.

        How much faster than the best tried config it is believed to be; how sure that is (standard deviation); its
        expected improvement (Jones et al. 1998), all in log slot time; and how much longer it might make the step.
        """
        mean, variance = self.posterior(observations)
        seen = spaces.seen(observations)
        deviation = np.sqrt(variance)
        open_ = seen.configs
        best = np.where(open_ & (seen.count > 0), mean, np.inf).min(axis=1, keepdims=True)
        ahead = best - mean
        risk = observations[:, _SHARE, None] * (np.exp(np.minimum(mean + deviation, 2.0)) - 1)
        figures = np.stack([ahead, deviation, 4 * expected_improvement(ahead, deviation), risk], axis=1)
        return np.asarray(np.where(open_[:, None], np.clip(figures, -2, 2), 0).reshape(len(mean), -1), np.float32)


def own_variance(raw: Array) -> Array:
    """The variance of what a config shares with no other, from the network's output."""
    return np.asarray(np.exp(np.clip(raw, -9.0, 3.0)) + 1e-4)


def expected_improvement(ahead: Array, deviation: Array) -> Array:
    """E[max(x, 0)] for x normal with mean ``ahead`` and standard deviation ``deviation``.

    The normal's tail is that of Bowling et al. 2009 (a logistic of a cubic), within 2e-4.
    """
    u = ahead / deviation
    below = 1 / (1 + np.exp(-np.clip(1.5976 * u + 0.07056 * u**3, -40, 40)))
    density = np.exp(-0.5 * u * u) / np.sqrt(2 * np.pi)
    return np.asarray(np.maximum(ahead * below + deviation * density, 0.0))

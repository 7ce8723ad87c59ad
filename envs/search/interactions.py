"""What whole tables do beyond the sum of their slots: configs of two slots may help or disturb each other.

A Gaussian process over tables (Rasmussen and Williams 2006, chapter 2) on what the step time of each measured table
differs by from what the belief over single slots expects. Two tables are alike as far as pairs of slots run alike in
both: the same config, the same algorithm and protocol, or the same number of channels. NCCL's own table has no effect
by definition. How strong interactions are on this job is averaged over a few strengths, none among them, each weighed
by how well it explains the windows so far.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...traces.records import PAIRS
from ...traces.spaces import N_CHANNELS, N_CONFIGS, pair_of

Array = np.ndarray[Any, Any]

#: Standard deviations (log of the step) that interactions may have, and how likely each is beforehand.
STRENGTHS, CHANCES = np.array([0.0, 0.01, 0.03, 0.08]), np.array([0.8, 0.1, 0.06, 0.04])
#: What two configs of a slot have in common: all, algorithm and protocol, number of channels.
SAME, SAME_PAIR, SAME_CHANNELS = 0.4, 0.4, 0.2
#: A table's effect is known no better than this (log).
FLOOR = 0.002


class Interactions:
    """Of one job of ``s`` slots; effects are logs of the step time, above 0 where a table is slower than expected."""

    def __init__(self, features: Array, share: Array) -> None:
        """``features`` (s, N_FEATURES), ``share`` (s,) of the step."""
        config = np.arange(N_CONFIGS)
        own = features[:, -len(PAIRS) :].argmax(axis=1)
        pair = pair_of(config, own[:, None])
        same_pair = pair[:, :, None] == pair[:, None, :]
        same_channels = (config % N_CHANNELS)[:, None] == config % N_CHANNELS
        weight = np.sqrt(np.maximum(share, 1e-3) / max(float(np.sum(share)), 1e-3))
        weight /= math.sqrt(max((weight.sum() ** 2 - (weight**2).sum()) / 2, 1e-9))
        like = SAME * np.eye(N_CONFIGS) + SAME_PAIR * same_pair + SAME_CHANNELS * same_channels
        self._weight, self._like = weight, weight[:, None, None] * like  # (s,), (s, N_CONFIGS, N_CONFIGS)
        self.tables = np.zeros((0, len(share)), np.int64)  # measured ones, (n, s)
        self._sums = np.zeros((0, 2))  # of each: precisions, and logs of the step times times them
        self._rows = self._like[
            :, :, :1
        ]  # of each slot, how alike any config is to NCCL's own and the n tables'
        self._own = self._one(np.zeros(len(share), np.int64))
        self._kernel = np.zeros((0, 0))  # prior covariance of the measured tables, in squared strengths
        self._mean, self._less, self.variance = np.zeros(0), np.zeros((0, 0)), 0.0

    @property
    def is_there(self) -> bool:
        """Whether anything speaks for interactions on this job."""
        return self.variance > 0

    # -- prior covariances, in squared strengths -----------------------------------------------------------------

    def _one(self, table: Array) -> Array:
        """Of a table (s,) with NCCL's own and the measured ones, (1 + n,), before the own one is known."""
        like = self._rows[np.arange(len(table)), table]
        return np.asarray((like.sum(axis=0) ** 2 - (like**2).sum(axis=0)) / 2)

    def _slot(self, table: Array, slot: int) -> Array:
        """The same of a table with any config in a slot, (N_CONFIGS, 1 + n)."""
        like = self._rows[np.arange(len(table)), table]
        like[slot] = 0.0
        rest = like.sum(axis=0)
        return np.asarray((rest**2 - (like**2).sum(axis=0)) / 2 + rest * self._rows[slot])

    def _given_own(self, common: Array) -> Array:
        """With the measured tables (..., n), once NCCL's own is known to have no effect; ``common`` (..., 1 + n)."""
        return np.asarray(common[..., 1:] - common[..., :1] - self._own[1:] + self._own[0])

    # -- learning ------------------------------------------------------------------------------------------------

    def see(self, table: Array, log_step: float, noise: float) -> None:
        """A window under a table (s,): the log of its step time over the default's, and its standard deviation."""
        if len(table) < 2 or not table.any():
            return
        if not (self.tables == table).all(axis=1).any():
            self.tables = np.concatenate([self.tables, table[None]])
            self._sums = np.concatenate([self._sums, np.zeros((1, 2))])
            row = self._like[np.arange(len(table)), :, table]
            self._rows = np.concatenate([self._rows, row[:, :, None]], axis=2)
            self._own = self._one(np.zeros(len(table), np.int64))
            common = self._given_own(self._one(table))
            self._kernel = np.block([[self._kernel, common[:-1, None]], [common[None]]])
        precision = 1 / (noise**2 + FLOOR**2)
        self._sums[(self.tables == table).all(axis=1)] += precision, precision * log_step

    def fit(self, expected: Array, unsure: Array) -> None:
        """``expected`` (n,): logs of the step that the slots alone let expect of :attr:`tables`; ``unsure`` (n,): the
        variance of what that may miss."""
        if not len(self.tables):
            return
        precision, sums = self._sums.T
        away, noise = sums / precision - expected, np.sqrt(1 / precision + unsure)
        # In units of the noise and along its own axes the covariance is diagonal, whatever the strength.
        values, axes = np.linalg.eigh(self._kernel / np.outer(noise, noise))
        inner, axes, squares = axes.T @ (away / noise), axes / noise[:, None], STRENGTHS**2
        left = 1 / (
            1 + squares[:, None] * np.maximum(values, 0.0)
        )  # of a variance of 1, once interactions are known
        logs = np.log(CHANCES) - 0.5 * (left * inner**2 - np.log(left)).sum(axis=1)
        weights = np.exp(logs - logs.max())
        weights *= squares / weights.sum()
        self.variance = float(weights.sum())
        self._mean = axes @ (weights @ left * inner)
        self._less = (axes * (weights * squares @ left)) @ axes.T

    # -- reading -------------------------------------------------------------------------------------------------

    def effect(self, table: Array) -> tuple[float, float]:
        """Mean and variance of the effect of a table (s,)."""
        common = self._one(table)
        cross = self._given_own(common)
        alone = (self._weight.sum() ** 2 - (self._weight**2).sum()) / 2
        prior = alone - 2 * common[0] + self._own[0]
        return float(cross @ self._mean), max(float(self.variance * prior - cross @ self._less @ cross), 0.0)

    def means(self, table: Array, slot: int) -> Array:
        """Means (N_CONFIGS,) of the effects of a table (s,) with any config in a slot."""
        return np.asarray(self._given_own(self._slot(table, slot)) @ self._mean)

    def effects(self, table: Array, slot: int, configs: Array) -> tuple[Array, Array]:
        """Means (m,) and covariance (m, m) of the effects of a table (s,) with each of ``configs`` (m,) in a slot."""
        common = self._slot(table, slot)[configs]
        cross = self._given_own(common)
        rest = np.delete(self._weight, slot)
        among = (rest.sum() ** 2 - (rest**2).sum()) / 2 + rest.sum() * self._like[slot][
            np.ix_(configs, configs)
        ]
        prior = among - common[:, :1] - common[:, 0] + self._own[0]
        return cross @ self._mean, self.variance * prior - cross @ self._less @ cross.T

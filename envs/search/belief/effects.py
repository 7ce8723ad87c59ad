"""What the belief computes from its mean and covariance: savings of configs, kept until the next window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .gaussian import Covariance
from .normal import within

Array = np.ndarray[Any, Any]

#: Logs of call times are clipped to this range, in training as well: beyond, a linear model of the step fails.
LOG_RANGE = (-3.0, 2.0)
#: A config with a larger log call time is believed to save nothing: its calls take e times as long.
FAR = 1.0
#: Most of a slot's exposure: calls may hold up a step for a little longer than they take.
MOST_EXPOSURE = 1.3
#: Largest variance of a log call time in the mean saving: beyond, the expansion of exp fails.
MOST_VARIANCE = 1.0


class Effects(NamedTuple):
    """Savings of the ``a`` configs of a slot, as parts of the step."""

    mean: Array  # (a,)
    cov: Array  # (a, a)
    by_exposure: Array  # (a,) slopes by the slot's exposure ...
    by_log: Array  # (a,) ... and by each config's own log time
    with_logs: Array  # (a, a) covariance of each config's saving with each config's log time

    @classmethod
    def of(cls, mean: Array, cov: Array, share: float) -> Effects:
        """From a slot's part of the belief, ``mean`` (2 a + 1,) and ``cov`` (2 a + 1, 2 a + 1): its exposure, then the
        log times and the remaining effects of its configs. ``share``: the slot's, of the step."""
        a = len(mean) // 2
        exposure = min(max(float(mean[0]), 0.0), MOST_EXPOSURE)
        logs = mean[1 : a + 1]
        rest = mean[a + 1 :]
        time = call_time(logs)
        by_exposure = share * (1 - time)
        by_log = -share * exposure * time
        # Covariance of each saving with every figure of the slot: only three of these have a slope.
        cross = by_exposure[:, None] * cov[0]
        cross += by_log[:, None] * cov[1 : a + 1]
        cross += share * cov[a + 1 :]
        with_logs = cross[:, 1 : a + 1]
        of_savings = cross[:, :1] * by_exposure
        of_savings += with_logs * by_log
        of_savings += share * cross[:, a + 1 :]
        variance = cov.diagonal()[1 : a + 1]
        together = cov[0, 1 : a + 1]
        wait = mean_wait(exposure, time, variance, together)
        saving = mean_saving(share, wait + rest, logs)
        return cls(saving, of_savings, by_exposure, by_log, with_logs)


class Savings(NamedTuple):
    """Savings of all configs of all slots, one after the other, as parts of the step."""

    mean: Array
    by_exposure: Array  # slopes, as in :class:`Effects`
    by_log: Array

    @classmethod
    def of(cls, mean: Array, cov: Covariance, places: Places) -> Savings:
        """From the mean and the covariance of the whole belief."""
        exposure = within(mean[places.exposure], 0.0, MOST_EXPOSURE)
        logs = mean[places.log]
        time = call_time(logs)
        variance = cov.between(places.log, places.log)
        together = cov.between(places.exposure, places.log)
        wait = mean_wait(exposure, time, variance, together)
        rest = mean[places.rest]
        share = places.share
        saving = mean_saving(share, wait + rest, logs)
        by_exposure = share * (1 - time)
        by_log = -share * exposure * time
        return cls(saving, by_exposure, by_log)


class Places(NamedTuple):
    """Where the figures of all configs of all slots lie in ``mean``; the share of their slots; each slot's first."""

    exposure: Array
    log: Array
    rest: Array
    share: Array
    first: list[int]

    @classmethod
    def of(cls, arms: list[Array], parts: list[slice], share: Array) -> Places:
        """From the configs of each slot and their parts of ``mean``."""
        sizes = [len(one) for one in arms]
        part_starts = [part.start for part in parts]
        exposure = np.repeat(part_starts, sizes).astype(np.int64)
        counted = [np.arange(size) for size in sizes]
        within_slot = np.concatenate(counted).astype(np.int64)
        log = exposure + 1 + within_slot
        rest = log + np.repeat(sizes, sizes)
        share_of_each = np.repeat(share, sizes)
        first = [0, *np.cumsum(sizes).tolist()]
        return cls(exposure, log, rest, share_of_each, first)


@dataclass
class Known:
    """What was computed since ``mean`` and ``cov`` changed last."""

    effects: list[Effects | None]  # by slot
    savings: Savings | None = None
    best: Array | None = None
    best_saving: tuple[float, float] | None = None
    exposure: tuple[Array, Array] | None = None


def call_time(logs: Array) -> Array:
    """Times of calls over the default's, from their logs."""
    near = within(logs, *LOG_RANGE)
    times: Array = np.exp(near)
    return times


def mean_wait(exposure: float | Array, time: Array, variance: Array, together: Array) -> Array:
    """Mean of what the step waits less for under each config, as a part of the slot's time.

    ``time``: its calls' over the default's; ``variance``: of their log; ``together``: covariance of that log and the
    exposure.
    """
    longer = 1 + np.minimum(variance, MOST_VARIANCE) / 2  # the mean of exp
    return exposure * (1 - time * longer) - together * time


def mean_saving(share: float | Array, saved: Array, logs: Array) -> Array:
    """Mean savings as parts of the step, from those as parts of a slot's time, ``saved``; of configs whose calls are
    far too long (``logs``) nothing above 0."""
    mean = share * saved
    at_most_none = np.minimum(mean, 0.0)
    return np.where(logs > FAR, at_most_none, mean)

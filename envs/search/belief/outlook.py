"""What a window under each config of a slot is expected to teach about which one is the best."""

from __future__ import annotations

from typing import Any

import numpy as np

from .effects import Effects

Array = np.ndarray[Any, Any]

#: Standard deviation of a window's log call time, as windows of one table scatter in the simulator.
CALL_NOISE = 0.03
#: What the log call time is off beyond that: the mean of a window is not the mean of the job.
CALL_FLOOR = 0.03
#: Saving of a config that cannot be had, as a part of the step: below any that can.
LOST = -9.0
#: Smallest determinant: keeps a division finite.
TINY_DETERMINANT = 1e-18


def highest(savings: Array, auto: float) -> tuple[int, float]:
    """Which of the mean savings (a,) of a slot's configs is the highest; that saving, or AUTO's if it is higher."""
    index = int(savings.argmax())
    saving = float(savings.max())
    return index, max(saving, auto)


def lead_of(effect: Effects, leader: int, rival: int) -> tuple[Array, Array]:
    """Covariance (a,) of each config's lead over the best with its own saving, and with its own log time. The best
    itself leads over the second best. -1: that is AUTO, which is certain."""
    cov = effect.cov
    cov_with_logs = effect.with_logs
    savings = cov.diagonal()
    logs = cov_with_logs.diagonal()
    if leader < 0:
        return savings, logs
    with_savings = savings - cov[leader]
    with_logs = logs - cov_with_logs[leader]
    with_savings[leader] = cov[leader, leader]
    with_logs[leader] = cov_with_logs[leader, leader]
    if rival >= 0:
        with_savings[leader] -= cov[rival, leader]
        with_logs[leader] -= cov_with_logs[rival, leader]
    return with_savings, with_logs


def deviation_of_lead(
    effect: Effects, of_step: Array, of_log: Array, with_savings: Array, with_logs: Array
) -> Array:
    """Standard deviation (a,) of the change of each config's mean lead through a window that shows the step and the
    slot's calls.

    ``of_step``, ``of_log``: variances (a,) of what the window shows of the two; the others as of :func:`lead_of`.
    """
    both = effect.with_logs.diagonal()
    determinant = np.maximum(of_step * of_log - both**2, TINY_DETERMINANT)
    squares = with_savings**2 * of_log + with_logs**2 * of_step
    product = 2 * with_savings * with_logs * both
    explained = (squares - product) / determinant
    return np.sqrt(np.maximum(explained, 0.0))

"""What a step depends on besides the table of a window: tables that hold for a part of a job's calls or steps, what
their first use costs, and the moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..nccl_model.columns import Columns
from ..search.interfaces import arms_of

Array = np.ndarray[Any, Any]


def default_tables(jobs: Any) -> Array:
    """A table for each of ``jobs`` that leaves every slot as it is, (n, S)."""
    shape = len(jobs), jobs.width
    return np.zeros(shape, np.int64)


@dataclass
class FirstUse(Columns):
    """What the first use of an algorithm costs each job: NCCL connects it then. A communicator for each collective."""

    us: Array  # (n,) each
    connected: Array  # (n, 2, N_ALGOS) bool
    spent_us: Array  # (n,) so far

    def of(self, rows: Array, is_rs: Array, algo: Array, used: Array) -> Array:
        """Connect what the jobs at ``rows`` use now, arrays (m, S); us (m,) that it takes."""
        shape = self.connected.shape[1:]
        need = np.zeros((len(rows), *shape), bool)
        place, slot = np.nonzero(used)
        func = is_rs[place, slot]
        need[place, func, algo[place, slot]] = True
        new = need & ~self.connected[rows]
        us = new.sum(axis=(1, 2)) * self.us[rows]
        self.connected[rows] |= need
        self.spent_us[rows] += us
        return np.asarray(us)


@dataclass
class Few(Columns):
    """Tables of ``m`` jobs hold at ``part`` (m,) of the calls, 1: at all; at the rest the ``others`` (m, S) do."""

    part: Array
    others: Array


@dataclass
class Turns(Columns):
    """Tables of ``m`` jobs that take turns with ``others``, see ``search.interfaces.PATTERN``."""

    steps: Array  # (m,) of a turn; 0: no turns
    others: Array  # (m, S) the current tables

    def arms(self, n_steps: int) -> Array:
        """(m, n_steps) 1 where the job's own table runs, 0 where the other one does."""
        arms = arms_of(n_steps, np.maximum(self.steps, 1))
        return np.where(self.steps[:, None] > 0, arms, 1)

    def mixed(self, tried_us: Array, current_us: Array, carry: Array) -> Array:
        """Step times (m, most) us of the two tables in turns, from those that each has by itself; the current one's may
        be shorter than ``most``. A part ``carry`` (m,) of each table's effect carries over into the next step."""
        most = tried_us.shape[1]
        missing = most - current_us.shape[1]
        current_us = np.pad(current_us, ((0, 0), (0, missing)))
        is_tried = self.arms(most) == 1
        ran = np.where(is_tried, tried_us, current_us)
        was_tried = np.pad(is_tried[:, :-1], ((0, 0), (1, 0)))  # before the first turn the current table ran
        as_before = np.where(was_tried, tried_us, current_us)
        carried = carry[:, None] * (as_before - ran)
        return np.asarray(ran + carried)


@dataclass
class Moment(Columns):
    """What the truth of ``m`` jobs depends on besides their configs; arrays (m,)."""

    weather: Array  # calls take so many times as long
    weight: Array  # of the one congestion, see Extras.congestion
    regime: Array

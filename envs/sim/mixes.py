"""Tables that hold for a part of a job's calls or steps, and what their first use costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..nccl_model.columns import Columns
from ..search.interfaces import arms_of

Array = np.ndarray[Any, Any]


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

"""What the belief computes from its mean and covariance: savings of configs, kept until the next window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Effects(NamedTuple):
    """Savings of the ``a`` configs of a slot, as parts of the step."""

    mean: Array  # (a,)
    cov: Array  # (a, a)
    by_exposure: Array  # (a,) slopes by the slot's exposure ...
    by_log: Array  # (a,) ... and by each config's own log time
    with_logs: Array  # (a, a) covariance of each config's saving with each config's log time


class Savings(NamedTuple):
    """Savings of all configs of all slots, one after the other, as parts of the step."""

    mean: Array
    by_exposure: Array  # slopes, as in :class:`Effects`
    by_log: Array


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
        starts = np.repeat([part.start for part in parts], sizes).astype(np.int64)
        within_slot = np.concatenate([np.arange(size) for size in sizes]).astype(np.int64)
        log = starts + 1 + within_slot
        first = [0, *np.cumsum(sizes).tolist()]
        return cls(starts, log, log + np.repeat(sizes, sizes), np.repeat(share, sizes), first)


@dataclass
class Known:
    """What was computed since ``mean`` and ``cov`` changed last."""

    effects: list[Effects | None]  # by slot
    savings: Savings | None = None
    best: Array | None = None
    best_saving: tuple[float, float] | None = None
    exposure: tuple[Array, Array] | None = None

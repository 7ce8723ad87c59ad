"""World ``mpi-headroom``: what a better setting saves is not drawn but taken from measured collectives.

``mpi_headroom.csv`` holds 234 cells of MPI all-gather and reduce-scatter on Leonardo, LUMI, MareNostrum 5 and Fugaku
(HLC-Lab/pico, MIT licence, commit 413bc5d): the library's default time over that of its best other algorithm, which was
chosen on one half of the iterations and timed on the other. In half of the cells there is less than 2 % to gain, in a
quarter more than 20 %. MPI's defaults are not NCCL's, and its algorithms are not NCCL's settings: the world takes over
how gains are spread, no setting's name.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import resources

import numpy as np
from numpy.random import Generator

from .family import STANDARD, JobFamily
from .truth import Jobs

Array = np.ndarray
CELLS = "mpi_headroom.csv"


@cache
def cells() -> tuple[Array, Array, Array, Array]:
    """Of each measured cell, (234,): the system's name, 1 for a reduce-scatter, bytes, default time / best time."""
    with resources.files(__package__).joinpath(CELLS).open() as file:
        table = np.genfromtxt(file, delimiter=",", names=True, dtype=None, encoding="ascii")
    return table["system"], table["is_reduce_scatter"], table["bytes"], table["gain"]


def drawn_gains(is_reduce_scatter: Array, n_bytes: Array, rng: Generator) -> Array:
    """A measured gain for each slot of each job, (n, S).

    The slots of a job take cells of one system, of their function, and of the size that is nearest to theirs.
    """
    system, func, sizes, gain = cells()
    names = np.unique(system)
    of_job = names[rng.integers(0, len(names), len(n_bytes))]
    is_like = (system == of_job[:, None, None]) & (func == is_reduce_scatter[:, :, None])
    octaves = np.abs(np.log2(sizes) - np.log2(n_bytes)[:, :, None])
    off = np.where(is_like, octaves, np.inf)
    is_nearest = off <= off.min(axis=2, keepdims=True)
    lot = np.where(is_nearest, rng.random(is_nearest.shape), -1.0)
    return np.asarray(gain[lot.argmax(axis=2)])


def _measured(jobs: Jobs, rng: Generator) -> None:
    """Where a slot has another setting, the quickest of them takes the default's time over a measured gain; the others
    keep their distance from it."""
    shape = jobs.calls.shape
    told = jobs.fingerprint
    gain = drawn_gains(np.reshape(told.func, shape), np.reshape(told.n_bytes, shape), rng)
    us = jobs.tables.us
    default_us = us[:, :, 0]
    others_us = np.where(jobs.mask[:, :, 1:], us[:, :, 1:], np.inf).min(axis=2)
    has_others = np.isfinite(others_us)
    factor = np.where(has_others, default_us / gain / others_us, 1.0)
    us[:, :, 1:] *= factor[:, :, None].astype(us.dtype)


_PLAIN = STANDARD.only("plain")
MPI_HEADROOM = JobFamily(
    "mpi-headroom", 1, tuple(replace(part, name="mpi-headroom", hook=_measured) for part in _PLAIN.parts)
)

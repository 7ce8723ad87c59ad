"""The time of training steps: compute and collectives on in-order streams, computed event by event (step.c).

An operation starts when the one before it on its stream and everything it waits for have ended. What runs side by side
slows each other by the job's :class:`Law`. This is the only event loop of the project.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..nccl.plugin.build import STEP, library_path
from ..nccl_model.columns import Columns

Array = np.ndarray[Any, Any]
#: What a call is to the event loop, see :class:`Calls`.
N_CALL = 7
#: Numbers of ports, 0 included, as step.c has them.
N_PORTS = 4


@dataclass(frozen=True)
class Law(Columns):
    """How what runs side by side slows each other; fields are floats or arrays (n,), drawn, see :mod:`.family`.

    A call runs ``max(1, load) ** power`` times as long, where ``load`` is the sum of what all running calls take of the
    link that it uses (links are shared, as by processor sharing), times ``1 + crowd`` for each unit of ``Calls.crowd``
    beside it, times ``1 + drag`` beside compute. Compute runs ``1 + s + saturation * s * s`` times as long, ``s`` the
    sum of the slowdowns of the calls beside it, and ``steep`` for each of their channels beyond ``knee``.

    Calls side by side that together have more channels than ``budget`` take ``1 + squeeze * (channels / budget - 1)``
    times as long; with more than ``serial`` the later one waits until the earlier has ended; and those on the same
    port (above 0) take ``1 + port`` times as long. 0 is none.
    """

    crowd: Any = 0.0
    power: Any = 1.0
    saturation: Any = 0.0
    drag: Any = 0.0
    budget: Any = 0.0
    squeeze: Any = 0.0
    serial: Any = 0.0
    port: Any = 0.0
    knee: Any = 0.0
    steep: Any = 0.0

    def rows(self, n: int) -> Array:
        """(n, 10) as step.c reads it."""
        return _side_by_side(n, vars(self))


@dataclass
class Calls(Columns):
    """What calls are to the event loop; arrays of one shape, of which the last axis counts a job's kinds of call."""

    us: Array  # alone
    slow: Array  # of compute beside it
    near: Array  # share of the links within a node that it takes
    far: Array  # and of the network
    crowd: Array  # its weight in crowding others
    channels: Array
    port: Array  # below N_PORTS; 0: none

    def rows(self) -> Array:
        """(..., N_CALL) as step.c reads it."""
        return _side_by_side(self.us.shape, vars(self))


@dataclass(frozen=True)
class Steps:
    """Some steps, their operations one after the other, as step.c reads them. An operation has ``work`` us alone on its
    stream; a call's is the time of its kind of call, times ``work``."""

    op_at: Array  # (steps + 1,) int32: where the operations of each step begin; then the end
    n_streams: Array  # (steps,) int32
    stream: Array  # (operations,) int32: numbers within the step
    slot: Array  # (operations,) int32: kind of call, a row of the job's Calls; -1: compute
    work: Array  # (operations,)
    after_at: Array  # int32, where in ``after`` the operations begin that each one waits for; one more for each step
    after: Array  # int32, numbers within the step

    @functools.cached_property
    def kinds(self) -> Array:
        """Kinds of call of each step, (steps,)."""
        return np.asarray(np.maximum.reduceat(self.slot, self.op_at[:-1]) + 1)

    def run(
        self, which: Array, calls: Array, scale: Array, law: Law, times: Array | None = None
    ) -> tuple[Array, Array, Array]:
        """Steps of ``n`` jobs: job ``j`` takes step ``which[j]`` with its compute ``scale[j]`` times as long.

        ``calls`` are the rows of :class:`Calls`, (n, k, N_CALL): ``k`` kinds of call that operations point to. Returns
        the steps' us (n,), and of each kind of call the sum over a step of its durations and of what of it no compute
        ran beside, (n, k) us. Of a single job ``times`` (3, operations) is filled with when each began and ended, us
        from the step's begin, and what of it no compute ran beside. Raises ValueError when operations wait for each
        other for ever.
        """
        n, k = len(which), calls.shape[1]
        if calls.shape != (n, k, N_CALL) or not np.isfinite(calls).all() or (calls < 0).any():
            raise ValueError("every call of every job needs a duration, and nothing of it below 0")
        if (calls[:, :, -1] >= N_PORTS).any():
            raise ValueError(f"ports are below {N_PORTS}")
        if k < self.kinds[which].max(initial=0):
            raise ValueError(f"the steps have {self.kinds[which].max()} kinds of call, {k} are given")
        # Names for what the loop reads: an array lives as long as its name.
        which, calls = np.ascontiguousarray(which, np.int32), np.ascontiguousarray(calls)
        scale, laws = np.ascontiguousarray(np.broadcast_to(np.asarray(scale, float), n)), law.rows(n)
        total, spent, bare = np.zeros(n), np.zeros((n, k)), np.zeros((n, k))
        most = int(np.diff(self.op_at).max(initial=0))
        done, following = np.zeros(most, np.uint8), np.zeros(most, np.int32)
        steps = (self.op_at, self.n_streams, self.stream, self.slot, self.work, self.after_at, self.after)
        given = (None, None, None) if times is None else tuple(times)
        stuck = _library().dynamiccl_steps(
            n,
            *map(_at, (which, *steps)),
            k,
            *map(_at, (calls, scale, laws, total, spent, bare, *given, done, following)),
        )
        if stuck:
            raise ValueError(f"operations of job {stuck - 1} wait for each other: the step never ends")
        return total, spent, bare


def _side_by_side(shape: Any, parts: dict[str, Any]) -> Array:
    """The parts, of that shape or numbers, as the last axis of one array."""
    out = np.empty((*np.atleast_1d(shape), len(parts)))
    for k, part in enumerate(parts.values()):
        out[..., k] = part
    return out


def _at(array: Array | None) -> Any:
    return None if array is None else ctypes.c_void_p(array.ctypes.data)


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(library_path(STEP)))
    library.dynamiccl_steps.argtypes = [
        ctypes.c_int32,
        *[ctypes.c_void_p] * 8,
        ctypes.c_int32,
        *[ctypes.c_void_p] * 11,
    ]
    library.dynamiccl_steps.restype = ctypes.c_int
    return library

"""When did each rank enqueue its n-th collective? One small shared page per emulated communicator.

A real collective starts when its last rank arrives. Each rank notes its arrival here, by its emulated clock, before it
hands the bytes to gloo; gloo is done only after every rank took part, so by then all arrivals can be read and every
rank computes the same start: the ranks' clocks meet in it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any, Protocol

import numpy as np

DEPTH = 1024  # collectives that one rank may be ahead of another


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is needed to agree on a file."""

    def set(self, key: str, value: str, /) -> None: ...  # noqa: D102
    def get(self, key: str, /) -> bytes: ...  # noqa: D102


class Arrivals:
    """Ring of arrival times, shape ``(DEPTH, n_processes)``: the sequence number and the nanosecond."""

    def __init__(self, store: Store, rank: int, n_processes: int) -> None:
        shape = (DEPTH, n_processes, 2)
        size = int(np.prod(shape)) * 8
        if rank == 0:
            folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
            fd, path = tempfile.mkstemp(prefix="dynamiccl-arrivals-", dir=folder)
            os.ftruncate(fd, size)
            store.set("arrivals", path)
        else:
            path = store.get("arrivals").decode()
            fd = os.open(path, os.O_RDWR)
        with os.fdopen(fd, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        self._array: np.ndarray[Any, Any] = np.frombuffer(self._map, np.int64).reshape(shape)
        self._rank = rank
        store.set(f"arrivals-open-{rank}", "1")
        if rank == 0:  # nobody needs the name any more once all have opened it: nothing is left behind
            for other in range(n_processes):
                store.get(f"arrivals-open-{other}")
            os.unlink(path)

    def note(self, seq: int, now_ns: int) -> None:
        """This rank enqueues its ``seq``-th collective (from 1) at ``now_ns``."""
        cell = self._array[seq % DEPTH, self._rank]
        cell[1] = now_ns
        cell[0] = seq

    def last(self, seq: int) -> int:
        """The latest arrival noted for collective ``seq``, ns; ranks that have not arrived do not count."""
        row = self._array[seq % DEPTH]
        return int(np.where(row[:, 0] == seq, row[:, 1], 0).max())

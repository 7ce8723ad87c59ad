"""The reader of a ring: what one process of the job has to tell, in a file of shared memory. Its writer is ring.c.

All reads are ``pread``: a file that another process truncates gives an error here, not a signal.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import stat
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np

from ...traces.positions import Spans, size_of, spans_of
from ...traces.records import COLL_DTYPE, RECORD_BYTES

RING_MAGIC, RING_VERSION = b"DCCLRNG1", 3
_NO_RING = b"DCCLNONE"  # begins a file that says why a rank has no ring
_HEAD = struct.Struct("<8sIIQII")  # magic, version, record_bytes, capacity, pid, places for known records
_HEAD_BYTES = 128
_CALLS_AT, _HEAD_AT, _KNOWN_AT, _WAITED_AT, _LIFE_AT, _START_AT = 32, 64, 72, 80, 88, 96
_NUMBER = struct.Struct("<Q")
_BUSY = np.uint64(2**64 - 1)
_PATIENCE_S = 1.0  # how long a record may stay half written before it counts as lost


class Ring:
    """Reader of one process's ring."""

    def __init__(self, path: Path) -> None:
        """Open a ring file. Raises ValueError when it is none (any more), OSError when it cannot be read."""
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            self.name = path.name
            self.pid, self.capacity, self._known_places = self._check()
            self.life = int(_NUMBER.unpack(os.pread(self._fd, 8, _LIFE_AT))[0])
        except BaseException:
            os.close(self._fd)
            raise
        self._start = _HEAD_BYTES + self._known_places * RECORD_BYTES
        #: Positions of records that were overwritten, or dropped by the producer, before they could be read: spans.
        self.gaps: Spans = []
        self.tail = 0  # positions that were read, or are gaps
        self._stuck_at, self._stuck_since = -1, 0.0

    @classmethod
    def of_this_process(cls, folder: Path) -> Ring:
        """The ring that this very process writes. Raises FileNotFoundError when it has none in ``folder``."""
        for path in sorted(folder.glob("ring-*")):
            try:
                ring = cls(path)
            except ValueError:  # of a rank that found no room
                continue
            if ring.pid == os.getpid():
                return ring
            ring.close()
        raise FileNotFoundError(f"{folder} holds no ring of this process")

    def _check(self) -> tuple[int, int, int]:
        status = os.fstat(self._fd)
        raw = os.pread(self._fd, _HEAD.size, 0) if stat.S_ISREG(status.st_mode) else b""
        if raw[:8] == _NO_RING:
            text = os.pread(self._fd, 200, len(_NO_RING)).decode("utf-8", "replace").strip()
            raise ValueError(f"{self.name}: {text}")
        if len(raw) < _HEAD.size or raw[:8] != RING_MAGIC:
            raise ValueError(f"{self.name}: not a ring of dynamiccl")
        _, version, record_bytes, capacity, pid, known = _HEAD.unpack(raw)
        if version != RING_VERSION or record_bytes != RECORD_BYTES:
            raise ValueError(
                f"{self.name}: ring of format version {version}, this release reads {RING_VERSION}"
            )
        whole = 0 < capacity <= 2**24 and capacity & (capacity - 1) == 0
        if not whole or status.st_size < _HEAD_BYTES + (capacity + known) * RECORD_BYTES:
            raise ValueError(f"{self.name}: cut off: {status.st_size} bytes for {capacity + known} records")
        return int(pid), int(capacity), int(known)

    @property
    def key(self) -> str:
        """What names these positions in a trace: the life, and its ring, as a plugin that is loaded again makes one."""
        return f"{self.life:016x}/{self.name}"

    @functools.cached_property
    def process(self) -> int:
        """The process in tables, a number of 63 bits: process ids come again."""
        digest = hashlib.blake2b(self.key.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    @property
    def lost(self) -> int:
        """Records that could not be read."""
        return size_of(self.gaps)

    def is_alive(self) -> bool:
        """Whether the process that writes this ring still runs: it holds a lock as long as it does.

        A process id would say nothing here: the job may live in another container.
        """
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return False

    def is_read(self) -> bool:
        """Whether nothing is left to drain."""
        head = os.pread(self._fd, 8, _HEAD_AT)
        read = _NUMBER.pack(self.tail)
        return head == read

    def calls(self) -> tuple[int, int]:
        """(collectives about which NCCL has asked the tuner in this process, those in which a table had its word)."""
        raw = os.pread(self._fd, 16, _CALLS_AT)
        return (
            (int(_NUMBER.unpack_from(raw)[0]), int(_NUMBER.unpack_from(raw, 8)[0]))
            if len(raw) == 16
            else (0, 0)
        )

    def start(self) -> str:
        """The start of the job that the process is of, by the life of its rank 0; "" while it has not been told."""
        raw = os.pread(self._fd, 8, _START_AT)
        life = int(_NUMBER.unpack(raw)[0]) if len(raw) == 8 else 0
        return f"{life:016x}" if life else ""

    def waited_ns(self) -> int:
        """Nanoseconds that threads of this process were held back while the ranks agreed on a table."""
        raw = os.pread(self._fd, 8, _WAITED_AT)
        return int(_NUMBER.unpack(raw)[0]) if len(raw) == 8 else 0

    def known(self) -> np.ndarray[Any, Any]:
        """What was told once, communicators and offers, shape (n,) of COLL_DTYPE: for ``Assembler.add``.

        However many records the ring has seen since. Raises ValueError when the file is cut off.
        """
        raw = os.pread(self._fd, 8, _KNOWN_AT)
        n = min(int(_NUMBER.unpack(raw)[0]) if len(raw) == 8 else 0, self._known_places)
        records = np.zeros(n, COLL_DTYPE)
        self._fill(memoryview(records.view(np.uint8).data), _HEAD_BYTES)
        return records

    def head(self) -> int:
        """Positions handed out so far. Raises ValueError where the file is damaged."""
        raw = os.pread(self._fd, 8, _HEAD_AT)
        head = int(_NUMBER.unpack(raw)[0]) if len(raw) == 8 else -1
        if not self.tail <= head < 2**62:
            raise ValueError(f"{self.name}: damaged: head {head} with {self.tail} records read")
        return head

    def _copy(self, start: int, n: int) -> np.ndarray[Any, Any]:
        records = np.zeros(n, COLL_DTYPE)
        raw = memoryview(records.view(np.uint8).data)
        first = start % self.capacity
        run = min(n, self.capacity - first)
        for offset, count, at in ((first, run, 0), (0, n - run, run)):
            self._fill(
                raw[at * RECORD_BYTES : (at + count) * RECORD_BYTES], self._start + offset * RECORD_BYTES
            )
        return records

    def _fill(self, part: memoryview, at: int) -> None:
        """Fills ``part`` from the file's byte ``at`` on; a large read may come in pieces."""
        while len(part):
            n_read = os.preadv(self._fd, [part], at)
            if n_read == 0:
                raise ValueError(f"{self.name}: cut off while it was read")
            part, at = part[n_read:], at + n_read

    def drain(self) -> np.ndarray[Any, Any]:
        """Records written since the last call, oldest first: COLL_DTYPE, shape (n,), other kinds by ``.view``.

        Lost records become :attr:`gaps`; where some are, what is :meth:`known` comes again before the rest, without
        stamps: they may have told of it. Raises ValueError when the file is no sound ring any more.
        """
        before = len(self.gaps)
        records = self._drain()
        if len(self.gaps) == before:
            return records
        known = self.known()
        known["stamp"] = 0
        return np.concatenate([known, records])

    def _drain(self) -> np.ndarray[Any, Any]:
        head = self.head()
        if (
            head - self.tail > self.capacity
        ):  # lapped: half a ring of distance, or we are lapped again at once
            self.gaps.append((self.tail, head - self.capacity // 2))
            self.tail = head - self.capacity // 2
        records = self._copy(self.tail, head - self.tail)
        if len(records) == 0:
            return records
        positions = np.arange(self.tail, head, dtype=np.uint64)
        stamps = records["stamp"]
        # A producer at position p + capacity may have been in the slot of p while we copied it.
        safe = positions + np.uint64(self.capacity) >= np.uint64(self.head())
        whole = safe & (stamps == positions + np.uint64(1))
        pending = np.flatnonzero(safe & ((stamps == _BUSY) | (stamps <= positions)))
        if len(pending) and self._waits_for(int(positions[pending[0]]), head):
            records, whole = records[: pending[0]], whole[: pending[0]]
        self.gaps += spans_of(positions[: len(whole)][~whole])
        self.tail += len(records)
        return records if whole.all() else records[whole]

    def _waits_for(self, position: int, head: int) -> bool:
        """True while a half-written record deserves patience: its writer may sleep, and has not ended."""
        now = time.monotonic()
        if position != self._stuck_at:
            self._stuck_at, self._stuck_since = position, now
        is_soon = now - self._stuck_since < _PATIENCE_S and head - position < self.capacity // 2
        return is_soon and self.is_alive()

    def close(self) -> None:
        """Close the file; it stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

"""What rank 0 has done last, as one number: one process of a node asks the store for it, and the others read a file.

The file holds the number and when it was last asked. Who finds that too old takes the turn; if it dies or freezes, the
next does. Without a file each asks once a second.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

from ..run_folder import shared_roots

#: Between two requests of a node while rounds run, and after ``QUIET_S`` without one.
BUSY_S, IDLE_S, QUIET_S = 0.25, 1.0, 5.0
#: Between two looks at the file: while rounds run, with many ranks longer; and where none run.
_NEAR_S, _A_RANK_S, _FAR_S = 0.02, 1e-4, 0.1
_SOON_S = 0.05  # until a process without a file asks for the second time; doubled each time
_GONE = 2**62  # as the number: rank 0 leads no round any more
_HEAD = struct.Struct("<Qd")  # the number; when the store was asked, by the clock of this machine
_FIRST = 64  # here begins one byte a rank: 1 for those that share the file
_STALE_S = 3600.0  # so long after its last request a file is nobody's


class Lookout:
    """One rank's view. ``newest`` is called often; what it asks of the store is little."""

    def __init__(self, name: str, rank: int, n_ranks: int) -> None:
        """``name``: of the job's life, equal on all its ranks and on no other's; empty while it is not known."""
        self._rank, self._n_ranks = rank, n_ranks
        self._asked_s, self._changed_s = 0.0, time.monotonic()
        self._alone_s = _SOON_S
        self._number = 0
        self._path: Path | None = None
        self._file = -1
        if not name:
            return
        with contextlib.suppress(OSError, StopIteration):  # no place, no rights: this rank asks for itself
            folder = next(shared_roots())
            _remove_stale(folder)
            self._path = folder / f"looks-{name}"
            self._open(self._path)

    def _open(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(path, flags, 0o600)
        try:
            os.pwrite(self._file, b"\1", _FIRST + self._rank)
        except OSError:
            self._leave()
            raise

    def close(self) -> None:
        """This rank looks no more; the last one of the node removes the file."""
        if self._file < 0:
            return
        with contextlib.suppress(OSError):
            os.pwrite(self._file, b"\0", _FIRST + self._rank)
            if self._path is not None and not self._present():
                self._path.unlink()
        self._leave()

    def _leave(self) -> None:
        os.close(self._file)
        self._file = -1

    def _present(self) -> int:
        """How many ranks share the file."""
        if self._file < 0:
            return 1
        return os.pread(self._file, self._n_ranks, _FIRST).count(1)

    def is_whole(self) -> bool:
        """Whether all ranks of the job share the file: then nobody hears of a round much later than another."""
        with contextlib.suppress(OSError):
            return self._present() == self._n_ranks
        return False

    def spread_s(self) -> float:
        """How much later than this rank another one may hear of a round while rounds run."""
        if self.is_whole():
            return 0.0
        return BUSY_S if self._file >= 0 else IDLE_S

    def is_quiet(self) -> bool:
        """Whether no number has come for so long that nodes ask seldom."""
        return time.monotonic() - self._changed_s > QUIET_S

    def pause_s(self) -> float:
        """Until ``newest`` should be called again."""
        return _FAR_S if self.is_quiet() else _NEAR_S + _A_RANK_S * self._n_ranks

    def newest(self, ask: Callable[[], int]) -> int | None:
        """Rank 0's number as this node knows it; ``ask()`` gets it from the store. None: rank 0 is gone."""
        number, asked_s = self._read()
        now = time.monotonic()
        if self._is_due(asked_s, now) and self._takes_turn(now):
            self._alone_s = min(2 * self._alone_s, IDLE_S)
            number = max(number, ask())
            now = time.monotonic()  # a store that answers late is asked later, not more often
            self._write(number, now)
        self._note(number, now)
        return None if number >= _GONE else number

    def tell(self, number: int) -> None:
        """Rank 0 knows the number."""
        now = time.monotonic()
        self._note(number, now)
        self._write(number, now)

    def tell_gone(self) -> None:
        """Rank 0 leads no round any more: nobody on this node asks the store, which may go with it."""
        self._write(_GONE, time.monotonic())

    def _note(self, number: int, now: float) -> None:
        if number != self._number:
            self._number, self._changed_s = number, now

    def _is_due(self, asked_s: float, now: float) -> bool:
        if self._file < 0:
            return now - asked_s >= self._alone_s
        return abs(now - asked_s) >= (IDLE_S if self.is_quiet() else BUSY_S)

    def _read(self) -> tuple[int, float]:
        """(number, when the store was asked last); (0, 0.0) of a new file."""
        if self._file >= 0:
            raw = os.pread(self._file, _HEAD.size, 0)
            number, asked_s = _HEAD.unpack(raw.ljust(_HEAD.size, b"\0"))
            return int(number), float(asked_s)
        return self._number, self._asked_s

    def _write(self, number: int, now: float) -> None:
        self._asked_s = now
        if self._file >= 0:
            os.pwrite(self._file, _HEAD.pack(number, now), 0)

    def _takes_turn(self, now: float) -> bool:
        """Whether it is this process that asks. It writes the time down first, so that no other does meanwhile."""
        if self._file < 0:
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another one is at this very place
            return False
        except OSError:  # a file system without locks: two may ask at once
            return True
        try:
            number, asked_s = self._read()
            if not self._is_due(asked_s, now):
                return False
            self._write(number, now)
            return True
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)


def _remove_stale(folder: Path) -> None:
    """Delete the files of jobs that were killed."""
    for path in folder.glob("looks-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink()

"""The table file as the probe of rank 0 reads it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ..shm import TableFile, decode_table, message_of


class TableMailbox:
    """The table file as the probe of rank 0 sees it: what the daemon wants in force. Nothing here raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TableFile | None = None
        self._generation = 0

    def take(self) -> tuple[int, bytes] | None:
        """(generation, message) of what was published since the last call; None if nothing was, or is whole."""
        with contextlib.suppress(OSError):  # no such file (yet), or not ours
            if self._file is None:
                self._file = TableFile(self._path)
            if (found := self._file.read()) is not None and found[0] != self._generation:
                self._generation = found[0]
                return found
        return None

    def confirmed(self) -> tuple[int, bytes] | None:
        """(generation, message) of what the daemon has confirmed last, from the run folder."""
        with contextlib.suppress(OSError, ValueError):
            message = message_of((self._path.parent / "confirmed").read_bytes())
            return decode_table(message).generation, message
        return None

"""The table file as the probe of rank 0 reads it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ..run_folder import CONFIRMED, TRIED
from ..shm import TableFile, decode_table, message_of, trial_of


class TableMailbox:
    """The table file as the probe of rank 0 sees it: what the daemon wants in force. Nothing here raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TableFile | None = None
        self._generation = 0
        self._tried = self._tried_before = self._read_tried()

    def take(self) -> tuple[int, bytes] | None:
        """(generation, message) of what was published since the last call; None if nothing was, or is whole."""
        with contextlib.suppress(OSError):  # no such file (yet), or not ours
            if self._file is None:
                self._file = TableFile(self._path)
            if (found := self._file.read()) is not None and found[0] != self._generation:
                self._generation = found[0]
                return found
        return None

    def is_old(self, found: tuple[int, bytes]) -> bool:
        """Whether it is a trial that a life before has begun.

        It is over: its tuner may be dead, and its first call may be what ended that life.
        """
        return found[0] == self._tried_before and trial_of(found[1]).trial_steps > 0

    def note_trial(self, generation: int) -> None:
        """A round for a trial begins: lives after this one leave it alone."""
        if generation == self._tried:
            return
        self._tried = generation
        path = self._path.parent / TRIED
        draft = path.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            draft.write_text(str(generation))
            os.replace(draft, path)

    def _read_tried(self) -> int:
        """Generation of the last trial that a life before has begun; 0: none is known."""
        with contextlib.suppress(OSError, ValueError):
            return int((self._path.parent / TRIED).read_text())
        return 0

    def confirmed(self) -> tuple[int, bytes] | None:
        """(generation, message) of what the daemon has confirmed last, from the run folder."""
        with contextlib.suppress(OSError, ValueError):
            message = message_of((self._path.parent / CONFIRMED).read_bytes())
            return decode_table(message).generation, message
        return None

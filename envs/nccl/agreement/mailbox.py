"""The table file as the probe of rank 0 reads it, and its note of trials, which outlives the ranks."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ....traces.outside import TraceError, atomically, read_json
from ....traces.reasons import NotAgreeing, Why
from ....traces.records import Table
from .. import life
from ..run_folder import CONFIRMED, PLANS, TRIED
from ..shm import TableFile, decode_table, encode_table, message_of, row_digest, trial_of
from ..untouched import Untouched


@dataclass(frozen=True)
class Note:
    """The last trial of which a round has begun, and the rows in whose trials ranks have ended."""

    life: int = 0  # of rank 0
    generation: int = 0
    rows: tuple[str, ...] = ()  # digests of its unproven rows; none: its end was seen, or it has none
    fatal: tuple[str, ...] = ()  # such digests


class TableMailbox:
    """The table file as the probe of rank 0 sees it: what the daemon wants in force. Nothing here raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TableFile | None = None
        self._generation = 0
        self._note, self._before = Note(), 0
        self._word: dict[str, Any] = {}

    def read_note(self) -> None:
        """Of the lives before, on rank 0."""
        self._note = note = self._read_note()
        self._before = note.generation
        if note.rows and note.life != life.own():  # its ranks ended before it did
            self._write(replace(note, rows=(), fatal=(*note.fatal, *note.rows)))

    def take(self) -> tuple[int, bytes] | None:
        """(generation, message) of what was published since the last call; None if nothing was, or is whole."""
        with contextlib.suppress(OSError):  # no such file (yet), or not ours
            if self._file is None:
                self._file = TableFile(self._path)
            if (found := self._file.read()) is not None and found[0] != self._generation:
                self._generation = found[0]
                return found
        return None

    def refuses(self, found: tuple[int, bytes]) -> Why | None:
        """Why a table is not led; None if it may be.

        A trial that an earlier life has begun is over. If the ranks ended in it, its first call may be the cause: its
        rows are not tried again, under whichever generation.
        """
        if not trial_of(found[1]).trial_steps:
            return None
        if not set(self._unproven(found[1])).isdisjoint(self._note.fatal):
            return NotAgreeing.FATAL_TRIAL()
        return NotAgreeing.OLD_TRIAL() if found[0] == self._before else None

    def trial_begins(self, found: tuple[int, bytes]) -> None:
        """A round for a trial begins: if the ranks end in it, later lives know."""
        generation, message = found
        rows = self._unproven(message)
        self._write(replace(self._note, life=life.own(), generation=generation, rows=rows))

    def trial_is_over(self) -> None:
        """The ranks have outlived it, or did not get it."""
        self._write(replace(self._note, rows=()))

    def tell_plans(self, why: Why | None, lacks: Why | None, is_last: bool) -> None:
        """Whether all living communicators report the default, for who ends the tuning: ``why`` not, None if they do.
        ``lacks``: why not all of them report the table that stays. ``is_last``: no table changes any more."""
        word = {
            "generation": self._generation,
            "why": why and why.as_json(),
            "lacks": lacks and lacks.as_json(),
        }
        word |= {"is_last": is_last}
        if word != self._word:
            self._word = word
            with contextlib.suppress(TraceError):
                atomically(self._path.parent / PLANS, lambda draft: draft.write_text(json.dumps(word)))

    def _unproven(self, message: bytes) -> tuple[str, ...]:
        """Digest of each row that the confirmed table does not have; none if they cannot be read."""
        with contextlib.suppress(ValueError):
            confirmed = self.confirmed()
            proven = decode_table(confirmed[1]).deciding if confirmed else ()
            rules = decode_table(message).deciding
            return tuple(row_digest(rule) for rule in rules if rule not in proven)
        return ()

    def _write(self, note: Note) -> None:
        if note == self._note:
            return
        self._note = note
        with contextlib.suppress(TraceError):
            atomically(self._path.parent / TRIED, lambda draft: draft.write_text(json.dumps(asdict(note))))

    def _read_note(self) -> Note:
        """An empty one if there is none, or it is damaged."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            found = read_json(self._path.parent / TRIED)
            rows, fatal = (tuple(map(str, found[name])) for name in ("rows", "fatal"))
            return Note(int(found["life"]), int(found["generation"]), rows, fatal)
        return Note()

    def default(self, generation: int) -> bytes:
        """The table to stay that leaves NCCL untouched: empty, or with ``--headroom`` of ceilings alone."""
        table, untouched = Table(generation), None
        with contextlib.suppress(ValueError):  # damaged: then no tuner starts, and nothing was changed
            untouched = Untouched.read(self._path.parent)
        return encode_table(untouched.over(table) if untouched else table)

    def confirmed(self) -> tuple[int, bytes] | None:
        """(generation, message) of what the daemon has confirmed last, from the run folder."""
        with contextlib.suppress(OSError, ValueError):
            message = message_of((self._path.parent / CONFIRMED).read_bytes())
            return decode_table(message).generation, message
        return None

"""The table confirmed last, in the run folder: where a daemon, or a job, that comes back goes on."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ...traces.records import Decision, Slot, Table
from ..nccl.shm import decode_table, encode_table
from .obedience import slot_of

CONFIRMED = "confirmed"


def note_confirmed(folder: Path, table: Table) -> None:
    """Leave the confirmed table in the run folder. Where that fails the table is in force all the same."""
    draft = folder / f"{CONFIRMED}.tmp"
    with contextlib.suppress(OSError):  # a deleted folder, a full memory
        draft.write_bytes(encode_table(table))
        os.replace(draft, folder / CONFIRMED)


def read_confirmed(folder: Path) -> dict[Slot, Decision]:
    """What an earlier daemon of this run had confirmed; nothing if there is none or it is damaged."""
    try:
        table = decode_table((folder / CONFIRMED).read_bytes())
    except (OSError, ValueError):
        return {}
    return {slot_of(rule): rule.decision for rule in table.rules}

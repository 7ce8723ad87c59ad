"""The table that a job falls back to, in the run folder; and what of another table is new beside it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ...traces.outside import TraceError, atomically
from ...traces.records import Decision, Decisions, Slot, Table
from ..nccl.run_folder import CONFIRMED
from ..nccl.shm import decode_table, encode_table
from .obedience import Disobeyed, slot_of


def note_confirmed(folder: Path, table: Table) -> None:
    """Leave the confirmed table in the run folder. Where that fails the table is in force all the same."""
    raw = encode_table(table)
    path = folder / CONFIRMED
    with contextlib.suppress(TraceError):  # a deleted folder, a full memory
        atomically(path, lambda draft: draft.write_bytes(raw))


def read_confirmed(folder: Path) -> dict[Slot, Decision]:
    """What an earlier daemon of this run had confirmed; nothing if there is none or it is damaged."""
    try:
        table = decode_table((folder / CONFIRMED).read_bytes())
    except (OSError, ValueError):
        return {}
    return {slot_of(rule): rule.decision for rule in table.rules}


def without_fatal(
    decisions: Decisions, confirmed: Decisions
) -> tuple[tuple[Disobeyed, ...], dict[Slot, Decision]]:
    """Of a table in whose trial the ranks have ended: the rows that do not run again, and the others.

    The former are those that are new in it, or all of them if none is.
    """
    new: dict[Slot, Decision] = {}
    proven: dict[Slot, Decision] = {}
    for slot, row in decisions.items():
        same = confirmed.get(slot) == row
        (proven if same else new)[slot] = row
    if not new:
        new, proven = proven, {}
    rows = [Disobeyed(slot, row, "") for slot, row in new.items()]
    return tuple(rows), proven

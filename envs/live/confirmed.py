"""The table that a job falls back to, in the run folder; and what of another table is new beside it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ...traces.outside import TraceError, atomically, parse_json
from ...traces.records import Decision, Decisions, Rule, Slot, Table
from ..nccl.run_folder import CONFIRMED, TRIED
from ..nccl.shm import decode_table, encode_table, row_digest
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
        raw = (folder / CONFIRMED).read_bytes()
        table = decode_table(raw)
    except (OSError, ValueError):
        return {}
    return {slot_of(rule): rule.decision for rule in table.deciding}


def decided(decisions: Decisions) -> dict[Slot, Decision]:
    """Without the slots that are left to NCCL."""
    found: dict[Slot, Decision] = {}
    for slot, decision in decisions.items():
        if not decision.is_auto:
            found[slot] = decision
    return found


def without_fatal(
    folder: Path, decisions: Decisions, confirmed: Decisions
) -> tuple[tuple[Disobeyed, ...], dict[Slot, Decision]]:
    """Of a table in whose trial the ranks have ended: the rows that do not run again, and the others.

    The former are the new rows that rank 0 has noted in the run folder, perhaps in another trial. If none is noted: all
    new rows, or all rows if none is new. The same table must not come again.
    """
    new: dict[Slot, Decision] = {}
    for slot, row in decisions.items():
        if confirmed.get(slot) != row:
            new[slot] = row
    noted = _noted_fatal(folder)
    fatal: dict[Slot, Decision] = {}
    for slot, row in new.items():
        digest = row_digest(Rule.of(slot, row))
        if digest in noted:
            fatal[slot] = row
    gone = fatal or new or decisions
    rest = dict(decisions)
    rows: list[Disobeyed] = []
    for slot, row in gone.items():
        rows.append(Disobeyed(slot, row, ""))
        del rest[slot]
    return tuple(rows), rest


def _noted_fatal(folder: Path) -> set[str]:
    """Digests of the rows in whose trials ranks have ended; none where there is no such note, or it is damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        text = (folder / TRIED).read_text()
        note = parse_json(text)
        return set(note["fatal"])
    return set()

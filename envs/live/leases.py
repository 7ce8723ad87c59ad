"""The daemon's part of leases: how long a trial may last, the heartbeat that renews it, and what was confirmed.

Rank 0's probe takes a trial back whose lease has run out; what is then in force is what was confirmed last.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ...traces.records import Decision, Lease, Slot, Table
from ..nccl.shm import decode_table, encode_table
from .obedience import slot_of

#: A trial lapses when its daemon has been silent for so many milliseconds; it beats every BEAT_S seconds. And when it
#: has been in force for so much longer than its window takes: a daemon that lives but does not go on.
LEASE_MS, BEAT_S, SLACK_S = 5000, 0.25, 10.0
#: The table confirmed last, in the run folder: where a daemon that comes back goes on.
CONFIRMED = "confirmed"


def lease(n_steps: int, durations_ms: Sequence[float]) -> Lease:
    """The lease of a window of ``n_steps``, given the step times seen of late."""
    typical = float(np.median(durations_ms)) if durations_ms else 1000.0
    return Lease(2 * n_steps + max(20, int(SLACK_S * 1e3 / max(typical, 0.1))), LEASE_MS)


class Heart:
    """Beats from a thread of its own, so also while the daemon computes."""

    def __init__(self, beat: Callable[[], None]) -> None:
        """Raises what ``beat`` raises the first time."""
        self._beat, self._stopped = beat, threading.Event()
        beat()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(BEAT_S):
            with contextlib.suppress(OSError, ValueError):
                self._beat()

    def stop(self) -> None:
        """No more beats."""
        self._stopped.set()
        self._thread.join(1.0)


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

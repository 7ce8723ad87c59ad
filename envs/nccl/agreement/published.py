"""What the daemon wants in force and whether it lives, as the probe of rank 0 sees it: the table file, and leases."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from ....traces.reasons import NotAgreeing, RowRefused
from ....traces.records import AgreementState, Lease, Table
from ..plugin.bindings import Plugin
from ..shm import TableFile, decode_table, encode_table, lease_of, message_of

EMPTY = encode_table(Table())


class TableMailbox:
    """Rank 0's view of the table file. Nothing here raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TableFile | None = None
        self._sequence = 0
        self._seen_ns = 0  # when a publication was noticed last: a sign of life too

    def is_new(self) -> bool:
        """Whether something was published since :meth:`take`; a microsecond."""
        try:
            if self._file is None:
                self._file = TableFile(self._path)
            sequence = self._file.sequence()
        except OSError:  # no such file (yet), or not ours
            return False
        return sequence != self._sequence and not sequence & 1

    def take(self) -> tuple[bytes, Lease | None] | None:
        """The message published last and its lease; None while it is being written, or damaged."""
        with contextlib.suppress(OSError):
            if self._file is not None and (found := self._file.read()) is not None:
                self._sequence, self._seen_ns = self._file.sequence(), time.monotonic_ns()
                return found[1], lease_of(found[1])
        return None

    def confirmed(self) -> bytes:
        """What the daemon has confirmed last, from the run folder; empty if it has confirmed nothing."""
        with contextlib.suppress(OSError, ValueError):
            message = message_of((self._path.parent / "confirmed").read_bytes())
            if message and decode_table(message).lease is None:
                return message
        return b""

    def silent_ms(self) -> float:
        """How long the daemon has given no sign of life."""
        beat = 0
        with contextlib.suppress(OSError):
            beat = self._file.heartbeat_ns() if self._file is not None else 0
        return (time.monotonic_ns() - max(beat, self._seen_ns)) / 1e6

    def is_stale(self, lease: Lease | None) -> bool:
        """Whether a table that was just taken is the trial of a daemon that is gone: it was there before this probe."""
        beat = 0
        with contextlib.suppress(OSError):
            beat = self._file.heartbeat_ns() if self._file is not None else 0
        return lease is not None and 0 < beat < time.monotonic_ns() - lease.ms * 1_000_000


class LeaseClock:
    """Keeps the lease of the table in force."""

    def __init__(self, published: TableMailbox) -> None:
        self._published = published
        self._lease: Lease | None = None
        self._until = 0

    def starts(self, lease: Lease | None, step: int) -> None:
        """A table is in force, or was published anew, at ``step``."""
        self._lease = lease
        self._until = step + lease.steps if lease else 0

    def renewed(self, step: int) -> None:
        """The daemon has published something: the trial in force may stay until that is in force."""
        self.starts(self._lease, step)

    def over(self, step: int) -> str:
        """Why the trial in force must go; empty if it may stay."""
        if self._lease is None:
            return ""
        if step > self._until:
            return NotAgreeing.LEASE_USED_UP(steps=self._lease.steps)
        if (silent := self._published.silent_ms()) > self._lease.ms:
            return NotAgreeing.TUNER_SILENT(seconds=silent / 1e3)
        return ""


class SingleProcess:
    """A job of one process: what is published becomes active at the next boundary.

    Not where it has no process group, and NCCL a communicator of several ranks: they were started by other means than
    torch.distributed, and nothing is known through which they could agree.
    """

    held_s = 0.0

    def __init__(
        self, plugin: Plugin | None, published: TableMailbox, alone: Callable[[AgreementState, str], None] | None = None
    ) -> None:
        """Without a process group ``alone`` hears once that there are several ranks."""
        self._plugin, self._published, self._keeper, self._alone = plugin, published, LeaseClock(published), alone
        self.stopped = ""
        self._confirmed = EMPTY
        self._step = 0

    def boundary(self) -> bool:
        """An optimizer step has ended; True if the plugin has been handed a table that is now to become active."""
        self._step += 1
        if self._alone is not None and self._plugin is not None and self._plugin.widest > 1:
            if not self.stopped:
                self.stopped = NotAgreeing.NO_GROUP()
                self._alone(AgreementState.SHUT, self.stopped)
            return False
        if self._published.is_new() and (found := self._published.take()):
            message, lease = found
            if lease is None:
                self._confirmed = message
        elif self._keeper.over(self._step):
            message, lease = self._confirmed, None
        else:
            return False
        self._keeper.starts(lease, self._step)
        return not stage(self._plugin, message)

    def proceed(self) -> None:
        """Nothing goes on between boundaries."""

    def close(self) -> None:
        """Nothing is open."""


def stage(plugin: Plugin | None, message: bytes) -> str:
    """Hand the plugin a table, empty for none, ready to become active; why it refuses, empty if it does not."""
    if plugin is None:
        return RowRefused.PLUGIN_MISSING()
    try:
        plugin.stage(message or EMPTY)
    except ValueError as error:
        return str(error)
    return ""

"""One rank's connection to the job's own store: keys of this life of the job, and the log of each attempt.

torchrun keeps its store when it starts all workers anew, and its agents count restarts each for itself. So rank 0
draws a name for each life, which all ranks hear when the gate opens: what an earlier life has left is not read then.
The gate's own word is older than the process group if it is of an earlier one.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from typing import Any

from ....traces.reasons import NotAgreeing
from ..steps.words import say
from .protocol import ABORT

#: How long who stands asks again a store that cannot be reached: as long as NCCL's own watchdog waits for the others.
_LOST_S = 600.0
_AGAIN_S = 0.1
_SKEW_S = 2.0  # between the clocks of two nodes
_OPENING = "opening"  # how often rank 0 has opened the network again
_GATE = "gate"
_OPEN, _SHUT = "open ", "shut:"


class JobStore:
    """Connected at :meth:`connect`; used by one thread at a time. Raises what the store raises, but in :meth:`log`."""

    def __init__(self, make: Callable[[], tuple[Any, str]], rank: int, since: float = 0.0) -> None:
        """``make()`` gives a new connection of our own to the job's store, and the store's host.

        ``since`` is when the process group began to be made, in seconds of the node's clock.
        """
        self._make, self._rank, self._since = make, rank, since
        self._store: Any = None
        self.host = ""
        self.closing = False
        self._life = secrets.token_hex(4) if rank == 0 else ""

    @property
    def is_connected(self) -> bool:
        """Whether it ever was."""
        return self._store is not None

    def connect(self) -> None:
        """A new connection, in place of the one that there may be."""
        self._store, self.host = self._make()

    # -- the network and its gate ----------------------------------------------------------------------------------

    def under(self, opening: int) -> _Under:
        """The keys of the network as it is opened for the ``opening``-th time. Before the first no life is known."""
        return _Under(self._store, f"{self._life}/{opening}/" if opening else "0/")

    def opens(self, opening: int) -> str:
        """Rank 0's word that the gate is open; what stands there then, another's "shut:..." if that was first."""
        return self.gate(opening, _OPEN + self._life)

    def shuts(self, opening: int, why: str) -> str:
        """The word that the gate is shut; what stands in the store then."""
        return self.gate(opening, _SHUT + why)

    def gate(self, opening: int, word: str) -> str:
        """Set the gate if it is free, or an earlier life's; what stands there."""
        keys, mine = self.under(opening), f"{time.time():.0f} {word}"
        found = keys.compare_set(_GATE, "", mine).decode()
        if float(found.split()[0]) < self._since - _SKEW_S:
            found = keys.compare_set(_GATE, found, mine).decode()
        return found.partition(" ")[2]

    def hears(self, word: str) -> str:
        """What the gate's word says: why it is shut, empty if it is open; then this life's name is known."""
        if word.startswith(_OPEN):
            self._life = word.removeprefix(_OPEN)
            return ""
        return word.removeprefix(_SHUT)

    def next_opening(self, opening: int) -> int:
        """Which time the network is opened after the ``opening``-th: rank 0 counts, so that all try at the same one.

        The same number where rank 0 has not gone on, or the store is away: the next call has a new connection.
        """
        key = f"{self._life}/{_OPENING}"
        try:
            if self._rank == 0:
                self._store.set(key, str(opening + 1))
                return opening + 1
            return int(self._store.get(key)) if self._store.check([key]) else opening
        except Exception:
            with contextlib.suppress(Exception):
                self.connect()
            return opening

    # -- the log of an attempt -------------------------------------------------------------------------------------

    def log(self, attempt: int, word: str) -> str:
        """Set an attempt's log if it is free; what it holds. Only the store knows: it is asked until it answers.

        Who is in doubt asks over a new connection: its own may have idled for hours and been dropped on the way. A
        store that nobody serves any more has committed nothing.
        """
        anew, end = self._rank != 0, time.monotonic() + _LOST_S
        while True:
            try:
                if anew:
                    self._renew()
                return str(self._store.compare_set(f"{self._life}/log/{attempt}", "", word).decode())
            except Exception as error:
                if isinstance(error, ConnectionRefusedError) or self.closing or time.monotonic() > end:
                    say(NotAgreeing.NO_STORE(rank=self._rank, error=error))
                    return ABORT
                anew = True
                time.sleep(_AGAIN_S)

    def _renew(self) -> None:
        """A new connection; the one there is where this node has no descriptor for another, or no name service."""
        try:
            self.connect()
        except (ConnectionError, TimeoutError):
            raise
        except OSError:
            if self._store is None:
                raise

    def forget(self, attempt: int) -> None:
        """Drop an attempt's log. Raises when the store is away, and has a new connection the next time."""
        try:
            self._store.delete_key(f"{self._life}/log/{attempt}")
        except Exception:
            self.connect()
            raise


class _Under:
    """A store's keys under a prefix."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def set(self, key: str, value: str) -> None:
        self._store.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(self._prefix + key))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check([self._prefix + key for key in keys]))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return bytes(self._store.compare_set(self._prefix + key, expected, desired))

"""The agreement of all ranks on the active table: protocol.py with a store and a network.

The network is a gloo group of its own, made beside the job's groups and not known to torch.distributed: names and
counters of the user's groups stay as they are, and ``destroy_process_group`` does not meet it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from .plugin import Plugin
from .protocol import NO_TABLE, STOP, Member, State, closed
from .shm import TABLE_BYTES, TableFile, encode_table, message_of

if TYPE_CHECKING:
    from pathlib import Path

#: How long the first boundary waits for the other ranks: all ranks come to it after the same step, or some never do.
ATTACH_S = float(os.environ.get("DYNAMICCL_ATTACH_S", "60"))
#: How long a rank may be behind at a boundary before this one stops agreeing.
ROUND_S = float(os.environ.get("DYNAMICCL_ROUND_S", "120"))
_STOP_MESSAGE = STOP.ljust(TABLE_BYTES, b"\0")


class Published:
    """Rank 0's view of the table file: the message last published, read again only when it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TableFile | None = None
        self._sequence = 0
        self._message = NO_TABLE

    def message(self) -> bytes:
        """The published table's message, or the one before while a new one is being written. Never raises OSError."""
        try:
            if self._file is None:
                self._file = TableFile(self._path)
            sequence = self._file.sequence()
            if sequence != self._sequence and not sequence & 1:
                found = self._file.read()
                if found is not None:
                    self._sequence, self._message = sequence, found[1]
        except OSError:  # no such file (yet)
            pass
        return self._message


class Local:
    """A job of one process: what is published becomes active at the next boundary."""

    def __init__(self, plugin: Plugin | None, published: Published) -> None:
        self._plugin, self._published = plugin, published
        self._active = NO_TABLE

    def boundary(self) -> None:
        """An optimizer step has ended."""
        message = self._published.message()
        if message != self._active:
            self._active = message
            load(self._plugin, message)


class Agreement:
    """One rank's part in the agreement, for the life of one default process group."""

    def __init__(self, plugin: Plugin | None, published: Published, world: Any, store: Any, attempt: int) -> None:
        """``world`` is the default group, ``store`` its store, ``attempt`` counts groups, equally on all ranks."""
        from torch.distributed.distributed_c10d import PrefixStore

        self._plugin, self._published = plugin, published
        self._store: Any = PrefixStore(f"dynamiccl/{attempt}", store)
        self.member = Member(world.rank(), world.size())
        self._loaded: bytes | None = None  # unknown: an older group of this process may have left a table
        self._group: Any = None
        self._work: Any = None
        self._options: Any = None
        self._buffer: Any = None
        self._logging: threading.Thread | None = None
        self._logged: str | Exception = ""
        self._boundaries = 0
        self._every = 1
        self._do = {
            State.ARRIVE: self._arrive,
            State.GATE: self._gate,
            State.CONNECT: self._connect,
            State.WAIT: self._wait,
            State.LOG_TABLE: self._end_logging,
            State.BEGIN: self._begin,
            State.CLOSE_LOG: self._close_log,
            State.REPLAY: self._replay,
        }

    @property
    def stopped(self) -> bool:
        """True when the active table will not change any more."""
        return self.member.state is State.STOPPED

    def boundary(self) -> None:
        """An optimizer step has ended. Never raises; the active table changes in here or not at all."""
        member = self.member
        self._boundaries += 1
        if member.state is State.STOPPED or self._boundaries % self._every:
            return
        if member.state is State.LOG_TABLE:  # begun after the last boundary
            self._end_logging()
        if member.state is State.CLOSE_LOG:
            self._close_log()
        member.boundary(self._published.message() if member.rank == 0 else NO_TABLE)
        while member.state in self._do:
            if member.state is State.LOG_TABLE:
                self._start_logging()
                break
            self._do[member.state]()
        if member.active != self._loaded and member.round > 1:  # round 1 is the first with an outcome
            self._loaded = member.active
            load(self._plugin, member.active)

    def _trouble(self, error: Exception) -> None:
        """The network failed here: say so, break the connections so that all ranks learn it, ask the log."""
        if not self.member.in_trouble:
            text = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            _say(f"rank {self.member.rank}: the ranks stop agreeing on new tables ({text}); the job goes on")
        self._drop_group()
        self.member.failed()

    def _drop_group(self) -> None:
        group, self._group, self._work, self._buffer = self._group, None, None, None
        if group is not None and hasattr(group, "abort"):
            try:
                group.abort()
            except Exception as error:
                _say(f"group not closed cleanly: {error}")

    # -- what each state asks for ---------------------------------------------------------------------------------

    def _arrive(self) -> None:
        try:
            if self._plugin is None:  # this rank cannot obey a table, so none may have one
                self._store.compare_set("gate", "", "shut")
                self.member.gave_up()
                return
            count = int(self._store.add("arrived", 1))
            if count == self.member.n_ranks:
                every = max(1, int(os.environ.get("DYNAMICCL_EVERY", "1")))
                self._store.compare_set("gate", "", f"open:{every}")
            self.member.arrived(count)
        except Exception as error:  # a store that cannot: nothing was begun, nothing is lost
            _say(f"no agreement between ranks ({error}); NCCL decides alone")
            self.member.gave_up()

    def _gate(self) -> None:
        try:
            end = time.monotonic() + ATTACH_S
            while not self._store.check(["gate"]) and time.monotonic() < end:
                time.sleep(0.002)
            answer = self._store.compare_set("gate", "", "shut").decode()
        except Exception as error:
            _say(f"no agreement between ranks ({error}); NCCL decides alone")
            self.member.gave_up()
            return
        if answer == "shut" and self.member.rank == 0:
            _say(f"not every rank has the plugin and took a step within {ATTACH_S:.0f} s; NCCL decides alone")
        if answer.startswith("open:"):
            self._every = int(answer[5:])  # one rank's word: the environments may differ
        self.member.gate(answer.startswith("open:"))

    def _connect(self) -> None:
        try:
            import torch
            from torch.distributed import distributed_c10d as c10d

            limit = timedelta(seconds=ROUND_S)
            store = c10d.PrefixStore("gloo", self._store)
            gloo: Any = c10d.ProcessGroupGloo
            size = (self.member.rank, self.member.n_ranks)
            try:
                options = gloo._Options()
                options._threads, options._timeout = 1, limit
                options._devices = [gloo.create_default_device()]
                self._group = gloo(store, *size, options)
            except (AttributeError, TypeError):  # private names: the public constructor has two threads
                self._group = gloo(store, *size, limit)
            self._options = c10d.BroadcastOptions()
            self._options.rootRank = 0
            self._buffer = torch.zeros(TABLE_BYTES, dtype=torch.uint8)
        except Exception as error:
            self._trouble(error)
            return
        self.member.connected()

    def _wait(self) -> None:
        try:
            self._work.wait()
            message = bytes(self._buffer.numpy())
        except Exception as error:
            self._trouble(error)
            return
        self._work = None
        if message == _STOP_MESSAGE:
            message = STOP
        self.member.received(message if message == STOP else message_of(message))
        if self.stopped:
            _say(f"rank {self.member.rank}: the ranks stop agreeing on new tables; the job goes on")
            self._drop_group()

    def _start_logging(self) -> None:
        """Rank 0 has a new table: the store is told while the job trains, by a thread that lives as long as that."""
        self._logging = threading.Thread(target=self._log, name="dynamiccl-log", daemon=True)
        self._logging.start()

    def _log(self) -> None:
        member = self.member
        try:
            self._store.set(f"table/{member.round + 1}", member.wanted)
            self._logged = self._store.compare_set("log", member.log_before(), member.log_after()).decode()
        except Exception as error:
            self._logged = error

    def _end_logging(self) -> None:
        self.join()
        if isinstance(self._logged, str):
            self.member.table_logged()
            self.member.committed(self._logged)
        else:
            self._trouble(self._logged)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the store has been told of a new table."""
        if self._logging is not None:
            self._logging.join(timeout_s)

    def _begin(self) -> None:
        try:
            if self.member.rank == 0:
                data = self.member.sent.ljust(TABLE_BYTES, b"\0")
                np.copyto(self._buffer.numpy(), np.frombuffer(data, np.uint8))
            self._work = self._group.broadcast([self._buffer], self._options)
        except Exception as error:
            self._trouble(error)
            return
        self.member.begun()

    def _close_log(self) -> None:
        try:
            before, after = "", "stop:"
            while (found := self._store.compare_set("log", before, after).decode()) != after:
                before, after = found, closed(found)
                if before == after:
                    break
            self.member.log_closed(after)
        except Exception as error:
            _say(f"rank {self.member.rank}: the job's store is gone ({error})")
            self.member.gave_up()

    def _replay(self) -> None:
        try:
            key = f"table/{self.member.round}"
            message = self._store.get(key) if self._store.check([key]) else None
        except Exception as error:
            _say(f"rank {self.member.rank}: the job's store is gone ({error})")
            self.member.gave_up()
            return
        self.member.replayed(message)


def load(plugin: Plugin | None, message: bytes) -> None:
    """Make ``message`` the active table; NO_TABLE empties it. A table that the plugin refuses changes nothing."""
    from ...traces.records import Table

    if plugin is None:
        return
    try:
        plugin.activate(message or encode_table(Table()))
    except ValueError as error:  # the same bytes on all ranks: all refuse
        _say(str(error))


def _say(text: str) -> None:
    print(f"dynamiccl: {text}", file=sys.stderr, flush=True)

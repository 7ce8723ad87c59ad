"""The agreement of all ranks on the active table: protocol.py with a store and a network.

The network is a gloo group of its own, made beside the job's groups and not known to torch.distributed: names and
counters of the user's groups stay as they are, and ``destroy_process_group`` does not meet it.

The training thread does next to nothing: at a boundary it takes the outcome of the round under way and, for a new
table, makes active what the plugin has been handed already. Beginning the next round, waiting for it, telling the
store, checking and copying a table are done by a second thread until the next boundary. The member belongs to one
thread at a time. Only the first boundary, and trouble, are dealt with on the training thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ...traces.records import Table
from .background import Background
from .plugin import Plugin
from .protocol import NO_TABLE, STOP, Member, State, closed
from .shm import TABLE_BYTES, TableFile, encode_table, message_of

if TYPE_CHECKING:
    from pathlib import Path

#: How long the first boundary waits for the other ranks: all ranks come to it after the same step, or some never do.
ATTACH_S = float(os.environ.get("DYNAMICCL_ATTACH_S", "60"))
#: How long a round, and so a step, may take before this rank stops agreeing: steps that save or evaluate are long.
#: (A rank that is gone is noticed at once, by its connection.)
ROUND_S = float(os.environ.get("DYNAMICCL_ROUND_S", "1800"))
#: How long a rank may wait at a boundary for the others: they have taken the same collectives, so they are close.
#: (Uneven data is the exception: a rank that has run out of it answers the others' collectives and steps no more.)
WAIT_S = float(os.environ.get("DYNAMICCL_WAIT_S", "30"))
_SLICE_S = 0.2  # the background looks so often whether it has to end
_EMPTY = encode_table(Table())
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

    def boundary(self) -> bool:
        """An optimizer step has ended; True if the plugin has been handed a table that is now to become active."""
        message = self._published.message()
        if message is self._active:
            return False
        self._active = message
        return stage(self._plugin, message)

    def proceed(self) -> None:
        """Nothing goes on between boundaries."""


class Agreement:
    """One rank's part in the agreement, for the life of one default process group."""

    def __init__(self, plugin: Plugin | None, published: Published, world: Any, store: Any, attempt: int) -> None:
        """``world`` is the default group, ``store`` its store, ``attempt`` counts groups, equally on all ranks."""
        from torch.distributed.distributed_c10d import PrefixStore

        self._plugin, self._published = plugin, published
        # torchrun may keep the store when it starts all workers anew: an old gate or log must not be taken for ours.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store: Any = PrefixStore(f"dynamiccl/{restart}.{attempt}", _connection_of_our_own(store))
        self.member = Member(world.rank(), world.size())
        self._staged = False  # the plugin has a table ready that becomes active with the boundary now due
        self._group: Any = None
        self._work: Any = None
        self._options: Any = None
        self._buffer: Any = None
        self._view: Any = None  # the buffer's memory
        self._filled = NO_TABLE  # rank 0: what the buffer holds
        self._raw, self._message = bytes(TABLE_BYTES), NO_TABLE  # what the last round carried, and the table in it
        self._outcome: bytes | Exception = NO_TABLE  # of the round under way
        self._background: Background | None = None
        self._busy = False  # the member is in the background's hands
        self._enough = False  # the training thread has waited for the round for too long
        self._boundaries = 0
        self._every = 1
        self._do = {
            State.ARRIVE: self._arrive,
            State.GATE: self._gate,
            State.CONNECT: self._connect,
            State.WAIT: self._take_outcome,
            State.CLOSE_LOG: self._close_log,
            State.REPLAY: self._replay,
        }

    @property
    def stopped(self) -> bool:
        """True when the active table will not change any more."""
        return self.member.state is State.STOPPED

    def boundary(self) -> bool:
        """An optimizer step has ended; True if the plugin has been handed a table that is now to become active.

        Never raises. At the second boundary, where no rank has a table yet, all drop what an older group of their
        processes may have left.
        """
        member = self.member
        self._boundaries += 1
        if self._boundaries % self._every == 0 and self._is_ours() and member.state is not State.STOPPED:
            member.boundary()
            while (do := self._do.get(member.state)) is not None:
                do()
        if self._boundaries == 2:
            return stage(self._plugin, NO_TABLE)
        if self._busy:  # between two of the boundaries that count
            return False
        flip, self._staged = self._staged, False
        return flip

    def proceed(self) -> None:
        """The boundary is passed: the next round may begin, in the background."""
        if not self._busy and self.member.state is State.BEGIN and self._background is not None:
            self._busy = True
            self._background.go()

    def close(self) -> None:
        """This rank takes no further part; the active table stays. The others learn it at their next round."""
        if self._background is not None:
            self._background.close()
            self._drop_group()

    def _is_ours(self) -> bool:
        """True once the background is through with the round under way: the one place where a fast rank waits."""
        if self._busy and self._background is not None:
            if not self._background.join(WAIT_S):
                self._enough = True
            if self._enough and not self._background.join(2 * WAIT_S):  # the job's store does not answer
                say(f"rank {self.member.rank}: the agreement hangs; the table stays")
                self._every = sys.maxsize
                return False
            self._busy = False
        return True

    def _trouble(self, error: Exception) -> None:
        """The network failed here: say so, break the connections so that all ranks learn it, ask the log."""
        if not self.member.in_trouble:
            text = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            say(f"rank {self.member.rank}: the ranks stop agreeing on new tables ({text}); the job goes on")
        self._drop_group()
        self.member.failed()

    def _drop_group(self) -> None:
        group, work, buffer = self._group, self._work, self._buffer
        self._group, self._work, self._buffer, self._view = None, None, None, None
        if group is not None and hasattr(group, "abort"):
            try:
                group.abort()
            except Exception as error:
                say(f"group not closed cleanly: {error}")
        if work is not None and not work.is_completed():
            # Destroying the group would wait for a rank that does not come. It is left to the end of the process, and
            # so is what its thread would need the interpreter to free, perhaps while that goes away.
            for what in (group, work, buffer):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))

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
            say(f"no agreement between ranks ({error}); NCCL decides alone")
            self.member.gave_up()

    def _gate(self) -> None:
        try:
            end = time.monotonic() + ATTACH_S
            while not self._store.check(["gate"]) and time.monotonic() < end:
                time.sleep(0.002)
            answer = self._store.compare_set("gate", "", "shut").decode()
        except Exception as error:
            say(f"no agreement between ranks ({error}); NCCL decides alone")
            self.member.gave_up()
            return
        if answer == "shut" and self.member.rank == 0:
            say(f"not every rank has the plugin and took a step within {ATTACH_S:.0f} s; NCCL decides alone")
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
            self._view = memoryview(self._buffer.numpy())
            self._background = Background(self._between, "dynamiccl-rounds")
        except Exception as error:
            self._trouble(error)
            return
        self.member.connected()

    def _take_outcome(self) -> None:
        if isinstance(self._outcome, Exception):
            self._trouble(self._outcome)
            return
        self.member.received(self._outcome)
        if self.stopped:
            say(f"rank {self.member.rank}: the ranks stop agreeing on new tables; the job goes on")
            self._drop_group()

    # -- in the background, from one boundary to the next ----------------------------------------------------------

    def _between(self) -> None:
        """Begin the next round, tell the store of a table that is new, and wait until the round is complete here."""
        member = self.member
        try:
            self._begin()
            if member.rank == 0:
                member.wanted = self._published.message() or member.wanted
            member.begun()
            if member.state is State.LOG_TABLE:
                self._log()
        except Exception as error:
            self._trouble(error)
            self._close_log()
            return
        try:
            self._outcome = self._complete()
        except Exception as error:
            self._outcome = error

    def _begin(self) -> None:
        if self._filled is not self.member.sent:
            self._filled = self.member.sent
            self._view[:] = self._filled.ljust(TABLE_BYTES, b"\0")
        self._work = self._group.broadcast([self._buffer], self._options)

    def _log(self) -> None:
        """Rank 0 has a new table: the store is told while the job trains."""
        member = self.member
        self._store.set(f"table/{member.round + 1}", member.wanted)
        member.table_logged()
        member.committed(self._store.compare_set("log", member.log_before(), member.log_after()).decode())

    def _complete(self) -> bytes:
        """The message of the round under way, once it is here; a table is staged in the plugin. Raises on failure."""
        assert self._background is not None
        end = time.monotonic() + ROUND_S + _SLICE_S
        while True:
            try:
                self._work.wait(timedelta(seconds=_SLICE_S))  # in slices: see Background.close
                break
            except Exception:
                if self._enough:
                    raise TimeoutError(f"another rank took more than {WAIT_S:.0f} s longer to end its step") from None
                if self._work.is_completed() or self._background.closing or time.monotonic() > end:
                    raise
        self._work = None
        if self._background.closing:  # the plugin may be another agreement's already
            return NO_TABLE
        raw = bytes(self._view)
        if raw == self._raw:
            return self._message
        self._raw = raw
        self._message = STOP if self._raw == _STOP_MESSAGE else message_of(self._raw)
        self._staged = self._message != STOP and stage(self._plugin, self._message)
        return self._message

    # -- trouble ------------------------------------------------------------------------------------------------

    def _close_log(self) -> None:
        try:
            before, after = "", "stop:"
            while (found := self._store.compare_set("log", before, after).decode()) != after:
                before, after = found, closed(found)
                if before == after:
                    break
            self.member.log_closed(after)
        except Exception as error:
            say(f"rank {self.member.rank}: the job's store is gone ({error})")
            self.member.gave_up()

    def _replay(self) -> None:
        try:
            key = f"table/{self.member.round}"
            message = self._store.get(key) if self._store.check([key]) else None
        except Exception as error:
            say(f"rank {self.member.rank}: the job's store is gone ({error})")
            self.member.gave_up()
            return
        if message is not None:
            self._staged = stage(self._plugin, message)
        self.member.replayed(message)


def _connection_of_our_own(store: Any) -> Any:
    """A connection to the job's store: with the job's own we would keep its server alive after its group is gone."""
    try:
        return store.clone()
    except Exception:  # older releases of PyTorch, and stores that cannot
        return store


def stage(plugin: Plugin | None, message: bytes) -> bool:
    """Hand the plugin a table, NO_TABLE for an empty one, ready to become active; False if it refuses."""
    if plugin is None:
        return False
    try:
        plugin.stage(message or _EMPTY)
    except ValueError as error:  # the same bytes on all ranks: all refuse
        say(str(error))
        return False
    return True


def say(text: str) -> None:
    """Tell the user. Never raises: standard error may be closed or full."""
    with contextlib.suppress(Exception):
        print(f"dynamiccl: {text}", file=sys.stderr, flush=True)

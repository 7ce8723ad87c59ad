"""How all ranks change to the next table at the same step: the protocol alone, without any input or output.

All ranks of a job that runs in step call :meth:`Member.boundary` after the same optimizer steps. At every boundary
rank 0 begins a small broadcast, a *round*, and all ranks take its outcome at the boundary after: what a round carries
is active from there on, on every rank. The one hard case is a rank whose wait fails while the others' succeeded (a
broken connection, a timeout): it must neither keep the old table nor guess. Hence the *log*, one register in the
store that the job's process group already has, written only when a table is new:

* Rank 0, before it sends a new table as round n, puts the table into the store and sets the log from "m" to "n"
  (compare-and-set; m is the last such round). Only then is the table sent. A round that is not in the log changes
  nothing on any rank. All this takes place while round n - 1 is under way and the job trains.
* A rank that cannot complete round n closes the log ("stop:" before what stands there) and so learns the last round
  that is in it. Rank 0's compare-and-set fails from then on, so this is the last table that will ever be sent.
  The rank then takes the remaining rounds from the store, each at the boundary where it is due: exactly what the
  others take from their broadcasts. After the last it stops agreeing and keeps the table.
* Closing also breaks the rank's connections, so the others find out at their next round and do the same.

Whatever fails, at boundary k every rank therefore has the table of the last logged round below k. What is assumed:
the store is reachable by a rank that is in trouble (a job without its store is lost); collectives are ordered with the
optimizer step, as on the thread that trains; and ranks take the same steps. Under PyTorch's Join they do not, so no
boundary in there counts (probe.py).

``tests/test_protocol.py`` explores this class exhaustively; ``agreement.py`` gives it a store and a network.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

#: Sent instead of a table when the log was closed: agreeing ends after this round.
STOP = b"stop"
NO_TABLE = b""


class State(Enum):
    """What a member needs next; TRAINING and STOPPED need nothing."""

    ARRIVE = "count this rank in"
    GATE = "wait until all ranks are counted in, or give up for all"
    CONNECT = "open the group"
    TRAINING = "nothing until the next boundary"
    WAIT = "the outcome of the round under way"
    LOG_TABLE = "put the new table into the store"
    COMMIT = "set the log to the next round"
    BEGIN = "start the next round"
    CLOSE_LOG = "close the log and learn the last round in it"
    REPLAY = "what the log holds for this round"
    STOPPED = "nothing any more: the active table stays"


@dataclass
class Member:
    """One rank. Each method reports the outcome of what the state asked for and moves to the next state."""

    rank: int
    n_ranks: int
    state: State = State.ARRIVE
    round: int = 0  # the round under way, or the one that is due
    active: bytes = NO_TABLE  # the table in force on this rank
    wanted: bytes = NO_TABLE  # rank 0: what the daemon has published last
    sent: bytes = NO_TABLE  # rank 0: what the rounds carry
    last: int = 0  # rank 0: the log as far as it knows; in trouble: the last round that counts
    in_trouble: bool = False
    due: bool = False  # the outcome of `round` belongs to the boundary that is being passed

    def boundary(self, wanted: bytes = NO_TABLE) -> None:
        """An optimizer step has ended; on rank 0 ``wanted`` is the published table, empty if there is none."""
        if wanted:
            self.wanted = wanted
        if self.state is State.TRAINING:
            self.due = True
            self.state = State.REPLAY if self.in_trouble else State.WAIT

    # -- the first boundary: nobody opens a group that not everybody opens ------------------------------------

    def arrived(self, _count: int) -> None:
        """This rank is counted in."""
        self.state = State.GATE

    def gate(self, opened: bool) -> None:
        """All ranks were there in time, or some rank gave up: the same answer on all ranks."""
        self.state = State.CONNECT if opened else State.STOPPED

    def connected(self) -> None:
        """The group is open on this rank."""
        self.state = State.BEGIN

    # -- a round ------------------------------------------------------------------------------------------------

    def received(self, message: bytes) -> None:
        """The round is complete here and carried ``message``."""
        self.due = False
        if message == STOP:
            self.state = State.STOPPED
            return
        self.active = message
        self.state = State.BEGIN

    def begun(self) -> None:
        """The next round is under way. If there is a new table, rank 0 sees to the log before the round after it."""
        self.round += 1
        new = self.rank == 0 and self.sent != STOP and self.wanted not in (NO_TABLE, self.sent)
        self.state = State.LOG_TABLE if new else State.TRAINING

    def table_logged(self) -> None:
        """The new table lies in the store."""
        self.state = State.COMMIT

    def log_before(self) -> str:
        """The log as rank 0 expects it."""
        return str(self.last) if self.last else ""

    def log_after(self) -> str:
        """The log as rank 0 wants it."""
        return str(self.round + 1)

    def committed(self, log: str) -> None:
        """The log after rank 0's compare-and-set: as wanted, or closed by a rank in trouble."""
        if log == self.log_after():
            self.last, self.sent = self.round + 1, self.wanted
        else:
            self.sent = STOP
        self.state = State.TRAINING

    # -- trouble ------------------------------------------------------------------------------------------------

    def failed(self) -> None:
        """The group could not be opened, a round not be begun or completed, or the log not be set."""
        if self.state in (State.CONNECT, State.BEGIN):  # the round that did not begin here is due at the next boundary
            self.round += 1
        self.in_trouble = True
        self.state = State.CLOSE_LOG

    def log_closed(self, log: str) -> None:
        """The log after this rank closed it: "stop:" and the last round that counts."""
        self.last = int(log.removeprefix("stop:") or 0)
        self._replay_or_stop(State.REPLAY if self.due else State.TRAINING)

    def replayed(self, message: bytes | None) -> None:
        """What the log holds for this round: a table, or None for a round that changed nothing."""
        if message is not None:
            self.active = message
        self.round += 1
        self.due = False
        self._replay_or_stop(State.TRAINING)

    def _replay_or_stop(self, state: State) -> None:
        self.state = state if self.round <= self.last else State.STOPPED

    def gave_up(self) -> None:
        """The store cannot be reached: nothing more can be learnt."""
        self.state = State.STOPPED


def closed(log: str) -> str:
    """What a rank in trouble makes of the log; a closed log stays as it is."""
    return log if log.startswith("stop:") else "stop:" + log

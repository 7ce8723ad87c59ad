"""How all ranks change to the next table at the same place of the program: states only, no input or output.

Rank 0 leads (:class:`Leader`); every rank, rank 0 too, takes part (:class:`Member`). Nothing is sent in steps in which
nothing is new. A change is an *attempt*, numbered, in three parts:

1. *Announce.* The message goes to all ranks while they train; each checks it, stages it in the plugin and says so.
2. *Appoint.* When all have said so rank 0 names a place some steps ahead: the first boundary at which so many backward
   passes have been made, or so many steps. A rank that has passed it already says "missed".
3. *Meet.* At that boundary, and only there, each rank stops and says exactly where it is. Once all ranks stand, and
   stand at the same place, rank 0 writes "commit" into the attempt's *log* (one register in the job's store, set by
   compare-and-set from nothing) and tells them to flip. A rank that has waited long enough writes "abort" by the same
   compare-and-set, and obeys what it then finds there.

So a table changes on all ranks or on none, at a moment at which all ranks stood at the same place. Who never said
that it stands is never waited for: without its word there is no commit, and it passes freely. Who said so and hears
nothing asks the log. Therefore a broken network, a dead or frozen rank and a late message can lose an attempt, not
split it. Lost attempts are tried again at growing distances; after some in a row, or when the ranks turn out not to be
at the same place (one has skipped a step, say), the agreement *closes*: one last change, to the table that was last
confirmed, at a place where the collectives themselves prove that all ranks are at the same one.

A table in force is *confirmed* or a *trial* on a lease. :meth:`Leader.expire` ends a lease: rank 0 then wants the
confirmed table by itself. Nobody else has to be alive for that.

What it cannot do: a rank that stands, has waited, and cannot reach the job's store does not know whether the others
have changed. It waits for the store. For that the store must fail, or answer late, within the few milliseconds
between a rank's arrival and the answer, when it had answered at once before the place was appointed (rank 0 looks):
once in weeks of a store that fails daily, and as long as the store is away; NCCL's own watchdog treats such a job
as lost. And where NCCL has no profiler (before 2.23) collectives cannot be counted for each communicator: after a
skipped step such a job closes only if the ranks have asked for equally many, else the table stays and it is said.

``tests/protocol_model.py`` explores these classes exhaustively; ``agreement.py`` gives them a store and a network.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .place import Progress, SwitchPoint, Verdict

NO_TABLE = b""
_NOWHERE = SwitchPoint("steps", 0)
#: What the log of an attempt can hold.
COMMIT, ABORT = "commit", "abort"
#: So many lost attempts in a row, and the agreement closes.
PATIENCE = 8
#: The farthest ahead, in steps, that a place is appointed.
FARTHEST = 1024


class Phase(Enum):
    """Where a member is in an attempt."""

    IDLE = "in none"
    STAGED = "the table is staged; no place is known"
    APPOINTED = "will stop at the place"
    CALLED_OFF = "will not stop, but say where it is when it comes by"
    MET = "stands at the place and waits for the answer"
    DOUBT = "has waited long enough; the log decides"
    FLIP = "changes to the staged table before its next collective"


class Stop(Enum):
    """What a member does at a boundary."""

    PASS = "train on"
    MEET = "stand and say where"
    TELL = "train on, and say where"


@dataclass
class Member:
    """One rank. The thread that trains calls :meth:`boundary` and what follows a meeting, the network the rest."""

    phase: Phase = Phase.IDLE
    attempt: int = 0
    place: SwitchPoint = _NOWHERE
    passed: Progress | None = None  # this rank at its last boundary

    def is_free(self) -> bool:
        """False from the moment it stands until it trains on: the staged table must not be replaced then."""
        return self.phase in (Phase.IDLE, Phase.STAGED, Phase.APPOINTED, Phase.CALLED_OFF)

    def prepared(self, attempt: int) -> None:
        """The message of a new attempt is staged. Only when :meth:`is_free`."""
        self.phase, self.attempt = Phase.STAGED, attempt

    def appointed(self, attempt: int, place: SwitchPoint) -> bool:
        """Rank 0 names the place; False if it lies behind this rank."""
        if self.phase is Phase.STAGED and attempt == self.attempt:
            ahead = self.passed is None or not place.reached(self.passed)
            self.phase, self.place = (Phase.APPOINTED if ahead else Phase.IDLE), place
            return ahead
        return True

    def meets(self, here: Progress) -> bool:
        """Whether :meth:`boundary` is about to stand."""
        return self.phase is Phase.APPOINTED and self.place.reached(here)

    def boundary(self, here: Progress) -> Stop:
        """A step has ended."""
        self.passed = here
        if self.phase is Phase.APPOINTED and self.place.reached(here):
            self.phase = Phase.MET
            return Stop.MEET
        if self.phase is Phase.CALLED_OFF and self.place.reached(here):
            self.phase = Phase.IDLE
            return Stop.TELL
        return Stop.PASS

    def answered(self, attempt: int, commit: bool) -> None:
        """Rank 0's answer. In doubt it comes too late: the log says the same, and is being asked."""
        if attempt != self.attempt:
            return
        if self.phase is Phase.MET:
            self.phase = Phase.FLIP if commit else Phase.IDLE
        elif self.phase is Phase.APPOINTED:
            self.phase = Phase.CALLED_OFF
        elif self.phase is Phase.STAGED:
            self.phase = Phase.IDLE

    def overdue(self) -> None:
        """The answer did not come in time."""
        if self.phase is Phase.MET:
            self.phase = Phase.DOUBT

    def log_read(self, log: str) -> None:
        """What the log holds after this rank has tried to set it to "abort"."""
        if self.phase is Phase.DOUBT:
            self.phase = Phase.FLIP if log == COMMIT else Phase.IDLE

    def flipped(self) -> None:
        """The staged table is in force."""
        self.phase = Phase.IDLE

    def disconnected(self) -> None:
        """The network was lost: what was announced will be announced again. A meeting goes on by the log."""
        if self.is_free():
            self.phase = Phase.IDLE


class Stage(Enum):
    """Where the leader is in an attempt."""

    QUIET = "in none"
    ANNOUNCED = "waits until all ranks have staged the message"
    APPOINTED = "waits until all ranks stand at the place"
    COMMIT = "sets the log"
    CLOSED = "ends: the table in force stays"


@dataclass
class Leader:
    """Rank 0's other part: which table is wanted, which is in force, and the attempt under way."""

    confirmed: bytes = NO_TABLE  # last of the confirmed tables that were in force
    active: bytes = NO_TABLE
    trial: bool = False  # the active table is on a lease
    wanted: bytes = NO_TABLE
    wanted_trial: bool = False
    stage: Stage = Stage.QUIET
    attempt: int = 0
    message: bytes = NO_TABLE  # of the attempt
    message_trial: bool = False
    closing: str = ""  # why the agreement closes
    failures: int = 0  # lost attempts in a row
    why: str = ""  # the last of them was lost
    ahead: int = 2  # steps between the farthest rank and the place
    not_before: int = 0  # step of rank 0
    by_steps: bool = False  # places are named by steps, not by backward passes

    def want(self, message: bytes, trial: bool) -> None:
        """The daemon has published a table."""
        self.wanted, self.wanted_trial = message, trial

    def expire(self) -> None:
        """The lease of the table in force has run out."""
        self.want(self.confirmed, False)

    def close(self, reason: str) -> None:
        """Stop agreeing, with the confirmed table in force. The first reason counts."""
        self.closing = self.closing or reason

    def next(self, here: Progress) -> bool:
        """Begin an attempt if something is wanted and rank 0 has come far enough since a lost one."""
        if self.stage is not Stage.QUIET:
            return False
        message, trial = (self.confirmed, False) if self.closing else (self.wanted, self.wanted_trial)
        if message == self.active:
            self.trial = trial
            if self.closing:
                self.stage = Stage.CLOSED
            return False
        if here.steps < self.not_before:
            return False
        self.attempt += 1
        # In turn: where ranks have done one of the two unequally often, they meet only by the other, and what differs
        # is found there. Closing begins with the one by which it was found.
        self.by_steps = (self.failures % 2 == 1) != bool(self.closing) or not here.backwards
        self.message, self.message_trial, self.stage = message, trial, Stage.ANNOUNCED
        return True

    def acknowledged(self, attempt: int, farthest: Progress, stride: int = 1) -> SwitchPoint | None:
        """All ranks have staged the message; ``farthest`` has the most that any of them has done. The place, if any.

        ``stride`` is the number of backward passes in a step.
        """
        if self.stage is not Stage.ANNOUNCED or attempt != self.attempt:
            return None
        self.stage = Stage.APPOINTED
        if self.by_steps:
            return SwitchPoint("steps", farthest.steps + self.ahead)
        return SwitchPoint("backwards", farthest.backwards + self.ahead * stride)

    def arrived(self, attempt: int, verdict: Verdict) -> bool:
        """All ranks stand; True if they stand where the table may change: then the log is to be set."""
        if self.stage is not Stage.APPOINTED or attempt != self.attempt:
            return False
        if verdict.same or (self.closing and verdict.same_collectives):
            self.stage = Stage.COMMIT
            return True
        self.close(verdict.words)
        return False

    def log_read(self, log: str) -> bool:
        """What the log holds after rank 0 has tried to set it to "commit"; True if that is it."""
        if log != COMMIT:
            return False
        self.active, self.trial = self.message, self.message_trial
        if not self.trial:
            self.confirmed = self.active
        self.stage, self.failures, self.ahead = Stage.QUIET, 0, max(2, self.ahead - 1)
        return True

    def lost(self, here: Progress, why: str) -> None:
        """The attempt came to nothing: a rank missed the place, was late, or stood elsewhere."""
        self.failures, self.why = self.failures + 1, why
        self.ahead = min(2 * self.ahead, FARTHEST)
        self.not_before = here.steps + self.ahead
        self.stage = Stage.QUIET
        if self.failures >= PATIENCE:
            self.close(why)

    def disconnected(self) -> None:
        """The network was lost. What the log is being asked for goes on."""
        if self.stage in (Stage.ANNOUNCED, Stage.APPOINTED):
            self.stage = Stage.QUIET

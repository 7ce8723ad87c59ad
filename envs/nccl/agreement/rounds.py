"""The messages of the agreement over an open tree: what ranks below have said is combined and handed up, rank 0's word
handed down. All of it in the background thread; :class:`RankState` is what it shares with the thread that trains.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum, auto
from typing import Any

from ....traces.reasons import NotAgreeing
from ....traces.records import AgreementState, Lease
from ..plugin.bindings import Plugin
from ..steps.steps import Steps
from .job_store import JobStore
from .place import Progress, Report, SwitchPoint, elsewhere
from .protocol import COMMIT, NO_TABLE, Leader, Member, Phase, Stage
from .published import EMPTY, LeaseClock, TableMailbox, stage
from .tree import FAN_OUT, Tree

#: The longest that the training thread may stand at a boundary; a part of it is kept for asking the log.
MEET_S = float(os.environ.get("DYNAMICCL_MEET_MS", "50")) / 1e3
#: A store that takes longer to answer is not relied upon: no place is appointed.
PROMPT_S = 0.1 * MEET_S
#: So many lost attempts in a row, and the tuner hears of it.
_IN_A_ROW = 3
#: So many to take a trial back, and the user hears of it.
_OVERDUE = 5
#: While no attempt is lost.
TOGETHER = AgreementState.OPEN, "all ranks decide together"
_ATTEMPT = struct.Struct("<I")


class Kind(IntEnum):
    """What a message is."""

    READY = auto()  # up: all ranks below are connected and have NCCL's tuner
    OPEN = auto()  # down
    SHUT = auto()
    PREPARE = auto()
    STAGED = auto()  # up
    APPOINT = auto()
    MISSED = auto()  # up
    STANDS = auto()  # up
    ANSWER = auto()
    CLOSED = auto()
    LEAVES = auto()  # up: a rank's probe is broken


class RankState:
    """One rank's member, for rank 0 the leader, and what its two threads tell each other. ``lock`` guards both."""

    def __init__(
        self,
        rank: int,
        n_ranks: int,
        plugin: Plugin | None,
        steps: Steps,
        published: TableMailbox,
        before: RankState | None = None,
    ) -> None:
        self.rank, self.n_ranks, self.plugin, self.steps = rank, n_ranks, plugin, steps
        self.published, self.keeper = published, LeaseClock(published)
        self.lock = threading.Lock()
        self.member = Member()
        self.leader: Leader | None = _leader(plugin, before.leader if before else None) if rank == 0 else None
        self.leases: dict[bytes, Lease | None] = before.leases if before else {}  # of what was published
        self.answered = threading.Lock()  # released when the answer that the training thread waits for is there
        self.answered.acquire()
        self.outbox: deque[tuple[Kind, int, Any]] = deque()  # from the training thread
        self.stood: Progress | None = None  # rank 0's place in the attempt under way
        self.stride = 1  # backward passes in a step
        self.absent: Callable[[], str] = str  # who has not come to the place
        self.leaves = ""  # why this rank will take no further part

    def here(self) -> Progress:
        """This rank's place, now."""
        return Progress(self.rank, self.steps.backwards, self.steps.ended)

    def release(self) -> None:
        """Let the training thread go on."""
        if self.answered.locked():
            self.answered.release()


class Rounds:
    """Handles the messages of one open tree."""

    def __init__(self, desk: RankState, tree: Tree, store: JobStore, tell: Any) -> None:
        """``tell(state, text)`` is rank 0's word to the user."""
        self._desk, self._tree, self._store, self._tell = desk, tree, store, tell
        self._attempt = 0
        self._staged: dict[int, tuple[Progress, str]] = {}
        self._stands: dict[int, Report] = {}
        self._waiting: tuple[int, bytes] | None = None  # an attempt announced while this rank was not free for it
        self._refused = ""  # said already
        self._said_lost = self._overdue = False  # that attempts are lost, that a trial outlasts its lease: was said
        self.closed = ""  # why the agreement has ended
        desk.absent = self._absent

    def serve(self) -> None:
        """Until the agreement ends. Raises OSError when a connection is lost."""
        if self._desk.leaves:  # it may not have been heard over the network before
            self._leaves(self._desk.leaves)
        while not self.closed:
            self._outgoing()
            if self._desk.leader is not None:
                self._lead(self._desk.leader)
            if self.closed:
                return
            for rank, kind, payload in self._tree.receive(None):
                self._incoming(rank, Kind(kind), payload)

    # -- from this rank's training thread --------------------------------------------------------------------------

    def _outgoing(self) -> None:
        if self._waiting is not None:
            self._prepare(*self._waiting)
        while self._desk.outbox:
            kind, attempt, what = self._desk.outbox.popleft()
            if kind is Kind.STANDS:
                self._combine_stands(attempt, self._desk.rank, what)
            elif kind is Kind.MISSED:
                self._missed(attempt, what)
            elif kind is Kind.LEAVES:
                self._leaves(what)
            else:  # rank 0 has waited long enough: its attempt is lost already
                self._tree.down(Kind.ANSWER, _pack(attempt, False))

    # -- from the other ranks --------------------------------------------------------------------------------------

    def _incoming(self, rank: int, kind: Kind, payload: bytes) -> None:
        if kind is Kind.CLOSED:
            self._tree.down(kind, payload)
            self.closed = payload.decode()
            return
        (attempt,), rest = _ATTEMPT.unpack_from(payload), payload[_ATTEMPT.size :]
        desk = self._desk
        if kind is Kind.PREPARE:
            self._tree.down(kind, payload)
            self._begin(attempt)
            self._prepare(attempt, rest)
        elif kind is Kind.APPOINT:
            self._tree.down(kind, payload)
            self._appointed(attempt, SwitchPoint(*json.loads(rest)))
        elif kind is Kind.ANSWER:
            self._tree.down(kind, payload)
            if self._waiting is not None and self._waiting[0] == attempt:
                self._waiting = None
            self._answered(attempt, json.loads(rest))
        elif kind is Kind.STAGED:
            where, refused = json.loads(rest)
            self._combine_staged(attempt, rank, Progress(*where), refused)
        elif kind is Kind.STANDS:
            self._combine_stands(attempt, rank, Report.decode(rest))
        elif kind is Kind.MISSED:
            self._missed(attempt, Progress(*json.loads(rest)))
        elif kind is Kind.LEAVES:
            self._leaves(json.loads(rest))
        else:
            raise ConnectionError(f"rank {desk.rank} does not expect {kind.name} here")

    def _begin(self, attempt: int) -> None:
        self._attempt, self._waiting = attempt, None
        self._staged, self._stands = {}, {}

    def _prepare(self, attempt: int, message: bytes) -> None:
        desk = self._desk
        with desk.lock:
            if not desk.member.is_free():
                self._waiting = (attempt, message)
                return
            self._waiting = None
            refused = stage(desk.plugin, message)
            desk.member.prepared(attempt)
        self._combine_staged(attempt, desk.rank, desk.here(), refused)

    def _combine_staged(self, attempt: int, rank: int, where: Progress, refused: str) -> None:
        if attempt != self._attempt:
            return
        self._staged[rank] = where, refused
        if len(self._staged) <= len(self._tree.children):
            return
        (farthest, refused), *others = self._staged.values()
        for where, also in others:
            farthest, refused = farthest.farther(where), refused or also
        if self._desk.leader is None:
            self._tree.up(Kind.STAGED, _pack(attempt, [farthest, refused]))
        else:
            self._appoint(self._desk.leader, farthest, refused)

    def _appointed(self, attempt: int, place: SwitchPoint) -> None:
        desk = self._desk
        with desk.lock:
            in_time = desk.member.appointed(attempt, place)
        if not in_time:
            self._missed(attempt, desk.here())

    def _combine_stands(self, attempt: int, rank: int, report: Report) -> None:
        if attempt != self._attempt:
            return
        self._stands[rank] = report
        if len(self._stands) <= len(self._tree.children):
            return
        whole = Report.merged(report for _, report in sorted(self._stands.items()))
        if self._desk.leader is None:
            self._tree.up(Kind.STANDS, _ATTEMPT.pack(attempt) + whole.encode())
        else:
            self._decide(self._desk.leader, attempt, whole)

    def _missed(self, attempt: int, where: Progress) -> None:
        leader, desk = self._desk.leader, self._desk
        if leader is None:
            self._tree.up(Kind.MISSED, _pack(attempt, where))
            return
        if attempt != leader.attempt:
            return
        stood = desk.stood
        if stood is not None and stood.backwards == where.backwards and stood.steps != where.steps:
            with desk.lock:
                leader.close(elsewhere("steps", where, stood))
        if leader.stage is Stage.APPOINTED:
            self._lose(leader, NotAgreeing.PAST_THE_PLACE(rank=where.rank))

    def _leaves(self, why: str) -> None:
        """Some rank will take no further part: the agreement closes, as long as that rank can still do so with all."""
        leader = self._desk.leader
        if leader is None:
            self._tree.up(Kind.LEAVES, _pack(0, why))
            return
        with self._desk.lock:
            leader.close(why)

    def _answered(self, attempt: int, commit: bool) -> None:
        desk = self._desk
        with desk.lock:
            stood = desk.member.phase is Phase.MET and desk.member.attempt == attempt
            desk.member.answered(attempt, commit)
            if stood:
                desk.release()

    # -- rank 0 ----------------------------------------------------------------------------------------------------

    def _lead(self, leader: Leader) -> None:
        """Whether something is wanted that is not in force, or no longer to be in force."""
        desk = self._desk
        step = desk.steps.ended
        if desk.published.is_new() and (found := desk.published.take()) is not None:
            message, lease = found
            if desk.published.is_stale(lease):
                self._tell(AgreementState.REVERTED, NotAgreeing.TUNER_SILENT(seconds=desk.published.silent_ms() / 1e3))
                message, lease = desk.published.confirmed() or leader.confirmed, None
            with desk.lock:
                desk.leases[message] = lease
                leader.want(message, lease is not None)
                desk.keeper.renewed(step)
        if leader.wanted_trial and (why := desk.keeper.over(step)):
            with desk.lock:
                leader.expire()
                desk.keeper.starts(None, step)
            self._tell(AgreementState.REVERTED, why)
        if self._said_lost != (leader.failures >= _IN_A_ROW) and leader.stage is Stage.QUIET:
            self._said_lost = not self._said_lost
            self._tell(*(AgreementState.LOSING, leader.why) if self._said_lost else TOGETHER)
        overdue = leader.trial and not leader.wanted_trial and leader.failures >= _OVERDUE
        if overdue and leader.stage is Stage.QUIET and not self._overdue:
            self._overdue = True
            self._tell(None, NotAgreeing.NOT_TAKEN_BACK(why=self._absent()))
        with desk.lock:
            before = leader.active
            begun = desk.member.is_free() and desk.member.passed is not None and leader.next(desk.member.passed)
            desk.stood = None if begun else desk.stood
        if leader.stage is Stage.CLOSED:
            words = leader.closing
            self._tree.down(Kind.CLOSED, words.encode())
            self.closed = words
        elif begun:
            assert before is leader.active
            self._begin(leader.attempt)
            self._tree.down(Kind.PREPARE, _ATTEMPT.pack(leader.attempt) + leader.message)
            self._prepare(leader.attempt, leader.message)

    def _appoint(self, leader: Leader, farthest: Progress, refused: str) -> None:
        desk = self._desk
        began, late = time.monotonic(), False
        try:
            self._store.forget(leader.attempt - 1)  # also tells how fast the store is now
        except Exception:
            late = True
        late = late or time.monotonic() - began > PROMPT_S
        with desk.lock:
            place = leader.acknowledged(leader.attempt, farthest, desk.stride)
            if refused:  # the same bytes everywhere: nobody can have it
                leader.want(leader.active, leader.trial)
        if refused and refused != self._refused:
            self._refused = refused
            self._tell(None, refused)
        if refused or late or place is None:
            self._lose(leader, refused or NotAgreeing.SLOW_STORE())
            return
        self._tree.down(Kind.APPOINT, _pack(leader.attempt, place))
        self._appointed(leader.attempt, place)

    def _decide(self, leader: Leader, attempt: int, report: Report) -> None:
        desk = self._desk
        with desk.lock:
            if leader.stage is not Stage.APPOINTED or attempt != leader.attempt:
                return
            verdict = report.verdict()
            stands = leader.arrived(attempt, verdict)
        if not stands:
            self._lose(leader, verdict.words)
            return
        log = self._store.log(attempt, COMMIT)
        with desk.lock:
            flips = leader.log_read(log)
        if not flips:
            self._lose(leader, NotAgreeing.WAITED_TOO_LONG())
            return
        with desk.lock:
            lease = desk.leases.get(leader.active) if leader.trial else None
            desk.keeper.starts(lease, desk.steps.ended)
            desk.leases = {m: kept for m, kept in desk.leases.items() if m in (leader.active, leader.wanted)}
        self._answered(attempt, True)  # first: a connection may be lost in the next line
        self._tree.down(Kind.ANSWER, _pack(attempt, True))

    def _lose(self, leader: Leader, why: str) -> None:
        desk = self._desk
        with desk.lock:
            leader.lost(desk.member.passed or desk.here(), why)
        self._tree.down(Kind.ANSWER, _pack(leader.attempt, False))
        self._answered(leader.attempt, False)

    def _absent(self) -> str:
        """Who has not come to the place: also asked by the training thread of rank 0."""
        missing = [r for r in self._tree.children if r not in self._stands]
        if not missing:
            return NotAgreeing.TOO_FAR_APART()
        absent = NotAgreeing.ABSENT_BELOW if self._desk.n_ranks > FAN_OUT + 1 else NotAgreeing.ABSENT
        return absent(rank=missing[0])


def _leader(plugin: Plugin | None, before: Leader | None) -> Leader:
    """What an older group of this process has left in force is not known to be in force on all ranks of this one."""
    active = EMPTY if plugin is None or plugin.generation == 0 else NO_TABLE
    if before is None:
        return Leader(active=active, confirmed=EMPTY, wanted=EMPTY)
    return Leader(before.confirmed, active, False, before.wanted, before.wanted_trial)


def _pack(attempt: int, what: Any) -> bytes:
    return _ATTEMPT.pack(attempt) + json.dumps(what).encode()

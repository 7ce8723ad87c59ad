"""One rank's part in the agreement of all ranks on the active table: protocol.py with a store, a network and a thread.

The training thread does next to nothing at a boundary: it notes where it is. Only at a boundary that all ranks have
been appointed to it stops, for at most 50 ms; all else is done by one thread in the background: opening the network
(tree.py) and the gate, staging tables, passing messages on (rounds.py). Nothing is sent in steps without news.

The gate: every rank says what it would decide with (the plugin's sources and interfaces, NCCL's version) once NCCL
itself has initialised our tuner there. It opens when all are connected and say the same, within a minute; else it is
shut for good, with a reason, and NCCL decides alone. A network that is lost later is opened again, however long that
takes: a trial may be in force, and only together can the ranks take it back.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ....traces.reasons import KEEP_CONFIRMED, KEEP_TRIAL, NotAgreeing, NotTuning
from ....traces.records import AgreementState
from ..plugin.bindings import Plugin
from ..steps.interrupts import Interrupts
from ..steps.steps import Steps
from .job_store import JobStore
from .place import Report, one_of
from .protocol import ABORT, Phase, Stage, Stop
from .published import TableMailbox
from .rounds import MEET_S, TOGETHER, Kind, RankState, Rounds
from .tree import WAIT_S, Tree

#: How long the gate waits for ranks that have not taken a step yet, or whose NCCL has not loaded the tuner.
ATTACH_S = float(os.environ.get("DYNAMICCL_ATTACH_S", "60"))
_FOR_THE_TREE = 0.8
_SOON_S, _LATER_S = 0.5, 60.0  # until a lost network is opened again: at first, and at most
_AFTER_S = 0.1
_OFTEN = 5  # losses after which it takes longer each time
_NEWS_S = 0.02  # between two looks at what the daemon has published
_LOOK_S = 0.25  # until NCCL has loaded the tuner, this often

Tell = Callable[[AgreementState | None, str], None]


class Agreement:
    """One rank's part, for the life of one default process group."""

    def __init__(
        self,
        rank: int,
        n_ranks: int,
        plugin: Plugin | None,
        steps: Steps,
        published: TableMailbox,
        store: Callable[[], tuple[Any, str]],
        versions: str = "",
        before: RankState | None = None,
        tell: Tell = lambda state, text: None,
        since: float = 0.0,
    ) -> None:
        """``store()`` gives a new connection of our own to the job's store, and the store's host.

        ``versions`` is what beside the plugin's identity must be equal on all ranks. ``tell`` hears on rank 0 of every
        change of state, elsewhere only of what is wrong with the rank itself. ``before`` is the desk of the group
        that this process had before; ``since`` is when this one began to be made, by the node's clock.
        """
        self.desk = RankState(rank, n_ranks, plugin, steps, published, before)
        self.held_s = 0.0  # the longest that the training thread has stood here
        self.stopped = ""  # why the active table will not change any more
        self.store = JobStore(store, rank, since)
        self._versions, self._tell = versions, tell
        self._tree: Tree | None = None
        self._closing, self._end = False, threading.Event()
        self._backwards = steps.backwards  # at the last boundary
        self._look_at = 0.0
        self._interrupts = Interrupts()
        self._thread = threading.Thread(target=self._run, name="dynamiccl-agreement", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread to be had
            self._stop(AgreementState.SHUT, NotAgreeing.FAULT(rank=rank, error=error))

    # -- the thread that trains ----------------------------------------------------------------------------------------

    def boundary(self) -> bool:
        """A step has ended; True if the table that the plugin has staged is now to become active. Never raises."""
        desk = self.desk
        if self.stopped:
            return False
        here = desk.here()
        backwards = here.backwards
        desk.stride, self._backwards = max(1, backwards - self._backwards), backwards  # the count may begin anew
        with desk.lock:
            meets = desk.member.meets(here)
            stop = Stop.MEET if meets else desk.member.boundary(here)
        if meets:
            self._interrupts.hold()
            with desk.lock:
                stop = desk.member.boundary(here)  # it may have been called off
        if stop is Stop.PASS:
            if desk.leader is not None and self._has_news():
                self._wake()
            return False
        if stop is Stop.MEET:
            began = time.monotonic()
            try:
                return self._meet(began)
            finally:
                self.held_s = max(self.held_s, time.monotonic() - began)
        desk.outbox.append((Kind.MISSED, desk.member.attempt, here))
        self._wake()
        return False

    def proceed(self) -> None:
        """The boundary is passed; where a table was to become active it is. Raises what the job's signals raise."""
        if not self._interrupts.held:  # nobody stood here
            return
        desk = self.desk
        if desk.member.phase is Phase.FLIP:
            with desk.lock:
                desk.member.flipped()
            self._wake()  # an attempt may be waiting for this
        self._interrupts.let_go()

    def leave(self, why: str) -> None:
        """This rank's probe is broken: it meets the others once more, to go back to the confirmed table with them."""
        self.desk.leaves = why
        self.desk.outbox.append((Kind.LEAVES, 0, why))
        self._wake()

    def _has_news(self) -> bool:
        """Rank 0: whether the other thread has something to begin."""
        desk, leader = self.desk, self.desk.leader
        assert leader is not None
        now = time.monotonic()
        if now >= self._look_at:  # asking costs a system call
            self._look_at = now + _NEWS_S
            if desk.published.is_new():
                return True
        if leader.wanted_trial and desk.keeper.over(desk.steps.ended):
            return True
        open_ = leader.wanted != leader.active or leader.closing
        return bool(open_) and leader.stage is Stage.QUIET and desk.steps.ended >= leader.not_before

    def _meet(self, began: float) -> bool:
        """Stand at the place until rank 0 has answered; True if the table is to change."""
        desk, member = self.desk, self.desk.member
        attempt = member.attempt
        plugin = desk.plugin
        asked, counts = (plugin.asked, plugin.counts()) if plugin is not None else (0, {})
        desk.stood = desk.here()._replace(asked=asked)
        desk.answered.acquire(blocking=False)  # of an older meeting
        report = Report.of(desk.stood, counts)
        if plugin is not None and plugin.untold:  # steps and backward passes alone prove nothing
            report = replace(report, clash=NotAgreeing.UNCOUNTED(rank=desk.rank))
        desk.outbox.append((Kind.STANDS, attempt, report))
        self._wake()
        desk.answered.acquire(timeout=max(0.0, _FOR_THE_TREE * MEET_S - (time.monotonic() - began)))
        with desk.lock:
            if member.phase is Phase.MET and desk.leader is not None and desk.leader.stage is Stage.APPOINTED:
                desk.leader.lost(desk.stood, desk.absent())
                member.answered(attempt, False)
                desk.outbox.append((Kind.ANSWER, attempt, False))
                self._wake()
            waits = member.phase is Phase.MET
            if waits and desk.leader is None:
                member.overdue()
        if waits and desk.leader is not None:  # the log is being set: what it holds then is the answer
            while member.phase is Phase.MET and self._thread.is_alive():
                desk.answered.acquire(timeout=1.0)
        elif waits:
            log = self.store.log(attempt, ABORT)
            with desk.lock:
                member.log_read(log)
        return member.phase is Phase.FLIP

    def _wake(self) -> None:
        tree = self._tree
        if tree is not None:
            tree.wake()

    # -- the thread in the background ----------------------------------------------------------------------------------

    def _run(self) -> None:
        self._tell_first(AgreementState.WAITING, NotTuning.NOT_ALL_THERE())
        opening, losses, told = 0, 0, False
        while True:
            why, closed, opened = "", "", 0.0
            try:
                why = self._gate(opening)
                if not why:
                    opened, self.desk.steps.agreed = time.monotonic(), True
                    self._tell_first(*TOGETHER)
                    assert self._tree is not None
                    rounds = Rounds(self.desk, self._tree, self.store, self._tell_first)
                    rounds.serve()
                    closed = rounds.closed
            except Exception as error:  # whatever it is: the job goes on
                why = str(error) or type(error).__name__
                # No connection to the store is not this rank's fault.
                if self.store.is_connected or not isinstance(error, ConnectionError):
                    why = NotAgreeing.FAULT(rank=self.desk.rank, error=why)
                if not (opened or opening):
                    why = self._give_up(why)
            self._leave()
            if self._closing:
                return
            if closed or not (opened or opening):
                self._stop(AgreementState.CLOSED if closed else AgreementState.SHUT, closed or why)
                return
            # The ranks have decided together, and a trial may be in force: only together can they take it back.
            if opened:
                told, losses = False, 0 if time.monotonic() - opened > _LATER_S else losses
            elif not told:
                told = True
                self._tell_first(None, NotAgreeing.NOT_CONNECTED(why=why))
            before = opening
            while opening == before:
                losses += 1
                again_s = min(_SOON_S * 2 ** min(max(0, losses - _OFTEN), 20), _LATER_S)
                if self.desk.rank:  # rank 0 goes first, and waits at its gate for ATTACH_S
                    again_s = min(again_s, ATTACH_S / 6) + _AFTER_S
                self._end.wait(again_s)  # most often the job has ended on another rank, and does so here in a moment
                if self._closing:
                    return
                opening = self.store.next_opening(before)

    def _leave(self) -> None:
        """The network is gone: what was announced is off; who stands asks the log."""
        desk = self.desk
        tree, self._tree = self._tree, None
        if tree is not None:
            tree.close()
        with desk.lock:
            desk.member.disconnected()
            if desk.leader is not None:
                desk.leader.disconnected()
                if desk.member.phase is Phase.MET and desk.leader.stage is Stage.QUIET:
                    desk.member.answered(desk.member.attempt, False)
            desk.outbox.clear()
            desk.release()
        while desk.member.phase in (Phase.MET, Phase.DOUBT) and not self._closing:
            time.sleep(0.01)  # the training thread is at the store, and the connection is its own for so long

    def _gate(self, opening: int) -> str:
        """Open the tree and pass the gate; why it is shut, empty if it is open. Raises OSError."""
        desk, end = self.desk, time.monotonic() + ATTACH_S
        if not self.store.is_connected:
            self.store.connect()
        tree = self._tree = Tree(desk.rank, desk.n_ranks, self.store.under(opening), self.store.host)
        if self._closing:
            raise ConnectionAbortedError(NotAgreeing.DESTROYED())
        # Anew: a part of it, or a rank that comes to an opening when rank 0 has left it misses the next one as well.
        tree.open(ATTACH_S / 3 if opening else ATTACH_S)
        reports: dict[int, list[Any]] = {}  # [identity, rank, what is wrong] of this rank and of those below
        sent = False
        while True:
            if desk.rank not in reports and (mine := self._identity()) is not None:
                reports[desk.rank] = mine
            if not sent and len(reports) > len(tree.children):
                sent, whole = True, one_of(list(reports.values()))
                if desk.rank == 0:
                    store = self.store
                    return self._passed(store.shuts(opening, whole[2]) if whole[2] else store.opens(opening))
                tree.up(Kind.READY, json.dumps(whole).encode())
            left = end - time.monotonic()
            if desk.rank in reports:  # who is at fault itself says so first
                left += ATTACH_S / 10
            if left < 0:
                not_ready = self._not_ready(tree, reports)
                if shut := self.store.hears(self.store.shuts(opening, not_ready)):
                    return self._passed(shut)
                if left < -ATTACH_S:  # the word of a job before this one
                    return not_ready
                left = 1.0  # it has opened this moment: the word is on its way
            for rank, kind, payload in tree.receive(left if desk.rank in reports else min(left, _LOOK_S)):
                if kind == Kind.READY:
                    reports[rank] = json.loads(payload)
                elif kind in (Kind.OPEN, Kind.SHUT):
                    return self._passed(payload.decode())

    def _passed(self, word: str) -> str:
        """The gate's word is handed on to the ranks below."""
        assert self._tree is not None
        shut = self.store.hears(word)
        self._tree.down(Kind.SHUT if shut else Kind.OPEN, word.encode())
        return shut

    def _identity(self) -> list[Any] | None:
        """What this rank would decide with; None as long as NCCL has not loaded the tuner here."""
        desk = self.desk
        if desk.plugin is None:
            return ["", desk.rank, NotAgreeing.NO_PLUGIN(rank=desk.rank)]
        if not desk.plugin.tuners:
            return None
        return [f"{desk.plugin.identity()} {self._versions}".strip(), desk.rank, ""]

    def _not_ready(self, tree: Tree, reports: dict[int, list[Any]]) -> str:
        rank = self.desk.rank
        if rank not in reports:
            return NotAgreeing.NO_TUNER(rank=rank)
        missing = tree.missing()
        if missing:
            return NotAgreeing.NO_FIRST_STEP(rank=missing[0], seconds=ATTACH_S, other=rank)
        late = next((child for child in tree.children if child not in reports), None)
        if late is not None:
            return NotAgreeing.NOT_READY_BELOW(seconds=ATTACH_S, rank=late)
        return NotAgreeing.NOT_READY(seconds=ATTACH_S)

    def _give_up(self, why: str) -> str:
        """This rank cannot take part: nobody may have a table. The reason that all hear of, which may be another's."""
        with contextlib.suppress(Exception):
            return self.store.hears(self.store.shuts(0, why)) or why
        return why

    def _stop(self, state: AgreementState, why: str) -> None:
        self.stopped = why or NotAgreeing.OVER()
        if self.desk.rank == 0:
            kept = ""
            leader = self.desk.leader
            if state is AgreementState.CLOSED and leader is not None:
                kept = KEEP_TRIAL if leader.trial else KEEP_CONFIRMED
            self._tell(state, self.stopped + kept)
        elif self.stopped.startswith(f"rank {self.desk.rank}:"):
            self._tell(None, self.stopped)

    def _tell_first(self, state: AgreementState | None, text: str) -> None:
        if self.desk.rank == 0:
            self._tell(state, text)

    def close(self) -> None:
        """This rank takes no further part; the active table stays."""
        self._closing = self.store.closing = True
        self.stopped = self.stopped or NotAgreeing.DESTROYED()
        self._end.set()
        if (tree := self._tree) is not None:
            tree.stop()

    def join(self) -> None:
        """After :meth:`close`, before the interpreter ends: no thread may be inside the store's code then."""
        self._thread.join(2 * WAIT_S)

    def close_inherited(self) -> None:
        """In the child of a fork: the connections are the parent's."""
        if self._tree is not None:
            self._tree.close_inherited()

"""One rank's part in the agreement of all ranks on tables: protocol.py with a store, a plugin and a thread.

The training thread has no part in it. The background thread votes and tells the plugin the decision. Rank 0's leads a
round for each published table, and again where a communicator lacks the one that stays (plans.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from ....traces.reasons import NotAgreeing, NotTuning, Why
from ....traces.records import AgreementState
from ..plugin.bindings import Plugin, Span
from ..shm import trial_of
from ..steps.steps import Steps
from . import protocol
from .ballot import Ballot
from .leader import Leader
from .lookout import IDLE_S
from .mailbox import TableMailbox
from .pace import Pace
from .protocol import Decision, LeftOut
from .store import LOST_S, Parted, Proposal, RoundStore

_IDLE_S, _A_RANK_S = 0.25, 1e-4  # until NCCL is looked for again; with many ranks the job's end waits longer
_LOOK_S = 0.02  # between two looks of rank 0 at what the daemon has published
#: Between two questions of rank 0 whether a rank or a communicator is new; IDLE_S where no rounds run.
_NEWS_S = 0.25
#: Between two looks whether a call is held back at a limit; with many ranks the store is asked later.
_HELD_S = 0.02
_LOOKS = 3  # of rank 0 for the votes, of another rank for the decision: so many a round takes at least
_VOTES_S = 0.5  # for the votes of all ranks, or four rounds as they last
_SOON_S, _LATER_S = 0.25, 60.0  # until a store that is away is tried again: at first, and at most
_FAULTS = 8  # doublings from the one to the other
_SILENT_S = 30.0  # a store that is away for longer is told of
#: The plugin holds a call for no longer, whatever becomes of this thread: a store that hangs with its connections open
#: never answers the request under way. Where requests fail, `RoundStore.settle` gives up first, and says why. Both do
#: so before PyTorch's watchdog (600 s) ends the job, as the other ranks have launched the collective.
HOLD_S = int(LOST_S) + 60
_IN_A_ROW = 3  # so many lost rounds, and the user hears of it
_WAITING = AgreementState.WAITING, NotTuning.NOT_ALL_THERE()
TOGETHER = AgreementState.OPEN, None  # all ranks decide together

#: A state, its reason, and the generation of a table that was refused, else 0.
Tell = Callable[[AgreementState | None, Why | None, int], None]


class Agreement:
    """One rank's part, for the life of one default process group."""

    def __init__(
        self,
        rank: int,
        n_ranks: int,
        plugin: Plugin,
        steps: Steps,
        published: TableMailbox,
        store: Callable[[], Any],
        versions: str = "",
        tell: Tell = lambda state, why, generation: None,
    ) -> None:
        """``store()`` gives a new connection of our own to the job's store.

        ``versions`` is what beside the plugin's identity must be equal on all ranks. ``tell`` hears on rank 0 of every
        change of state, elsewhere only of what is wrong with the rank itself.
        """
        self.rank, self.n_ranks = rank, n_ranks
        self.stopped: Why | None = None  # no table will change any more
        self._plugin, self._steps, self._versions, self._tell = plugin, steps, versions, tell
        self._store, self._end = RoundStore(store, rank, n_ranks), threading.Event()
        self._pace = Pace(_LOOKS * self._look_s)
        plugin.hold(HOLD_S)
        self._owner = plugin.join()  # what this agreement lays ready and limits in the plugin is its own
        self._ballot = Ballot(plugin, self._owner, self._pace, self._store)
        self._leader = Leader(n_ranks, published) if rank == 0 else None
        self._said: tuple[AgreementState, Why | None, int] | None = None  # last, on rank 0
        self._acted = 0  # the last round in which this rank had a vote
        self._thread = threading.Thread(target=self._run, name="dynamiccl-agreement", daemon=True)
        if not self._owner:
            self._stop(NotAgreeing.TOO_MANY(rank=rank))
            self._store.close()
            return
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread to be had
            self._stop(NotAgreeing.FAULT(rank=rank, error=error))
            self._store.close()

    @property
    def _look_s(self) -> float:
        """Seconds between two questions what was decided."""
        return _HELD_S + _A_RANK_S * self.n_ranks

    def _run(self) -> None:
        try:
            self._take_part()
        except Exception as error:  # a fault of ours writes one line into the job's output, and no traceback
            with contextlib.suppress(Exception):
                self._stop(NotAgreeing.FAULT(rank=self.rank, error=f"{type(error).__name__}: {error}"))
        self._part()

    def _take_part(self) -> None:
        """Rounds, whatever becomes of the store, until this rank is to part."""
        self._say(*_WAITING)
        faults, away_since, told = 0, 0.0, False
        while not self.stopped:
            began = time.monotonic()
            try:
                self._store.connect(self._leader.number if self._leader else 0)
                if self._leader is not None:
                    self._plugin.started(self._store.start)
                    self._leader.begin_life()
                    self._leader.tell()
                    self._lead_rounds(self._leader)
                else:
                    self._follow_rounds()
            except Parted:
                self.stopped = NotAgreeing.DESTROYED()
            except Exception as error:  # the job goes on, and tables change again when the store is there
                now = time.monotonic()
                if not faults or now - began > _LATER_S:
                    faults, away_since, told = 0, now, False
                faults += 1
                if now - away_since > _SILENT_S and not told and not self._end.is_set():
                    why = NotAgreeing.FAULT(rank=self.rank, error=str(error) or type(error).__name__)
                    self._tell(None, NotAgreeing.NOT_CONNECTED(why=why), 0)
                    told = True
                self._rest(min(_SOON_S * 2 ** min(faults, _FAULTS), _LATER_S))

    def _rest(self, seconds: float) -> None:
        """The store is away. Rank 0 still looks at what is wanted, and at its own communicators."""
        until = time.monotonic() + seconds
        while not self._end.wait(min(IDLE_S, max(until - time.monotonic(), 0))) and time.monotonic() < until:
            if self._leader is not None:
                with contextlib.suppress(Exception):
                    self._look(self._leader)
                    self._leader.sees(self._ballot.plans())
                    self._leader.tell()

    def _part(self) -> None:
        self._plugin.part(self._owner)
        if self._leader is not None:
            with contextlib.suppress(Exception):
                self._leader.sees(self._ballot.plans())
                self._leader.tell(is_last=True)
            with contextlib.suppress(Exception):  # the store is gone before
                self._store.part(self._leader.number + 1)
        self._store.close()

    # -- every rank but the first --------------------------------------------------------------------------------------

    def _follow_rounds(self) -> None:
        """Raises Parted where no life follows the one that rank 0 has ended."""
        while not self._end.is_set() and not self.stopped:
            try:
                self._follow_life()
            except Parted:
                self._store.leave_life()
                if not self._is_followed():
                    raise

    def _is_followed(self) -> bool:
        """Whether rank 0 begins another life: it may have made this rank's group anew, and this rank came first.

        Asked seldom, and no longer than the store answers: it may go with rank 0.
        """
        pause_s = IDLE_S
        with contextlib.suppress(Exception):
            while not self._end.wait(pause_s):
                if self._store.is_over():
                    return True
                pause_s = min(2 * pause_s, _LATER_S)
        return False

    def _follow_life(self) -> None:
        while not self._end.wait(self._store.lookout.pause_s()):
            if self._look_around() and self._ballot.is_here:
                self._tell_plans()
            if not self._store.has_changed():
                continue
            is_new_life, number = self._store.now()
            if is_new_life:
                self._plugin.started(self._store.start)
                self._ballot.is_here = False
                self._acted = min(self._acted, self._store.newest)  # another rank 0 counts anew
            if not self._ballot.is_here:
                self._present()
            proposal = self._store.proposal(number) if number else None
            if proposal is None:
                continue
            if not proposal.message:
                raise Parted
            decision = self._drive(protocol.follow(self.rank, number, self._identity()), proposal)
            if self.stopped:
                return
            if decision.switches:
                self._tell_plans()

    def _present(self) -> None:
        """Say that this rank is there, once NCCL has loaded the tuner."""
        while not self._plugin.tuners() and not self._end.wait(_IDLE_S):
            pass
        # Its plans first: rank 0 asks for those of all that have cast a vote.
        self._ballot.reported = {}
        self._tell_plans()
        self._store.cast(protocol.Vote(self.rank, 0, self._identity()), 0)
        self._store.says_news()
        self._ballot.is_here = True  # not before: a request that fails is made again

    def _tell_plans(self) -> None:
        """Rank 0 hears what each communicator here will answer. Where the request fails it is made again."""
        plans, self._ballot.reported = self._ballot.plans(), {}
        self._store.tell_plans(self._acted, plans)
        self._store.says_news()
        self._ballot.was_told(plans)

    def _look_around(self) -> bool:
        """Note how fast this rank goes; whether rank 0 shall hear of its plans."""
        if not self._pace.is_due():
            return False
        plans = self._ballot.plans()
        self._pace.sample(self._steps.ended, {comm: told.plan.made for comm, told in plans.items()})
        self._ballot.comms |= plans.keys()
        if self._leader is not None:
            self._leader.sees(plans)
            return False
        return self._ballot.has_news(plans, self._store.lookout.is_quiet())

    # -- rank 0 --------------------------------------------------------------------------------------------------------

    def _lead_rounds(self, leader: Leader) -> None:
        asked, lookout = 0.0, self._store.lookout
        while not self._end.wait(_LOOK_S):
            self._look(leader)
            self._look_around()
            self._store.keeps_watch()
            if time.monotonic() - asked > (IDLE_S if lookout.is_quiet() else _NEWS_S):
                asked = time.monotonic()
                if leader.hears(self._store):
                    self._say_what_ranks_report(leader)
                leader.tell()
            if leader.is_waiting(self._ballot.comms) or time.monotonic() < leader.not_before:
                continue
            message = leader.next()
            if message is None:
                continue
            if until_awake_s := self._store.wakes():
                leader.not_before = time.monotonic() + until_awake_s
                continue
            self._lead(leader, message)
            if self.stopped:
                return

    def _look(self, leader: Leader) -> None:
        """Whether there is another table. A daemon that waits for an old trial hears that it will not come."""
        generation, why = leader.look()
        if why:
            self._say(AgreementState.NO_TURNS, why, generation)
            if leader.lacked:
                self._say(AgreementState.LOSING, leader.lacked)
            else:
                self._say(*(TOGETHER if leader.switched else _WAITING))

    def _lead(self, leader: Leader, message: tuple[int, bytes]) -> None:
        """One round."""
        generation, table = message
        trial, left_out = trial_of(table), dict[int, LeftOut]()
        n_votes = leader.begin_round(message)
        proposal = Proposal(leader.number, table, n_votes, leader.is_again)
        rhythms: protocol.Rhythms = {}
        known = leader.gone, leader.stays, leader.loses, left_out, rhythms, leader.default
        part = protocol.lead(leader.number, self._identity(), generation, trial, *known)
        decision = self._drive(part, proposal)
        steady = leader.ended(message, decision, left_out, rhythms, self._ballot.comms)
        leader.sees(self._ballot.plans())
        if leader.number > 2 and not leader.silent:
            self._store.forget(leader.number - 2)  # all have voted since
        if not self._say_if_plans_differ(leader):
            self._say_what_came(leader, generation, decision, left_out, steady)

    def _say_what_ranks_report(self, leader: Leader) -> None:
        """A communicator that lacked what stays may have it, or be gone."""
        is_losing = self._said is not None and self._said[0] == AgreementState.LOSING
        if self._say_if_plans_differ(leader) or not is_losing:
            return
        if leader.switched and not (leader.lost or leader.lacked):
            self._say(*TOGETHER)

    def _say_if_plans_differ(self, leader: Leader) -> bool:
        """Whether ranks would run one collective under different tables: the default comes, and tuning ends."""
        if why := leader.mismatch():
            leader.fails(why)
        if leader.ends:
            self._say(AgreementState.CLOSED, leader.ends)
        return bool(leader.ends)

    def _say_what_came(
        self,
        leader: Leader,
        generation: int,
        decision: Decision,
        left_out: dict[int, LeftOut],
        steady: list[int],
    ) -> None:
        """Of a round. ``steady``: see :meth:`Leader.ended`."""
        refused = left_out.get(0)
        if decision.switches or leader.is_again:
            for unlike in leader.unlike(left_out):  # rank 0's tables change, so no state says it
                self._tell(None, unlike, 0)
            lacked = leader.lacked
            for turns in steady or [0] * (not lacked):
                self._say(*TOGETHER, turns)
            if lacked:
                self._say(AgreementState.LOSING, lacked)
        elif refused is not None and refused.is_refusal:
            self._say(AgreementState.LOSING, refused.why)
        elif refused is not None and refused.for_good:
            self._say(AgreementState.NO_TURNS, refused.why, generation)
        elif leader.lost >= _IN_A_ROW:
            self._say(AgreementState.LOSING, leader.why)

    # -- both ----------------------------------------------------------------------------------------------------------

    def _identity(self) -> str:
        return f"{self._plugin.identity()} {self._versions}".strip()

    def _drive(self, part: protocol.Part, proposal: Proposal) -> Decision:
        """Do what a part of the protocol asks for, one thing after the other; the decision of the round."""
        began, result, held = time.monotonic(), None, False
        while True:
            try:
                request = part.send(result)
            except StopIteration as end:
                decision: Decision = end.value
                leader, self._acted = self._leader, proposal.number
                if leader is None or leader.is_whole or not leader.is_again:  # else it was our own waiting
                    self._pace.round_took(time.monotonic() - began, held, leader is None or leader.is_whole)
                return decision
            result = self._do(request, proposal)
            held |= isinstance(request, protocol.Await) and result is None

    def _do(self, request: protocol.Request, proposal: Proposal) -> Any:
        store, number = self._store, proposal.number
        match request:
            case protocol.Propose():
                return store.propose(proposal)
            case protocol.Stage():
                return self._ballot.staged(proposal.message)
            case protocol.Limit():
                return self._ballot.limits(proposal.message, proposal.again)
            case protocol.Cast(vote):
                with contextlib.suppress(Exception):  # it may have been heard all the same: the register says
                    store.cast(vote, proposal.n_votes)
                return None
            case protocol.Gather():
                return self._gathered(proposal)
            case protocol.Settle(decision):
                return store.settle(number, decision)
            case protocol.Await():
                return self._awaited(number)
            case protocol.Switch(comm, span):
                return self._switch(comm, span)
            case protocol.Lift(generation):
                return self._plugin.lift(self._owner, generation)

    def _gathered(self, proposal: Proposal) -> list[protocol.Vote]:
        """The votes of a round, as far as they come in time."""
        leader, store, number = self._leader, self._store, proposal.number
        assert leader is not None
        longest_s = _VOTES_S + 2 * store.lookout.spread_s()
        if leader.is_again:
            longest_s = self._pace.again_s(longest_s, store.answer_s)
        else:
            longest_s = max(longest_s, 4 * self._pace.round_s)
        votes = store.votes(number, leader.here, longest_s)
        leader.votes(votes, proposal.n_votes)
        return votes

    def _switch(self, comm: int, span: Span) -> None:
        try:
            self._plugin.switch(self._owner, comm, *span)
        except OSError as error:
            # The other ranks have the table now: no further one, and the user hears of it.
            self._stop(NotAgreeing.NOT_SWITCHED(rank=self.rank, error=error))

    def _awaited(self, number: int) -> Decision | None:
        ask_s = max(self._look_s, self._pace.round_s / 4)
        next_s = time.monotonic() + ask_s
        with contextlib.suppress(Exception):  # the store is away: the register must be asked until it answers
            while not self._plugin.waiting() and not self._end.is_set():
                if time.monotonic() >= next_s:
                    if (found := self._store.decision(number)) is not None:
                        return found
                    next_s = time.monotonic() + ask_s
                self._end.wait(_HELD_S)
        return None

    def _say(self, state: AgreementState, why: Why | None, generation: int = 0) -> None:
        word = state, why, generation
        if self._leader is not None and word != self._said:
            self._said = word
            self._tell(*word)

    def _stop(self, why: Why) -> None:
        self.stopped = why
        if self._leader is None:
            self._tell(None, why, 0)
        elif not self._leader.switched:
            self._say(AgreementState.SHUT, why)
        else:
            is_default = not self._leader.not_default()
            self._say(AgreementState.CLOSED, why if is_default else NotAgreeing.TABLE_STAYS(why=why))

    def close(self) -> None:
        """This rank takes no further part; what is there to stay stays."""
        self._store.closing = True
        self.stopped = self.stopped or NotAgreeing.DESTROYED()
        self._end.set()

    def is_alive(self) -> bool:
        """Whether its thread still runs."""
        return self._thread.is_alive()

    def join(self) -> None:
        """After :meth:`close`, before the interpreter ends: no thread may be inside the store's code then."""
        if self._thread.ident is not None:
            self._thread.join(8 * (_IDLE_S + _A_RANK_S * self.n_ranks))

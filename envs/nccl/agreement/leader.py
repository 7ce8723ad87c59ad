"""What rank 0 knows between two rounds: who is there, what the ranks report, which tables are wanted.

The table to stay is led once for all communicators, and then again, ever more seldom, while one lacks it: plans.py says
which, from what the ranks report. A trial is led once, after the table to stay.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from ....traces.reasons import NotAgreeing, Why
from ..shm import rows_hash, trial_of
from ..steps.user_numbers import attach_s
from .mailbox import TableMailbox
from .plans import Lack, Report, Told, all_there, lacking, mismatch
from .protocol import Decision, LeftOut, Rhythms, Vote
from .store import RoundStore

_AGAIN_S = 0.2  # until a lost round is tried again, doubled each time, up to _LACKS_MOST_S
#: A communicator without a collective for so long is used no more: it does not go to the end of its trial.
_RESTS_S = 60.0
PATIENCE = 5  # so many lost rounds in a row, and rank 0 goes on without who does not vote
#: Seconds until what stays is led again for who lacks it, doubled up to the second.
_LACKS_S, _LACKS_MOST_S = 1.0, 60.0
#: So long the first round of a life waits for those that were there before rank 0 lost its connection. Who has kept its
#: own hears of the new life within a second. Who has lost it too may try again a minute later: a later round has it.
_BACK_S = 5.0

Message = tuple[int, bytes]  # generation, table


class Leader:
    """What rank 0 knows of the other ranks, and which tables are wanted."""

    def __init__(self, n_ranks: int, published: TableMailbox) -> None:
        self.number = 0  # of the last round
        self.here: set[int] = set()  # ranks that have told their plans in this life
        self.silent: set[int] = set()  # of them, who has not voted in the last round
        self.reports: dict[int, Report] = {0: Report(0, {})}
        self.rounds: dict[int, int] = {}  # the last that has given each communicator a table
        self.gone: dict[int, Why] = {}  # communicators that have left for good, and why
        self.switched: set[int] = set()  # communicators that have had a part, and were not left out since
        self.lost = 0  # rounds in a row
        self.why: Why | None = None  # the last of them was
        self.not_before = 0.0  # of the next round
        self.ends: Why | None = None  # nothing but the default is led any more
        self.is_again = False  # the round under way leads what stays again
        self.is_whole = True  # it has had all votes that it waited for
        # A table in turns, and the rhythms in it of communicators that rank 0 is not in: they may be turns late while
        # its steps look whole, until the next round shows it.
        self._turns: tuple[int, Rhythms] = (0, {})
        self._n_ranks, self._published = n_ranks, published
        self.default = rows_hash(published.default(0))  # of rows that leave NCCL untouched
        published.read_note()
        self._stays: Message | None = published.confirmed()  # the newest table to stay
        self._is_led = False  # a round has given it to anybody
        self._again_at, self._pause_s = 0.0, _LACKS_S  # it is led again then, for who lacks it
        self._trial: Message | None = None  # wanted, and not led yet
        self._is_trial = False  # the round under way
        self._tries: frozenset[int] = (
            frozenset()
        )  # rank 0's communicators in the last trial, until its end is seen
        self._is_withdrawn = False  # that trial is: a table to stay came after it
        self._let_go: set[int] = set()  # communicators without which a trial went on
        self._whys: dict[int, Why] = {}  # why the last round of what stays has left a communicator out
        self._unlike: set[Why] = set()  # that were told
        self._seen: dict[
            int, tuple[int, float]
        ] = {}  # collectives of rank 0's, and since when there are so many
        self._awaited = set(range(1, n_ranks))  # by the next round
        self._until = time.monotonic() + attach_s()

    # -- who is there --------------------------------------------------------------------------------------------------

    def begin_life(self) -> None:
        """Rank 0 has connected anew: every rank has to come again. What their plugins were told still holds."""
        if self.here and not self._awaited:  # nobody waits for who was silent
            self._awaited, self._until = self.here - self.silent, time.monotonic() + _BACK_S
        self.here, self.silent = set(), set()

    def hears(self, store: RoundStore) -> bool:
        """Whether ranks have come, or have told other plans."""
        if not store.has_news():
            return False
        absent = set(range(1, self._n_ranks)) - self.here
        came = (
            absent if store.are_there(sorted(absent)) else {one for one in absent if store.are_there([one])}
        )
        if came:
            self.lost, self.not_before = 0, 0.0  # they were lost without who comes now
        self.here |= came
        before = self._lacks()
        for rank, report in store.reports(sorted(self.here)).items():
            self._reported(rank, report)
        if self._lacks().keys() - before.keys() - self.gone.keys():
            self._again_at = 0.0
        return True

    def _reported(self, rank: int, report: Report) -> None:
        if rank not in self.reports or report.number >= self.reports[rank].number:
            self.reports[rank] = report

    def votes(self, votes: Collection[Vote], n_votes: int) -> None:
        """The last votes of all ranks that are here; so many were waited for."""
        self.silent = {vote.rank for vote in votes if vote.round != self.number}
        self.is_whole = len(votes) - len(self.silent) >= n_votes
        for vote in votes:
            comms = {comm: Told(word.n_ranks, word.plan) for comm, word in vote.comms.items()}
            if comms:
                self._reported(vote.rank, Report(vote.round - 1, comms))

    def sees(self, plans: Mapping[int, Told]) -> None:
        """The plans of rank 0's own communicators, now."""
        now = time.monotonic()
        for comm, told in plans.items():
            if comm not in self._seen or self._seen[comm][0] != told.plan.made:
                self._seen[comm] = told.plan.made, now
        self.reports[0] = Report(self.number, plans)
        if self._tries and self._is_past():
            self._tries = frozenset()
            self._published.trial_is_over()  # it has ended no rank

    def _is_past(self) -> bool:
        """Whether the last trial has ended on one of rank 0's communicators, and is under way on none of them.

        One that has not come to its beginning by then rests, and so does one that stands still.
        """
        own = self.reports[0].comms
        there = [comm for comm in self._tries if comm in own]
        tries = [comm for comm in there if own[comm].plan.tries]
        if any(self._moves(comm) and own[comm].plan.first <= own[comm].plan.made for comm in tries):
            return False
        return not there or len(tries) < len(there)

    def _moves(self, comm: int, rests_s: float = _RESTS_S) -> bool:
        return time.monotonic() - self._seen[comm][1] < rests_s

    def is_waiting(self, comms: Collection[int]) -> bool:
        """Whether ranks, or rank 0's own communicators ``comms``, may still come before the next round."""
        is_late = time.monotonic() > self._until
        return not is_late and (bool(self._awaited - self.here) or not comms)

    # -- what is wanted ------------------------------------------------------------------------------------------------

    def look(self) -> tuple[int, Why | None]:
        """Whether the daemon has published another table; if it is not led, its generation, and why."""
        if (found := self._published.take()) is None:
            return 0, None
        if self.ends:
            return 0, None
        if why := self._published.refuses(found):
            return found[0], why
        self.not_before, self._trial = 0.0, found
        if not trial_of(
            found[1]
        ).trial_steps:  # the one before may have been withdrawn: nobody gets it any more
            self._stay(found)
        return 0, None

    def _stay(self, message: Message) -> None:
        self._stays, self._trial, self._is_led, self._pause_s = message, None, False, _LACKS_S

    def fails(self, why: Why) -> None:
        """Two plans differ: the default is all that is led from now on."""
        if not self.ends:
            self.ends, self.not_before = why, 0.0
            generation = self._stays[0] if self._stays else 1
            self._stay((generation, self._published.default(generation)))

    @property
    def stays(self) -> int | None:
        """Hash of the rows that are there to stay; None: no such table."""
        return None if self._stays is None else rows_hash(self._stays[1])

    def _lacks(self) -> dict[int, Lack]:
        """What stays. A trial that is wanted lacks nothing."""
        if self.stays is None:
            return {}
        may_try = not self._is_withdrawn
        return lacking(self.stays, self.reports, self.rounds, default=self.default, may_try=may_try)

    @property
    def lacked(self) -> Why | None:
        """Why a communicator runs another table than the one that stays; None if none does, as far as is known."""
        lacks = self._lacks() if self._is_led else {}
        return next((self._why(comm, lack) for comm, lack in lacks.items() if lack.has_table), None)

    def _why(self, comm: int, lack: Lack) -> Why:
        return lack.why if lack.is_for_good else self._whys.get(comm, lack.why)

    def mismatch(self) -> Why | None:
        """Which ranks would run one collective under different tables; None if none would."""
        return mismatch(self.reports, self.rounds)

    def not_default(self) -> Why | None:
        """Why not all living communicators come to NCCL's default; None if they do."""
        lacks = lacking(self.default, self.reports, self.rounds, default=self.default)
        return next((self._why(comm, lack) for comm, lack in lacks.items()), None)

    def _still_lacks(self) -> Why | None:
        """Why not all communicators have the table that stays; None if they do, as far as they report."""
        if self._stays is not None and not self._is_led:
            return NotAgreeing.NOT_SERVED(rank=0)
        return next((self._why(comm, lack) for comm, lack in self._lacks().items()), None)

    def tell(self, is_last: bool = False) -> None:
        """Whether all run the default, for who waits for it beside the job.

        One that is ahead of a communicator in use is not in force yet. At one that rests it is, but for its next calls.
        """
        own = self.reports[0].comms
        ahead = any(plan.made < plan.since and self._moves(comm, _LACKS_S) for comm, (_, plan) in own.items())
        why = self.not_default() or (NotAgreeing.NOT_SERVED(rank=0) if ahead and not is_last else None)
        lacks = self._still_lacks()
        if (
            self.default and not is_last
        ):  # with --headroom NCCL is untouched only where the ranks have such a table
            why = why or lacks
        self._published.tell_plans(why, lacks, is_last)

    def next(self) -> Message | None:
        """The table of the next round, if there is to be one: first what stays, for who does not have it yet.

        During a trial it waits: it would end the trial. One that nobody has yet waits for none: it may be there to
        withdraw what runs.
        """
        if self._stays is not None and not self._is_led:
            return self._stays
        now = time.monotonic()
        if now >= self._again_at and (self._is_withdrawn or not self._tries):
            if self._lacks().keys() - self.gone.keys():
                return self._stays
            self._again_at = now + _LACKS_S  # who lacks it is looked at again
        return self._trial

    def begin_round(self, message: Message) -> int:
        """The votes to wait for: of those that are here. A table that nobody has yet waits for no silent rank."""
        self.number += 1
        self._awaited = set()
        self._is_trial = trial_of(message[1]).trial_steps > 0
        if self._is_trial:
            self._published.trial_begins(message)
        # Where plans differ all members set limits: one that has the default may have it by itself.
        self.is_again = message == self._stays and self._is_led and not self.ends
        expected = self.here if self.is_again else self.here - self.silent
        return max(
            len(expected), min(1, len(self.here))
        )  # one is worth waiting for: who was silent may be back

    def loses(self, left_out: Mapping[int, LeftOut]) -> bool:
        """Whether the round is lost rather than go on without them. A table to stay waits for nobody.

        A trial waits for communicators that have had a part, and for those of a rank that is silent. But not for ever,
        and not again for those that it has let go.
        """
        if not self._is_trial or self.lost >= PATIENCE:
            return False
        for_now = {comm for comm, one in left_out.items() if not one.for_good} - self._let_go
        of_silent = {comm for rank in self.silent & self.reports.keys() for comm in self.reports[rank].comms}
        of_silent = {comm for comm in of_silent if all_there(comm, self.reports)}
        return bool(for_now & (self.switched | of_silent))

    # -- what came of it -----------------------------------------------------------------------------------------------

    def ended(
        self,
        message: Message,
        decision: Decision,
        left_out: Mapping[int, LeftOut],
        rhythms: Rhythms,
        own: Collection[int],
    ) -> list[int]:
        """A round is over. ``own``: the communicators that rank 0 is in.

        Returns the generations of tables in turns of which it has shown that all communicators turn where rank 0's
        steps end: their steps count if they look whole.
        """
        if self._is_trial and not decision.switches:
            self._published.trial_is_over()
        self.rounds |= dict.fromkeys(decision.switches, self.number)
        if self._fails_by(left_out):
            return []
        is_refused = 0 in left_out and left_out[0].for_good
        if self.is_again:
            self._pause_s = min(2 * self._pause_s, _LACKS_MOST_S)
        elif not (decision.switches or is_refused):
            self._lose(left_out)
            return []
        else:
            self.lost = 0
        if self._is_trial:
            self._trial = None
        else:
            self._led(left_out, is_refused)
        return self._switch(message, decision, left_out, rhythms, own) if decision.switches else []

    def _fails_by(self, left_out: Mapping[int, LeftOut]) -> bool:
        """Note who has left for good; whether plans differ, for the first time."""
        had_ended = bool(self.ends)
        for comm, one in left_out.items():
            if one.is_mismatch:
                self.fails(one.why)
            elif comm and one.for_good:
                self.gone[comm] = one.why
        return bool(self.ends) and not had_ended

    def _led(self, left_out: Mapping[int, LeftOut], is_refused: bool) -> None:
        """What stays was led: it is led again later, for who lacks it."""
        self._whys = {comm: one.why for comm, one in left_out.items()}
        self._is_led, self._is_withdrawn = not is_refused, True
        self._again_at = time.monotonic() + self._pause_s
        if is_refused:
            self._stays = None

    def _lose(self, left_out: Mapping[int, LeftOut]) -> None:
        """No communicator has switched: the round is led again, later each time."""
        self.lost += 1
        reasons = [left_out[0]] if 0 in left_out else list(left_out.values())
        self.why = reasons[0].why if reasons else NotAgreeing.LATE_STORE()
        self.not_before = time.monotonic() + min(_AGAIN_S * 2 ** min(self.lost, 2 * PATIENCE), _LACKS_MOST_S)

    def _switch(
        self,
        message: Message,
        decision: Decision,
        left_out: Mapping[int, LeftOut],
        rhythms: Rhythms,
        own: Collection[int],
    ) -> list[int]:
        switched = set(decision.switches)
        # Turns of a step need a rhythm: who has none keeps its table, and is in later rounds as before.
        self.switched = switched | self.switched.difference(left_out)
        self._let_go -= switched
        (before, kept), self._turns = self._turns, (0, {})
        is_steady = all(rhythms.get(comm) == rhythm for comm, rhythm in kept.items())
        steady = [before] if before and is_steady else []
        if trial_of(message[1]).turn_steps:
            agreed = {comm for comm in switched.difference(own) if decision.switches[comm].a_step}
            # Long turns end nowhere in particular. Those that lie about as long are taken as they are.
            if agreed:
                self._turns = decision.generation, {comm: rhythms[comm] for comm in agreed}
            else:
                steady.append(decision.generation)
        if self._is_trial:
            self._let_go |= {comm for comm, one in left_out.items() if not one.for_good}
            self._tries, self._is_withdrawn = frozenset(switched.intersection(own)), False
        return steady

    def unlike(self, left_out: Mapping[int, LeftOut]) -> list[Why]:
        """Why ranks with other code have no part in the round, without what was asked before."""
        whys = {one.why for one in left_out.values() if one.why.reason is NotAgreeing.NOT_ALIKE}
        fresh = sorted(whys - self._unlike, key=Why.packed)
        self._unlike |= whys
        return fresh

"""What rank 0 knows between two rounds: the other ranks, the tables that are wanted, how the last round ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from ....traces.reasons import NotAgreeing
from ....traces.records import Trial
from ..plugin.bindings import Span
from ..shm import trial_of
from .arrivals import Arrivals
from .in_force import InForce
from .mailbox import TableMailbox
from .protocol import Decision, LeftOut, Rhythms
from .store import RoundStore

_AGAIN_S = 0.2  # until a lost round is tried again, doubled each time
#: A communicator without a collective for so long is used no more: it does not go to the end of its trial.
_RESTS_S = 60.0
PATIENCE = 5  # so many lost rounds in a row, and rank 0 goes on without who does not vote
#: Seconds until what stays is led again for the communicators that a round left out for now, doubled up to the second.
_OWED_S, _OWED_MOST_S = 1.0, 60.0


@dataclass
class LastTable:
    """The table that was decided last."""

    trial: Mapping[int, Span] | None = (
        None  # where it holds on rank 0's own communicators; None: it is there to stay
    )
    begun: Mapping[int, Span] | None = None  # of the last trial, until its end was seen
    in_force: InForce = field(default_factory=InForce)
    generation: int = 0  # whose turns the next round checks; 0: none
    rhythms: Rhythms = field(
        default_factory=dict
    )  # of the communicators in these turns that rank 0 is not in
    #: Generations of which this round has shown that all communicators turn where rank 0's steps end, if they look
    #: whole.
    steady: list[int] = field(default_factory=list)
    #: Collectives made on each communicator at the last look, and since when there are so many.
    _seen: dict[int, tuple[int, float]] = field(default_factory=dict)

    def check(self, rhythms: Rhythms) -> None:
        """The next round: whether the communicators of the last turns have kept their rhythm on all ranks."""
        is_steady = all(rhythms.get(comm) == rhythm for comm, rhythm in self.rhythms.items())
        self.steady = [self.generation] if is_steady and self.generation else []
        self.generation, self.rhythms = 0, {}

    def take_turns(self, generation: int, foreign: Rhythms) -> None:
        """Turns begin. ``foreign``: the rhythms in them of communicators that rank 0 is not in.

        Rank 0 sees its own communicators only. Others may be turns late while its steps look whole, until the next
        round shows it.
        """
        if foreign:
            self.generation, self.rhythms = generation, foreign
        else:
            self.steady.append(generation)

    def is_over(self, counts: Mapping[int, int]) -> bool:
        """Whether no trial is under way; ``counts``: collectives made on each communicator of rank 0.

        Over is a trial that has ended on one of them and is under way on none. One that has not come to its beginning
        by then rests, and so does one that stands still.
        """
        return self.trial is None or self._is_past(self.trial, counts)

    def begin_trial(self, spans: Mapping[int, Span]) -> None:
        """A trial was decided. ``spans``: where it holds on rank 0's own communicators."""
        self.trial = self.begun = spans

    def stay(self, switches: Mapping[int, Span]) -> None:
        """A table to stay was decided: a trial that is under way ends where it begins."""
        self.trial = None
        if self.begun is not None:
            self.begun = {
                comm: span._replace(until=min(span.until, switches[comm].since)) if comm in switches else span
                for comm, span in self.begun.items()
            }

    def is_survived(self, counts: Mapping[int, int]) -> bool:
        """Whether the end of the last trial is seen, for the first time. None of it without rank 0 is ever seen."""
        is_seen = bool(self.begun) and self._is_past(self.begun or {}, counts)
        self.in_force.sees(counts)
        if is_seen:
            self.begun = None
        return is_seen

    def _is_past(self, trial: Mapping[int, Span], counts: Mapping[int, int]) -> bool:
        moving = self._moving(counts)
        found = [(comm, counts[comm], span) for comm, span in trial.items() if comm in counts]
        if any(comm in moving and span.since <= made < span.until for comm, made, span in found):
            return False
        return not found or any(made >= span.until for _, made, span in found)

    def _moving(self, counts: Mapping[int, int]) -> set[int]:
        """The communicators that have made a collective lately."""
        now = time.monotonic()
        for comm, made in counts.items():
            if comm not in self._seen or self._seen[comm][0] != made:
                self._seen[comm] = made, now
        return {comm for comm in counts if now - self._seen[comm][1] < _RESTS_S}


@dataclass
class Stays:
    """The newest table to stay."""

    message: tuple[int, bytes] | None  # None: there is none
    is_decided: bool = False  # whether a round has given it to anybody
    served: set[int] = field(default_factory=set)  # communicators that have it
    is_owed: bool = False  # the last round left out communicators that may get it later, or end a trial
    lacks: str = ""  # why a communicator runs something else, as its last round has shown
    is_led_again: bool = False  # for them, in the round under way
    again_at: float = 0.0  # when that is due
    _pause_s: float = _OWED_S

    def given(self, switches: Collection[int], is_owed: bool) -> None:
        """A round for it is over."""
        self.is_decided = True
        self.served.update(switches)
        self.is_owed = is_owed
        self.pauses()

    def pauses(self) -> None:
        """It is led again later, each time after a longer pause: what is wanted meanwhile goes first."""
        self.again_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _OWED_MOST_S)

    @property
    def is_due(self) -> bool:
        """It is led again now."""
        return self.is_owed and time.monotonic() >= self.again_at


class Leader:
    """What rank 0 knows of the other ranks, and which tables are wanted."""

    def __init__(self, n_ranks: int, published: TableMailbox) -> None:
        self.arrivals = Arrivals(n_ranks)
        self.silent: set[int] = set()  # of those that are here, who has not voted in the last round
        self.gone: dict[int, str] = {}  # communicators that have left for good, and why
        self.switched: set[int] = set()  # communicators of the last round that was not lost
        self.news = False  # a rank or a communicator is new: it may not have what stays
        self.number, self.lost, self.why = (
            0,
            0,
            "",
        )  # the last round, lost ones in a row, why the last of them was
        self.not_before = 0.0  # of the next round
        self._published = published
        published.read_note()
        self._wanted: tuple[int, bytes] | None = None  # to be in force, and is not
        self._stays = Stays(published.confirmed())
        self._is_trial = False  # the round under way
        self._unlike: set[str] = set()  # reasons that were told
        self.last = LastTable()

    def look(self) -> tuple[int, str]:
        """Whether the daemon has published another table; if it is not led, its generation, and why."""
        if (found := self._published.take()) is None:
            return 0, ""
        if why := self._published.refuses(found):
            return found[0], why
        self._wanted, self.not_before = found, 0.0
        if not trial_of(found[1]).trial_steps:
            # The one before may have been withdrawn: nobody gets it any more.
            self._stays = Stays(found)
        return 0, ""

    def sees(self, counts: Mapping[int, int]) -> None:
        """``counts``: see :meth:`LastTable.is_over`. A trial that has come to its end has ended no rank."""
        if self.last.is_survived(counts):
            self._published.trial_is_over()

    def begin_life(self) -> None:
        """Rank 0 has connected anew. What the ranks' plugins were told still holds."""
        self.arrivals.begin_life(self.silent)
        self.silent = set()

    def hears(self, store: RoundStore) -> None:
        """Whether ranks have come, or communicators."""
        if store.has_news():
            self.news = True
            if self.arrivals.hear(store):
                self.lost = 0  # they were lost without who comes now

    def is_waiting(self, comms: frozenset[int]) -> bool:
        """Whether ranks, or rank 0's own communicators ``comms``, may still come before the next round."""
        return self.arrivals.are_awaited() or not (comms or self.arrivals.is_late())

    def misses(self) -> str:
        """Why no round can be led, not even later; empty if one can."""
        is_hopeless = self.lost >= PATIENCE and not self.switched
        return self.why if is_hopeless and self.arrivals.are_over() else ""

    def next(self, counts: Callable[[], Mapping[int, int]]) -> tuple[int, bytes] | None:
        """The table of the next round, if there is to be one: first what stays, for who does not have it yet.

        During a trial it waits: it would end the trial. One that nobody has yet waits for none: it may be there to
        withdraw what runs. ``counts()``: see :meth:`LastTable.is_over`.
        """
        stays = self._stays.message
        if stays is None or not self._stays.is_decided:
            return stays or self._wanted
        is_missed = self.news or not self.switched or self._stays.is_due
        return stays if is_missed and self.last.is_over(counts()) else self._wanted

    def begin_round(self, message: tuple[int, bytes]) -> int:
        """The votes to wait for."""
        self.number += 1
        self.arrivals.begin_round()
        self._is_trial = trial_of(message[1]).trial_steps > 0
        if self._is_trial:
            self._published.trial_begins(message)
        self._stays.is_led_again = message == self._stays.message and self._stays.is_owed
        here = len(self.arrivals.here)
        # One vote at least is worth waiting for: who was silent may be back. Who is late votes, if it has the time;
        # a trial or a withdrawal does not wait for it.
        silent = self.silent - self.arrivals.late if self.is_owed else self.silent
        return max(here - len(silent), min(1, here))

    @property
    def is_owed(self) -> bool:
        """Whether the round under way leads what stays again, for communicators that an earlier one left out."""
        return self._stays.is_led_again

    @property
    def served(self) -> set[int] | None:
        """Communicators that have the table that is there to stay; None: there is none."""
        return None if self._stays.message is None else self._stays.served

    def loses(self, left_out: Mapping[int, LeftOut]) -> bool:
        """Whether the round is lost rather than go on without them. A table to stay waits for nobody.

        A trial waits for communicators that were in the last round, and for those of a rank that is silent for the
        first time. But not for ever.
        """
        if not self._is_trial or self.lost >= PATIENCE:
            return False
        for_now = {comm for comm, one in left_out.items() if not one.for_good}
        if not self.silent - self.arrivals.given_up:
            for_now &= self.switched
        return bool(for_now)

    def lacks(self, left_out: Mapping[int, LeftOut]) -> str:
        """Why a communicator runs something else than the table to stay of this round; empty if none does.

        It may have left for good: it keeps what it has.
        """
        stays = self._stays.message
        if self._is_trial or stays is None:
            return ""
        for comm, one in left_out.items():
            if self.last.in_force.differs(comm, stays[1]):
                return one.why
        return ""

    @property
    def lacked(self) -> str:
        """Why a communicator runs something else than what stays, as its last round has shown; a trial says nothing."""
        return self._stays.lacks

    def _owes(self, left_out: Mapping[int, LeftOut]) -> bool:
        """Whether what stays is to be led again for communicators that a round has left out: they may get it later.

        Where a trial may still run the next round says that it has ended, also if they have left for good.
        """
        trials = self.last.in_force.trials
        return any(comm and (not one.for_good or comm in trials) for comm, one in left_out.items())

    def ended(
        self,
        message: tuple[int, bytes],
        decision: Decision,
        left_out: dict[int, LeftOut],
        rhythms: Rhythms,
        own: Collection[int],
    ) -> None:
        """A round is over. ``own``: the communicators that rank 0 is in."""
        self._note(left_out)
        if self._is_trial and not decision.switches:
            self._published.trial_is_over()
        is_refused = 0 in left_out and left_out[0].for_good
        if not (decision.switches or is_refused):
            self._lose(left_out)
            return
        stays = self._stays
        is_repeated = message == stays.message and stays.is_decided
        if not is_repeated:  # a trial that waits goes on counting
            self.lost = 0
        if message == self._wanted:
            self._wanted = None
        self.last.in_force.decided(message[1], decision.switches)
        if message == stays.message:
            self.news = False
            stays.message = None if is_refused else message
            self._give(decision.switches, left_out)
        if decision.switches:
            self._switch(trial_of(message[1]), decision, left_out, rhythms, own)

    def _give(self, switches: Mapping[int, Span], left_out: dict[int, LeftOut]) -> None:
        """A round for what stays is over: note who has it, and who does not."""
        named = {*switches, *left_out}
        left_out |= self.arrivals.unheard(named)
        stays = self._stays
        stays.lacks = self.lacks(left_out)
        is_owed = self._owes(left_out)
        stays.given(switches, is_owed)

    def _note(self, left_out: Mapping[int, LeftOut]) -> None:
        """Who has left for good."""
        for comm, one in left_out.items():
            if comm and one.for_good:
                self.gone[comm] = one.why

    def _lose(self, left_out: dict[int, LeftOut]) -> None:
        """No communicator has switched: the round is led again, later each time."""
        if self.is_owed:
            self._stays.pauses()
            if not self.news:  # nothing that is wanted was lost
                return
        self.lost += 1
        reasons = [left_out[0]] if 0 in left_out else list(left_out.values())
        self.why = reasons[0].why if reasons else NotAgreeing.LATE_STORE()
        pause_s = _AGAIN_S * 2 ** min(self.lost, PATIENCE)
        self.not_before = time.monotonic() + pause_s

    def _switch(
        self,
        trial: Trial,
        decision: Decision,
        left_out: Collection[int],
        rhythms: Rhythms,
        own: Collection[int],
    ) -> None:
        self.arrivals.given_up = (
            set(self.silent) if trial.trial_steps else self.arrivals.given_up & self.silent
        )
        switched = set(decision.switches)
        last = self.last
        last.check(rhythms)
        if trial.turn_steps:
            foreign = {comm: rhythms[comm] for comm in switched.difference(own)}
            last.take_turns(decision.generation, foreign)
            # Turns need a rhythm: who has none keeps its table, and is in later rounds as before.
            switched |= self.switched.difference(left_out)
        self.switched = switched
        if trial.trial_steps:
            last.begin_trial({comm: span for comm, span in decision.switches.items() if comm in own})
        else:
            last.stay(decision.switches)

    def unlike(self, left_out: Mapping[int, LeftOut]) -> str:
        """Why ranks with other code have no part in the round, unless it was asked before; empty if there are none."""
        whys = {one.why for one in left_out.values() if NotAgreeing.NOT_ALIKE.facts(one.why)}
        fresh = sorted(whys - self._unlike)
        self._unlike |= whys
        return "; ".join(fresh)

    def is_over(self, comms: frozenset[int]) -> bool:
        """Whether all of rank 0's communicators have left for good."""
        return bool(comms) and comms <= self.gone.keys()

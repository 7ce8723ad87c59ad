"""A running job as the tuner sees it: publish a table, wait some steps, read what they took.

``Job`` reads the rings of the run folder and writes its table. It knows nothing of policies, and starts nothing.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...traces.assemble import EVENT_COLUMNS, WAIT_COLUMNS, empty, joined
from ...traces.reasons import Happened, NotAgreeing, NotTuning, Why
from ...traces.records import Decision, Decisions, Slot, Table
from ..nccl.shm import RunFolder
from ..search.interfaces import QUAD
from .confirmed import decided, without_fatal
from .confirmed import note_confirmed as note_confirmed
from .confirmed import read_confirmed as read_confirmed
from .job_ends import JobEnded
from .obedience import Disobeyed
from .pauses import Attempt, Cut, LastRound, Rhythm
from .reader import Reader, log
from .turns import ALIKE_STEPS, MOST_FAILED, Lease, Turns, lease_steps, together

if TYPE_CHECKING:
    import pandas as pd

    from ...traces.writer import TraceWriter

POLL_S = 0.02
TAKE_S = 2.0  # how often records become tables: pandas is too slow for every poll
#: Steps at the start of a window that do not count: the host runs ahead of a GPU, so the first step after a switch
#: still holds collectives of the table before.
DISCARD = 1
#: Steps from publishing a table to the first one under it: the poll, and the two steps that the ranks keep ahead.
SWITCH_STEPS = 3
#: A trial ends by itself after twice the steps of its window and so many more: the next table is late at times.
SPARE_STEPS = 20
#: Rows of events that are kept for :meth:`Job.take_events` when nobody takes them.
MOST_EVENTS = 400_000
#: Newest waits that are kept.
MOST_WAITS = 50_000


@dataclass(frozen=True)
class Window:
    """Some steps under one table: durations in ms of the counted steps, as rank 0 measured them."""

    generation: int
    steps: np.ndarray[Any, Any]  # step numbers
    durations_ms: np.ndarray[Any, Any]
    disobeyed: tuple[Disobeyed, ...] = ()  # rows of the table that NCCL did not follow

    @property
    def step_ms(self) -> float:
        """Median step time: a pre-empted step on a shared machine does not move it."""
        return float(np.median(self.durations_ms))


class Job(Reader):
    """One training job with our plugin and probe in it.

    ``writer``, where given, gets every event, step and table. ``on_state`` hears what is waited for. A table is
    published *confirmed* or as a *trial*, which ends by itself some steps after its window would.
    """

    tries_few = True  # it can run a table at few calls, and tell their times
    takes_turns = True  # two tables can take turns by its steps

    def __init__(
        self,
        run: RunFolder,
        process: subprocess.Popen[bytes] | None = None,
        writer: TraceWriter | None = None,
        on_state: Callable[[Why], None] = lambda what: None,
    ) -> None:
        super().__init__(run, process)
        self.writer: TraceWriter | None = None
        if writer is not None:
            self.begin_trace(writer)
        self.on_state = on_state
        self.untouched = run.untouched
        self.generation = run.table.generation()  # another tuner may have been here before
        self.confirmed: dict[Slot, Decision] = read_confirmed(run.path)
        self.memory_pressure = 0.0  # memory used / total on the fullest GPU, 0 = unknown
        self.memory_free = 0  # bytes on the GPU that has least, 0 = unknown
        self._memory: dict[tuple[int, int], tuple[int, int]] = {}  # of each pid and rank: used, total
        self.waits = empty(WAIT_COLUMNS)  # when the job stood still, where it tells: an emulated one
        self.thin = False  # the search is over: write events whose kernels were timed, and keep none
        self.rhythm = Rhythm()
        # Published last, where no trial. With --headroom nothing is untouched until the first table has said so.
        self._to_stay: dict[Slot, Decision] | None = None if self.generation or run.untouched else {}
        self._told: Why | None = None
        self._taken = time.monotonic()
        self._events: deque[pd.DataFrame] = deque()

    def poll(self) -> None:
        """Take everything new out of the rings."""
        before, is_first = self.state, self.sources.is_joining
        super().poll()
        if is_first and self.writer:
            self.writer.begin(self.sources.coverage(self.assembler))
        why = self.state[1] if self.state is not None and self.state != before else None
        if why is not None and why.reason is NotTuning.OTHER_BACKEND:
            self._say(Happened.NEEDS_NCCL(why=why))
        if time.monotonic() - self._taken > TAKE_S:
            self.take()

    def take(self, everything: bool = False) -> None:
        """Turn what was read into tables: to the trace, and kept for :meth:`take_events`."""
        self._taken = time.monotonic()
        if self.writer:
            writer = self.writer
            coverage = partial(self.sources.coverage, self.assembler)
            events, steps, waits = writer.drain(self.assembler, everything, self.thin, coverage)
            self._note_lost(writer)
        else:
            events, steps = self.assembler.take(everything)
            waits = self.assembler.take_waits()
        if len(waits) and not self.thin:
            self.waits = joined([self.waits, waits], WAIT_COLUMNS).tail(MOST_WAITS)
        self._note_memory(steps)
        if len(events) and not self.thin:
            self._events.append(events)
            while len(self._events) > 1 and sum(map(len, self._events)) > MOST_EVENTS:
                self._events.popleft()

    def begin_trace(self, writer: TraceWriter) -> None:
        """From now on ``writer`` gets every event, step and table. Before the first poll."""
        self.writer = writer
        self.on_disk = lambda: writer.segment.coverage
        self.sources.begin_trace(writer.earlier, self.run.gone())

    def end_trace(self) -> None:
        """The trace is closed."""
        self.writer = self.on_disk = None

    def _note_lost(self, writer: TraceWriter) -> None:
        """The header of the trace tells how many records it lacks."""
        lost = self.records_lost
        told = int(writer.header.get("records_lost") or 0)
        if lost != told:
            writer.update_header(records_lost=lost)
        if lost > told:
            log.warning("%d records of the job were lost so far", lost)

    def _note_memory(self, steps: pd.DataFrame) -> None:
        """Keep the last word of each rank about its GPU: a batch of records seldom has all of them."""
        known = steps[steps["memory_total"] > 0]
        columns = [known[name].tolist() for name in ("pid", "rank", "memory_used", "memory_total")]
        for pid, rank, used, total in zip(*columns, strict=True):
            self._memory[pid, rank] = used, total
        alive = {ring.process for ring in self.run.rings() if ring.is_alive()}
        if alive:  # a job that was started again has other processes
            self._memory = {key: told for key, told in self._memory.items() if key[0] in alive}
        if self._memory:
            self.memory_pressure = max(used / total for used, total in self._memory.values())
            least = min(total - used for used, total in self._memory.values())
            self.memory_free = max(1, int(least))

    def take_events(self) -> pd.DataFrame:
        """Events since the last call (the newest MOST_EVENTS), those still waiting for their kernel times included."""
        self.poll()
        self.take(everything=True)
        events, self._events = list(self._events), deque()
        return joined(events, EVENT_COLUMNS)

    def rest(self) -> None:
        """One unhurried poll; steps that no window asked for are let go."""
        self.poll()
        self.new_steps()
        time.sleep(POLL_S * 5)

    def publish(self, decisions: Decisions, *trial: int) -> int:
        """Make ``decisions`` the table of the next generation; ``trial``: as :class:`Trial`, none to stay."""
        self.generation += 1
        self._to_stay = None if trial and trial[0] else decided(decisions)
        table = Table.of(self.generation, decisions, *trial)
        self.obedience.expect(table)
        log.debug("table %d published %s: %s", self.generation, table.trial, table.rules)
        self.run.table.publish(self.run.whole(table))
        if self.writer:
            self.writer.log("table", {"table": table})
        return self.generation

    def confirm(self, decisions: Decisions) -> int:
        """Publish ``decisions`` to stay: what the job falls back to, and a later daemon goes on from."""
        self.confirmed = decided(decisions)
        generation = self.publish(self.confirmed)
        note_confirmed(self.run.path, self.run.whole(Table.of(generation, self.confirmed)))
        return generation

    def release(self) -> None:
        """The way out, whatever happened: what was confirmed is in force."""
        writer, self.writer = self.writer, None  # a full disk must not stand in the way
        try:
            self.confirm(self.confirmed)
        finally:
            self.writer = writer

    def window(
        self,
        decisions: Decisions,
        n_steps: int,
        discard: int = DISCARD,
        give_up_ms: float = math.inf,
        one_of: int = 0,
    ) -> Window:
        """Run ``n_steps`` counted steps under ``decisions`` and return them; ``one_of``: see :class:`Table`.

        Ends early once a counted step took longer than ``give_up_ms``. After a pause the window begins anew; of a job
        that pauses under the confirmed table too (rollouts) it goes on. Where ``decisions`` alone make it pause, that
        is the result. Raises JobEnded.
        """
        chosen = decided(decisions)
        counted: dict[int, float] = {}  # duration in ms by step
        pauses = barren = 0  # in this window, and how many of them in a row without a counted step between
        while True:
            before = len(counted)
            cut = self._attempt(chosen, n_steps, discard, give_up_ms, one_of, counted)
            generation = self.generation
            if cut is None:
                return self._whole(chosen, counted, give_up_ms)
            is_pause = cut.took_ms > 0
            pauses += is_pause
            is_barren = is_pause and len(counted) == before
            barren = (barren + 1) * is_barren
            if chosen == self.confirmed:
                self.rhythm.pauses += is_pause
            elif chosen and is_pause and pauses >= 2:
                self._look_for_pauses(n_steps, discard)
                if barren >= 2 or not self.rhythm.has_pauses:
                    self.publish(self.confirmed)
                    return Window(generation, np.array([cut.step]), np.array([cut.took_ms]))
            if chosen and not self.rhythm.has_pauses:
                counted.clear()
            self._say_again(counted, cut)

    def _whole(self, chosen: Decisions, counted: dict[int, float], give_up_ms: float) -> Window:
        """The window of steps that were counted. One that a too slow step has ended ends its table as well: who asked
        for it may think for long before the next window."""
        generation = self.generation
        disobeyed = self.obedience.verdict(generation, self.assembler.comms)
        durations_ms = np.array([*counted.values()])
        if chosen != self.confirmed and durations_ms[-1] > give_up_ms:
            self.publish(self.confirmed)
        return Window(generation, np.array([*counted]), durations_ms, disobeyed)

    def _say_again(self, counted: dict[int, float], cut: Cut) -> None:
        """What becomes of a window that was cut short."""
        happened = Happened.WINDOW_GOES_ON if counted else Happened.WINDOW_AGAIN
        self._say(happened(why=cut.why))

    def _look_for_pauses(self, n_steps: int, discard: int) -> None:
        """Whether the job pauses under the confirmed table too. Raises JobEnded."""
        before = self.rhythm.pauses
        if not self.rhythm.has_pauses:
            self.window(self.confirmed, n_steps, discard)
            self.rhythm.pauses += self.rhythm.pauses > before

    def _attempt(
        self,
        chosen: Decisions,
        n_steps: int,
        discard: int,
        give_up_ms: float,
        one_of: int,
        counted: dict[int, float],
    ) -> Cut | None:
        """Add to ``counted`` until it is whole, or what cuts that short. Raises JobEnded."""
        trial = chosen != self.confirmed
        if trial or chosen != self._to_stay:  # else it is in force already, and to stay
            self.publish(chosen, 2 * (n_steps + discard) + SPARE_STEPS if trial else 0, one_of)
        is_few = trial and one_of > 0
        attempt = Attempt(self.generation, trial, n_steps, discard, counted, self.rhythm, is_few)
        cut = self._run(attempt, give_up_ms)
        if cut is None or not cut.is_fatal:
            return cut
        rows, rest = without_fatal(self.run.path, chosen, self.confirmed)
        cut = self._attempt(rest, n_steps, discard, give_up_ms, one_of, counted)
        self.obedience.leave_out(self.generation, rows)
        return cut

    def alternate(
        self,
        decisions: Decisions,
        n_steps: int,
        turn_steps: int = 1,
        discard: int = 0,
        give_up_ms: float = math.inf,
    ) -> Turns | None:
        """Let ``decisions`` and the confirmed table take turns of ``turn_steps`` steps, and return ``n_steps`` of them.

        Both numbers of steps are whole quads of turns; the first ``discard`` do not count. Ends early once a step of
        ``decisions`` took longer than ``give_up_ms``. Afterwards the confirmed table is in force. None where the job's
        steps are not alike: measure it in windows. Raises JobEnded.
        """
        chosen = decided(decisions)
        for _ in range(MOST_FAILED):
            leases = self._leases(chosen, n_steps, turn_steps, discard, give_up_ms)
            if leases[-1].is_fatal:
                rows, rest = without_fatal(self.run.path, chosen, self.confirmed)
                turns = self.alternate(rest, n_steps, turn_steps, discard, give_up_ms)
                return replace(turns, disobeyed=(*rows, *turns.disobeyed)) if turns else None
            self._end_turns(leases[-1])
            turns = together(leases, self.heard.steady, discard, n_steps)
            if turns.has_both:
                disobeyed = self.obedience.verdict(turns.generation, self.assembler.comms)
                return replace(turns, disobeyed=disobeyed)
        return None

    def _leases(
        self, chosen: Decisions, n_steps: int, turn_steps: int, discard: int, give_up_ms: float
    ) -> list[Lease]:
        """Leases until all steps were seen, or one comes to nothing: the steps were not alike."""
        quad = QUAD * turn_steps
        leases: list[Lease] = []
        wanted, waited = n_steps + discard, 0
        while wanted > 0:
            steps = lease_steps(wanted, waited, quad)
            swap = 1 - len(leases) % 2
            left_out = max(wanted - n_steps, 0)
            generation = self.publish(chosen, steps, 2, turn_steps, swap)
            lease = Lease(generation, steps, quad, self.rhythm, left_out)
            if cut := self._run(lease, give_up_ms):
                lease.is_fatal = cut.is_fatal
                # The normal course of a job that evaluates now and then: for the log, no alarm on a terminal.
                log.debug("the alternating steps are measured again: %s", cut.why)
            lease.is_given_up = lease.newest_ms > give_up_ms
            leases.append(lease)
            wanted, waited = wanted - lease.n_kept, lease.waited
            if lease.is_given_up or not lease.n_kept:
                break
        return leases

    def _end_turns(self, last: Lease) -> None:
        """The confirmed table alone is in force again. By itself, where all turns went by and rank 0 knows of each
        communicator in them. Else after a round, whose votes say whether the last turns were alike; where they ended
        early, after enough steps for a new rhythm."""
        lease, steady = last.generation, self.heard.steady
        if last.is_whole and lease in steady:
            return
        self.publish(self.confirmed)
        is_early = not (last.is_whole or last.is_given_up)
        n_steps = 1
        if is_early:
            n_steps, steady = ALIKE_STEPS, set()
        attempt = LastRound(self.generation, False, n_steps, 0, {}, self.rhythm, lease=lease, steady=steady)
        self._run(attempt, math.inf)

    def _run(self, attempt: Attempt | Lease, give_up_ms: float) -> Cut | None:
        """Give an attempt all steps until it is whole; what cuts that short. Raises JobEnded."""
        began = last = time.monotonic()
        while not attempt.is_whole:
            alive = self.is_alive()
            self.poll()
            self.check()
            for step in itertools.chain.from_iterable(self.new_steps()):
                last = time.monotonic()
                if (cut := attempt.add(step, last - began)) is not None:
                    return cut
                if attempt.newest_ms > give_up_ms:  # however many steps a poll brings, this one is the last
                    break
            if attempt.newest_ms > give_up_ms or attempt.is_whole:
                break
            if not alive:
                raise JobEnded(self.ended())
            if self.heard.refused == attempt.generation:
                why = self.heard.why or Happened.TRIAL_REFUSED()
                return Cut(why, is_fatal=why.reason is NotAgreeing.FATAL_TRIAL)
            if (cut := self._wait(attempt, began, last)) is not None:
                return cut
            time.sleep(POLL_S * (5 if self.thin else 1))
        self._told = None
        return None

    def _wait(self, attempt: Attempt | Lease, began: float, last: float) -> Cut | None:
        """No step has come since ``last``: say what is waited for; in a pause wait, however long, until one comes. Say
        it also if steps come, but none under the table that was published when it ``began``."""
        now = time.monotonic()
        silent_s = now - last
        is_told = bool(self.no_switch()) and now - began > 2
        if not attempt.seen and (silent_s > 2 or is_told or self.losing()):
            self._say(Happened.WAITING(why=self.waits_for()))
        if silent_s <= self.rhythm.silence_s:
            return None
        self._say(NotTuning.PAUSED(seconds=silent_s))
        while not self._fresh:
            alive = self.is_alive()
            self.poll()
            self.check()
            if not alive and not self._fresh:
                raise JobEnded(self.ended())
            time.sleep(POLL_S * 5)
        took_ms = 1e3 * (time.monotonic() - last) if attempt.seen else 0.0  # else not this table's doing
        return Cut(Happened.JOB_PAUSED(), self.last_step, took_ms)

    def _say(self, what: Why) -> None:
        if what != self._told:
            self._told = what
            self.on_state(what)

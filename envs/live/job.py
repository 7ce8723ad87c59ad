"""A running job as the tuner sees it: publish a table, wait some steps, read what they took.

``Job`` reads the rings of the run folder and writes its table. It knows nothing of policies, and starts nothing.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...traces.assemble import EVENT_COLUMNS, WAIT_COLUMNS, empty, joined
from ...traces.reasons import Happened, NotAgreeing, NotTuning, Why
from ...traces.records import Decision, Decisions, Slot, Table
from ..nccl.shm import RunFolder
from ..search.config import LONG_TURN_STEPS
from ..search.interfaces import QUAD
from .confirmed import decided, without_fatal
from .confirmed import note_confirmed as note_confirmed
from .confirmed import read_confirmed as read_confirmed
from .job_ends import JobEnded, NothingToTune
from .obedience import Disobeyed
from .pauses import Rhythm
from .reader import Reader, log
from .turns import (
    ALIKE_STEPS,
    MOST_FAILED,
    MOST_SPARE_STEPS,
    MOST_UNEVEN,
    ODD_STEPS,
    SPARE_STEPS,
    Lease,
    Turns,
    lease_steps,
    together,
)

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
    published *confirmed* or as a *trial*, which ends by itself.
    """

    tries_few = True  # it can run a table at few calls, and tell their times

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
        self.all_reduce = run.all_reduce
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
        """Wait for ``n_steps`` counted steps under ``decisions``, which hold already, and return them; with ``one_of``
        they are to hold at one call of so many, see :class:`Table`. Ends early with a step above ``give_up_ms``.

        Pauses of the job's do not count. Raises JobEnded; ValueError where a table that does not hold is to hold
        throughout: it takes turns, see :meth:`alternate`.
        """
        chosen = decided(decisions)
        if one_of:
            return self._at_few_calls(chosen, n_steps, discard, give_up_ms, one_of)
        if chosen != self.confirmed:
            raise ValueError("this table does not hold: it is measured in turns with the one that does")
        lease = self._holds(n_steps, discard, give_up_ms)
        return replace(_window([lease]), disobeyed=self._disobeyed(lease))

    def _holds(
        self, n_steps: int, discard: int = 0, give_up_ms: float = math.inf, until_steady: int = -1
    ) -> Lease:
        """So many steps under the confirmed table; none once rank 0 says that the turns of that generation were alike.
        Raises JobEnded."""
        if self._to_stay != self.confirmed:  # else it is in force already, and to stay
            self.publish(self.confirmed)
        lease = Lease(self.generation, n_steps, self.rhythm, discard)
        self._run(lease, give_up_ms, until_steady)
        return lease

    def _at_few_calls(
        self, chosen: Decisions, n_steps: int, discard: int, give_up_ms: float, one_of: int
    ) -> Window:
        leases: list[Lease] = []
        wanted = n_steps
        while wanted > 0:
            self.publish(chosen, 2 * (wanted + discard), one_of)
            lease = Lease(self.generation, wanted, self.rhythm, discard, is_trial=True)
            self._run(lease, give_up_ms)
            leases.append(lease)
            if lease.is_fatal:
                rows, rest = without_fatal(self.run.path, chosen, self.confirmed)
                window = self._at_few_calls(rest, n_steps, discard, give_up_ms, one_of)
                return replace(window, disobeyed=(*rows, *window.disobeyed))
            wanted -= len(lease.kept)
            if lease.is_given_up:  # who asked for it may think for long before the next table
                self.publish(self.confirmed)
                break
            if not lease.seen:
                self._holds(ALIKE_STEPS)
        return replace(_window(leases), disobeyed=self._disobeyed(leases[-1]))

    def _disobeyed(self, lease: Lease) -> tuple[Disobeyed, ...]:
        return self.obedience.verdict(lease.generation, self.assembler.comms)

    def alternate(
        self,
        decisions: Decisions,
        n_steps: int,
        turn_steps: int = 1,
        discard: int = 0,
        give_up_ms: float = math.inf,
    ) -> Turns:
        """Let ``decisions`` and the confirmed table take turns of ``turn_steps`` steps, and return ``n_steps`` of them.

        Whole quads of turns; the first ``discard`` do not count. Ends early after a step of ``decisions`` beyond
        ``give_up_ms``. Where steps are not alike, turns are LONG_TURN_STEPS long, at least a quad. Raises JobEnded;
        NothingToTune if steps differ too much.
        """
        chosen = decided(decisions)
        failed: list[Lease] = []
        tries, spare = 0, SPARE_STEPS
        while True:
            leases = self._leases(chosen, n_steps, turn_steps, discard, give_up_ms, spare)
            last = leases[-1]
            if last.is_fatal:
                rows, rest = without_fatal(self.run.path, chosen, self.confirmed)
                turns = self.alternate(rest, n_steps, turn_steps, discard, give_up_ms)
                return replace(turns, disobeyed=(*rows, *turns.disobeyed))
            self._end_turns(last)
            turns = together(leases, self.heard.steady, discard, n_steps, failed)
            if turns.has_both:
                return replace(turns, disobeyed=self._disobeyed(last))
            failed += leases
            # A trial in long turns that nobody votes on is asked for again and again.
            tries += last.seen > 0 or not last.is_long
            if last.is_long:
                if tries >= MOST_UNEVEN:
                    raise NothingToTune(NotTuning.UNEVEN(count=tries))
                spare = min(2 * spare, MOST_SPARE_STEPS)
            elif tries >= MOST_FAILED:
                tries = 0
                turn_steps = LONG_TURN_STEPS
                quad = QUAD * turn_steps
                n_steps, discard = quad * max(n_steps // quad, 1), quad * (discard // quad)

    def _leases(
        self, chosen: Decisions, n_steps: int, turn_steps: int, discard: int, give_up_ms: float, spare: int
    ) -> list[Lease]:
        """Leases until all steps were seen, or one comes to nothing: the steps were not alike. ``spare``: steps by
        which long turns are longer, of which a lease has one quad."""
        quad = QUAD * turn_steps
        is_long = turn_steps >= LONG_TURN_STEPS
        leases: list[Lease] = []
        wanted, waited = n_steps + discard, 0
        while wanted > 0:
            lasts = turn_steps + spare * is_long
            steps = QUAD * lasts if is_long else lease_steps(wanted, waited, quad)
            swap = 1 - len(leases) % 2
            left_out = max(wanted - n_steps, 0)
            if is_long and left_out:
                left_out = 2 * steps
            generation = self.publish(chosen, steps, 2, lasts, swap)
            lease = Lease(generation, steps, self.rhythm, left_out, is_trial=True, turn_steps=turn_steps)
            self._run(lease, give_up_ms)
            leases.append(lease)
            n_kept = len(lease.kept)
            wanted, waited = wanted - n_kept, lease.waited
            if lease.is_given_up or not n_kept:
                break
        return leases

    def _end_turns(self, last: Lease) -> None:
        """The confirmed table alone is in force again. By itself, where all turns went by and rank 0 knows of each
        communicator in them. Else after a round, whose votes say whether the last turns were alike; where they ended
        early, after enough steps for a new rhythm."""
        is_early = not (last.is_given_up or (last.seen and last.is_whole and last.odd < ODD_STEPS))
        if is_early:
            self._holds(ALIKE_STEPS)
        elif last.is_given_up or last.generation not in self.heard.steady:
            self._holds(1, until_steady=last.generation)

    def _run(self, lease: Lease, give_up_ms: float = math.inf, until_steady: int = -1) -> None:
        """Give a lease all steps until it is whole, or refused. Raises JobEnded."""
        began = last = time.monotonic()
        while not (lease.is_whole or until_steady in self.heard.steady):
            alive = self.is_alive()
            self.poll()
            self.check()
            for step in itertools.chain.from_iterable(self.new_steps()):
                last = time.monotonic()
                lease.add(step, last - began)
                if lease.newest_ms > give_up_ms:  # however many steps a poll brings, this one is the last
                    lease.is_given_up = True
                    break
            if lease.is_given_up or lease.is_whole:
                break
            if not alive:
                raise JobEnded(self.ended())
            if self.heard.refused == lease.generation:
                self._refused(lease)
                break
            self._wait(lease, began, last)
            time.sleep(POLL_S * (5 if self.thin else 1))
        self._told = None

    def _refused(self, lease: Lease) -> None:
        """Rank 0 has refused the trial of a lease."""
        why = self.heard.why
        lease.is_fatal = why is not None and why.reason is NotAgreeing.FATAL_TRIAL
        # The normal course of a job that evaluates now and then: for the log, no alarm on a terminal.
        log.debug("a trial is refused: %s", why)

    def _wait(self, lease: Lease, began: float, last: float) -> None:
        """No step has come since ``last``: say what is waited for; in a pause wait, however long, until one comes. Say
        it also if steps come, but none under the table that was published when it ``began``."""
        now = time.monotonic()
        silent_s = now - last
        is_told = bool(self.no_switch()) and now - began > 2
        if not lease.seen and (silent_s > 2 or is_told or self.losing()):
            self._say(Happened.WAITING(why=self.waits_for()))
        if silent_s <= self.rhythm.silence_s:
            return
        self._say(NotTuning.PAUSED(seconds=silent_s))
        while not self._fresh:
            alive = self.is_alive()
            self.poll()
            self.check()
            if not alive and not self._fresh:
                raise JobEnded(self.ended())
            time.sleep(POLL_S * 5)

    def _say(self, what: Why) -> None:
        if what != self._told:
            self._told = what
            self.on_state(what)


def _window(leases: Sequence[Lease]) -> Window:
    """The steps that count of leases under one table."""
    steps, durations_ms = list[int](), list[float]()
    for lease in leases:
        kept = lease.kept
        steps += [lease.steps[at] for at in kept]
        durations_ms += [lease.durations_ms[at] for at in kept]
    return Window(leases[-1].generation, np.array(steps), np.array(durations_ms))

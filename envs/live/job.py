"""A running job as the tuner sees it: publish a table, wait some steps, read what they took.

``Job`` reads the rings of the run folder and writes its table. It knows nothing of policies, and starts nothing.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...traces.assemble import EVENT_COLUMNS, Assembler, as_records, joined, step_rows
from ...traces.reasons import NotTuning, RunEnds
from ...traces.records import COLL, COLL_DTYPE, STATE, STATE_DTYPE, AgreementState, Decision, Slot, Table
from ..nccl.run_folder import LAUNCHER, STATUS, STOP
from ..nccl.shm import RunFolder
from .confirmed import note_confirmed, read_confirmed
from .job_ends import Closed, JobEnded, Stopped, Withdrawn
from .locks import is_locked
from .obedience import CallAudit, Disobeyed, Obedience

if TYPE_CHECKING:
    import pandas as pd

    from ...traces.files import TraceWriter

log = logging.getLogger("dynamiccl.live")
logging.getLogger("dynamiccl").addHandler(logging.NullHandler())
POLL_S = 0.02
TAKE_S = 2.0  # how often records become tables: pandas is too slow for every poll
#: Steps at the start of a window that do not count: the host runs ahead of a GPU, so the first step after a switch
#: still holds collectives of the table before.
DISCARD = 1
#: Steps from publishing a table to the first one under it: the poll, and the two steps that the ranks keep ahead.
SWITCH_STEPS = 3
#: A trial ends by itself after twice the steps of its window and so many more: the next table is late at times.
SPARE_STEPS = 20
#: So many steps in a row under another table, and the table of a window has ended. A communicator that is used in few
#: steps comes to a new table later than the others: such a step alone is left out.
ODD_STEPS = 3
#: A trial of which no step was seen for so long has come and gone between two steps, in an evaluation say.
UNSEEN_S = 30.0
#: A pause (checkpoint, evaluation) is a step that takes so many times what most before it took, and so long.
PAUSE_TIMES, PAUSE_STEP_S, PAUSE_S = 20, 1.0, 5.0
_OFTEN = 0.8  # a fifth of the steps that are longer are the job's rhythm
#: An attached job without a launcher is over when none of its processes has lived for so long: they may be restarted.
RESTART_S = 60.0
#: Rank 0 counts as being on another node when ranks here have stepped for so long without it.
ELSEWHERE_S = 10.0
#: Rows of events that are kept for :meth:`Job.take_events` when nobody takes them.
MOST_EVENTS = 400_000


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


@dataclass
class _Pause(Exception):
    """A window was cut short: what happened, and the step in which it did; ``took_ms`` 0: the job did not pause."""

    what: str
    generation: int
    step: int = 0
    took_ms: float = 0.0


class Job:
    """One training job with our plugin and probe in it.

    ``writer``, where given, gets every event, step and table. ``on_state`` hears what is waited for. A table is
    published *confirmed* or as a *trial*, which ends by itself some steps after its window would.
    """

    def __init__(
        self,
        run: RunFolder,
        process: subprocess.Popen[bytes] | None = None,
        writer: TraceWriter | None = None,
        on_state: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.run, self.process, self.writer, self.on_state = run, process, writer, on_state
        self.assembler = Assembler()
        self.generation = run.table.generation()  # another tuner may have been here before
        self.confirmed: dict[Slot, Decision] = read_confirmed(run.path)
        self.damaged: dict[str, str] = {}  # rings that cannot be read any more, with the reason
        self.lost: dict[str, int] = {}  # records that each ring dropped because nobody read them in time
        self.memory_pressure = 0.0  # memory used / total on the fullest GPU, 0 = unknown
        self.last_step = 0
        self.ranks: set[int] = set()  # of those whose steps were seen
        self.state: tuple[AgreementState, str] | None = None  # of the ranks' agreement, as rank 0 said it last
        self.audit = CallAudit()
        self.obedience = Obedience()
        self.thin = False  # the search is over: write events whose kernels were timed, and keep none
        self._pauses = 0  # under confirmed tables: two, and the job does so of its own
        self._to_stay: dict[Slot, Decision] | None = None  # the table published last, where it is no trial
        self._durations: deque[float] = deque(maxlen=50)
        self._known: set[str] = set()  # rings whose communicators and offers were read
        self._told = ""
        self._stepped_at = 0.0  # when the first step of any rank was seen
        self._alive_at = self._taken = time.monotonic()
        self._events: deque[pd.DataFrame] = deque()
        self._fresh: list[np.ndarray[Any, Any]] = []

    # -- is it alive, and what does it say ---------------------------------------------------------------------

    @property
    def status(self) -> int | None:
        """Exit status (128 + n after signal n), None while it runs or where nobody has told."""
        if self.process:
            code = self.process.poll()
            return 128 - code if code is not None and code < 0 else code
        with contextlib.suppress(OSError, ValueError):
            return int((self.run.path / STATUS).read_text())
        return None

    def is_alive(self) -> bool:
        """Whether the job runs: its process or its launcher; where there is neither, a process with a ring."""
        if self.process:
            return self.process.poll() is None
        if (self.run.path / LAUNCHER).exists():
            return self.status is None and is_locked(self.run.path / LAUNCHER)
        rings = self.run.rings()
        now = time.monotonic()
        if not rings or any(ring.is_alive() for ring in rings):
            self._alive_at = now
        return now - self._alive_at < RESTART_S

    def poll(self) -> None:
        """Take everything new out of the rings."""
        for ring in self.run.rings():
            if ring.name in self.damaged:
                continue
            try:
                if ring.name not in self._known:  # what was announced before we came
                    self._known.add(ring.name)
                    self.assembler.add(ring.known(), ring.pid)
                records = ring.drain()
            except (OSError, ValueError) as error:  # its process may have scribbled over it: the others go on
                self.damaged[ring.name] = str(error)
                log.warning("ring %s cannot be read any more: %s", ring.name, error)
                continue
            self.lost[ring.name] = ring.lost
            if len(records):
                self._read(records, ring.pid)
        if time.monotonic() - self._taken > TAKE_S:
            self.take()

    def _read(self, records: np.ndarray[Any, Any], pid: int) -> None:
        self.assembler.add(records, pid)
        rows = as_records(records, COLL_DTYPE)
        calls = rows[rows["kind"] == COLL]
        self.audit.add(calls, pid)
        self.obedience.add(calls)
        for row in rows[rows["kind"] == STATE].view(STATE_DTYPE):
            text = bytes(row["text"]).split(b"\0", 1)[0].decode("utf-8", "replace")
            self.state = AgreementState(int(row["code"])), text
            log.info("the ranks' agreement is %s: %s", self.state[0].name, text)
        steps = step_rows(records, None)
        if len(steps):
            self._stepped_at = self._stepped_at if self.ranks else time.monotonic()
            self.ranks.update(map(int, np.unique(steps["rank"])))
            steps = steps[steps["rank"] == 0]
        if len(steps):
            self._fresh.append(steps)
            self.last_step = int(steps["step"][-1])

    def take(self, everything: bool = False) -> None:
        """Turn what was read into tables: to the trace, and kept for :meth:`take_events`."""
        self._taken = time.monotonic()
        lost = sum(self.lost.values())
        if self.writer and lost != self.writer.header.get("records_lost", 0):
            self.writer.update_header(records_lost=lost)
            log.warning("%d records of the job were lost so far", lost)
        if self.writer:
            events, steps = self.writer.drain(self.assembler, everything, self.thin)
        else:
            events, steps = self.assembler.take(everything)
        if len(steps):
            memory = steps[steps["memory_total"] > 0].groupby("rank").tail(1)
            if len(memory):  # of the rank that has least left: what it cannot afford none can
                self.memory_pressure = float((memory["memory_used"] / memory["memory_total"]).max())
        if len(events) and not self.thin:
            self._events.append(events)
            while len(self._events) > 1 and sum(map(len, self._events)) > MOST_EVENTS:
                self._events.popleft()

    def waits_for(self) -> str:
        """What stands between the job and a step under our table, in words."""
        if not self.run.rings():
            return NotTuning.NO_PROBE()
        if not self.ranks:
            return NotTuning.NO_STEP()
        if 0 not in self.ranks:
            if time.monotonic() - self._stepped_at < ELSEWHERE_S:
                return NotTuning.NO_STEP_OF_RANK_0()
            return NotTuning.ELSEWHERE()
        if self.state and self.state[0] in (AgreementState.WAITING, AgreementState.LOSING):
            return NotTuning.NO_SWITCH_YET(why=self.state[1])
        return NotTuning.NEXT_STEP()

    def check(self) -> None:
        """Raise what ends tuning while the job goes on: Withdrawn, Stopped, Closed."""
        if self.audit.mismatches:
            raise Withdrawn(RunEnds.TWO_WAYS(example=self.audit.example))
        if (self.run.path / STOP).exists():
            raise Stopped(RunEnds.STOPPED())
        if self.state and self.state[0] in (AgreementState.SHUT, AgreementState.CLOSED):
            never = self.state[0] == AgreementState.SHUT
            raise Closed((RunEnds.NEVER_SWITCHED if never else RunEnds.NO_MORE_SWITCHES)(why=self.state[1]))

    # -- tables --------------------------------------------------------------------------------------------------

    def publish(self, decisions: Mapping[Slot, Decision], trial_steps: int = 0) -> int:
        """Make ``decisions`` the table of the next generation, for about so many steps, or to stay."""
        self.generation += 1
        self._to_stay = None if trial_steps else {s: d for s, d in decisions.items() if not d.is_auto}
        table = Table.of(self.generation, decisions, trial_steps)
        self.obedience.expect(table)
        log.debug("table %d published (%s): %s", self.generation, "trial" if trial_steps else "to stay", table.rules)
        self.run.table.publish(table)
        if self.writer:
            self.writer.log("table", {"table": table})
        return self.generation

    def confirm(self, decisions: Mapping[Slot, Decision]) -> int:
        """Publish ``decisions`` to stay: what the job falls back to, and a later daemon goes on from."""
        self.confirmed = {s: d for s, d in decisions.items() if not d.is_auto}
        generation = self.publish(self.confirmed)
        note_confirmed(self.run.path, Table.of(generation, self.confirmed))
        return generation

    def release(self) -> None:
        """The way out, whatever happened: what was confirmed is in force."""
        writer, self.writer = self.writer, None  # a full disk must not stand in the way
        try:
            self.confirm(self.confirmed)
        finally:
            self.writer = writer

    # -- windows -------------------------------------------------------------------------------------------------

    def window(
        self, decisions: Mapping[Slot, Decision], n_steps: int, discard: int = DISCARD, give_up_ms: float = float("inf")
    ) -> Window:
        """Run ``n_steps`` counted steps under ``decisions`` and return them.

        Ends early once a counted step took longer than ``give_up_ms``. After a pause the window begins
        anew; of a job that pauses under the confirmed table too (rollouts)
        it goes on. Where ``decisions`` alone make it pause, that is the result. Raises JobEnded.
        """
        chosen = {s: d for s, d in decisions.items() if not d.is_auto}
        counted: dict[int, float] = {}  # duration in ms by step
        pauses = barren = 0
        while True:
            before = len(counted)
            try:
                return self._window(chosen, n_steps, discard, give_up_ms, counted)
            except _Pause as pause:
                pauses += pause.took_ms > 0
                barren = barren + 1 if len(counted) == before and pause.took_ms else 0
                if chosen == self.confirmed:
                    self._pauses += pause.took_ms > 0
                elif chosen and pause.took_ms and pauses >= 2:
                    if (before := self._pauses) < 2:  # does it pause without them too?
                        self.window(self.confirmed, n_steps, discard)
                        self._pauses += self._pauses > before
                    if barren >= 2 or self._pauses < 2:
                        return Window(pause.generation, np.array([pause.step]), np.array([pause.took_ms]))
                if chosen and self._pauses < 2:
                    counted.clear()
                self._say(f"the window {'goes on' if counted else 'is measured again'}: {pause.what}")

    def _window(
        self, decisions: dict[Slot, Decision], n_steps: int, discard: int, give_up_ms: float, counted: dict[int, float]
    ) -> Window:
        trial = decisions != self.confirmed
        if trial or decisions != self._to_stay:
            generation = self.publish(decisions, 2 * (n_steps + discard) + SPARE_STEPS if trial else 0)
        else:
            generation = self.generation  # in force already, and to stay
        seen, odd, newest = 0, 0, 0.0
        began = last = time.monotonic()
        while len(counted) < n_steps:
            alive = self.is_alive()
            self.poll()
            self.check()
            for row in (row for rows in self.new_steps() for row in rows):
                last = time.monotonic()
                took = float(row["duration_ns"]) / 1e6
                pause_ms = self._pause_ms()
                self._durations.append(took)
                if int(row["generation"]) != generation:
                    odd += 1
                    if odd >= ODD_STEPS and (seen or (trial and last - began > UNSEEN_S)):
                        raise _Pause("its table has ended", generation)
                    continue
                seen, odd = seen + 1, 0
                if took > pause_ms:
                    raise _Pause(f"a step took {took / 1e3:.1f} s", generation, int(row["step"]), took)
                if seen > discard and len(counted) < n_steps:
                    counted[int(row["step"])] = newest = took
            if newest > give_up_ms or len(counted) >= n_steps:
                break
            if not alive:
                raise JobEnded(self._ended())
            now = time.monotonic()
            if not seen and (now - last > 2 or (self.state and self.state[0] == AgreementState.LOSING)):
                self._say(f"waiting: {self.waits_for()}")
            if self._durations and now - last > max(PAUSE_S, self._pause_ms() / 1e3):
                self._sit_out(now - last)
                took_ms = 1e3 * (time.monotonic() - last) if seen else 0.0  # not this table's doing
                raise _Pause("the job paused", generation, self.last_step, took_ms)
            time.sleep(POLL_S * (5 if self.thin else 1))
        self._told = ""
        return Window(
            generation,
            np.array([*counted]),
            np.array([*counted.values()]),
            self.obedience.verdict(generation, self.assembler.comms),
        )

    def _sit_out(self, since_s: float) -> None:
        """The job takes no steps: wait, however long, until they come."""
        self._say(NotTuning.PAUSED(seconds=since_s))
        while not self._fresh:
            alive = self.is_alive()
            self.poll()
            self.check()
            if not alive and not self._fresh:
                raise JobEnded(self._ended())
            time.sleep(POLL_S * 5)

    def _pause_ms(self) -> float:
        known = float(np.quantile(self._durations, _OFTEN)) if len(self._durations) >= 3 else float("inf")
        return max(PAUSE_STEP_S * 1e3, PAUSE_TIMES * known)

    def _ended(self) -> str:
        ended = RunEnds.JOB_ENDED() if self.status is None else RunEnds.JOB_STATUS(status=self.status)
        why = "" if self.ranks else self.waits_for()
        if self.state and self.state[0] in (AgreementState.WAITING, AgreementState.LOSING):
            why = self.state[1]
        return RunEnds.BEFORE_A_SWITCH(ended=ended, why=why) if why else ended

    def _say(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self.on_state(text)

    def take_events(self) -> pd.DataFrame:
        """Events since the last call (the newest MOST_EVENTS), those still waiting for their kernel times included."""
        self.poll()
        self.take(everything=True)
        events, self._events = list(self._events), deque()
        return joined(events, EVENT_COLUMNS)

    def rest(self) -> None:
        """One unhurried poll; steps that no window asked for are let go."""
        self.poll()
        self._fresh.clear()
        time.sleep(POLL_S * 5)

    def new_steps(self) -> list[np.ndarray[Any, Any]]:
        """STEP records of rank 0 since the last call, in pieces."""
        fresh, self._fresh = self._fresh, []
        return fresh

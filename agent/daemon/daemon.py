"""The daemon: the tuner beside a running job. It searches, keeps watch, and leaves a trace, a summary and a report.

It may end at any time, in any way: the confirmed table stays the current one, and a later daemon goes on from there.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from ...envs.live.fail_closed import Holds, Until, row_of
from ...envs.live.job import Job
from ...envs.live.job_ends import Closed, JobEnded
from ...envs.live.locks import Busy, is_locked, lock
from ...envs.live.windows import LiveWindows
from ...envs.nccl.run_folder import LAUNCHER, STOP, TUNER
from ...envs.nccl.shm import RunFolder
from ...envs.search.config import SearchConfig
from ...traces.header import masked
from ...traces.outside import TraceError, readable
from ...traces.reasons import Happened, RunEnds, Why
from ...traces.records import Decision, Slot, Table
from ...traces.writer import TraceWriter
from ..policies.choosing import make_chooser
from ..report.outputs import claim, link, refuse_others, run_of, task_folder
from ..report.summary import DEFAULT, EVENT, VERDICT, RunSummary, read_object
from ..report.verdict import verdict
from .account import Costs, Stand
from .events import Events
from .following import start_follower
from .log import log, open_log
from .memory import Memory, facts_of
from .request import Request
from .search_slots import take
from .stopping import Signals
from .summarise import ReportPage, Results, error_of, is_asked_for, seen_of
from .tuner import Tuner, WindowLine

#: Space that a trace may take on disk, however long the job runs.
TRACE_BYTES = 256 * 2**20


def config_of(request: Request) -> SearchConfig:
    """How the search is run."""
    config = SearchConfig(budget=request.budget)
    if request.window_steps is not None:
        config = replace(config, window_steps=(request.window_steps, request.window_steps))
    if request.windows is not None:
        config = replace(config, rounds=request.windows, rounds_a_slot=0)
    return config


class Daemon:
    """One request being served. ``on_window`` hears of every window, ``on_phase`` of what is being done."""

    def __init__(
        self,
        request: Request,
        run: RunFolder,
        again: bool = False,
        on_window: Callable[[WindowLine], None] = lambda line: None,
        on_phase: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Raises ValueError for an unknown policy or a run that was stopped, Busy if the run has a tuner, OSError."""
        self.run, self.on_window, self.on_phase = run, on_window, on_phase
        # Before anything is touched: a bad name costs nothing.
        policy = make_chooser(request.policy, request.seed, request.windows)
        if (run.path / STOP).exists() and not again:
            raise ValueError("tuning of this run was stopped by `dynamiccl stop`: --again begins once more")
        self._lock = lock(run.path / TUNER, f"{run.path} has a tuner already: stop that one first")
        self.request = request
        self.out, self._out_lock = self._claim()
        #: of the site's, which this tuner holds to its end once it has begun to search
        self._slot: int | None = None
        self.job = Job(run, on_state=self._say)
        self.memory = Memory(request.memory, request.job, self._warn) if request.memory else None
        windows = LiveWindows(self.job, funcs=("all_gather",) if request.bitwise else ())
        before = self._before()
        self._events = Events(lambda: self.job.last_step)
        goes_on = before if self.job.confirmed and before else None
        self._events.begin(self.out, self._header(), goes_on)
        self.tuner = Tuner(
            windows, policy, config_of(request), self._tell, self._recall, self._events, goes_on
        )
        self.tuner.costs = Costs.after(before, bool(self.job.confirmed))  # what the job has lost stays lost
        if self.job.confirmed:  # also if this tuner ends before it has measured anything
            self._events.tell("stand", kept=True, in_force=self.tuner.names.of(self.job.confirmed))
        self._closed: Why | None = None  # the ranks change no tables, while they do not
        self._results, self._page = Results(self.out, run.path), ReportPage(self.out)
        if request.log_to:
            start_follower(self.out, request.log_to)
        if again:  # last: one that is refused has undone nothing
            (run.path / STOP).unlink(missing_ok=True)

    def _take_slot(self) -> None:
        """Take one of the site's slots; without one this tuner has no budget from here on.

        Called as a search begins, so tuners on nodes without rank 0, and those that only watch, hold none.
        """
        slots = self.request.search_slots
        if not slots or not self.request.budget or self._slot is not None:
            return
        try:
            self._slot = take(slots)
            why = Happened.NO_SEARCH_SLOT()
        except OSError as error:
            why = Happened.NO_SLOT_FILE(path=error.filename, error=error.strerror)
        if self._slot is None:
            self._warn(Happened.ONLY_WATCHES(slots=slots, why=why))
            self.request = replace(self.request, budget=0.0)
            self.tuner.config = config_of(self.request)

    def _claim(self) -> tuple[Path, int]:
        out = self.request.out
        if out is not None:
            refuse_others(task_folder(out))
        try:
            return claim(out)
        except Busy:
            named = run_of(out) if out is not None else None
            ours = named is not None and named.resolve() == self.run.path
            if out is None or not ours or not is_locked(self.run.path / LAUNCHER):
                raise
            return out, -1  # our launcher has it

    def _before(self) -> RunSummary:
        """What the tuner before this one has come to, by its log. Where that lies, its summary in the run folder
        tells."""
        left = RunSummary.read(self.run.path)
        log = RunSummary.read(Path(left.trace).parent) if left.trace else left
        return log if log.run_id == self.run.id else left

    def _header(self) -> dict[str, Any]:
        """What the trace tells of the run from its beginning."""
        request = self.request
        header = {"emulated": request.emulated is not None, "policy": request.policy, **request.facts}
        header |= asdict(request.emulated) if request.emulated else {}
        if request.typed:  # the launcher started this process by words of its own
            header["command"] = readable(masked(request.typed))
        if self.job.untouched:
            header["headroom"] = self.job.untouched.headroom
        if self.job.all_reduce:
            header["all_reduce"] = self.job.all_reduce
        return header | {"job": request.job, "run": str(self.run.path), "run_id": self.run.id}

    @property
    def outcome(self) -> RunSummary:
        """What the run has come to, as far as was told."""
        return self._events.summary

    def serve(self, signals: Signals | None = None) -> RunSummary:
        """Tune, and stay to the end of the job; returns the summary (also ``summary.json``).

        Raises OSError or TraceError if what was seen cannot be written. A KeyboardInterrupt, or one of ``signals``,
        ends the tuner and not the job; the confirmed table stays. Then signals do nothing until the summary is written;
        after it they cut short the rest.
        """
        out, signals = self.out, signals or Signals()
        link(out, self.run.path)
        with contextlib.ExitStack() as stack:
            self._open(stack)
            try:
                of_run = read_object(out / "trace" / "header.json").get("run_id")
                existing: Literal["resume", "replace"] = "resume" if of_run == self.run.id else "replace"
                header, most = self._header(), TRACE_BYTES
                with TraceWriter(out / "trace", header, existing=existing, most_bytes=most) as writer:
                    self.job.begin_trace(writer)
                    self._events.open(writer.log)
                    self._results.begin(self._summary())
                    self._serve(writer, signals)
                    self._summary()
            except (OSError, TraceError) as error:
                self._events.close()
                self.tuner.result.ended(self.outcome.ended or RunEnds.CANNOT_WRITE(error=error))
                self._warn(Happened.ENDS_BY_ERROR(error=error))
            finally:
                self._events.close()
                self.job.end_trace()
            summary = self._summarise(signals)
            with contextlib.suppress(OSError):  # the folder may be gone
                self.run.close(remove=not self.job.is_alive())
        return summary

    def _open(self, stack: contextlib.ExitStack) -> None:
        """The log, until ``stack`` closes."""
        request = self.request
        try:
            stack.callback(open_log(self.out))
        except OSError as error:
            self._warn(Happened.NOT_LOGGED(error=error))
        log.info("a tuner begins, process %d: policy %s, run %s", os.getpid(), request.policy, self.run.path)
        log.info("job: %s", request.job or "joined")

    def _serve(self, writer: TraceWriter, signals: Signals) -> None:
        job = self.job
        try:
            signals.begin()
            self._say(Happened.GOES_ON() if job.confirmed else Happened.WAITS_FOR_STEPS())
            if self._tune():
                self._watch()
            signals.are_heard = False
        except KeyboardInterrupt as interrupt:
            ended = interrupt.args[0] if interrupt.args else RunEnds.INTERRUPTED()
            self.tuner.result.ended(ended)
            self._say(Happened.LEAVES_JOB(why=ended))
        finally:
            signals.are_heard = False
            if (self.run.path / STOP).exists() and job.is_alive():
                # A tuner that was frozen may end after `stop` has withdrawn its table, and must not publish it again.
                self._mark_dropped(RunEnds.STOPPED())
                job.confirmed = {}
            job.release()
            job.take(everything=True)
            if job.damaged:
                writer.update_header(rings_damaged=job.damaged)

    def _recall(self, windows: LiveWindows) -> dict[Slot, Decision]:
        """The table that is tried first, from the memory; the trace's header tells the cluster from here on."""
        self._take_slot()
        facts = facts_of(windows, self.request)
        assert self.job.writer is not None
        self.job.writer.update_header(**facts)
        if self.memory is None or not self.request.budget:  # without a budget nothing is tried
            return {}
        table = self.memory.recall(facts, windows.profiles)
        self._say(Happened.RECALLED(why=self.memory.why))
        return table

    def _tune(self) -> bool:
        """Up to the verdict, or to the watch over a table that was confirmed before. Whether the tuner goes on."""
        job = self.job
        job.thin = False
        if job.confirmed:
            with contextlib.suppress(JobEnded):  # the watch says why
                self._resume()
            if self.tuner.search is not None and not self.tuner.search.is_over:  # no row could go on
                self.tuner.run(is_begun=True)
                self._say_verdict()
        else:
            self.tuner.run()
            self._say_verdict()
        job.thin = True
        try:
            job.check()
        except Closed as reason:
            if row_of(reason.why).holds is Holds.DEFAULT:  # before the table is published or stored once more
                return self._obey(reason)
        job.confirm(job.confirmed)
        self._leave()
        self._page.draw_soon()
        return True

    def _resume(self) -> None:
        """Go on with the table that was confirmed before. Raises JobEnded."""
        if gone := self.tuner.resume(self.job.confirmed):
            self._say(Happened.ROWS_GONE(slots=", ".join(map(str, gone))))

    def _say_verdict(self) -> None:
        """The verdict, as it stands in the summary, and what is done from there on."""
        summary, search = self._summary(), self.tuner.search
        if summary.steps_to_verdict is not None:
            self._say_text(f"verdict after {summary.steps_to_verdict} steps: {verdict(summary)}")
            self._events.tell(VERDICT, step=summary.steps_to_verdict)
        elif self.outcome.ended and not is_asked_for(self.outcome.ended):
            self._say(self.outcome.ended)
        if search is not None and search.is_over and not search.is_done and not self.request.once:
            n_steps = search.state.noise.window_steps
            self._say(Happened.TRIALS_LEFT(count=search.trials_left, steps=n_steps))

    def _watch(self) -> None:
        """Until the job ends: the search keeps watch, takes a table back, and begins anew where the job has changed."""
        job, tuner = self.job, self.tuner
        over = tuner.search is None or bool(self.outcome.failure)
        while job.is_alive():
            self._keep_up()
            try:
                if self._ends_with_verdict():
                    return
                if not over:
                    self._step()
                    over = tuner.search is None
                    continue
                job.rest()
                job.check()
                if self._closed:  # ranks that were started again have agreed anew
                    ended, self._closed, over = self._closed, None, tuner.search is None
                    if self.outcome.ended == ended:
                        self.tuner.result.ended(None)
                if tuner.looks_again():
                    self._say(Happened.LOOKS_AGAIN())
                    if not self._tune():
                        return
                    over = tuner.search is None
            except Closed as reason:
                over = True
                if not self._obey(reason):
                    return
            except JobEnded:
                return

    def _obey(self, reason: Closed) -> bool:
        """Do what the table of events says (:mod:`envs.live.fail_closed`). Whether the tuner goes on."""
        row = row_of(reason.why)
        if row.until is Until.ASKED:
            self._drop(reason.why)
            return False
        if row.holds is Holds.DEFAULT and not self.outcome.failure:
            self._events.tell("end", failure=reason.why)
            self._drop(reason.why, is_failure=True)
            self._leave()
        elif not self._closed and reason.why not in (self.outcome.failure, self.outcome.ended):
            self._say(reason.why)  # else it was said
        self.job.audit.is_told = self.job.audit.mismatches > 0
        self._closed = reason.why
        return True

    def _keep_up(self) -> None:
        """The page and the files follow figures that move by themselves."""
        self._page.keep_up(self._summary)
        if self._results.are_old:
            self._results.write(self._summary(), self._table())

    def _ends_with_verdict(self) -> bool:
        """Whether the verdict is there and the request is for no more: says so then."""
        search = self.tuner.search
        if not self.request.once or search is None or not search.is_over:
            return False
        ended = self.outcome.ended or RunEnds.ONCE()
        self.tuner.result.ended(ended)
        self._say(ended)
        return True

    def _step(self) -> None:
        """One window of the watch, and a word where it has changed something. Raises JobEnded."""
        search = self.tuner.search
        assert search is not None
        before = Stand.of(search, self.outcome.kept, self.job.confirmed)
        self.job.thin = search.is_over  # a search asks for kernel times
        self.tuner.step()
        if (search := self.tuner.search) is None:  # the job has become another one, with nothing to tune
            return
        now = Stand.of(search, self.outcome.kept, self.job.confirmed)
        if now != before:
            self._say_changes(before, now)
            self._leave()

    def _say_changes(self, before: Stand, now: Stand) -> None:
        costs = self.tuner.costs
        if now.marks.reopened > before.marks.reopened:
            self._say(Happened.JOB_CHANGED())
        if now.is_over and not before.is_over:
            self._say_text(f"verdict after the change: {verdict(self._summary())}")
            self._events.tell(VERDICT)
        if now.is_done and not before.is_done:
            self._say(Happened.TRIALS_OVER(count=costs.trials, cost=costs.trials_ms / 1e3))
        if before.kept and not now.kept and self.outcome.dropped:
            self._say(Happened.TABLE_DROPPED(why=self.outcome.dropped))

    def _leave(self) -> None:
        """Write down what the run has come to: from here the job may run for weeks, and the tuner may be killed. The
        memory comes last: its store may be slow."""
        self._results.write(self._summary(), self._table())
        self._remember()

    def _table(self) -> Table:
        """What was confirmed, as `dynamiccl apply` takes it; without rows while nothing is."""
        table = Table.of(1, self.job.confirmed)
        return self.run.whole(table) if table.rules else table

    def _remember(self) -> None:
        """Leave what was confirmed, or the verdict, to the next job here; a run that failed leaves word of that."""
        search, memory = self.tuner.search, self.memory
        if memory is None:
            return
        has_result = search is not None and any(one.steps for one in search.comparisons)
        if has_result or self.outcome.failure:  # a run that compared nothing says nothing of what is best
            # A tuner that joined may fail before it has recalled anything.
            memory.facts = memory.facts or facts_of(self.tuner.windows, self.request)
            memory.leave(self.tuner)

    def _mark_dropped(self, why: Why) -> None:
        dropped = why if self.outcome.kept else self.outcome.dropped
        self._events.tell("stand", kept=False, in_force=DEFAULT, dropped=dropped)
        self.tuner.result.ended(self.outcome.ended or why)

    def _drop(self, why: Why, is_failure: bool = False) -> None:
        self._mark_dropped(why)
        self.job.confirm({})
        if is_failure:
            self._say(Happened.FAILED(why=why), logging.ERROR)
        else:
            self._say(why)

    def _say(self, what: Why, level: int = logging.INFO) -> None:
        """To the log of what happened, and to who watches."""
        self._events.tell(EVENT, what=what)
        self._say_text(str(what), level)

    def _say_text(self, text: str, level: int = logging.INFO) -> None:
        log.log(level, "%s", text)
        self.on_phase(text)

    def _warn(self, what: Why) -> None:
        self._say(what, logging.WARNING)

    def _tell(self, line: WindowLine) -> None:
        log.info("%s", line)
        self.on_window(line)
        # A search may confirm one long before its verdict.
        self._results.keep(self._table(), self.outcome.dropped)
        self._page.keep_up(self._summary)

    def _summarise(self, signals: Signals) -> RunSummary:
        """The last word. The summary and the table come first: whoever ended the tuner may not wait for more."""
        summary = self._summary()
        why = error_of(lambda: self._results.write(summary, self._table()))
        with contextlib.suppress(KeyboardInterrupt):
            signals.are_heard = True
            self._remember()
            why = why or error_of(self._page.draw_last)
            signals.are_heard = False
        if why:
            self._warn(Happened.NO_REPORT(error=why))
        return summary

    def _summary(self) -> RunSummary:
        """What the run has come to, after the log was told how the job is."""
        memory = self.memory.told() if self.memory else None
        self._events.tell("job", **seen_of(self.request, self.job), memory=memory)
        return self.tuner.sum_up()

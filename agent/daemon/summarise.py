"""The results that the daemon leaves of its run: the summary, and the report that is drawn from its log."""

from __future__ import annotations

import contextlib
import math
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...envs.live.job import Job
from ...envs.nccl.tables import TABLE, set_aside, to_json
from ...traces.here import program
from ...traces.outside import TraceError, atomically
from ...traces.reasons import RunEnds, Why
from ...traces.records import Table
from ..report.outputs import logged
from ..report.summary import RunSummary
from .request import Request

#: Events that the report is drawn from, at most: the first and the last of a long run.
REPORT_EVENTS = 500_000
#: Seconds between two drawings of the report while the job runs, at least; and at least so many times the seconds that
#: the drawing before took. After the verdict the summary is written as often.
EVERY_S, BREAK = 30.0, 10.0


def seen_of(request: Request, job: Job) -> dict[str, Any]:
    """Fields of the summary that were seen of the job so far."""
    losses: list[float | None] = [loss for _, loss in logged(request.job_log, "loss")] or [None]
    audit = job.audit
    return {
        "steps": job.last_step,
        "n_processes": len(job.ranks) or request.facts.get("n_processes"),
        "n_ranks": max((c.n_ranks for c in job.assembler.comms.values()), default=None),
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "consistency": {
            "calls_checked": audit.calls_checked,
            "mismatches": audit.mismatches,
            "held_ms": job.held_ms,
            "ranks_elsewhere": 0 if request.emulated else _ranks_elsewhere(job),
        },
        "records_lost": job.records_lost,
        "agreement": {"state": job.state[0].name, "why": job.state[1]} if job.state else None,
        "job_status": job.status,
    }


def _ranks_elsewhere(job: Job) -> int:
    """Most ranks of one communicator that other hosts record."""
    return max((c.n_ranks - len(c.ranks) for c in job.assembler.comms.values()), default=0)


class Results:
    """The summary of a run and its table, as they lie in the folder of its results: all that others read of it.

    The budget and the result belong to the job: the summary lies in its run folder too, from the beginning, so that a
    later tuner finds the log that it goes on from.
    """

    def __init__(self, out: Path, run: Path) -> None:
        self.out, self.run = out, run
        self._next = math.inf  # no summary before the verdict
        self._kept: Table | None = None  # as it lies in the folder; None: not known

    def begin(self, summary: RunSummary) -> None:
        """Leave word in the run folder, which goes with the job, and may be full."""
        with contextlib.suppress(TraceError):
            summary.write(self.run)

    def write(self, summary: RunSummary, table: Table) -> None:
        """The summary, and the table as :meth:`keep` does. Raises OSError or TraceError."""
        summary.write(self.out)
        self.begin(summary)
        self.keep(table, summary.dropped or summary.ended)
        self._next = time.monotonic() + EVERY_S

    def keep(self, table: Table, why: Why | None) -> None:
        """The table that is confirmed, as `dynamiccl apply` takes it; the one before is set aside if there is none now.

        ``why`` there is none. Raises OSError or TraceError.
        """
        if table == self._kept:
            return
        if table.rules:
            text = to_json(table)
            atomically(self.out / TABLE, lambda draft: draft.write_text(text))
        else:
            set_aside(self.out, why or RunEnds.SEARCHED_AGAIN())
        self._kept = table

    @property
    def are_old(self) -> bool:
        """They were written EVERY_S ago: figures such as mismatches may have moved since."""
        return time.monotonic() >= self._next


class ReportPage:
    """The page of a run. A process of its own draws it, so nothing that draws is imported beside the job."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._process: subprocess.Popen[str] | None = None
        self._begun = time.monotonic()
        self._next = self._begun + EVERY_S

    def draw(self, *before: str, errors: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        """Begin to draw what the log tells; ``before`` are words before the command. Raises OSError."""
        if self._process:
            self._process.kill()  # it must not write after this one
            self._process.wait()
        words = [*before, *program("dynamiccl.agent.report.html.report"), str(self.out), str(REPORT_EVENTS)]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(words, stdin=quiet, stdout=quiet, stderr=errors, text=True)
        self._process = process
        self._begun = time.monotonic()
        self._next = math.inf  # until this one is done
        return process

    def draw_soon(self) -> None:
        """Begin to draw at the lowest priority. The page is a convenience: it may fail, and the job comes first."""
        with contextlib.suppress(OSError):
            self.draw("nice", "-n", "19")

    def keep_up(self, tell: Callable[[], object]) -> None:
        """Draw again if the page is EVERY_S old, after ``tell`` has brought the log up to date. A page that takes long
        to draw is drawn less often."""
        now = time.monotonic()
        if self._process and self._next == math.inf and self._process.poll() is not None:
            took = now - self._begun
            self._next = now + max(EVERY_S, BREAK * took)
        if now >= self._next:
            tell()
            self.draw_soon()

    def draw_last(self) -> str:
        """Draw the page of a run that is over. Returns an error's text, or ''. Raises OSError."""
        last = self.draw(errors=subprocess.PIPE)
        said = last.stderr.read() if last.stderr else ""
        if not last.wait():
            return ""
        return said.strip().rpartition("\n")[2] or f"its process ended with {last.returncode}"


def is_asked_for(ended: Why) -> bool:
    """Whether somebody ended tuning from outside: then the table that was kept by then is told at the end."""
    return ended.reason in (RunEnds.STOPPED, RunEnds.SWITCHED_OFF)


def error_of(work: Callable[[], str | None]) -> str:
    """What ``work`` says went wrong, or raises; '' where nothing did. What was measured must not be lost with it."""
    try:
        return work() or ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"

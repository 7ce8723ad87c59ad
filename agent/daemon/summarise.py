"""The results that the daemon leaves of its run: the summary, and the report that is drawn from it."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ...envs.live.job import Job
from ...envs.nccl.tables import TABLE, to_json
from ...traces.header import plain
from ...traces.here import program
from ...traces.outside import TraceError, atomically
from ...traces.reasons import RunEnds, Why
from ...traces.records import Table
from ..report.outputs import logged
from ..report.summary import RunSummary
from ..report.verdict import DEFAULT
from .request import Request

#: Events that the report is drawn from, at most: the first and the last of a long run.
REPORT_EVENTS = 500_000
#: Seconds between two drawings of the report while the job runs, at least; and at least so many times the seconds that
#: the drawing before took. After the verdict the summary is written as often.
EVERY_S, BREAK = 30.0, 10.0


def summarise(request: Request, found: RunSummary, outcome: RunSummary, job: Job) -> RunSummary:
    """The summary so far. ``found``: what the search gave, of an earlier tuner of the run where there was one;
    ``outcome``: how this one's stands."""
    facts = _asked(request) | _seen(request, job)
    no_gain = RunEnds.NO_GAIN() if found.is_decided and not outcome.kept else None
    return replace(
        found,
        **facts,
        default_share_after=outcome.default_share_after,
        kept=outcome.kept,
        in_force=found.in_force if outcome.kept else DEFAULT,
        dropped=outcome.dropped,
        not_obeyed=outcome.not_obeyed,
        refused=outcome.refused,
        no_table=outcome.dropped or no_gain,
        agreement={"state": job.state[0].name, "why": job.state[1]} if job.state else None,
        ended=outcome.ended,
        failure=outcome.failure,
    )


def _asked(request: Request) -> dict[str, Any]:
    """Fields of the summary that the request alone tells."""
    emulated = asdict(request.emulated) if request.emulated else {}
    return {
        "cluster": emulated.get("cluster"),
        "emulated": bool(emulated),
        "bytes_scale": emulated.get("bytes_scale", 1.0),
        "compute_scale": emulated.get("compute_scale", 1.0),
        "stage": request.facts.get("stage"),
        "policy": request.policy,
    }


def _seen(request: Request, job: Job) -> dict[str, Any]:
    """Fields of the summary that were seen of the job so far."""
    losses: list[float | None] = [loss for _, loss in logged(request.job_log, "loss")] or [None]
    audit = job.audit
    return {
        "n_processes": len(job.ranks) or request.facts.get("n_processes"),
        "n_ranks": max((c.n_ranks for c in job.assembler.comms.values()), default=None),
        "steps": job.last_step,
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "consistency": {
            "calls_checked": audit.calls_checked,
            "mismatches": audit.mismatches,
            "ranks_elsewhere": 0 if request.emulated else _ranks_elsewhere(job),
        },
        "records_lost": job.records_lost,
        "job_status": job.status,
        "headroom": job.untouched.headroom if job.untouched else None,
    }


def _ranks_elsewhere(job: Job) -> int:
    """Most ranks of one communicator that other hosts record."""
    return max((c.n_ranks - len(c.ranks) for c in job.assembler.comms.values()), default=0)


class Results:
    """The summary of a run and its table, as they lie in the folder of its results: all that others read of it.

    The budget and the result belong to the job: the summary lies in its run folder too, and a later tuner goes on from
    it, wherever it leaves its own results.
    """

    def __init__(self, out: Path, run: Path) -> None:
        self.out, self.run = out, run
        self._next = math.inf  # no summary before the verdict

    def write(self, summary: RunSummary, table: Table) -> None:
        """The summary, and what was confirmed as `dynamiccl apply` takes it; no table while nothing is.

        Raises OSError or TraceError.
        """
        path = self.out / TABLE
        summary.write(self.out)
        with contextlib.suppress(TraceError):  # the run folder goes with the job, and may be full
            summary.write(self.run)
        if table.rules:
            text = to_json(table)
            atomically(path, lambda draft: draft.write_text(text))
        else:
            path.unlink(missing_ok=True)
        self._next = time.monotonic() + EVERY_S

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

    def draw(
        self, summary: RunSummary, *before: str, errors: int = subprocess.DEVNULL
    ) -> subprocess.Popen[str]:
        """Begin to draw; ``before`` are words before the command. Raises OSError."""
        if self._process:
            self._process.kill()  # it must not write after this one
            self._process.wait()
        words = [*before, *program("dynamiccl.agent.report.html.report"), str(self.out), str(REPORT_EVENTS)]
        quiet = subprocess.DEVNULL
        with tempfile.TemporaryFile("w+") as file:  # a pipe could make the tuner wait for its reader
            file.write(json.dumps(plain(vars(summary))))
            file.seek(0)
            process = subprocess.Popen(words, stdin=file, stdout=quiet, stderr=errors, text=True)
        self._process = process
        self._begun = time.monotonic()
        self._next = math.inf  # until this one is done
        return process

    def draw_soon(self, summary: RunSummary) -> None:
        """Begin to draw at the lowest priority. The page is a convenience: it may fail, and the job comes first."""
        with contextlib.suppress(OSError):
            self.draw(summary, "nice", "-n", "19")

    def keep_up(self, summary: Callable[[], RunSummary]) -> None:
        """Draw again if the page is EVERY_S old. A page that takes long to draw is drawn less often."""
        now = time.monotonic()
        if self._process and self._next == math.inf and self._process.poll() is not None:
            took = now - self._begun
            self._next = now + max(EVERY_S, BREAK * took)
        if now >= self._next:
            self.draw_soon(summary())

    def draw_last(self, summary: RunSummary) -> str:
        """Draw the page of a run that is over. Returns an error's text, or ''. Raises OSError."""
        last = self.draw(summary, errors=subprocess.PIPE)
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

"""What the daemon leaves of its run: the summary, from what was asked, what the search came to and how the job stands,
and the page that is drawn from it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

from ...envs.live.job import Job
from ...traces.reasons import RunEnds, names
from ..report.outputs import logged
from ..report.summary import RunSummary
from ..report.verdict import DEFAULT
from .request import Request

#: Events that the report is drawn from, at most: the first and the last of a long run.
REPORT_EVENTS = 500_000


def summarise(request: Request, found: RunSummary, outcome: RunSummary, job: Job) -> RunSummary:
    """The summary so far. ``found``: what the search gave, of an earlier tuner of the run where there was one;
    ``outcome``: how this one's stands."""
    losses: list[float | None] = [loss for _, loss in logged(request.job_log, "loss")] or [None]
    emulated = asdict(request.emulated) if request.emulated else {}
    agreement = {"state": job.state[0].name, "text": job.state[1]} if job.state else {}
    no_gain = RunEnds.NO_GAIN() if found.is_decided and not outcome.kept else ""
    texts = {
        "ended": outcome.ended,
        "no_table": outcome.dropped or no_gain,
        "agreement": agreement.get("text", ""),
    }
    return replace(
        found,
        cluster=emulated.get("cluster"),
        emulated=bool(emulated),
        bytes_scale=emulated.get("bytes_scale", 1.0),
        compute_scale=emulated.get("compute_scale", 1.0),
        stage=request.facts.get("stage"),
        n_processes=len(job.ranks) or request.facts.get("n_processes"),
        n_ranks=max((c.n_ranks for c in job.assembler.comms.values()), default=None),
        policy=request.policy,
        steps=job.last_step,
        loss_first=losses[0],
        loss_last=losses[-1],
        default_share_after=outcome.default_share_after,
        kept=outcome.kept,
        in_force=found.in_force if outcome.kept else DEFAULT,
        dropped=outcome.dropped,
        not_obeyed=outcome.not_obeyed,
        refused=outcome.refused,
        agreement=agreement or None,
        consistency={"calls_checked": job.audit.calls_checked, "mismatches": job.audit.mismatches},
        records_lost=sum(job.lost.values()),
        ended=outcome.ended,
        failure=outcome.failure,
        reasons={key: names(text or "") for key, text in texts.items()},
        job_status=job.status,
    )


class ReportPage:
    """The page of a run. A process of its own draws it: what draws is not imported beside the job."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._process: subprocess.Popen[str] | None = None

    def draw(
        self, summary: RunSummary, *before: str, errors: int = subprocess.DEVNULL
    ) -> subprocess.Popen[str]:
        """Begin to draw; ``before`` are words before the command. Raises OSError."""
        if self._process:
            self._process.kill()  # it must not write after this one
            self._process.wait()
        words = [
            *before,
            sys.executable,
            "-m",
            "dynamiccl.agent.report.report",
            str(self.out),
            str(REPORT_EVENTS),
        ]
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, text=True
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(vars(summary)))
        process.stdin.close()
        self._process = process
        return process

    def draw_last(self, summary: RunSummary) -> str:
        """The page of a run that is over; what went wrong, '' for nothing. Raises OSError."""
        last = self.draw(summary, errors=subprocess.PIPE)
        said = last.stderr.read() if last.stderr else ""
        return (
            (said.strip().rpartition("\n")[2] or f"its process ended with {last.returncode}")
            if last.wait()
            else ""
        )

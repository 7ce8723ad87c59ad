"""A fake job with all that the daemon asks of a job: a whole tuner runs in the process of a test, without waiting."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dynamiccl.agent.daemon import daemon
from dynamiccl.agent.daemon.request import Request
from dynamiccl.envs.live.job_ends import Closed
from dynamiccl.envs.live.sources import Sources
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.traces.reasons import RunEnds
from dynamiccl.traces.records import Decision
from fake_job import GATHER, SCATTER, STEP_MS, FakeJob

#: What is best at first, and after a change.
GOOD, OTHER = Decision("ring", "ll128", 8), Decision("ring", "simple", 4)


class WatchedJob(FakeJob):
    """``best``, which may change, saves an eighth of the step on each slot; anything else costs a little.

    ``look(job)`` hears each time that the tuner asks, after its verdict, whether the job lives; False ends the job.
    """

    def __init__(self, run: RunFolder, look: Callable[[WatchedJob], bool]) -> None:
        super().__init__(self._ms, noise=0.002)
        self.run, self.untouched = run, run.untouched
        self.look, self.best, self.base_ms = look, GOOD, STEP_MS
        self.audit = SimpleNamespace(calls_checked=0, mismatches=0)
        self.assembler.comms = {}
        self.lost: dict[str, int] = {}
        self.damaged: dict[str, str] = {}
        self.ranks, self.state, self.status, self.writer = {0}, None, None, None
        self.thin, self.is_over = False, False
        self.sources = Sources()

    def _ms(self, decisions: Any) -> float:
        rows = [decisions.get(slot) for slot in (GATHER, SCATTER)]
        saved = sum(row == self.best for row in rows) / 8
        worse = sum(row is not None and row != self.best for row in rows) / 16
        return self.base_ms * (1 - saved + worse)

    def is_alive(self) -> bool:
        self.is_over = self.is_over or not self.look(self)
        return not self.is_over

    def check(self) -> None:
        if self.audit.mismatches:
            raise Closed(RunEnds.TWO_WAYS(example="x"))

    @property
    def records_lost(self) -> int:
        return sum(self.lost.values()) + self.sources.lost_before

    def begin_trace(self, writer: Any) -> None:
        self.writer = writer
        self.sources.begin_trace(writer.earlier, {})

    def end_trace(self) -> None:
        self.writer = None

    def rest(self) -> None:
        self.last_step += 1

    def take(self, everything: bool = False) -> None:
        pass

    def window(self, *args: Any, **more: Any) -> Any:
        found = super().window(*args, **more)  # a real one publishes before it looks, too
        self.check()
        return found


@contextlib.contextmanager
def tuner_of(job: WatchedJob, out: Path, memory: Path | None = None) -> Iterator[daemon.Daemon]:
    """The tuner of a fake job; it draws no page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(daemon, "Job", lambda run, on_state: job)
        patch.setattr(daemon.ReportPage, "draw_soon", lambda page: None)
        patch.setattr(daemon.ReportPage, "draw_last", lambda page: "")
        asked = Request(out=out, policy="expected-improvement", memory=str(memory) if memory else None)
        yield daemon.Daemon(asked, job.run)

"""A running job as the tuner sees it: publish a table, wait some steps, read what they took.

``Job`` owns the run folder (rings and table) and, where we started it, the process. It knows nothing of policies.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..traces.assemble import EVENT_COLUMNS, Assembler, empty, step_rows
from ..traces.files import TraceWriter
from ..traces.records import Decision, Slot, Table
from .nccl.shm import RunFolder

POLL_S = 0.02
TAKE_S = 2.0  # how often records become tables: pandas is too slow for every poll
#: Steps at the start of a window that do not count: the host runs ahead of a GPU, so the first step after a switch
#: still holds collectives of the table before.
DISCARD = 1
#: Steps from publishing a table to the first one under it: the poll, the round under way, the round that carries it.
SWITCH_STEPS = 3


class JobEnded(Exception):
    """The job is over (its exit status is in ``Job.status``) or has stopped stepping."""


@dataclass(frozen=True)
class Window:
    """Some steps under one table: durations in ms of the counted steps, as rank 0 measured them."""

    generation: int
    steps: np.ndarray[Any, Any]  # step numbers
    durations_ms: np.ndarray[Any, Any]

    @property
    def step_ms(self) -> float:
        """Median step time: a pre-empted step on a shared machine does not move it."""
        return float(np.median(self.durations_ms))


class Job:
    """One training job with our plugin and probe in it.

    ``writer``, where given, gets every event, step and table. A job is called stalled after ``stall_s`` seconds
    without a step.
    """

    def __init__(
        self,
        run: RunFolder,
        process: subprocess.Popen[bytes] | None = None,
        writer: TraceWriter | None = None,
        stall_s: float = 120,
    ) -> None:
        self.run, self.process, self.writer, self.stall_s = run, process, writer, stall_s
        self.assembler = Assembler()
        self.generation = run.table.generation()  # another tuner may have been here before
        self.damaged: dict[str, str] = {}  # rings that cannot be read any more, with the reason
        self.lost: dict[str, int] = {}  # records that each ring dropped because nobody read them in time
        self.memory_pressure = 0.0  # memory used / total on the fullest GPU, 0 = unknown
        self.last_step = 0
        self._taken = time.monotonic()
        self._events: list[pd.DataFrame] = []
        self._fresh: list[np.ndarray[Any, Any]] = []

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        run: RunFolder,
        log: Path,
        env: Mapping[str, str] | None = None,
        writer: TraceWriter | None = None,
        headroom: int | None = None,
    ) -> Job:
        """Start ``command`` with the run's environment, its output in ``log``. Raises OSError if it cannot start.

        The output goes to a file, not to a pipe, and the job gets its own session: it must outlive the tuner.
        """
        with open(log, "ab") as out:
            process = subprocess.Popen(
                list(command),
                env={**os.environ, **run.env(headroom), **(env or {})},
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return cls(run, process, writer)

    @property
    def status(self) -> int | None:
        """Exit status, None while it runs (or where we did not start it)."""
        return self.process.poll() if self.process else None

    def is_alive(self) -> bool:
        """Whether the job, or for an attached one any process with a ring, still runs."""
        if self.process:
            return self.process.poll() is None
        return any(ring.is_alive() for ring in self.run.rings())

    def poll(self) -> None:
        """Take everything new out of the rings."""
        for ring in self.run.rings():
            if ring.name in self.damaged:
                continue
            try:
                records = ring.drain()
            except (OSError, ValueError) as error:  # its process may have scribbled over it: the others go on
                self.damaged[ring.name] = str(error)
                continue
            self.lost[ring.name] = ring.lost
            if len(records):
                self.assembler.add(records, ring.pid)
                rows = step_rows(records)
                if len(rows):
                    self._fresh.append(rows)
                    self.last_step = int(rows["step"][-1])
        if time.monotonic() - self._taken > TAKE_S:
            self.take()

    def take(self, everything: bool = False) -> None:
        """Turn what was read into tables: to the trace, and kept for :meth:`take_events`."""
        self._taken = time.monotonic()
        lost = sum(self.lost.values())
        if self.writer and lost != self.writer.header.get("records_lost", 0):
            self.writer.update_header(records_lost=lost)
        source = self.writer.drain if self.writer else Assembler.take
        events, steps = source(self.assembler, everything)
        if len(steps):
            memory = steps[steps["memory_total"] > 0].groupby("rank").tail(1)
            if len(memory):  # of the rank that has least left: what it cannot afford none can
                self.memory_pressure = float((memory["memory_used"] / memory["memory_total"]).max())
        if len(events):
            self._events.append(events)

    def publish(self, decisions: Mapping[Slot, Decision]) -> int:
        """Make ``decisions`` the table of the next generation; the probe switches all ranks at one step."""
        self.generation += 1
        table = Table.of(self.generation, decisions)
        if self.writer:
            self.writer.log("table", {"table": table})
        self.run.table.publish(table)
        return self.generation

    def window(
        self,
        decisions: Mapping[Slot, Decision],
        n_steps: int,
        discard: int = DISCARD,
        give_up_ms: float = float("inf"),
    ) -> Window:
        """Run ``n_steps`` counted steps under ``decisions`` and return them.

        Ends early once a counted step took longer than ``give_up_ms``. Raises JobEnded if the job ends, or takes no
        step for ``stall_s`` seconds.
        """
        generation = self.publish(decisions)
        steps: list[int] = []
        durations: list[float] = []
        seen = 0
        last = time.monotonic()
        while len(durations) < n_steps:
            alive = self.is_alive()
            self.poll()
            for rows in self._take_fresh():
                for row in rows:
                    last = time.monotonic()
                    if int(row["generation"]) != generation:
                        continue
                    seen += 1
                    if seen > discard and len(durations) < n_steps:
                        steps.append(int(row["step"]))
                        durations.append(float(row["duration_ns"]) / 1e6)
            if durations and durations[-1] > give_up_ms:
                break
            if len(durations) >= n_steps:
                break
            if not alive:
                raise JobEnded(f"the job ended with status {self.status}")
            if time.monotonic() - last > self.stall_s:
                raise JobEnded(f"the job has taken no step for {self.stall_s:.0f} s")
            time.sleep(POLL_S)
        return Window(generation, np.array(steps), np.array(durations))

    def take_events(self) -> pd.DataFrame:
        """Events since the last call, those still waiting for their kernel times included."""
        self.poll()
        self.take(everything=True)
        events, self._events = self._events, []
        return pd.concat(events, ignore_index=True) if events else empty(EVENT_COLUMNS)

    def stop(self, grace_s: float = 10) -> None:
        """End a job that we started: SIGTERM to its session, SIGKILL after ``grace_s`` seconds."""
        if self.process and self.process.poll() is None:
            for sig, wait in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, sig)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(wait)
                    return

    def wait(self) -> int:
        """Keep reading until the job ends; its exit status (0 for an attached job that is gone)."""
        while self.is_alive():
            self.rest()
        self.poll()
        return self.status or 0

    def rest(self) -> None:
        """One unhurried poll."""
        self.poll()
        time.sleep(POLL_S * 5)

    def _take_fresh(self) -> list[np.ndarray[Any, Any]]:
        fresh, self._fresh = self._fresh, []
        return fresh


def logged(path: Path | None, name: str) -> list[float]:
    """Field ``name`` of a job's own log, JSON lines in step order; lines that are not whole or lack it are left out."""
    values = []
    if path and path.exists():
        for text in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                values.append(float(json.loads(text)[name]))
    return values

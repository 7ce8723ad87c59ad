"""What a job can log about the tuner beside it. For the process of rank 0; needs no package but numpy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..daemon.log import log
from ..daemon.request import Request
from ..report.runs import state
from ..report.summary import Follower


def current_results() -> Path | None:
    """The folder of the results of the run that this process belongs to; None if no tuner was started with the job."""
    run = os.environ.get("DYNAMICCL_RUN")
    return Request.read(Path(run), {}).out if run else None


class Values:
    """The figures that callbacks log, read from the run's folder.

    A job must not end by its logger: what fails is said once, and nothing is logged any more.

    Args:
        every: optimizer steps between two logs, at least.

    Raises:
        ValueError: if ``every`` is below 1.
    """

    def __init__(self, every: int = 10) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 step, not {every}")
        self.every = every
        self.results: Path | None = None
        self._run: Follower | None = None
        self._last = 0
        self._read: tuple[int, ...] | None = None  # when the files had changed that were read last
        self._values: dict[str, float] = {}
        with self._guarded():
            self.results = current_results()
            self._run = Follower(self.results) if self.results else None

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.results = None
            log.warning("the tuner's figures are no longer logged: %s: %s", type(error).__name__, error)

    def log(self, step: int, send: Callable[[dict[str, float]], object]) -> None:
        """Give ``send`` what to log after ``step`` optimizer steps, if it is time to. Never raises."""
        with self._guarded():
            if values := self.at(step):
                send(values)

    def at(self, step: int) -> dict[str, float]:
        """What to log after ``step`` optimizer steps; {} if the last log is too near, or there is no tuner.

        Keys: ``dynamiccl/step_ms`` (ms under the current table), ``dynamiccl/tuned`` (1 while a table is kept),
        ``dynamiccl/gain`` (share of the step that it saves), ``dynamiccl/verdict`` (1 once the search has ended).
        Unknown figures are left out.
        """
        # A training that begins anew in this process counts from 0 again.
        if self.results is None or self._run is None or 0 <= step - self._last < self.every:
            return {}
        self._last = step
        # Rank 0's own thread reads them, and all ranks wait for it: of the log only the new lines.
        changed = _changed(self.results)
        if changed != self._read:
            self._read = changed
            self._values = _values(state(self.results, self._run.fold()))
        return dict(self._values)


def _changed(results: Path) -> tuple[int, ...]:
    """When the files changed last that the values come from, in ns; 0 where there is none."""
    times = []
    for name in ("trace/windows.jsonl", "summary.json"):
        try:
            times.append((results / name).stat().st_mtime_ns)
        except OSError:
            times.append(0)
    return tuple(times)


def _values(status: dict[str, Any]) -> dict[str, float]:
    found: dict[str, Any] = {
        "step_ms": status["step_ms"],
        "tuned": None if status["kept"] is None else float(status["kept"]),
        "gain": status["gain"],
        "verdict": float(status["verdict"] is not None),
    }
    return {f"dynamiccl/{name}": float(value) for name, value in found.items() if value is not None}

"""What a job can log about the tuner beside it. For the process of rank 0; needs no package but numpy."""

from __future__ import annotations

import os
from pathlib import Path

from ..api import Run


def current_run() -> Run | None:
    """The run that this process belongs to; None if no tuner was started with the job."""
    folder = os.environ.get("DYNAMICCL_RUN")
    if not folder:
        return None
    from ..daemon.request import Request

    left = Request.read(Path(folder), {})
    return Run(left.out) if left.out else None


class Values:
    """The figures that callbacks log, read from the run's folder.

    Args:
        every: optimizer steps between two logs.
    """

    def __init__(self, every: int = 10) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 step, not {every}")
        self.every = every
        self.run = current_run()

    def at(self, step: int) -> dict[str, float]:
        """What to log after ``step`` optimizer steps; {} if it is not the turn of this step, or there is no tuner.

        Keys: ``dynamiccl/step_ms`` (ms under the current table), ``dynamiccl/tuned`` (1 while a table is kept),
        ``dynamiccl/gain`` (share of the step that it saves), ``dynamiccl/verdict`` (1 once the search has ended).
        Unknown figures are left out.
        """
        if self.run is None or step % self.every:
            return {}
        status = self.run.status()
        found = {
            "step_ms": status["step_ms"],
            "tuned": None if status["kept"] is None else float(status["kept"]),
            "gain": status["gain"],
            "verdict": float(status["verdict"] is not None),
        }
        return {f"dynamiccl/{name}": float(value) for name, value in found.items() if value is not None}

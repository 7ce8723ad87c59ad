"""Send a run's figures to a logger while the run goes on: ``python -m dynamiccl.agent.integrations.follow OUT NAME``.

A process of its own, which the tuner starts for ``tune --log-to``: a logger that hangs or fails takes nothing with it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..report.runs import ALIVE, state
from ..report.summary import Follower
from .loggers import LOGGERS, Logger

#: Seconds between two looks at the run's folder.
EVERY_S = 2.0
#: Seconds without a tuner after which the run counts as over: a tuner that is started anew takes less.
PATIENCE_S = 20.0
#: Key of the logger -> key of ``runs.state``.
KEYS = {
    "dynamiccl/step_ms": "step_ms",
    "dynamiccl/gain": "gain",
    "dynamiccl/tuned": "kept",
    "dynamiccl/search_cost_s": "cost_s",
    "dynamiccl/windows": "window",
    "dynamiccl/mismatches": "mismatches",
}


def figures(status: dict[str, Any]) -> dict[str, float]:
    """The figures of a run's state that are known."""
    return {name: float(status[key]) for name, key in KEYS.items() if status.get(key) is not None}


class Late:
    """A logger that is made with the first figures: beside the ranks other than 0 there are none, and so no run."""

    def __init__(self, make: Callable[[], Logger]) -> None:
        self.make = make
        self.logger: Logger | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the figures of an optimizer step."""
        self.logger = self.logger or self.make()
        self.logger.log(step, values)

    def close(self) -> None:
        """Write what is left."""
        if self.logger is not None:
            self.logger.close()


def follow(out: Path, logger: Logger, every_s: float = EVERY_S, patience_s: float = PATIENCE_S) -> None:
    """Log each new state of the run, from its first window on, until its tuner has been gone for ``patience_s`` s.

    A job that is started anew counts its steps from 0 again.
    """
    logged, alive, run = -1, time.monotonic(), Follower(out)
    while True:
        status = state(out, run.fold())
        step, has_tuner = status["step"], status["state"] in ALIVE
        if step not in (None, logged) and status["window"] is not None:
            logger.log(step, figures(status))
            logged = step
        if has_tuner:
            alive = time.monotonic()
        elif status["state"] == "ended" or time.monotonic() - alive > patience_s:
            return
        time.sleep(every_s)


def main() -> None:
    """Follow the run of the command line until it ends."""
    out, name = Path(sys.argv[1]), sys.argv[2]
    os.nice(10)
    make, _ = LOGGERS[name]
    logger = Late(lambda: make(out, str(out)))
    try:
        follow(out, logger)
    finally:
        logger.close()


if __name__ == "__main__":
    main()

"""Start the process that sends a run's figures to a logger, for ``tune --log-to``."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ...traces.here import program

_MODULE = "dynamiccl.agent.integrations.follow"


def start_follower(out: Path, logger: str) -> subprocess.Popen[bytes]:
    """Follow the run in ``out`` until it ends. What the logger prints goes to ``OUT/logger.log``."""
    with (out / "logger.log").open("ab") as log:
        command = [*program(_MODULE), str(out), logger]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )

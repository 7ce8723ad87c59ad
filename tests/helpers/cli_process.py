"""The command line as a process of its own."""

import os
import subprocess
import sys

DYNAMICCL = [sys.executable, "-m", "dynamiccl.agent.cli"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}


def run(*arguments, env=None, timeout=280):
    done = subprocess.run(
        [*DYNAMICCL, *arguments], env={**ENV, **(env or {})}, capture_output=True, text=True, timeout=timeout
    )
    assert "Traceback" not in done.stderr + done.stdout
    return done

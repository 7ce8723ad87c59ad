"""A word to the user from inside a job."""

from __future__ import annotations

import contextlib
import sys


def say(text: str) -> None:
    """Tell the user. Never raises: standard error may be closed or full."""
    with contextlib.suppress(Exception):
        print(f"dynamiccl: {text}", file=sys.stderr, flush=True)

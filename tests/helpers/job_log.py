"""The log of a ZeRO job: a head, a line a step, and lines of other kinds (memory, loss on held-out text)."""

import json
from pathlib import Path
from typing import Any

#: Options of a job of two small layers.
SMALL_MODEL = ("--quiet", "--layers", "2", "--width", "32", "--heads", "2", "--seq", "32")


def read_log(log: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The head of ``log``, and its steps in order."""
    head, *lines = [json.loads(line) for line in log.read_text().splitlines()]
    return head, [line for line in lines if "step_ms" in line]

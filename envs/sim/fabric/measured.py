"""What was measured, with its source and its day: ``measured.json``. What is not in it is drawn."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "measured.json"


@functools.cache
def _records() -> dict[str, dict[str, Any]]:
    records: dict[str, dict[str, Any]] = json.loads(FILE.read_text("utf-8"))
    return records


def measured(name: str) -> Any:
    """The value on record. Raises KeyError for a name that is not."""
    return _records()[name]["value"]


def ranges(name: str) -> dict[str, Any]:
    """A record of several figures, its lists as (low, high)."""
    values = measured(name).items()
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values}

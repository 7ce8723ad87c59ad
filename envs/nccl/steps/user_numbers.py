"""Numbers that the user gives in variables. One place reads them, for the job and for doctor."""

from __future__ import annotations

import os
from collections.abc import Mapping

from .words import say

SAMPLE_EVERY, ATTACH_S = "DYNAMICCL_SAMPLE_EVERY", "DYNAMICCL_ATTACH_S"
_MOST = {SAMPLE_EVERY: 2**32 - 1, ATTACH_S: float("inf")}
#: In words, for people.
_TAKES = {
    SAMPLE_EVERY: f"a whole number from 0 to {_MOST[SAMPLE_EVERY]}",
    ATTACH_S: "a number of seconds, 0 or more",
}
#: How long rank 0 waits by default.
_ATTACH_S = 60.0


def sample_every() -> int | None:
    """One step of so many takes kernel times, 0: none; None: as the tuner likes."""
    number = _given(SAMPLE_EVERY)
    return None if number is None else int(number)


def attach_s() -> float:
    """How long rank 0 waits for ranks that have not taken a step yet, or whose NCCL has not loaded the tuner."""
    number = _given(ATTACH_S)
    return _ATTACH_S if number is None else number


def wrong_number(env: Mapping[str, str]) -> str:
    """The first of the variables whose value is not such a number, and what it takes; empty if there is none."""
    for name in _MOST:
        if (value := env.get(name)) and _number(name, value) is None:
            return f"{name}={value}: this variable takes {_TAKES[name]}"
    return ""


def _given(name: str) -> float | None:
    """The number in the variable. None where it is not set, or its value is no such number; rank 0 says so then."""
    if not (value := os.environ.get(name)):
        return None
    number = _number(name, value)
    if number is None and os.environ.get("RANK", "0") == "0":
        say(f"{name}={value} is no number that it takes: it counts as not set")
    return number


def _number(name: str, value: str) -> float | None:
    try:
        number = int(value) if name == SAMPLE_EVERY else float(value)
    except ValueError:
        return None
    return number if 0 <= number <= _MOST[name] else None

"""Files that others may have written or damaged: JSON within limits, and files that are replaced whole.

All JSON from outside is parsed here. Whatever is wrong with it is a ValueError, so a caller has one error to handle.
Standard library only.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

#: Most characters of a document, levels of nesting, and the largest whole number.
MOST_TEXT, MOST_DEPTH, LARGEST = 64 << 20, 64, 2**64 - 1
_LONGEST_NUMBER = 400  # digits: more are a mistake, and turning them into a number takes long


class TraceError(Exception):
    """A trace cannot be read or written; the message is one line and names the cure."""


def parse_json(text: str | bytes, most_text: int = MOST_TEXT, most_depth: int = MOST_DEPTH) -> Any:
    """The value of a JSON text. Raises ValueError, and nothing else, for a text that is none or is beyond the limits.

    Limits: ``most_text`` characters (of bytes: bytes), ``most_depth`` levels, whole numbers up to LARGEST, finite
    fractions. NaN and Infinity are no JSON.
    """
    if len(text) > most_text:
        raise ValueError(f"{len(text):,} characters, at most {most_text:,} are read")
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        found = json.loads(text, parse_int=_whole, parse_float=_fraction, parse_constant=_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"nested deeper than {most_depth} levels") from None
    _check_depth(found, most_depth)
    return found


def read_json(path: Path, most_text: int = MOST_TEXT) -> Any:
    """The value in a JSON file. Raises OSError, ValueError."""
    with path.open("rb") as file:
        return parse_json(file.read(most_text + 1), most_text)


def _whole(digits: str) -> int:
    value = int(digits) if len(digits) <= _LONGEST_NUMBER else LARGEST + 1
    if abs(value) > LARGEST:
        raise ValueError(f"the number {digits[:20]}... is beyond 64 bits")
    return value


def _fraction(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:20]} is too large")
    return value


def _constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _check_depth(value: Any, most: int) -> None:
    """Raise ValueError where containers are nested deeper than ``most``; without recursion."""
    level = [value]
    for _ in range(most):
        inner = list[Any]()
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        level = [one for one in inner if isinstance(one, (dict, list))]
        if not level:
            return
    raise ValueError(f"nested deeper than {most} levels")


def atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` write a file under another name, which no other process has, and rename it. Raises TraceError."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        write(draft)
        os.replace(draft, path)
    except OSError as error:
        raise TraceError(
            f"cannot write {path}: {error.strerror or error}; free space or give another folder"
        ) from None

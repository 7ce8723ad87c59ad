"""Large JSON documents with one long array (a profile's events), read in blocks: memory stays that of a block.

A block is cut where an element seems to end; if it does not parse, elsewhere. Broken elements are mended where the
fault is known, else left out and counted (:class:`Faults`). Hostile input ends in a TraceError of one line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from ..outside import TraceError, blocks
from .found import many

#: The longest single element, in bytes.
MAX_ELEMENT = 32 << 20
#: A cut is looked for in so many of a buffer's last bytes, at so many places.
WINDOW, TRIES = 256 << 10, 8
#: An element that does not end is joined with so many of the following pieces, at most.
MOST_JOINED = 500
_BOM = b"\xef\xbb\xbf"
_BETWEEN = re.compile(rb"\}\s*,(?=\s*\{)")
#: The end of the array, behind an element.
_END = re.compile(rb"\}\s*(\]\s*[,}])")
#: Numbers that C++ prints and JSON does not have.
_NO_NUMBER = re.compile(r"(?<=[:,\[])\s*[+-]?(?:inf(?:inity)?|nan)(?=\s*[,}\]])", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f]")


@dataclass
class Faults:
    """Elements of an array that were no JSON: read after a repair, or left out (of these: with NCCL in their text)."""

    mended: int = 0
    lost: int = 0
    lost_of_nccl: int = 0

    def notes(self, name: str) -> list[str]:
        """What to tell people about the file ``name``."""
        found = []
        if self.mended:
            what = "inf or nan, control characters or bad UTF-8"
            found.append(f"{name}: {what} in {many(self.mended, 'event')}, read without these")
        if self.lost:
            part = f", {self.lost_of_nccl} of NCCL" if self.lost_of_nccl else ""
            why = "such as an unescaped quote in a name"
            found.append(f"{name}: left out {many(self.lost, 'event')}{part}: no JSON ({why})")
        return found


def read_elements(
    path: Path, key: str, take: Callable[[list[Any]], None], faults: Faults | None = None
) -> dict[str, Any] | None:
    """Hand the elements of the array ``key`` of a JSON object to ``take``, in batches; the object's other keys.

    An array as document has no other keys. None: there is no such array. ``faults`` counts what was mended and left
    out. Raises TraceError that says where it stops to be JSON (nesting over 1,024 is none).
    """
    faults = Faults() if faults is None else faults
    head = b""  # the document up to the begin of its array
    buffer = b""  # the part of the array that was not handed on yet
    for block in blocks(path):
        buffer += block
        if not head:
            head, buffer = _opened(buffer.removeprefix(_BOM), key)
        if head:
            batch, buffer = _whole_elements(buffer, faults)
            take(batch)
        if len(buffer) > MAX_ELEMENT:
            raise TraceError(f"{path} holds an event of over {MAX_ELEMENT >> 20} MiB: that is no profile")
    document = _last(path, head, buffer, take, faults)
    if isinstance(document, list):
        document = {key: document}
    if not isinstance(document, dict) or not isinstance(document.get(key), list):
        return None
    take(document.pop(key))
    return document


def mended(text: bytes) -> bytes:
    """JSON text without the faults that PyTorch's profiler is known to write.

    inf and nan become null, control characters become spaces, bad UTF-8 is replaced.
    """
    plain = _CONTROL.sub(" ", text.decode("utf-8", "replace"))
    return _NO_NUMBER.sub("null", plain).encode()


def _opened(buffer: bytes, key: str) -> tuple[bytes, bytes]:
    """The document as far as its array begins, and what follows; the first is empty where it does not begin yet."""
    if buffer.lstrip()[:1] == b"[":
        return b"[", buffer.lstrip()[1:]
    for match in re.finditer(rb'"' + key.encode() + rb'"\s*:\s*\[', buffer):
        head = buffer[: match.end()]
        for text in (head, mended(head)):
            if _parsed(text + b"]}") is not None:
                return text, buffer[match.end() :]
    return b"", buffer  # the key is in a text or another object, or is still to come


def _whole_elements(buffer: bytes, faults: Faults) -> tuple[list[Any], bytes]:
    """The elements at the buffer's begin, as many as seem whole, and what is left."""
    window = max(0, len(buffer) - WINDOW)
    for match in list(_BETWEEN.finditer(buffer, window))[: -TRIES - 1 : -1]:
        try:
            return orjson.loads(b"[" + buffer[: match.start() + 1] + b"]"), buffer[match.end() :]
        except orjson.JSONDecodeError:
            continue  # within a text or another element, or something before it is no JSON
    return _one_by_one(buffer, faults)


def _one_by_one(buffer: bytes, faults: Faults) -> tuple[list[Any], bytes]:
    """As :func:`_whole_elements`, each element parsed by itself: one that is no JSON does not lose the others."""
    found: list[Any] = []
    begin = joined = 0
    for match in _BETWEEN.finditer(buffer):
        piece = buffer[begin : match.start() + 1]
        elements = _element(piece, faults)
        if elements is None and joined < MOST_JOINED:  # the cut is within an element: try a later one
            joined += 1
            continue
        if elements is None:
            faults.lost += 1
        found += elements or []
        begin, joined = match.end(), 0
    return found, buffer[begin:]


def _element(text: bytes, faults: Faults) -> list[Any] | None:
    """The element that a text is, in a list that is empty where it is no JSON; None where it does not end there."""
    try:
        return [orjson.loads(text)]
    except orjson.JSONDecodeError as error:
        if _unfinished(error):
            return None
    repaired = mended(text)
    try:
        element = orjson.loads(repaired)
    except orjson.JSONDecodeError as error:
        if _unfinished(error):
            return None
        faults.lost += 1
        faults.lost_of_nccl += b"nccl" in text.lower() or b"record_param_comms" in text
        return []
    faults.mended += 1
    return [element]


def _unfinished(error: orjson.JSONDecodeError) -> bool:
    return "end of data" in error.msg


def _parsed(text: bytes) -> Any:
    """The document, None where it is no JSON."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _last(path: Path, head: bytes, rest: bytes, take: Callable[[list[Any]], None], faults: Faults) -> Any:
    """The document whose array's last elements are in ``rest``. Raises TraceError where it is no JSON, or cut."""
    try:
        return orjson.loads(head + rest)
    except orjson.JSONDecodeError as error:
        reason = error
    if head:
        batch, rest = _one_by_one(rest, faults)
        take(batch)
        if (document := _parsed(head + rest)) is not None:
            return document
        if (document := _parsed(mended(head + rest))) is not None:
            faults.mended += 1
            return document
        for match in _END.finditer(rest):  # the last element is no JSON
            if (document := _parsed(mended(head + rest[match.start(1) :]))) is not None:
                faults.lost += 1
                return document
        raise TraceError(f"{path} is cut short: its last event does not end; was it copied whole?")
    what = "text" if "UTF-8" in str(reason) else f"JSON ({reason})"
    raise TraceError(f"{path} is not {what}: is it a whole profile, unpacked or packed by gzip?")

"""Large JSON documents with one long array (a profile's events), read in blocks: memory stays that of a block.

A block is cut where an element seems to end and parsed: only a cut between two whole elements parses, so a wrong guess
is noticed, and another place is tried or another block read. Hostile input (endless nesting, compressed nothing, a
truncated file) ends in a TraceError of one line.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

from ..files import TraceError

#: Bytes read at a time; the longest single element.
BLOCK, MAX_ELEMENT = 2 << 20, 32 << 20
#: A cut is looked for in so many of a buffer's last bytes, at so many places.
WINDOW, TRIES = 256 << 10, 8
#: More text than this for each compressed byte is no recording (profiles reach about 30), after so much of it.
MAX_RATIO, RATIO_FROM = 200, 16 << 20
_BETWEEN = re.compile(rb"\}\s*,(?=\s*\{)")


def read_elements(path: Path, key: str, take: Callable[[list[Any]], None]) -> dict[str, Any] | None:
    """Hand the elements of the array ``key`` of a JSON object to ``take``, in batches; the object's other keys.

    A document that is itself an array gives its elements, and no other keys. None where there is no such array. Raises
    TraceError that says where it stops to be JSON (nesting over 1,024 is none).
    """
    head, buffer = (
        b"",
        b"",
    )  # the document as far as its array begins; of the array what was not handed on yet
    for block in _blocks(path):
        buffer += block
        if not head:
            head, buffer = _opened(buffer, key)
        if head:
            batch, buffer = _whole_elements(buffer)
            take(batch)
        if len(buffer) > MAX_ELEMENT:
            raise TraceError(f"{path} holds an event of over {MAX_ELEMENT >> 20} MiB: that is no profile")
    try:
        document = orjson.loads(head + buffer)  # what is left of the array, in the document that it is of
    except orjson.JSONDecodeError as error:
        what = "text" if "UTF-8" in str(error) else f"JSON ({error})"
        raise TraceError(
            f"{path} is not {what}: is it a whole profile, unpacked or packed by gzip?"
        ) from None
    if isinstance(document, list):
        document = {key: document}
    if not isinstance(document, dict) or not isinstance(document.get(key), list):
        return None
    take(document.pop(key))
    return document


def _blocks(path: Path) -> Iterator[bytes]:
    """The text of a file, compressed by gzip or not.

    Raises TraceError for a damaged file or one that is compressed nothing.
    """
    given = 0
    try:
        with path.open("rb") as raw:
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            file = gzip.GzipFile(fileobj=raw) if packed else raw
            while data := file.read(BLOCK):
                given += len(data)
                if packed and given > max(RATIO_FROM, MAX_RATIO * raw.tell()):
                    raise TraceError(
                        f"{path} unpacks to over {MAX_RATIO} times its size: that is no recording"
                    )
                yield data
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"cannot read {path} ({error}): is it a whole file?") from None


def _opened(buffer: bytes, key: str) -> tuple[bytes, bytes]:
    """The document as far as its array begins, and what follows; the first is empty where it does not begin yet."""
    if buffer.lstrip()[:1] == b"[":
        return b"[", buffer.lstrip()[1:]
    for match in re.finditer(rb'"' + key.encode() + rb'"\s*:\s*\[', buffer):
        try:
            orjson.loads(buffer[: match.end()] + b"]}")
        except orjson.JSONDecodeError:
            continue  # the key's name within a text or another object
        return buffer[: match.end()], buffer[match.end() :]
    return b"", buffer


def _whole_elements(buffer: bytes) -> tuple[list[Any], bytes]:
    """The elements at the buffer's begin, as many as seem whole, and what is left."""
    window = max(0, len(buffer) - WINDOW)
    for match in list(_BETWEEN.finditer(buffer, window))[: -TRIES - 1 : -1]:
        try:
            return orjson.loads(b"[" + buffer[: match.start() + 1] + b"]"), buffer[match.end() :]
        except orjson.JSONDecodeError:
            continue  # within a text or another element
    return [], buffer

"""Large JSON documents with one long array (a profile's events), read in blocks: memory stays that of a block.

A block is cut where an element seems to end and parsed: only a cut between two whole elements parses, so a wrong guess
is noticed, and another place is tried or another block read. Hostile input (endless nesting, compressed nothing, a
truncated file) ends in a TraceError of one line.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import orjson

from ..files import TraceError

#: Bytes read at a time; the longest single element; the longest document that is read whole.
BLOCK, MAX_ELEMENT, MAX_WHOLE = 2 << 20, 32 << 20, 256 << 20
#: A cut is looked for in so many of a buffer's last bytes, at so many places.
WINDOW, TRIES = 256 << 10, 8
#: More text than this for each compressed byte is no recording (profiles reach about 30), after so much of it.
MAX_RATIO, RATIO_FROM = 200, 16 << 20
_ARCHIVES = {b"PK\x03\x04": "a zip", b"\x28\xb5\x2f\xfd": "packed by zstd", b"\xfd7zX": "packed by xz"}
_BETWEEN = re.compile(rb"\}\s*,(?=\s*\{)")


class Source:
    """A file, compressed by gzip or not, read in blocks."""

    def __init__(self, path: Path) -> None:
        self.path, self._given = path, 0
        try:
            self._raw = path.open("rb")
        except OSError as error:
            raise TraceError(f"cannot read {path}: {error.strerror}") from None
        head = self._raw.peek(4)[:4]
        if head in _ARCHIVES:
            raise TraceError(f"{path} is {_ARCHIVES[head]}: unpack it first (gzip alone is read as it is)")
        packed = head[:2] == b"\x1f\x8b"
        self._file = cast(BinaryIO, gzip.GzipFile(fileobj=self._raw) if packed else self._raw)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def read(self, n: int) -> bytes:
        """Up to ``n`` bytes, b'' at the end. Raises TraceError for a damaged file or one that is compressed nothing."""
        try:
            data = self._file.read(n)
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"cannot read {self.path} ({error}): is it a whole gzip file?") from None
        self._given += len(data)
        if self._file is not self._raw and self._given > max(RATIO_FROM, MAX_RATIO * self._raw.tell()):
            raise TraceError(f"{self.path} unpacks to over {MAX_RATIO} times its size: that is no recording")
        return data

    def read_all(self, limit: int = MAX_WHOLE) -> bytes:
        """The whole text. Raises TraceError when it is longer than ``limit``."""
        parts, size = [], 0
        while data := self.read(BLOCK):
            parts.append(data)
            size += len(data)
            if size > limit:
                raise TraceError(f"{self.path} is longer than {limit >> 20} MiB: cut it, or record fewer steps")
        return b"".join(parts)


def loads(path: Path, data: bytes | str) -> Any:
    """The value of a JSON text. Raises TraceError that says where it stops to be JSON (nesting over 1,024 is none)."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        what = "text" if "UTF-8" in str(error) else f"JSON ({error})"
        raise TraceError(f"{path} is not {what}: is it whole, and of the format that was named?") from None


def read_elements(source: Source, key: str, take: Callable[[list[Any]], None]) -> dict[str, Any] | None:
    """Hand the elements of the array ``key`` of a JSON object to ``take``, in batches; the object's other keys.

    A document that is itself an array gives its elements, and no other keys. None where there is no such array.
    """
    head, buffer = b"", b""  # the document as far as its array begins; of the array what was not handed on yet
    while block := source.read(BLOCK):
        buffer += block
        if not head:
            head, buffer = _opened(buffer, key)
        if head:
            batch, buffer = _whole_elements(buffer)
            take(batch)
        if len(buffer) > MAX_ELEMENT:
            raise TraceError(f"{source.path} holds an event of over {MAX_ELEMENT >> 20} MiB: that is no profile")
    document = loads(source.path, head + buffer)  # what is left of the array, in the document that it is of
    if isinstance(document, list):
        document = {key: document}
    if not isinstance(document, dict):
        raise TraceError(f"{source.path} is no JSON object")
    if not isinstance(document.get(key), list):
        return None
    take(document.pop(key))
    return document


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

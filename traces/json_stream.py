"""Large JSON documents with one long array (a profile's events), read in blocks: memory stays that of a block.

A block is cut where an element seems to end and parsed; only a cut between two whole elements parses, so a wrong guess
is noticed and the brackets are counted instead. Hostile input (endless nesting, compressed nothing, a truncated file)
ends in a TraceError of one line.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import orjson

from .files import TraceError

#: Bytes read at a time; the longest single element; the longest document that is read whole.
BLOCK, MAX_ELEMENT, MAX_WHOLE = 2 << 20, 32 << 20, 256 << 20
MAX_DEPTH = 1000
#: More text than this for each compressed byte is no recording (profiles reach about 30), after so much of it.
MAX_RATIO, RATIO_FROM = 200, 16 << 20
_BETWEEN = re.compile(rb"\}\s*,(?=\s*\{)")
_TOKEN = re.compile(rb'\\.|["{}\[\]]', re.S)


class Source:
    """A file, compressed by gzip or not, read in blocks. ``on_bytes`` hears how many bytes of the file were read."""

    def __init__(self, path: Path, on_bytes: Callable[[int], None] = lambda n: None) -> None:
        self.path, self._on_bytes, self._given, self._told = path, on_bytes, 0, 0
        try:
            self._raw: BinaryIO = path.open("rb")
        except OSError as error:
            raise TraceError(f"cannot read {path}: {error.strerror}") from None
        packed = self._raw.read(2) == b"\x1f\x8b"
        self._raw.seek(0)
        self._file = cast(BinaryIO, gzip.GzipFile(fileobj=self._raw)) if packed else self._raw

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
        at = self._raw.tell()
        self._given += len(data)
        if self._file is not self._raw and self._given > max(RATIO_FROM, MAX_RATIO * at):
            raise TraceError(f"{self.path} unpacks to over {MAX_RATIO} times its size: that is no recording")
        self._on_bytes(at - self._told)
        self._told = at
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
        raise TraceError(f"{path} is not JSON ({error}): is it whole, and of the format that was named?") from None


class Elements:
    """The elements of the array ``key`` of a JSON object, in batches; :attr:`rest` then holds its other keys.

    A document that is itself an array gives its elements, and nothing else.
    """

    def __init__(self, source: Source, key: str) -> None:
        self._source, self._key = source, re.compile(rb'"' + key.encode() + rb'"\s*:\s*\[')
        self.rest: dict[str, Any] = {}
        self.found = False  # there is such an array

    def __iter__(self) -> Iterator[list[Any]]:
        source = self._source
        buffer = self._head()
        while self.found:
            block = source.read(BLOCK)
            buffer += block
            batch, buffer, closed = _split(buffer, final=not block)
            if batch:
                yield batch
            if closed:
                while (more := source.read(BLOCK)) and len(buffer) <= MAX_ELEMENT:
                    buffer += more
                tail = buffer.strip().lstrip(b",").strip()
                if tail:
                    self._take(b"{" + tail)
                return
            if not block:
                raise TraceError(f"{source.path} is cut short: its list of events has no end; record or copy it again")
            if len(buffer) > MAX_ELEMENT:
                raise TraceError(f"{source.path} holds an event of over {MAX_ELEMENT >> 20} MiB: that is no profile")

    def _head(self) -> bytes:
        """Read as far as the array begins; what was read of it."""
        buffer = self._source.read(BLOCK)
        if buffer.lstrip()[:1] == b"[":
            self.found = True
            return buffer.lstrip()[1:]
        while True:
            for match in self._key.finditer(buffer):
                try:
                    head = orjson.loads(buffer[: match.start()].rstrip().rstrip(b",") + b"}")
                except orjson.JSONDecodeError:
                    continue  # the key's name within a text or another object
                self.rest |= head
                self.found = True
                return buffer[match.end() :]
            block = self._source.read(BLOCK)
            if not block:
                self._take(buffer)
                return b""
            buffer += block
            if len(buffer) > MAX_ELEMENT:
                raise TraceError(f"{self._source.path}: no list of events in its first {MAX_ELEMENT >> 20} MiB")

    def _take(self, text: bytes) -> None:
        found = loads(self._source.path, text)
        if not isinstance(found, dict):
            raise TraceError(f"{self._source.path} is no JSON object")
        self.rest |= found


def _split(buffer: bytes, final: bool) -> tuple[list[Any], bytes, bool]:
    """Whole elements at the buffer's begin, what is left, and whether the array has ended."""
    if not final:
        window = max(0, len(buffer) - (256 << 10))
        for match in list(_BETWEEN.finditer(buffer, window))[:-9:-1]:
            try:
                return orjson.loads(b"[" + buffer[: match.start() + 1] + b"]"), buffer[match.end() :], False
            except orjson.JSONDecodeError:
                continue
    depth, in_text, last, closed = 0, False, 0, False
    for match in _TOKEN.finditer(buffer):
        token = match[0]
        if token == b'"':
            in_text = not in_text
        elif in_text or len(token) > 1:
            continue
        elif token in b"{[":
            depth += 1
            if depth > MAX_DEPTH:
                raise TraceError(f"the list of events is nested deeper than {MAX_DEPTH}: that is no profile")
        else:
            depth -= 1
            if depth == 0:
                last = match.end()
            elif depth < 0:
                closed, end = True, match.end()
                break
    whole = buffer[: end - 1].strip() if closed else buffer[:last]
    left = buffer[end:] if closed else buffer[last:].lstrip().removeprefix(b",")
    try:
        return orjson.loads(b"[" + whole.rstrip().removesuffix(b",") + b"]"), left, closed
    except orjson.JSONDecodeError as error:
        raise TraceError(f"the list of events is not JSON ({error}): is the file whole?") from None

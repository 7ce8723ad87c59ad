"""Files that others may have written, named or damaged, and files that are replaced whole.

Paths and files are bytes, perhaps not UTF-8: gzip is unpacked, and decoding loses no byte (``surrogateescape``).
:func:`shown` makes such text printable. All JSON from outside is parsed here; any fault in it is a ValueError. Standard
library only.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NoReturn

#: Most characters of a document, levels of nesting, and the largest whole number.
MOST_TEXT, MOST_DEPTH, LARGEST = 64 << 20, 64, 2**64 - 1
_LONGEST_NUMBER = 400  # digits: more are a mistake, and turning them into a number takes long
#: Bytes read at a time.
BLOCK = 2 << 20
#: More text than this for each compressed byte is no recording (profiles reach about 30), after so much of it.
MAX_RATIO, RATIO_FROM = 200, 16 << 20
_GZIP, _BOM = b"\x1f\x8b", b"\xef\xbb\xbf"
#: Characters that would end a line or steer a terminal.
_UNSHOWN = re.compile("[\x00-\x1f\x7f-\x9f]")


class TraceError(Exception):
    """A trace cannot be read or written; the message is one line and names the cure."""

    def __init__(self, message: str) -> None:
        super().__init__(shown(message))


def readable(text: str) -> str:
    """``text`` without the surrogates by which Python passes on bytes that are no UTF-8: it can be encoded.

    >>> readable("j\\udcc3\\udcb6b"), readable("\\udcff"), readable("\\ud800")
    ('jöb', '\\\\xff', '\\\\ud800')
    """
    try:
        raw = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # surrogates that stand for no byte
        raw = text.encode("utf-8", "backslashreplace")
    return raw.decode("utf-8", "backslashreplace")


def shown(text: object) -> str:
    """A text or a path as one line that can be printed and encoded: bytes that are no UTF-8, and control characters,
    as ``\\xfc``.

    >>> shown(os.fsdecode(b"r\\xfcn/a\\nb"))
    'r\\\\xfcn/a\\\\x0ab'
    """
    return _UNSHOWN.sub(lambda one: f"\\x{ord(one[0]):02x}", readable(str(text)))


def said(error: BaseException, most: int = 120) -> str:
    """The first line that an error says, with its kind if that is all there is."""
    lines = str(error).splitlines()
    return shown(lines[0][:most]) if lines else type(error).__name__


def text_of(data: bytes) -> str:
    """Bytes as text, without a loss: those that are no UTF-8 come back by ``surrogateescape``."""
    return data.decode("utf-8", "surrogateescape")


def blocks(path: Path, size: int | None = None) -> Generator[bytes, None, None]:
    """The content of a file, unpacked where gzip packed it, in blocks of ``size`` bytes.

    Raises TraceError for a file that cannot be read or is damaged, and for one that is compressed nothing.
    """
    given = 0
    try:
        with path.open("rb") as raw:
            packed = raw.peek(2)[:2] == _GZIP
            file = gzip.GzipFile(fileobj=raw) if packed else raw
            for data in _of_size(file, size or BLOCK):
                given += len(data)
                if packed and given > max(RATIO_FROM, MAX_RATIO * raw.tell()):
                    raise TraceError(
                        f"{path} unpacks to over {MAX_RATIO} times its size: that is no recording"
                    )
                yield data
    except gzip.BadGzipFile as error:
        if not given or "Not a gzipped file" not in str(error):
            raise _unread(path, error) from None
        # What follows the packed part is none of it: a line end, say.
    except (OSError, EOFError, zlib.error) as error:
        raise _unread(path, error) from None


def _of_size(file: Any, size: int) -> Iterator[bytes]:
    """The content of an open file in blocks of this size. What comes before an error is given first."""
    held, fault = bytearray(), None
    try:
        while part := file.read1(size - len(held)):
            held += part
            if len(held) == size:
                yield bytes(held)
                held.clear()
    except (OSError, EOFError, zlib.error) as error:
        fault = error
    if held:
        yield bytes(held)
    if fault is not None:
        raise fault


def _unread(path: Path, error: Exception) -> TraceError:
    why = getattr(error, "strerror", None) or said(error)
    return TraceError(f"cannot read {path} ({why}): is it a whole file?")


def first_bytes(path: Path, most: int) -> bytes:
    """The begin of a file, unpacked, without a byte order mark. Raises TraceError as :func:`blocks`."""
    with contextlib.closing(blocks(path, most)) as parts:
        return next(parts, b"").removeprefix(_BOM)


def lines(path: Path, longest: int = 1 << 20) -> Iterator[bytes]:
    """The lines of a file, unpacked; of longer ones the begin. Raises TraceError as :func:`blocks`."""
    rest = b""
    for block in blocks(path):
        *whole, rest = (rest + block).split(b"\n")
        yield from whole
        rest = rest[:longest]
    if rest:
        yield rest


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """A path of the file's content, for a library that opens files itself and knows no gzip: the file, or a temporary
    copy while the context lasts. Raises TraceError as :func:`blocks`."""
    if not is_packed(path):
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="dynamiccl-") as copy:
        for block in blocks(path):
            copy.write(block)
        copy.flush()
        yield Path(copy.name)


def is_packed(path: Path) -> bool:
    """Whether gzip packed a file. Raises TraceError where it cannot be read."""
    try:
        with path.open("rb") as raw:
            return raw.read(2) == _GZIP
    except OSError as error:
        raise _unread(path, error) from None


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
    """Let ``write`` write a file under another name, which no other process has, and rename it. No draft is left.

    Raises TraceError, and what ``write`` raises.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        write(draft)
        os.replace(draft, path)
    except OSError as error:
        raise TraceError(
            f"cannot write {path}: {error.strerror or error}; free space or give another folder"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Replace a file by this text, :func:`readable` and in UTF-8. Raises TraceError."""
    atomically(path, lambda draft: draft.write_text(readable(text), encoding="utf-8"))

"""Shared memory between a job and its daemon: the run folder and the file that holds the table.

All reads are ``pread``: a file that another process truncates gives an error here, not a signal. The one writer of the
table file is the daemon, its reader is the probe of rank 0.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...traces.names import ALL_REDUCE_WAYS
from ...traces.outside import atomically, read_json, readable
from ...traces.records import RULE_DTYPE, TABLE_VERSION, Rule, Table, Trial
from .plugin.private import private_folder
from .rings import Ring
from .run_folder import ALL_REDUCE, GONE, RUN_ID, TABLE, TABLE_FILE_BYTES, make_folder
from .untouched import Untouched

TABLE_MAGIC = b"DCCLTBL1"
MAX_RULES = 126  # what fits into TABLE_FILE_BYTES
#: magic, version, n_rows, generation, crc; trial_steps, one_of, turn_steps, swap
_HEAD = struct.Struct("<8sIIII8xIIII16x")


def encode_table(table: Table) -> bytes:
    """Table -> the message that lies in the file, travels between ranks and is activated. Raises ValueError."""
    rows = table.to_array().tobytes()
    n_rows = len(rows) // RULE_DTYPE.itemsize
    head = TABLE_MAGIC, TABLE_VERSION, n_rows, table.generation
    crc = zlib.crc32(rows, zlib.crc32(_HEAD.pack(*head, 0, *table.trial)))
    return _HEAD.pack(*head, crc, *table.trial) + rows


def decode_table(message: bytes) -> Table:
    """Inverse of :func:`encode_table`; bytes after the last row are ignored. Raises ValueError with the reason."""
    generation, rows = _unpack(message)
    return Table.from_array(generation, np.frombuffer(rows, RULE_DTYPE), *_HEAD.unpack_from(message)[5:])


def trial_of(message: bytes) -> Trial:
    """How the table of a sound message is tried."""
    return Trial(*_HEAD.unpack_from(message)[5:])


def rows_of(message: bytes) -> bytes:
    """What a sound message says, whatever its number and for how long; b"" leaves everything to NCCL."""
    return _unpack(message)[1]


def rows_hash(message: bytes) -> int:
    """A sound message's number of rows and their checksum, as the plugin tells them: equal where the rows are; 0 of a
    table that leaves everything to NCCL."""
    rows = rows_of(message)
    return (len(rows) // RULE_DTYPE.itemsize) << 32 | zlib.crc32(rows) if rows else 0


def row_digest(rule: Rule) -> str:
    """By which the note of trials in the run folder names a row."""
    raw = encode_table(Table(0, (rule,)))
    return hashlib.sha256(raw).hexdigest()[:16]


def _unpack(message: bytes) -> tuple[int, bytes]:
    """(generation, rows) of a message whose head and checksum are right; much cheaper than decoding the rows."""
    if len(message) < _HEAD.size:
        raise ValueError("a table has at least 64 bytes")
    magic, version, n_rows, generation, crc, *_ = _HEAD.unpack_from(message)
    if magic != TABLE_MAGIC:
        raise ValueError("not a dynamiccl table")
    if version != TABLE_VERSION:
        raise ValueError(f"table of format version {version}, this release reads {TABLE_VERSION}")
    end = _HEAD.size + n_rows * RULE_DTYPE.itemsize
    if len(message) < end:
        raise ValueError(f"table cut off: {n_rows} rows announced, {len(message)} bytes there")
    rows = message[_HEAD.size : end]
    bare = message[:20] + bytes(4) + message[24 : _HEAD.size]  # without crc
    if zlib.crc32(rows, zlib.crc32(bare)) != crc:
        raise ValueError("table damaged: its checksum does not match")
    return int(generation), rows


def message_of(raw: bytes) -> bytes:
    """A table's message without the padding after its last row; empty if ``raw`` does not begin with a table."""
    if len(raw) < _HEAD.size or raw[: len(TABLE_MAGIC)] != TABLE_MAGIC:
        return b""
    return raw[: _HEAD.size + _HEAD.unpack_from(raw)[2] * RULE_DTYPE.itemsize]


class TableFile:
    """The table that the daemon wants in force. Its checksum tells a reader whether it is whole."""

    def __init__(self, path: Path, *, write: bool = False) -> None:
        """Open the file to read it, or to ``write`` it, which makes it if needed.

        Raises OSError, PermissionError also where file or folder belong to another user or are open to others' writing:
        what lies there is obeyed.
        """
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._fd = -1
        try:
            _require_ours(folder, path.parent)
            flags = (
                (os.O_RDWR | os.O_CREAT if write else os.O_RDONLY)
                | os.O_CLOEXEC
                | os.O_NOFOLLOW
                | os.O_NONBLOCK
            )
            self._fd = os.open(path.name, flags, 0o600, dir_fd=folder)
            _require_ours(self._fd, path)
            if write:
                os.posix_fallocate(self._fd, 0, TABLE_FILE_BYTES)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(folder)

    def generation(self) -> int:
        """Of the table published last, or half written when its daemon died: the next one must be above. 0 = none."""
        raw = os.pread(self._fd, _HEAD.size, 0)
        return int(_HEAD.unpack(raw)[3]) if len(raw) == _HEAD.size and raw[:8] == TABLE_MAGIC else 0

    def publish(self, table: Table) -> None:
        """Put ``table`` before the job; the ranks take it at their next agreement. One writer at a time.

        Raises ValueError for more than 126 rows, OSError when the file cannot be written.
        """
        message = encode_table(table)
        if len(message) > TABLE_FILE_BYTES:
            raise ValueError(
                f"a table for a running job has at most {MAX_RULES} rows, this has {len(table.rules)}"
            )
        os.pwrite(self._fd, message, 0)

    def read(self) -> tuple[int, bytes] | None:
        """(generation, message) of the published table, or None: nothing there, being written, or damaged."""
        message = message_of(os.pread(self._fd, TABLE_FILE_BYTES, 0))
        try:
            return _unpack(message)[0], message
        except ValueError:
            return None

    def close(self) -> None:
        """Close the file; it stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class RunFolder:
    """Where a job and its daemon meet: 0700, owned by the user; holds ``table``, ``daemon`` and one ring a process.

    Whoever uses it holds a shared lock on the file ``daemon``, each process of the job one on its ring: a folder in
    which no file is locked is nobody's.
    """

    def __init__(self, path: Path | str) -> None:
        """The folder of a job that runs, or is to be started. Raises ValueError when it is not ours, OSError."""
        self.path = Path(path)
        if self.path.is_symlink() or not self.path.is_dir() or not private_folder(self.path):
            raise ValueError(f"{path} is not a run folder of this user (a folder of its own, mode 0700)")
        self.id = _id_of(self.path)
        self.untouched = Untouched.read(self.path)
        self.all_reduce = _all_reduce_of(self.path)
        self._hold = _hold(self.path)
        try:
            self.table = TableFile(self.path / TABLE, write=True)
        except BaseException:
            os.close(self._hold)
            raise
        self._rings: dict[tuple[str, int], Ring] = {}
        self._no_rings = set[tuple[str, int]]()
        #: Files that look like rings by name but are not, or cannot be opened now, with the reason.
        self.refused: dict[str, str] = {}

    @classmethod
    def create(cls, name: str | None = None) -> RunFolder:
        """A fresh folder in shared memory (else the temp folder); clears those of dead jobs.

        Raises OSError, FileExistsError where a run of that ``name`` still lives or waits for its job.
        """
        return cls(make_folder(name))

    def whole(self, table: Table) -> Table:
        """The table as the ranks get it: with ``--headroom`` it has a ceiling where no row decides."""
        return self.untouched.over(table) if self.untouched else table

    def rings(self) -> list[Ring]:
        """Rings of the job's processes, dead ones included until :meth:`remove`; opens those that are new."""
        with os.scandir(self.path) as entries:
            for entry in entries:
                key = (entry.name, entry.inode())
                if not entry.name.startswith("ring-") or key in self._rings or key in self._no_rings:
                    continue
                try:
                    ring = Ring(Path(entry.path))
                except ValueError as error:
                    self.refused[entry.name] = str(error)
                    self._no_rings.add(key)
                    continue
                except OSError as error:  # tried again: this process may have too many files open
                    self.refused[entry.name] = str(error)
                    continue
                self.refused.pop(entry.name, None)
                self._rings[key] = ring
        return list(self._rings.values())

    def remove(self, over: Sequence[Ring]) -> None:
        """Remove rings from which nothing more can come, while another process of the job lives.

        Else they stay, and tell that the job had begun. Another reader that has one open can read it to its end. Raises
        TraceError.
        """
        if not over or not any(ring.is_alive() for ring in self._rings.values() if ring not in over):
            return
        text = json.dumps(self.gone() | {ring.key: ring.tail for ring in over})
        atomically(self.path / GONE, lambda draft: draft.write_text(text))
        for key, ring in list(self._rings.items()):
            if ring in over:
                with contextlib.suppress(OSError):  # where it cannot be removed it stays known: it was read
                    (self.path / ring.name).unlink(missing_ok=True)
                    ring.close()
                    del self._rings[key]

    def gone(self) -> dict[str, int]:
        """How many records each ring had that was removed, by its key."""
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
            told = read_json(self.path / GONE)
            names = {path.name for path in self.path.iterdir()}
            return {str(key): int(n) for key, n in told.items() if key.partition("/")[2] not in names}
        return {}

    def close(self, remove: bool = True) -> None:
        """Close all files; with ``remove`` delete the folder. Running jobs keep their mapping and go on."""
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()
        self.table.close()
        if remove:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._hold >= 0:
            os.close(self._hold)
            self._hold = -1


def _require_ours(fd: int, path: Path) -> None:
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(
            errno.EPERM, "belongs to another user, or others may write to it", os.fspath(path)
        )


def _all_reduce_of(path: Path) -> str:
    """The option for all_reduce that the job was started with, "" for none. Raises ValueError for a damaged file."""
    try:
        found = readable((path / ALL_REDUCE).read_bytes()[:64].decode(errors="replace")).strip()
    except FileNotFoundError:
        return ""
    if found not in ALL_REDUCE_WAYS:
        raise ValueError(f"{path / ALL_REDUCE} is damaged ({found!r}): start the job again")
    return found


def _id_of(path: Path) -> str:
    """What tells this run from others in a folder of the same name; without a word of its own it is like no other."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (path / RUN_ID).read_text()
    return os.urandom(8).hex()


def _hold(path: Path) -> int:
    """Says that somebody uses the run folder, as long as the returned file is open. Raises OSError."""
    fd = os.open(path / "daemon", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise
    except OSError:  # a file system without locks
        return fd
    return fd

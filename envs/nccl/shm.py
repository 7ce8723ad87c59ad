"""Shared memory between a job and its daemon: the run folder, the rings of events, the file that holds the table.

All reads are ``pread``: a file that another process truncates gives an error here, not a signal. The producer of a
ring is ring.c; the one writer of the table file is the daemon, its reader is the probe of rank 0.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import struct
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ...traces.records import COLL_DTYPE, RECORD_BYTES, RULE_DTYPE, TABLE_VERSION, Lease, Table
from .build import nccl_env, plugin_path, private_folder

RING_MAGIC, RING_VERSION = b"DCCLRNG1", 1
TABLE_MAGIC = b"DCCLTBL1"
TABLE_BYTES = 4096
_FILE_BYTES, _HEARTBEAT_AT = 8192, 4096
MAX_RULES = 126  # what fits into TABLE_BYTES
_HEAD = struct.Struct("<8sIIIIQII24x")  # magic, version, n_rows, generation, crc, sequence, lease steps and ms
_SEQUENCE = struct.Struct("<Q")
_SEQUENCE_AT = 24
_RING_HEAD = struct.Struct("<8sIIQI")  # magic, version, record_bytes, capacity, pid
_RING_HEAD_BYTES = 128
_HEAD_AT = 64
_BUSY = np.uint64(2**64 - 1)
_PATIENCE_S = 1.0  # how long a record may stay half written before it counts as lost


def encode_table(table: Table) -> bytes:
    """Table -> the message that lies in the file, travels between ranks and is activated. Raises ValueError."""
    rows = table.to_array().tobytes()
    n_rows = len(rows) // RULE_DTYPE.itemsize
    lease = (table.lease.steps, table.lease.ms) if table.lease else (0, 0)
    head = TABLE_MAGIC, TABLE_VERSION, n_rows, table.generation
    crc = zlib.crc32(rows, zlib.crc32(_HEAD.pack(*head, 0, 0, *lease)))
    return _HEAD.pack(*head, crc, 0, *lease) + rows


def decode_table(message: bytes) -> Table:
    """Inverse of :func:`encode_table`; bytes after the last row are ignored. Raises ValueError with the reason."""
    generation, rows = _unpack(message)
    return Table.from_array(generation, np.frombuffer(rows, RULE_DTYPE), lease_of(message))


def lease_of(message: bytes) -> Lease | None:
    """The lease of a sound message, None = the table is confirmed."""
    *_, steps, ms = _HEAD.unpack_from(message)
    return Lease(steps, ms) if steps or ms else None


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
    bare = message[:20] + bytes(12) + message[32 : _HEAD.size]  # without crc and sequence
    if zlib.crc32(rows, zlib.crc32(bare)) != crc:
        raise ValueError("table damaged: its checksum does not match")
    return int(generation), rows


def message_of(raw: bytes) -> bytes:
    """A table's message without the padding after its last row; empty if ``raw`` does not begin with a table."""
    if len(raw) < _HEAD.size or raw[: len(TABLE_MAGIC)] != TABLE_MAGIC:
        return b""
    return raw[: _HEAD.size + _HEAD.unpack_from(raw)[2] * RULE_DTYPE.itemsize]


class TableFile:
    """The table that the daemon wants in force, under a sequence lock (odd = being written), and its signs of life."""

    def __init__(self, path: Path, *, write: bool = False) -> None:
        """Open the file to read it, or to ``write`` it, which makes it if needed.

        Raises OSError, PermissionError also where file or folder belong to another user or are open to others' writing:
        what lies there is obeyed.
        """
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._fd = -1
        try:
            _require_ours(folder, path.parent)
            flags = (os.O_RDWR | os.O_CREAT if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._fd = os.open(path.name, flags, 0o600, dir_fd=folder)
            _require_ours(self._fd, path)
            if write:
                os.posix_fallocate(self._fd, 0, _FILE_BYTES)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(folder)

    def beat(self) -> None:
        """A sign of life of the daemon, for the leases of its trials. Raises OSError."""
        os.pwrite(self._fd, _SEQUENCE.pack(time.monotonic_ns()), _HEARTBEAT_AT)

    def heartbeat_ns(self) -> int:
        """CLOCK_MONOTONIC of the last sign of life, nanoseconds; 0 before the first."""
        raw = os.pread(self._fd, 8, _HEARTBEAT_AT)
        return int(_SEQUENCE.unpack(raw)[0]) if len(raw) == 8 else 0

    def sequence(self) -> int:
        """Grows by 2 with every publication; 0 before the first and when the file is cut off."""
        raw = os.pread(self._fd, 8, _SEQUENCE_AT)
        return int(_SEQUENCE.unpack(raw)[0]) if len(raw) == 8 else 0

    def generation(self) -> int:
        """Of the table published last, or half written when its daemon died: the next one must be above. 0 = none."""
        raw = os.pread(self._fd, _HEAD.size, 0)
        return int(_HEAD.unpack(raw)[3]) if len(raw) == _HEAD.size and raw[:8] == TABLE_MAGIC else 0

    def publish(self, table: Table) -> None:
        """Put ``table`` before the job; the ranks take it at their next agreement. One writer at a time.

        Raises ValueError for more than 126 rows, OSError when the file cannot be written.
        """
        message = encode_table(table)
        if len(message) > TABLE_BYTES:
            raise ValueError(f"a table for a running job has at most {MAX_RULES} rows, this has {len(table.rules)}")
        odd = self.sequence() | 1  # odd already if a former daemon died while it wrote
        os.pwrite(self._fd, _SEQUENCE.pack(odd), _SEQUENCE_AT)
        os.pwrite(self._fd, message[:_SEQUENCE_AT], 0)
        os.pwrite(self._fd, message[_SEQUENCE_AT + 8 :], _SEQUENCE_AT + 8)
        os.pwrite(self._fd, _SEQUENCE.pack(odd + 1), _SEQUENCE_AT)

    def read(self) -> tuple[int, bytes] | None:
        """(generation, message) of the published table, or None: nothing there, being written, or damaged."""
        for _ in range(3):
            raw = os.pread(self._fd, TABLE_BYTES, 0)
            if len(raw) < TABLE_BYTES:
                return None
            (sequence,) = _SEQUENCE.unpack_from(raw, _SEQUENCE_AT)
            if sequence and not sequence & 1 and sequence == self.sequence():
                message = raw[:_SEQUENCE_AT] + bytes(8) + raw[_SEQUENCE_AT + 8 :]
                try:
                    return _unpack(message)[0], message_of(message)
                except ValueError:
                    return None
        return None

    def close(self) -> None:
        """Close the file; it stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Ring:
    """Reader of one process's ring."""

    def __init__(self, path: Path) -> None:
        """Open a ring file. Raises ValueError when it is none (any more), OSError when it cannot be read."""
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            self.name = path.name
            self.pid, self.capacity = self._check()
        except BaseException:
            os.close(self._fd)
            raise
        #: Records that were overwritten, or dropped by the producer, before they could be read.
        self.lost = 0
        self._tail = 0
        self._stuck_at, self._stuck_since = -1, 0.0

    def _check(self) -> tuple[int, int]:
        status = os.fstat(self._fd)
        raw = os.pread(self._fd, _RING_HEAD.size, 0) if stat.S_ISREG(status.st_mode) else b""
        if len(raw) < _RING_HEAD.size or raw[:8] != RING_MAGIC:
            raise ValueError(f"{self.name}: not a ring of dynamiccl")
        _, version, record_bytes, capacity, pid = _RING_HEAD.unpack(raw)
        if version != RING_VERSION or record_bytes != RECORD_BYTES:
            raise ValueError(f"{self.name}: ring of format version {version}, this release reads {RING_VERSION}")
        whole = 0 < capacity <= 2**24 and capacity & (capacity - 1) == 0
        if not whole or status.st_size < _RING_HEAD_BYTES + capacity * RECORD_BYTES:
            raise ValueError(f"{self.name}: cut off: {status.st_size} bytes for {capacity} records")
        return int(pid), int(capacity)

    def _head(self) -> int:
        raw = os.pread(self._fd, 8, _HEAD_AT)
        head = int(_SEQUENCE.unpack(raw)[0]) if len(raw) == 8 else -1
        if not self._tail <= head < 2**62:
            raise ValueError(f"{self.name}: damaged: head {head} with {self._tail} records read")
        return head

    def _copy(self, start: int, n: int) -> np.ndarray[Any, Any]:
        records = np.zeros(n, COLL_DTYPE)
        raw = memoryview(records.view(np.uint8).data)
        first = start % self.capacity
        run = min(n, self.capacity - first)
        for offset, count, at in ((first, run, 0), (0, n - run, run)):
            got = 0
            while got < count * RECORD_BYTES:  # a large read may come in pieces
                part = raw[at * RECORD_BYTES + got : (at + count) * RECORD_BYTES]
                n_read = os.preadv(self._fd, [part], _RING_HEAD_BYTES + offset * RECORD_BYTES + got)
                if n_read == 0:
                    raise ValueError(f"{self.name}: cut off while it was read")
                got += n_read
        return records

    def drain(self) -> np.ndarray[Any, Any]:
        """Records written since the last call, oldest first: COLL_DTYPE, shape (n,), other kinds by ``.view``.

        Lost records are counted in :attr:`lost`. Raises ValueError when the file is no sound ring any more.
        """
        head = self._head()
        if head - self._tail > self.capacity:  # lapped: half a ring of distance, or we are lapped again at once
            self.lost += head - self.capacity // 2 - self._tail
            self._tail = head - self.capacity // 2
        records = self._copy(self._tail, head - self._tail)
        if len(records) == 0:
            return records
        positions = np.arange(self._tail, head, dtype=np.uint64)
        stamps = records["stamp"]
        # A producer at position p + capacity may have been in the slot of p while we copied it.
        safe = positions + np.uint64(self.capacity) >= np.uint64(self._head())
        whole = safe & (stamps == positions + np.uint64(1))
        pending = np.flatnonzero(safe & ((stamps == _BUSY) | (stamps <= positions)))
        if len(pending) and self._waits_for(int(positions[pending[0]]), head):
            records, whole = records[: pending[0]], whole[: pending[0]]
        self._tail += len(records)
        self.lost += int(len(whole) - whole.sum())
        return records if whole.all() else records[whole]

    def _waits_for(self, position: int, head: int) -> bool:
        """True while a half-written record deserves patience: its writer may have been put to sleep."""
        now = time.monotonic()
        if position != self._stuck_at:
            self._stuck_at, self._stuck_since = position, now
        return now - self._stuck_since < _PATIENCE_S and head - position < self.capacity // 2

    def close(self) -> None:
        """Close the file; it stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class RunFolder:
    """Where a job and its daemon meet: 0700, owned by the user; holds ``table``, ``daemon`` and one ring a process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.table = TableFile(path / "table", write=True)
        self._rings: dict[tuple[str, int], Ring] = {}
        #: Files that look like rings by name but are not, with the reason.
        self.refused: dict[str, str] = {}

    @classmethod
    def create(cls, name: str | None = None) -> RunFolder:
        """A fresh folder in shared memory (else the temp folder); clears those of dead jobs. Raises OSError."""
        root = _root()
        _remove_stale(root)
        path = root / (name or f"{os.getpid()}-{time.time_ns():x}")
        path.mkdir(mode=0o700)
        return cls._own(path)

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """The folder of a running job, for a daemon that comes back. Raises ValueError when it is not ours."""
        path = Path(path)
        if not path.is_dir() or path.is_symlink() or not private_folder(path):
            raise ValueError(f"{path} is not a run folder of this user (a folder of its own, mode 0700)")
        return cls._own(path)

    @classmethod
    def _own(cls, path: Path) -> RunFolder:
        folder = cls(path)
        (path / "daemon").write_text(f"{os.getpid()} {_started(os.getpid())}\n")
        return folder

    def env(self, headroom: int | None = None) -> dict[str, str]:
        """What the job needs in its environment, see ``build.nccl_env``. Raises PluginBuildError."""
        return {"DYNAMICCL_RUN": str(self.path), **nccl_env(plugin_path(), headroom=headroom)}

    def rings(self) -> list[Ring]:
        """Rings of the job's processes, dead ones included; opens those that are new since the last call."""
        with os.scandir(self.path) as entries:
            for entry in entries:
                key = (entry.name, entry.inode())
                if not entry.name.startswith("ring-") or key in self._rings or entry.name in self.refused:
                    continue
                try:
                    self._rings[key] = Ring(Path(entry.path))
                except (OSError, ValueError) as error:
                    self.refused[entry.name] = str(error)
        return list(self._rings.values())

    def close(self, remove: bool = True) -> None:
        """Close all files; with ``remove`` delete the folder. Running jobs keep their mapping and go on."""
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()
        self.table.close()
        if remove:
            shutil.rmtree(self.path, ignore_errors=True)


def _require_ours(fd: int, path: Path) -> None:
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "belongs to another user, or others may write to it", os.fspath(path))


def _root() -> Path:
    name = f"dynamiccl-{os.geteuid()}"
    for base in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        folder = base / name
        if base.is_dir() and not folder.is_symlink() and private_folder(folder):
            return folder
    raise OSError(f"neither /dev/shm nor {tempfile.gettempdir()} takes a folder {name} of this user alone")


def _started(pid: int) -> str:
    """Start time of a process in clock ticks since boot, '' if it is gone: tells a reused pid from the old process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _remove_stale(root: Path) -> None:
    """Delete run folders whose daemon is dead and of whose job no process is left."""
    for folder in root.iterdir():
        try:
            pid, started = (folder / "daemon").read_text().split()
            alive = _started(int(pid)) == started
        except (OSError, ValueError):
            alive = time.time() - folder.stat().st_mtime < 60  # being made by another daemon just now
        ring_pids = [name.name[5:] for name in folder.glob("ring-*")]
        if not alive and not any(Path(f"/proc/{pid}").exists() for pid in ring_pids):
            shutil.rmtree(folder, ignore_errors=True)

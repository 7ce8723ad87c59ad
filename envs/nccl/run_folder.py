"""Where a job and its tuner meet, made before the job starts: a folder, the names in it, the job's variables.

Standard library only: a job does not wait until numpy is imported. What the files hold is in ``shm.py``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from ...traces.here import temp_folder
from .plugin.private import private_folder

#: The launcher's lock and the job's status from it, the lock of the run's one tuner, the wish to end, the table, the
#: last word of the ranks' agreement.
LAUNCHER, STATUS, TUNER, STOP, TABLE, WORD = "launcher", "status", "tuner", "stop", "table", "agreement"
#: The state of the ranks' agreement that goes with that word: rank 0's life, and a number.
SAID = "agreement-state"
#: How many records each ring had that was removed.
GONE = "gone"
#: A random word that is made with the folder: one of the same name that comes later is another run.
RUN_ID = "run-id"
#: NCCL's release, as rank 0 leaves it at its first step: only on its node.
NCCL = "nccl"
#: The table that was adopted last: it holds if the tuner dies.
CONFIRMED = "confirmed"
#: The last trial of which a round has begun, and rows in whose trials ranks have ended: no later life tries them.
TRIED = "tried"
#: The job's option for all_reduce, where it has one.
ALL_REDUCE = "all-reduce"
#: Whether all living communicators report NCCL's default, as rank 0 has heard; which table it has seen last.
PLANS = "plans"
TABLE_FILE_BYTES = 4096
_DAY_S = 86400.0


def make_folder(name: str | None = None) -> Path:
    """A fresh folder in shared memory (else the temp folder), its table empty; clears those of dead jobs.

    Raises OSError, FileExistsError where a run of that ``name`` still lives or waits for its job.
    """
    tried = list[str]()
    for root in shared_roots():
        try:
            _remove_stale(root)
            return _new_folder(root, name)
        except FileExistsError:
            raise
        except OSError as error:  # shared memory may be full or out of inodes: the next place may not be
            tried.append(f"{root}: {error.strerror or error}")
    reason = "; ".join(tried) or "neither /dev/shm nor the temp folder takes a folder of this user alone"
    raise OSError(f"no place for a run folder ({reason}): free space, or set TMPDIR")


def _new_folder(root: Path, name: str | None) -> Path:
    """An empty run folder below ``root``. Raises OSError, and leaves nothing then."""
    path = root / (name or f"{os.getpid()}-{time.time_ns():x}")
    path.mkdir(mode=0o700)
    try:
        fd = os.open(path / TABLE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, TABLE_FILE_BYTES)
        finally:
            os.close(fd)
        (path / RUN_ID).write_text(os.urandom(8).hex())
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return path


def leave_option(run: Path, all_reduce: str | None) -> None:
    """Leave the job's option for all_reduce in its run folder, before a tuner opens that. Raises OSError."""
    if all_reduce:
        (run / ALL_REDUCE).write_text(all_reduce, encoding="utf-8")


def free_bytes() -> int | None:
    """What is left of shared memory; None where there is none."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return None


def shared_roots() -> Iterator[Path]:
    """Folders of this user alone in which run folders may lie, the best first."""
    name = f"dynamiccl-{os.geteuid()}"
    for base in filter(None, (Path("/dev/shm"), temp_folder())):
        folder = base / name
        if base.is_dir() and not folder.is_symlink() and private_folder(folder):
            yield folder


def _nobody_has(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: not known, so somebody may
        return False
    return True


def _remove_stale(root: Path) -> None:
    """Delete run folders of this user in which nobody lives: no file in it is locked, by a ring's process or another.

    One without rings may wait for its job, as ``dynamiccl env`` leaves it: that one stays for a day.
    """
    for folder in root.iterdir():
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            files = list(folder.iterdir())
            if not any("ring-" in path.name for path in files) and time.time() - status.st_mtime < _DAY_S:
                continue
            locks: list[int] = []
            try:
                for path in files:
                    locks.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK))
                if all(map(_nobody_has, locks)):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                for fd in locks:
                    os.close(fd)

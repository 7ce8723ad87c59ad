"""Where a job and its tuner meet, made before the job starts: a folder, the names in it, the job's variables.

Standard library only: a job does not wait until numpy is imported. What the files hold is in ``shm.py``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from .plugin.private import private_folder

#: The launcher's lock and the job's status from it, the lock of the run's one tuner, the wish to end, the table, the
#: last word of the ranks' agreement.
LAUNCHER, STATUS, TUNER, STOP, TABLE, WORD = "launcher", "status", "tuner", "stop", "table", "agreement"
TABLE_FILE_BYTES = 4096
_DAY_S = 86400.0


def make_folder(name: str | None = None) -> Path:
    """A fresh folder in shared memory (else the temp folder), its table empty; clears those of dead jobs.

    Raises OSError, FileExistsError where a run of that ``name`` still lives or waits for its job.
    """
    root = shared_root()
    _remove_stale(root)
    path = root / (name or f"{os.getpid()}-{time.time_ns():x}")
    path.mkdir(mode=0o700)
    fd = os.open(path / TABLE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, TABLE_FILE_BYTES)
    finally:
        os.close(fd)
    return path


def free_bytes() -> int | None:
    """What is left of shared memory; None where there is none."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return None


def shared_root() -> Path:
    """The folder of this user in shared memory, else in the temp folder. Raises OSError where neither can be had."""
    name = f"dynamiccl-{os.geteuid()}"
    for base in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        folder = base / name
        if base.is_dir() and not folder.is_symlink() and private_folder(folder):
            return folder
    raise OSError(f"neither /dev/shm nor {tempfile.gettempdir()} takes a folder {name} of this user alone")


def _nobody_has(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
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

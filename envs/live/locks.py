"""Lock files: what two processes must not do at once. A lock ends with its process, however that ends."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path


class Busy(Exception):
    """Another process has the lock; the message says whose it is and names the cure."""


#: Errors by which file systems say that they have no locks (Lustre and NFS without the lock service, some FUSE).
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def lock(path: Path, what: str) -> int:
    """Take the lock file ``path`` for as long as the returned descriptor, or a copy of it, is open.

    On a file system without locks it is not known whether another process is there, and the caller goes on. Raises
    Busy with ``what`` as its message if another process has it, OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    if not hold(fd):
        raise Busy(what)
    return fd


def hold(fd: int) -> bool:
    """Take the lock of an open file, also where nobody can say whether another process has it. Else the file is closed.

    False if another process has it. Raises OSError.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(fd)
            raise
    return True


def is_locked(path: Path) -> bool:
    """Whether any process has the lock; works across containers that share the file system.

    False without the file, and on a file system without locks.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def holder(path: Path) -> int | None:
    """The process that has the lock, None where nobody has it or the system does not tell whom it sees."""
    try:
        status, lines = path.stat(), Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for words in map(str.split, lines):
        # Number, kind, mode, access, process, place; "->" where one only waits. A process not seen from here is 0.
        if words[1:4:2] == ["FLOCK", "WRITE"] and words[5] == place and int(words[4]) > 0:
            return int(words[4])
    return None

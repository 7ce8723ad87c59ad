"""How many tuners of a site search at a time: each of them holds one of N lock files in a folder that all can reach.

The lock ends with its process. A file system without locks limits nothing.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ...envs.live.locks import hold


def parsed(text: str) -> tuple[int, Path]:
    """Number and folder of ``N:FOLDER``. Raises ValueError."""
    number, _, folder = text.partition(":")
    if not number.isdecimal() or int(number) < 1 or not folder:
        raise ValueError(f"--search-slots is N:FOLDER, for example 4:/shared/dynamiccl-slots, not {text}")
    return int(number), Path(folder)


def take(text: str) -> int | None:
    """A descriptor that holds one of the slots of ``N:FOLDER`` for as long as it is open; None if all are taken.

    The folder is made if only it is missing. Raises ValueError; OSError if it cannot be used.
    """
    n, folder = parsed(text)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(0o1777)  # any user's tuner may make a slot's file, and none may remove another's
    for k in range(n):
        fd = _opened(folder / f"slot-{k}")
        if hold(fd):
            return fd
    return None


def _opened(path: Path) -> int:
    """The file may be another user's, in a folder with the sticky bit: it is created only where it is not there.

    Open for writing: NFS locks no other file (flock(2)).
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, flags)
    with contextlib.suppress(FileExistsError):
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        os.fchmod(fd, 0o666)  # other users' tuners must be able to open it, whatever the umask
        return fd
    return os.open(path, flags)

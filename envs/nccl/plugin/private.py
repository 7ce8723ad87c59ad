"""Folders that nobody else can write to."""

import os
from pathlib import Path


def private_folder(path: Path) -> bool:
    """Makes ``path`` (0700) if needed; True if it is ours alone to write, so that what lies there can be loaded."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022 and os.access(path, os.W_OK)

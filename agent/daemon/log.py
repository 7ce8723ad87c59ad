"""OUT/tuner.log: what the tuner says, with times and levels. Secrets of known forms are masked in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path

from ...traces.header import masked

#: Its file beside the summary; at this size it is renamed, the one before it goes.
LOG, MOST_BYTES = "tuner.log", 8 * 2**20
#: Characters of a line: what is longer is cut.
MOST = 8192
#: All that the tuner and what it uses write to; nobody else's handlers hear of it.
log = logging.getLogger("dynamiccl")


def open_log(folder: Path) -> Callable[[], None]:
    """Append to the log in ``folder`` until the function that is returned is called. Raises OSError."""
    handler = _File(folder / LOG, maxBytes=MOST_BYTES, backupCount=1, encoding="utf-8")
    line = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)-7s %(message)s", "%Y-%m-%dT%H:%M:%S")
    line.converter = time.gmtime
    handler.setFormatter(line)
    handler.addFilter(_without_secrets)
    log.setLevel(logging.DEBUG)
    log.addHandler(handler)
    log.propagate = False

    def close() -> None:
        log.removeHandler(handler)
        handler.close()

    return close


class _File(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk costs the line and no more."""


def _without_secrets(record: logging.LogRecord) -> bool:
    """One line, whatever texts from outside hold; tokens and passwords as ``***``."""
    record.msg, record.args = masked(" ".join(record.getMessage()[:MOST].splitlines())), ()
    return True

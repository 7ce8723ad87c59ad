"""The identity of a life: one start of a process of the job, or of its tuner. A random number, never 0.

Its ring, votes and segments of a trace have it. A forked child has a life of its own; communicators made anew in a
process are of the same life. Standard library only.
"""

from __future__ import annotations

import os
import secrets

#: ``PROCESS:LIFE``, for the plugin, which NCCL may load before the probe does. A child that inherits it is not meant.
VARIABLE = "DYNAMICCL_LIFE"
_own = 0
_is_announced = False


def own() -> int:
    """Of this process, 64 bits."""
    return _own


def announce() -> None:
    """Let the plugin in this process write the same identity into its ring. Called before NCCL loads it."""
    global _is_announced
    _is_announced = True
    os.environ[VARIABLE] = f"{os.getpid()}:{_own}"


def _begin() -> None:
    """A process has started, or was forked from one that had this module."""
    global _own
    _own = secrets.randbelow(2**64 - 1) + 1
    if _is_announced:
        announce()


_begin()
os.register_at_fork(after_in_child=_begin)

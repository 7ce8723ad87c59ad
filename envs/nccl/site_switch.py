"""The site's switch: turns the tuner off for every job, here and now.

Either a file or a variable is enough, and no option overrides them. The launcher then runs the job alone, the probe
attaches to nothing, and a running tuner goes back to NCCL's default. Standard library only: each rank asks.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

#: On each node. Its first line may say why.
FILE = "/etc/dynamiccl/off"
#: Set to anything but these, it turns the tuner off for the processes that inherit it.
VARIABLE, NOT_SET = "DYNAMICCL_OFF", ("", "0")
_LONGEST = 200  # characters of the reason
_OURS = ("NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN")


def switched_off() -> str | None:
    """Returns what turns the tuner off here, in words; None if nothing does. Never raises."""
    value = os.environ.get(VARIABLE, "")
    if value not in NOT_SET:
        return f"{VARIABLE}={value[:_LONGEST]}"
    try:
        with open(FILE, encoding="utf-8", errors="replace") as file:
            why = file.read(_LONGEST).strip().partition("\n")[0]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:  # it is there, and may not be read
        why = ""
    return f"{FILE}: {why}" if why else FILE


def leave(environment: MutableMapping[str, str]) -> None:
    """Take our run, table and plugin out of ``environment``: NCCL then loads what it would load without us."""
    from .plugin.build import named

    for name in ("DYNAMICCL_RUN", "DYNAMICCL_TABLE"):
        environment.pop(name, None)
    for name in _OURS:
        if named(environment.get(name, "")):
            del environment[name]
    theirs = environment.pop("DYNAMICCL_NEXT_TUNER", "")
    if theirs:
        environment["NCCL_TUNER_PLUGIN"] = theirs

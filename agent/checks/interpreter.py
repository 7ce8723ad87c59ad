"""Which Python a job's command runs in, and what is among its packages: it need not be the one that runs us.

Standard library only: the launcher asks before the job starts.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...envs.nccl.plugin.installed import WHEELS, has_torch
from ...traces.outside import parse_json, text_of

#: Asked of another Python: whether it finds PyTorch, whether dynamiccl is there to be loaded by it, and NCCL's wheels.
_QUESTION = """
import importlib.metadata as m, importlib.util as u, json
def version(name):
    try: return m.version(name)
    except Exception: return None
print(json.dumps({"torch": u.find_spec("torch") is not None,
                  "probe": version("dynamiccl") is not None,
                  "wheels": {name: version(name) for name in %r}}))
"""
_LONGEST_S = 20.0
#: Bytes of a script that are looked at for its interpreter.
_HEAD = 512
_FIRST_LINE = re.compile(r"#!\s*(?:\S*/env\s+(?:-\S+\s+)*)?(\S+)")
#: What pip writes in place of a path that is too long for the kernel.
_OF_PIP = re.compile(r"#!/bin/sh\n'''exec' \"?([^\"\n]+?)\"? \"\$0\"")
_PYTHON = re.compile(r"(?:python|pypy)[\d.]*")


@dataclass(frozen=True)
class Interpreter:
    """A Python, and what is known of its packages; None where nothing is known."""

    path: str = sys.executable
    is_ours: bool = True
    of: str = ""  # the command's first word, if it says which Python it is
    silent: str = ""  # the command's first word, if it does not: any Python may be started by it
    torch: bool | None = None
    probe: bool | None = None  # dynamiccl is there, whose probe PyTorch loads
    wheels: dict[str, str] = field(default_factory=dict)  # of NCCL -> version

    @property
    def text(self) -> str:
        """For people: which Python it is, and how it was found."""
        if not self.is_ours:
            return f"{self.path} (that of {self.of})"
        whose = f"that of {self.of}" if self.of else "the one that runs dynamiccl"
        whose += f"; {self.silent} does not say its own" if self.silent else ""
        return f"{self.path} ({whose})"

    @property
    def lacks(self) -> str:
        """What keeps the probe out of it, empty where nothing is known to."""
        missing = ["no PyTorch"] if self.torch is False else []
        missing += ["no dynamiccl"] if self.probe is False else []
        return " and ".join(missing)


def of_command(command: list[str] | None) -> Interpreter:
    """The Python of a command, as far as its first word tells; else our own."""
    first = (command or [""])[0]
    path = _python_of(first)
    here = os.path.dirname(os.path.abspath(sys.executable))
    if not path or os.path.dirname(os.path.abspath(path)) == here:
        name = os.path.basename(first)
        return Interpreter(
            of=name if path else "", silent="" if path else name, torch=has_torch(), probe=True
        )
    known: dict[str, Any]
    try:
        question = ["-c", _QUESTION % (tuple(WHEELS.values()),)]
        # Not in the current folder, where a job may have a queue.py.
        done = subprocess.run(
            [os.path.abspath(path), *question], capture_output=True, timeout=_LONGEST_S, cwd="/", check=True
        )
        told = parse_json(done.stdout)
        wheels = {name: version for name, version in told["wheels"].items() if version}
        known = {"torch": bool(told["torch"]), "probe": bool(told["probe"]), "wheels": wheels}
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        known = {}
    return Interpreter(path, is_ours=False, of=os.path.basename(first), **known)


def _python_of(word: str) -> str | None:
    """The path of the Python that a program is, or that its first line names; None for other programs."""
    path = shutil.which(word) if word else None
    if path is None or _PYTHON.fullmatch(os.path.basename(path)):
        return path
    head = b""
    with contextlib.suppress(OSError), Path(path).open("rb") as file:
        head = file.read(_HEAD)
    named = _OF_PIP.match(text_of(head)) or _FIRST_LINE.match(text_of(head))
    if named is None or not _PYTHON.fullmatch(os.path.basename(named[1])):
        return None
    return shutil.which(named[1])

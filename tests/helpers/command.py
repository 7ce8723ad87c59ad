"""A command of ``dynamiccl``, in this process or in one of its own: what it prints and with which status it ends."""

import contextlib
import io
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import patch

from dynamiccl.agent.cli import COMMANDS, run
from dynamiccl.agent.commands import Group


def named(name):
    """A command by all its words, as ``lab train``."""
    found = COMMANDS
    for word in name.split():
        found = found.named(word)
    return found


def _names(group, before=""):
    for name in group.commands:
        one = group.named(name)
        yield from _names(one, f"{name} ") if isinstance(one, Group) else (before + name,)


#: All commands.
NAMES = tuple(_names(COMMANDS))


def invoke(words):
    """``exit_code``, ``stdout``, ``stderr`` and both as ``output``."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run([str(word) for word in words])
        except SystemExit as end:
            status = end.code or 0
    told = out.getvalue(), err.getvalue()
    return SimpleNamespace(exit_code=status, stdout=told[0], stderr=told[1], output="".join(told))


def refused(words):
    """As ``invoke``, of a command that is to be refused: else it would become its job, in place of this process."""

    def becomes(*_):
        raise AssertionError(f"not refused: {words}")

    with patch.multiple(os, execv=becomes, execve=becomes, execvp=becomes):
        return invoke(words)


def clean(**env):
    """This environment without NCCL's variables and ours, and with ``env``."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("NCCL_", "DYNAMICCL_"))} | env


def start(*words, **env):
    """The command as a process, in the environment that is :func:`clean`."""
    command = [sys.executable, "-m", "dynamiccl.agent.cli", *map(str, words)]
    return subprocess.run(
        command, env=clean(**env), capture_output=True, text=True, errors="replace", check=False
    )

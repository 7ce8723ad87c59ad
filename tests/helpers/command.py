"""A command of ``dynamiccl`` in this process: what it prints and with which status it ends."""

import contextlib
import io
from types import SimpleNamespace

from dynamiccl.agent.cli import run


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

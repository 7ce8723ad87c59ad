"""``dynamiccl completion``: commands and options at the press of Tab."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Annotated

from ...traces.here import pip_install, program
from . import Argument, fail

SHELLS = ("bash", "zsh", "tcsh")


def completion(shell: Annotated[str, Argument(help="bash, zsh or tcsh.")]) -> None:
    """Print the completion script of a shell: commands, options and files at the press of Tab.

    \b
    eval "$(dynamiccl completion bash)"              # in ~/.bashrc
    dynamiccl completion zsh > ~/.zfunc/_dynamiccl   # in a folder of $fpath
    """
    if shell not in SHELLS:
        fail(f"no completion for {shell!r}: give {', '.join(SHELLS)}")
    if importlib.util.find_spec("shtab") is None:
        fail(f"completion needs shtab: {pip_install('tuner')}")
    # A program of its own: it asks every command for its options, and no command knows the others.
    os.execv(sys.executable, [*program("dynamiccl.agent.completion"), shell])
